"""Policies that tests add to those of the table, and a layer of random tokens to select from."""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.cache import Cache
from jspec.config import LayerSpec
from jspec.policies import Dense, ExactTopK, Hata, Loki, MagicPIG, Quest, ScoredPolicy, Streaming
from jspec.policies.policy import create_cache, with_pages

BATCH, CAPACITY, SPEC = 3, 24, LayerSpec(kv_heads=2, key_size=8, value_size=4)
LENGTHS = np.array([20, 3, 0], np.int32)


@dataclasses.dataclass(frozen=True)
class SharedTopK(ScoredPolicy):
    """The keys nearest to the mean query, one selection for all heads."""

    budget: int | float = 6
    sinks: int = 0
    recent: int = 0
    dense_layers: int = 0

    def score(self, policy_params, layer, cache, q):
        mean = q.mean(axis=(1, 2))
        return jnp.einsum("bh,bskh->bs", mean, cache.keys(layer))


@dataclasses.dataclass(frozen=True)
class NormTopK(ScoredPolicy):
    """Per head, the largest norms of keys, which it keeps in a column of its own."""

    budget: int | float = 6
    sinks: int = 0
    recent: int = 0
    dense_layers: int = 0

    def columns(self, layer: int, spec: LayerSpec):
        return {"norms": ((spec.kv_heads,), jnp.float32)}

    def encoder(self, policy_params, layer):
        return lambda k, v: {"norms": jnp.linalg.norm(k.astype(jnp.float32), axis=-1)}

    def score(self, policy_params, layer, cache, q):
        return jnp.swapaxes(cache.columns[layer]["norms"], 1, 2)


SOME = {"budget": 8, "sinks": 1, "recent": 2, "dense_layers": 0}
# A row for each policy of the table; the last two are the tests' own.
MATRIX = {
    "dense": Dense(),
    "streaming": Streaming(sinks=2, window=6),
    "exact_topk": ExactTopK(**SOME),
    "hata": Hata(**SOME, bits=32),
    "quest": Quest(**SOME | {"budget": 10}, page=2),
    "loki": Loki(**SOME, channels=3),
    "magicpig": MagicPIG(**SOME, bits=3, tables=12, weights=False),
    "shared top-k": SharedTopK(),
    "norms": NormTopK(),
}


def random(*shape, seed=0):
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def arrays_of(policy, specs=(SPEC,)):
    """What the policy is given, from random sample keys that are not centred."""
    keys = [
        np.asarray(random(64, spec.kv_heads, spec.key_size, seed=7 + layer)) + 0.5
        for layer, spec in enumerate(specs)
    ]
    model: Any = types.SimpleNamespace(config=types.SimpleNamespace(layers=specs))
    return policy.prepare(model, lambda: keys)


def filled(policy, layout, lengths=LENGTHS, junk=0.0) -> Cache:
    """A layer with random tokens at all committed positions, and ``junk`` in all other slots."""
    return _filled(policy, layout, junk, arrays_of(policy), np.array(lengths, np.int32))


@functools.partial(jax.jit, static_argnames=("policy", "layout", "junk"))
def _filled(policy, layout, junk, policy_params, context_len):
    batch = len(context_len)
    cache = create_cache(policy, [SPEC], [layout], batch, jnp.float32)
    index = jnp.arange(CAPACITY, dtype=jnp.int32)[None]
    positions = jnp.where(index < context_len[:, None], index, -1)
    k, v = random(batch, CAPACITY, 2, 8, seed=1), random(batch, CAPACITY, 2, 4, seed=2)
    columns = {
        name: jnp.full_like(x, junk) if jnp.issubdtype(x.dtype, jnp.floating) else x
        for name, x in cache.columns[0].items()
    }
    cache = cache.replaced(0, **columns)
    encode = policy.encoder(policy_params, 0)
    cache = cache.append(0, positions, keys=k, values=v, **encode(k, v))
    cache = with_pages(
        policy, policy_params, cache, jnp.zeros_like(context_len), context_len, CAPACITY
    )
    return cache.with_lengths(context_len)


def query(batch: int = BATCH, seed: int = 5):
    """A token's queries, keys and values."""
    q = random(batch, 1, 4, 8, seed=seed)
    return q, random(batch, 1, 2, 8, seed=seed + 1), random(batch, 1, 2, 4, seed=seed + 2)
