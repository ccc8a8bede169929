"""Keys of selection by hash codes: how they lie in words, and what a row selects by them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jspec.pallas.inline import TILE
from jspec.typing import Array

MAX_CHUNK = 2**15  # slots: a half of a word counts them


@dataclasses.dataclass(frozen=True)
class Keys:
    """How the keys of a row lie in words, and how a row is divided.

    Attributes:
        highest: the highest key.
        slots: of a row.
        chunk: words of a chunk, whose keys are counted together; a power of 2 and at least `TILE`.
        thread_words: words of a thread of the second launch at a time, a power of 2.
    """

    highest: int
    slots: int
    chunk: int
    thread_words: int

    @property
    def per_word(self) -> int:
        """Keys of a word: slots next to each other, the first in the lowest bits."""
        return 4 if self.highest < 2**8 else 2

    @property
    def bits(self) -> int:
        """Of a key."""
        return 32 // self.per_word

    @property
    def bins(self) -> int:
        """Of a histogram, a power of 2."""
        return 1 << self.highest.bit_length()

    @property
    def words(self) -> int:
        """Of a row."""
        return self.slots // self.per_word

    @property
    def chunks(self) -> int:
        """Of a row."""
        return -(-self.words // self.chunk)

    @property
    def piece(self) -> int:
        """Words of a program of the second launch at a time: one chunk, or several."""
        return TILE * self.thread_words

    @property
    def pieces(self) -> int:
        """Of a row."""
        return -(-self.words // self.piece)

    def reached(self, words: Array, key: Array) -> Array:
        """How many keys of each word are at least ``key`` in 1..highest + 1, int32.

        Two keys at a time are in halves of a word: adding 2**bits - key carries where the key is
        reached.
        """
        bits, ones = jnp.uint32(self.bits), jnp.uint32(0x00010001)
        carry = jnp.uint32(2**self.bits) - key.astype(jnp.uint32)
        if self.per_word == 2:
            low, high = words & jnp.uint32(0xFFFF), words >> bits
            return (((low + carry) >> bits) + ((high + carry) >> bits)).astype(jnp.int32)
        mask, carry = jnp.uint32(0x00FF00FF), carry * ones
        pairs = words & mask, (words >> bits) & mask
        even, odd = (((pair + carry) >> bits) & ones for pair in pairs)
        both = even + odd
        return ((both & jnp.uint32(0xFFFF)) + (both >> jnp.uint32(16))).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a row selects: its ``first`` slots, ``need`` of low..high - 1, and its ``last`` ones."""

    low: Array
    high: Array
    first: Array
    need: Array
    last: Array

    @classmethod
    def of(cls, count: Array, length: Array, n: int, k: int, sinks: int, recent: int) -> Budget:
        """Of a row with a budget ``count`` and ``length`` slots, int32 scalars."""
        length = jnp.clip(length, 0, n)
        count = jnp.minimum(jnp.clip(count, 0, k), length)
        low = jnp.minimum(sinks, length)
        high = jnp.maximum(length - recent, low)
        first = jnp.minimum(low, count)
        last = jnp.minimum(length - high, count - first)
        return cls(low, high, first, count - first - last, last)
