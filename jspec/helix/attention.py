"""Attention over the keys of all devices, laid out for the output projection over N.

Each device has read its own keys for all rows. What it exchanges does not grow with the context.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from jspec.helix.mesh import KVP, TPA, HelixConfig
from jspec.ops.attention.merge import merge_attention
from jspec.typing import Array

Read = Callable[[Array], tuple[Array, Array]]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The `jspec.cache.Shards` of a `HelixConfig`, inside a `jax.shard_map` over its mesh.

    Queries ``[B, T, N / TPA, H]`` are those of this device's key-value heads. Outputs are of the
    heads of its part of the output projection: N / (TPA x KVP), or N / TPA for Medha.
    """

    helix: HelixConfig

    def attended(self, read: Read, q: Array) -> tuple[Array, Array]:
        if self.helix.strategy == "tp":
            return read(own_heads(q, self.helix.kvp, 2))
        if self.helix.strategy == "gather":
            # As if each device had projected the queries of its own heads alone.
            q = lax.all_gather(own_heads(q, self.helix.kvp, 2), KVP, axis=2, tiled=True)
        return self.merged(*read(q))

    def merged(self, out: Array, lse: Array) -> tuple[Array, Array]:
        if self.helix.kvp == 1:
            return out, lse
        if self.helix.strategy == "helix":
            return all_to_all(out, lse, self.helix.kvp)
        weighted, lse = summed_weights(out, lse)
        if self.helix.strategy == "medha":
            return lax.psum(weighted, KVP).astype(out.dtype), lse
        scattered = lax.psum_scatter(weighted, KVP, scatter_dimension=2, tiled=True)
        return scattered.astype(out.dtype), own_heads(lse, self.helix.kvp, 2)

    def own_heads(self, x: Array) -> Array:
        return x if self.helix.strategy == "medha" else own_heads(x, self.helix.kvp, 0)

    def over_heads(self, x: Array) -> Array:
        return lax.psum(x, TPA)


def all_to_all(out: Array, lse: Array, ranks: int) -> tuple[Array, Array]:
    """Attention over the keys of all ``ranks`` of KVP, of this one's share of the heads.

    ``out [B, T, n, H]`` and ``lse [B, T, n]`` over this device's keys, for the heads of its TPA
    group; what comes is ``[B, T, n / ranks, H]``. One message carries both, bit for bit: whole
    numbers of the width of ``out``. Ranks are summed in their order, whatever arrives first
    (Helix, section 2.1.2).
    """
    width = jnp.dtype(f"uint{8 * out.dtype.itemsize}")
    bits = lax.bitcast_convert_type(out, width)
    # A float32 is one of these numbers, or two that get an axis of their own.
    sums = lax.bitcast_convert_type(lse, width).reshape(*lse.shape, -1)
    payload = jnp.concatenate([bits, sums], axis=-1)
    batch, tokens, heads, size = payload.shape
    payload = payload.reshape(batch, tokens, ranks, heads // ranks, size)
    parts = lax.all_to_all(payload, KVP, split_axis=2, concat_axis=0)
    bits, sums = jnp.split(parts, [out.shape[-1]], axis=-1)
    lses = lax.bitcast_convert_type(sums if sums.shape[-1] > 1 else sums[..., 0], lse.dtype)
    return merge_attention(lax.bitcast_convert_type(bits, out.dtype), lses)


def summed_weights(out: Array, lse: Array) -> tuple[Array, Array]:
    """What ``out`` adds to the attention over all ranks of KVP, float32, and their ``lse``."""
    highest = lax.pmax(lse, KVP)
    finite = jnp.where(highest == -jnp.inf, 0, highest)
    weights = jnp.exp(lse - finite)
    total = lax.psum(weights, KVP)
    share = weights / jnp.where(total > 0, total, 1)
    out = jnp.where(weights[..., None] > 0, out.astype(jnp.float32), 0)
    return out * share[..., None], finite + jnp.log(total)


def own_heads(x: Array, ranks: int, axis: int) -> Array:
    """This rank's share of the heads that are the ``axis`` of ``x``."""
    size = x.shape[axis] // ranks
    return lax.dynamic_slice_in_dim(x, lax.axis_index(KVP) * size, size, axis=axis)
