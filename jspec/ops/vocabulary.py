"""The vocabulary in tiles, whole or sharded over a mesh axis.

Tiles start at multiples of `TILE` in the whole vocabulary, wherever a shard starts, so sharded and
unsharded rows have the same tiles. A tile that spans several shards belongs to the shard with its
first token.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.typing import Array

TILE = 1024  # tokens of the vocabulary that share a maximum; every backend has the same tiles
NO_TOKEN = np.iinfo(np.int32).max
Axes = str | tuple[str, ...]  # mesh axes, the first of which varies slowest


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """``size`` tokens of this shard, or the whole vocabulary where ``axis`` is None.

    L is the number of tiles that a shard can overlap; tokens of them on other shards are padding.
    """

    size: int
    axis: Axes | None = None

    @property
    def _ragged(self) -> bool:
        return self.axis is not None and self.size % TILE != 0

    @property
    def _start(self) -> Array:
        index = 0 if self.axis is None else lax.axis_index(self.axis)
        return jnp.int32(index * self.size)

    @property
    def ids(self) -> Array:
        """The tokens of this shard, int32 ``[size]``."""
        return self._start + jnp.arange(self.size, dtype=jnp.int32)

    @property
    def _tile_ids(self) -> Array:
        touched = -(-self.size // TILE) + (1 if self._ragged else 0)
        return self._start // TILE + jnp.arange(touched, dtype=jnp.int32)

    @property
    def _last(self) -> Array:
        """Index of the last tile with a token of this shard."""
        return (self._start + self.size - 1) // TILE - self._start // TILE

    @property
    def guard_bits(self) -> int:
        """Bits by which the mass of a tile is shifted right, so that the sum over all tiles fits.

        It is the logarithm of their number, rounded up.
        """
        shards = 1 if self.axis is None else lax.axis_size(self.axis)
        tiles = -(-self.size * shards // TILE)
        return (tiles - 1).bit_length()

    def ids_like(self, tiles: Array) -> Array:
        """Token ids int32 for ``[..., L, TILE]``, `NO_TOKEN` for padding."""
        ids = self._tile_ids[:, None] * TILE + jnp.arange(TILE, dtype=jnp.int32)[None]
        mine = (ids >= self._start) & (ids < self._start + self.size)
        return jnp.broadcast_to(jnp.where(mine, ids, NO_TOKEN), tiles.shape)

    def mask_to_shard(self, x: Array) -> Array:
        """``x [..., L]`` with 0 for tiles that do not belong to this shard."""
        first = self._tile_ids * TILE
        owned = (first >= self._start) & (first < self._start + self.size)
        return jnp.where(jnp.broadcast_to(owned, x.shape), x, 0)

    def tiles(self, x: Array, fill: float) -> Array:
        """``[..., size]`` in tiles ``[..., L, TILE]``, padded with ``fill``."""
        count = self._tile_ids.shape[0]
        none = [(0, 0)] * (x.ndim - 1)
        if self._ragged:
            padded = jnp.full((*x.shape[:-1], count * TILE), fill, x.dtype)
            x = lax.dynamic_update_slice_in_dim(padded, x, self._start % TILE, axis=x.ndim - 1)
        else:
            x = jnp.pad(x, [*none, (0, count * TILE - self.size)], constant_values=fill)
        return x.reshape(*x.shape[:-1], count, TILE)

    def at(self, tiles: Array, tokens: Array) -> tuple[Array, Array]:
        """``tiles [..., L, TILE]`` at ``tokens [...]``, and whether they are on this shard."""
        _, inside = self._local(tokens)
        index = jnp.where(inside, tokens - self._tile_ids[0] * TILE, 0)
        flat = tiles.reshape(*tiles.shape[:-2], tiles.shape[-2] * TILE)
        return jnp.take_along_axis(flat, index[..., None], axis=-1)[..., 0], inside

    def of_tokens(self, x: Array, tokens: Array) -> Array:
        """``x [..., size]`` at ``tokens [...]``, on all shards the value of the one with it."""
        local, inside = self._local(tokens)
        index = jnp.where(inside, local, 0)[..., None]
        return self.sum(jnp.where(inside, jnp.take_along_axis(x, index, axis=-1)[..., 0], 0))

    def top(self, x: Array, count: int) -> tuple[Array, Array]:
        """The ``count`` largest of ``x [..., size]`` over all shards, and their token ids, int32.

        Both are ``[..., count]``, the largest first.
        """
        if not count:
            none = jnp.zeros((*x.shape[:-1], 0), x.dtype)
            return none, none.astype(jnp.int32)
        values, index = lax.top_k(x, min(count, self.size))
        tokens = index + self._start
        if self.axis is None:
            return values, tokens
        values, tokens = (
            lax.all_gather(array, self.axis, axis=x.ndim - 1, tiled=True)
            for array in (values, tokens)
        )
        values, index = lax.top_k(values, count)
        tokens = jnp.take_along_axis(tokens, index, axis=-1)
        # All shards have the same values: the maximum tells shard_map so.
        return self.max(values), self.max(tokens)

    def _local(self, tokens: Array) -> tuple[Array, Array]:
        """The indices of ``tokens`` in this shard, and whether they are on it."""
        local = tokens - self._start
        return local, (local >= 0) & (local < self.size)

    def max(self, x: Array) -> Array:
        """The largest over the shards."""
        return x if self.axis is None else lax.pmax(x, self.axis)

    def min(self, x: Array) -> Array:
        """The smallest over the shards."""
        return x if self.axis is None else lax.pmin(x, self.axis)

    def sum(self, x: Array) -> Array:
        """The sum over the shards."""
        return x if self.axis is None else lax.psum(x, self.axis)

    def before(self, x: Array) -> Array:
        """The sum over the shards before this one."""
        if self.axis is None:
            return jnp.zeros_like(x)
        every = lax.all_gather(x, self.axis)
        earlier = jnp.arange(every.shape[0], dtype=jnp.int32) < lax.axis_index(self.axis)
        return jnp.where(_aligned(earlier, every), every, 0).sum(axis=0, dtype=x.dtype)

    def tile_max(self, x: Array) -> Array:
        """The maxima of whole tiles, from those of parts of tiles on this shard, ``[..., L]``."""
        return self._whole(x, lambda parts, mine: jnp.where(mine, parts, -jnp.inf).max(axis=0))

    def tile_sum(self, x: Array) -> Array:
        """The sums of whole tiles, from those of parts of tiles on this shard, ``[..., L]``."""
        return self._whole(
            x, lambda parts, mine: jnp.where(mine, parts, 0).sum(axis=0, dtype=x.dtype)
        )

    def tile_before(self, x: Array) -> Array:
        """From sums over parts of tiles, ``[..., L]``: the sums over the shards before this one."""
        if not self._ragged:
            return jnp.zeros_like(x)
        shard = jnp.repeat(jnp.arange(lax.axis_size(self.axis), dtype=jnp.int32), 2)
        earlier = shard < lax.axis_index(self.axis)

        def sum_earlier(parts: Array, mine: Array) -> Array:
            mine = mine & _aligned(earlier, parts)
            return jnp.where(mine, parts, 0).sum(axis=0, dtype=x.dtype)

        # Only the first tile can have begun on an earlier shard.
        first = jnp.arange(x.shape[-1], dtype=jnp.int32) == 0
        return jnp.where(jnp.broadcast_to(first, x.shape), self._whole(x, sum_earlier), 0)

    def _whole(self, x: Array, reduce) -> Array:
        """Put ``reduce(parts, mine)`` into the first and last tile: only they can be shared."""
        if not self._ragged:
            return x
        ends = jnp.stack([x[..., 0], jnp.take(x, self._last, axis=-1)])
        parts = lax.all_gather(ends, self.axis, tiled=True)
        starts = np.arange(lax.axis_size(self.axis)) * self.size
        first, last = starts // TILE, (starts + self.size - 1) // TILE
        # A shard inside one tile counts once.
        ids = np.stack([first, np.where(first == last, -1, last)], 1).ravel().astype(np.int32)
        tile = jnp.arange(x.shape[-1], dtype=jnp.int32)
        for index in (0, self._last):
            whole = reduce(parts, _aligned(ids == self._tile_ids[index], parts))
            is_tile = jnp.broadcast_to(tile == index, x.shape)
            x = jnp.where(is_tile, whole[..., None], x)
        return x


def _aligned(mask: Array, x: Array) -> Array:
    """``mask [N]`` over the first axis of ``x [N, ...]``."""
    return mask.reshape(-1, *[1] * (x.ndim - 1))
