"""Policies that tests add to those of the table, and a model whose layers differ."""

import dataclasses

import jax.numpy as jnp

from jspec.config import LayerSpec
from jspec.policies import Dense, ScoredPolicy, Streaming


@dataclasses.dataclass(frozen=True)
class SharedTopK(ScoredPolicy):
    """The keys nearest to the mean query, one selection for all heads."""

    budget: int = 6

    def score(self, arrays, layer, cache, q):
        mean = q.mean(axis=(1, 2))
        return jnp.einsum("bh,bskh->bs", mean, cache.keys(layer))


@dataclasses.dataclass(frozen=True)
class NormTopK(ScoredPolicy):
    """Per head, the largest norms of keys, which it keeps in a column of its own."""

    budget: int = 6

    def columns(self, spec: LayerSpec):
        return {"norms": ((spec.kv_heads,), jnp.float32)}

    def encode(self, arrays, spec, k):
        return {"norms": jnp.linalg.norm(k.astype(jnp.float32), axis=-1)}

    def score(self, arrays, layer, cache, q):
        return jnp.swapaxes(cache.columns[layer]["norms"], 1, 2)


# A row for each policy of the table; the last two are the tests' own.
MATRIX = {
    "dense": Dense(),
    "streaming": Streaming(sinks=2, window=6),
    "shared top-k": SharedTopK(),
    "norms": NormTopK(),
}
