"""MagicPIG: keys that collide with the query in hash tables (Chen et al. 2024)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from jspec.cache import Cache
from jspec.cache.cache import Shapes
from jspec.config import LayerSpec
from jspec.policies.policy import ScoredPolicy
from jspec.typing import Array

LEAST = 2  # tables in which a key must collide
MOST_BITS = 16  # of a table's code, which is one uint16


@dataclasses.dataclass(frozen=True)
class MagicPIG(ScoredPolicy):
    """Keys that share a bucket with a query in at least two of ``tables`` random hash tables.

    A bucket is the signs of ``bits`` random projections. Keys are centred by the mean of sample
    keys where there are some; softmax does not change for it. A KV head's group reads what any of
    its queries found, where the budget is short those with the most collisions. The paper weights
    what it sampled by the inverse of its probability; here, as for every policy, the softmax over
    the selection is plain.
    """

    needs_arrays: ClassVar[bool] = True

    bits: int = 10
    tables: int = 150
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.bits <= MOST_BITS:
            raise ValueError(f"bits={self.bits} must be in [1, {MOST_BITS}]")
        if self.tables < LEAST:
            raise ValueError(f"tables={self.tables} must be at least {LEAST}")

    def columns(self, spec: LayerSpec) -> Shapes:
        return {"buckets": ((spec.kv_heads, self.tables), jnp.uint16)}

    def prepare(self, specs: Sequence[LayerSpec], keys: Sequence[np.ndarray] | None) -> Any:
        """A layer's ``center [K, H]`` and ``projections [H, tables * bits]``, float32."""
        rng = np.random.default_rng(self.seed)
        layers = []
        for layer, spec in enumerate(specs):
            shape = (spec.kv_heads, spec.key_size)
            center = np.zeros(shape) if keys is None else keys[layer].mean(axis=0)
            projections = rng.standard_normal((spec.key_size, self.tables * self.bits))
            arrays = {"center": center, "projections": projections}
            layers.append({name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()})
        return tuple(layers)

    def encode(self, arrays: Any, layer: int, k: Array) -> dict[str, Array]:
        own = arrays[layer]
        k = k.astype(jnp.float32) - own["center"][None, None]
        return {"buckets": self._buckets(k, own["projections"])}

    def _buckets(self, x: Array, projections: Array) -> Array:
        """The bucket of ``x [..., H]`` in each table, uint16 ``[..., tables]``."""
        signs = jnp.einsum("...h,hp->...p", x, projections) > 0
        signs = signs.reshape(*x.shape[:-1], self.tables, self.bits)
        weights = jnp.asarray(2 ** np.arange(self.bits), jnp.uint32)
        return jnp.einsum("...b,b->...", signs.astype(jnp.uint32), weights).astype(jnp.uint16)

    def score(self, arrays: Any, layer: int, cache: Cache, q: Array) -> Array:
        batch, tokens, heads, size = q.shape
        kv_heads = cache.specs[layer].kv_heads
        q = q.astype(jnp.float32).reshape(batch, tokens, kv_heads, heads // kv_heads, size)
        own = self._buckets(q, arrays[layer]["projections"])
        own = jnp.swapaxes(own, 1, 2).reshape(batch, kv_heads, -1, self.tables)
        held = cache.columns[layer]["buckets"]
        met = (held[:, :, :, None] == own[:, None]).sum(axis=-1, dtype=jnp.int32)
        met = jnp.where(met >= LEAST, met, 0).sum(axis=-1)
        met = jnp.swapaxes(met, 1, 2).astype(jnp.float32)
        return jnp.where(met > 0, met, -jnp.inf)
