"""Attention over the keys of all devices, laid out for the output projection over N.

Each device has read its own keys for all rows. What it exchanges does not grow with the context.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
from jax import lax

from jspec.cache.cache import Read
from jspec.helix.mesh import HelixConfig
from jspec.ops.all_to_all import By, all_to_all, merged_one_sided
from jspec.ops.attention.merge import merge_attention
from jspec.ops.vocabulary import Axes
from jspec.policies.read import projected
from jspec.typing import Array

# Longest pass, in tokens, that is cut into chunks. In a longer one, of a prompt, the message is
# short compared with attention, which the XLA backends compute for all rows in each chunk.
OVERLAPPED = 64


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The `jspec.cache.Shards` of a `HelixConfig`, inside a `jax.shard_map` over its mesh.

    Queries ``[B, T, N / TPA, H]`` are those of this device's key-value heads. Outputs are of the
    heads of its part of the output projection: N / (TPA x KVP), or N / TPA for Medha.
    """

    helix: HelixConfig

    def attended(
        self, read: Read, q: Array, positions: Array, up: Array | None = None
    ) -> tuple[Array, Array]:
        if self.helix.strategy == "tp":
            out, lse = read(local_heads(q, self.helix.kvp_axes, 2), positions)
            return projected(out, self._local_up(up)), lse
        if self.helix.strategy == "gather":
            # As if each device had projected the queries of its own heads alone.
            axes = self.helix.kvp_axes
            q = lax.all_gather(local_heads(q, axes, 2), axes, axis=2, tiled=True)
        return self._merged(self._read(read, q, positions), up)

    def merged(self, out: Array, lse: Array, up: Array | None = None) -> tuple[Array, Array]:
        return self._merged([(slice(None), out, lse)], up)

    def _read(self, read: Read, q: Array, positions: Array) -> Iterator[tuple[slice, Array, Array]]:
        """Yield chunks of rows with their outputs and log-sum-exps; other rows are empty."""
        batch, tokens = positions.shape
        chunks = self.helix.chunks(batch) if tokens <= OVERLAPPED else 1
        if chunks == 1:
            yield slice(None), *read(q, positions)
            return
        row = jnp.arange(batch)[:, None]
        for chunk in range(chunks):
            rows = slice(batch * chunk // chunks, batch * (chunk + 1) // chunks)
            # Other rows become padding, of which a kernel reads nothing (but for a selection, in a
            # pass of several tokens). A part of the cache for an operand would be copied first.
            is_chunk = (row >= rows.start) & (row < rows.stop)
            yield rows, *read(q, jnp.where(is_chunk, positions, -1))

    def _merged(
        self, chunks: Iterable[tuple[slice, Array, Array]], up: Array | None
    ) -> tuple[Array, Array]:
        """Exchange the outputs of attention chunk by chunk, and apply ``up``.

        ``up`` is applied to all rows at once, before the rows are cut into chunks: the shape of a
        matmul decides the order of its sums.
        """
        first = self._projects_first(up)
        parts = [
            self._exchanged(projected(out, up if first else None)[rows], lse[rows])
            for rows, out, lse in chunks
        ]
        out, lse = (jnp.concatenate(x) for x in zip(*parts, strict=True))
        return projected(out, None if first else self._local_up(up)), lse

    def _projects_first(self, up: Array | None) -> bool:
        if up is None or self.helix.kvp == 1:
            return False
        _, value_size, size = up.shape
        return {"before": True, "after": False}.get(self.helix.up_projection, size < value_size)

    def _local_up(self, x: Array | None) -> Array | None:
        return None if x is None else self.local_heads(x)

    def _exchanged(self, out: Array, lse: Array) -> tuple[Array, Array]:
        axes = self.helix.kvp_axes
        if self.helix.kvp == 1:
            return out, lse
        if self.helix.strategy == "helix":
            return all_to_all_merge(out, lse, axes, self.helix.exchange)
        weighted, lse = summed_weights(out, lse, axes)
        if self.helix.strategy == "medha":
            return lax.psum(weighted, axes).astype(out.dtype), lse
        scattered = lax.psum_scatter(weighted, axes, scatter_dimension=2, tiled=True)
        return scattered.astype(out.dtype), local_heads(lse, axes, 2)

    def local_heads(self, x: Array) -> Array:
        return x if self.helix.strategy == "medha" else local_heads(x, self.helix.kvp_axes, 0)

    def over_positions(self, lse: Array) -> Array:
        return jax.nn.logsumexp(lax.all_gather(lse, self.helix.kvp_axes), axis=0)

    def over_heads(self, x: Array) -> Array:
        return lax.psum(x, self.helix.tpa_axes)


def all_to_all_merge(out: Array, lse: Array, axes: Axes, by: By = "xla") -> tuple[Array, Array]:
    """Attention over the keys of all ranks, of this rank's share of the heads.

    One message carries outputs and log-sum-exps, bit for bit. Ranks are summed in their order,
    whatever arrives first (Helix, section 2.1.2). ``cuda`` merges in the kernel that exchanges.

    Args:
        out: ``[B, T, n, H]``: the output over this rank's keys, of the heads of its TPA group.
        lse: float32 ``[B, T, n]``: its log-sum-exp.
        axes: The mesh axes of KVP.
        by: How to exchange, as in `jspec.ops.all_to_all.all_to_all`.

    Returns:
        The output ``[B, T, n / ranks, H]`` and its log-sum-exp ``[B, T, n / ranks]``.
    """
    if (merged := merged_one_sided(out, lse, axes, by)) is not None:
        return merged
    # Whole numbers of the width of `out`.
    width = jnp.dtype(f"uint{8 * out.dtype.itemsize}")
    bits = lax.bitcast_convert_type(out, width)
    # A float32 is one of these numbers, or two that get an axis of their own.
    sums = lax.bitcast_convert_type(lse, width).reshape(*lse.shape, -1)
    payload = jnp.concatenate([bits, sums], axis=-1)
    batch, tokens, heads, size = payload.shape
    ranks = lax.axis_size(axes)
    payload = payload.reshape(batch, tokens, ranks, heads // ranks, size)
    parts = all_to_all(payload, axes, axis=2, by=by)
    bits, sums = jnp.split(parts, [out.shape[-1]], axis=-1)
    lses = lax.bitcast_convert_type(sums if sums.shape[-1] > 1 else sums[..., 0], lse.dtype)
    return merge_attention(lax.bitcast_convert_type(bits, out.dtype), lses)


def summed_weights(out: Array, lse: Array, axes: Axes) -> tuple[Array, Array]:
    """This rank's term of the output over all ranks of ``axes``, float32, and their log-sum-exp.

    The terms of all ranks sum to the output.
    """
    highest = lax.pmax(lse, axes)
    finite = jnp.where(highest == -jnp.inf, 0, highest)
    weights = jnp.exp(lse - finite)
    total = lax.psum(weights, axes)
    share = weights / jnp.where(total > 0, total, 1)
    out = jnp.where(weights[..., None] > 0, out.astype(jnp.float32), 0)
    return out * share[..., None], finite + jnp.log(total)


def local_heads(x: Array, axes: Axes, axis: int) -> Array:
    """The heads, along ``axis`` of ``x``, that belong to this rank of ``axes``."""
    size = x.shape[axis] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, axis=axis)
