"""What kernels of hash codes share on Mosaic GPU: tiles of codes, and their scores.

Of a tile of slots each thread has one slot, and of it the codes of some adjacent KV heads: at most
128 bytes, which one copy brings to shared memory. The words of a code are neighbours in a thread,
so that no sum over them leaves it.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.pallas.inline import TILE, Inline, code_layout
from jspec.typing import Array

UNROLLED = 8  # queries that a kernel unrolls over at most
_LINE = 32  # words of a slot that a tile has at most


@dataclasses.dataclass(frozen=True)
class Codes:
    """The sizes of codes ``[B, S, K, W]``, and how they are divided into tiles.

    Attributes:
        batch: B.
        slots: S.
        kv_heads: K.
        group: query heads of a KV head.
        tokens: T.
        words: W of a code.
    """

    batch: int
    slots: int
    kv_heads: int
    group: int
    tokens: int
    words: int

    @classmethod
    def of(cls, q_codes: Array, k_codes: Array) -> Codes:
        """The sizes of these codes of queries and keys."""
        batch, slots, kv_heads, words = k_codes.shape
        tokens, heads = q_codes.shape[1:3]
        return cls(batch, slots, kv_heads, heads // kv_heads, tokens, words)

    @property
    def queries(self) -> int:
        """Codes of queries that score a key."""
        return self.tokens * self.group

    @property
    def highest(self) -> int:
        """The highest score."""
        return self.queries * 32 * self.words

    @property
    def columns(self) -> int:
        """Words of a slot that a tile has."""
        return math.gcd(self.kv_heads * self.words, _LINE)

    @property
    def heads(self) -> int:
        """KV heads of a tile."""
        return self.columns // self.words

    @property
    def parts(self) -> int:
        """Tiles side by side that cover all heads."""
        return self.kv_heads // self.heads

    @property
    def vector(self) -> int:
        """Words that a thread loads at once: 2 codes of one word, since Mosaic slices no column."""
        return max(2, min(self.words, 4))

    @property
    def layout(self):
        """Of a tile, ``[TILE, columns]``, and of the code of a head in it."""
        return code_layout(self.vector)

    def memory(self, tiles: int):
        """Shared memory of several tiles.

        Swizzled: threads that read the codes of one head, in rows one after the other, then read
        from different banks.
        """
        row_bytes = 4 * self.columns
        # Swizzling moves units of 16 bytes.
        swizzle = () if row_bytes == 16 else (plgpu.SwizzleTransform(row_bytes),)
        transforms = (plgpu.TilingTransform((8, self.columns)), *swizzle)
        return plgpu.SMEM((tiles, TILE, self.columns), jnp.uint32, transforms=transforms)

    def copy(self, source, memory, arrived, tiles: int) -> None:
        """Start the copies of ``source [tiles * TILE, columns]`` into memory, a tile each."""
        for index in range(tiles):
            tile = source.at[pl.ds(index * TILE, TILE)]
            plgpu.copy_gmem_to_smem(tile, memory.at[index], arrived.at[index])

    def load(self, memory, arrived, index: int) -> Array:
        """Tile ``index`` of ``memory``, ``[TILE, columns]``, once it has arrived."""
        plgpu.barrier_wait(arrived.at[index])
        return plgpu.load(memory.at[index], layout=self.layout, optimized=False)  # pyright: ignore[reportCallIssue]

    def scores(self, tile: Array, q, batch, part, inline: Inline) -> list[Array]:
        """Scores int32 ``[TILE]`` of each head of a tile ``[TILE, columns]``.

        ``q``: the codes of queries, ``[B, T N, W]``.
        """
        width, layout = max(self.words, 2), self.layout
        column = plgpu.broadcasted_iota(jnp.int32, (TILE, width), 1, layout=layout)

        def head_scores(index: int) -> Array:
            first = index * self.words // width * width
            keys = tile[:, first : first + width]
            head = part * self.heads + index

            def distance(query) -> Array:
                token, member = lax.div(query, self.group), lax.rem(query, self.group)
                row = q.at[batch, (token * self.kv_heads + head) * self.group + member]
                if self.words == 1:
                    words = jnp.broadcast_to(row[0], keys.shape)
                else:
                    words = plgpu.load(row, layout=layout.reduce(0), optimized=False)  # pyright: ignore[reportCallIssue]
                    words = lax.broadcast_in_dim(words, keys.shape, [1])
                return inline.count_bits(keys ^ words, layout)

            if self.queries <= UNROLLED:
                distances = map(distance, range(self.queries))
                total = functools.reduce(jnp.add, distances)
            else:
                zero = plgpu.layout_cast(jnp.zeros(keys.shape, jnp.int32), layout)
                total = lax.fori_loop(0, self.queries, lambda i, sum: sum + distance(i), zero)
            if self.words == 1:
                total = jnp.where(column == index % 2, total, 0)
            return self.highest - total.sum(axis=1)

        return [head_scores(index) for index in range(self.heads)]


def padded_slots(slots: int, per_word: int = 1) -> int:
    """Slots that ``slots`` are padded to where ``per_word`` of them are one row of a tile.

    Rows of a tile that is copied begin at multiples of 8. Only small or odd capacities are padded,
    which copies the codes.
    """
    return max(-(-slots // (8 * per_word)) * 8, TILE) * per_word


def refuses_codes(q_codes: Array, k_codes: Array) -> str | None:
    """Why the kernels cannot take these codes, or None."""
    if 0 in q_codes.shape or 0 in k_codes.shape:
        return f"q_codes {q_codes.shape} and k_codes {k_codes.shape} leave nothing to launch"
    kv_heads, words = k_codes.shape[2:]
    if kv_heads * words % 4:
        return (
            f"the {kv_heads * words * 4} bytes of a slot's codes are not a multiple of 16, as "
            "copies to shared memory need; name another backend"
        )
    return None
