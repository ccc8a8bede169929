"""Unsigned 64-bit integers as pairs of uint32: JAX has its own only behind a global switch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jspec.typing import Array


class UInt64(NamedTuple):
    """``high * 2**32 + low``, two uint32 arrays of one shape."""

    high: Array
    low: Array


def widen(x: Array) -> UInt64:
    """A uint32 array."""
    return UInt64(jnp.zeros_like(x), x)


def add(a: UInt64, b: UInt64) -> UInt64:
    """``a + b``, modulo 2**64."""
    low = a.low + b.low
    return UInt64(a.high + b.high + (low < b.low).astype(jnp.uint32), low)


def subtract(a: UInt64, b: UInt64) -> UInt64:
    """``a - b``, modulo 2**64."""
    return UInt64(a.high - b.high - (a.low < b.low).astype(jnp.uint32), a.low - b.low)


def less(a: UInt64, b: UInt64) -> Array:
    """``a < b``."""
    return (a.high < b.high) | ((a.high == b.high) & (a.low < b.low))


def is_zero(x: UInt64) -> Array:
    """``x == 0``."""
    return (x.high | x.low) == 0


def where(condition: Array, a: UInt64, b: UInt64) -> UInt64:
    """``a`` where the condition holds, else ``b``."""
    return UInt64(jnp.where(condition, a.high, b.high), jnp.where(condition, a.low, b.low))


def select(condition: Array, x: UInt64) -> UInt64:
    """``x`` where the condition holds, else 0."""
    return UInt64(jnp.where(condition, x.high, 0), jnp.where(condition, x.low, 0))


def multiply(a: Array, b: Array) -> UInt64:
    """The whole product of two uint32 arrays."""
    return UInt64(high(a, b), a * b)


def high(a: Array, b: Array) -> Array:
    """The upper 32 bits of the product of two uint32 arrays."""
    # lax.mulhi gives the same, but does not lower inside shard_map.
    (a0, a1), (b0, b1) = _halves(a), _halves(b)
    first = a1 * b0 + (a0 * b0 >> 16)
    second = a0 * b1 + (first & 0xFFFF)
    return a1 * b1 + (first >> 16) + (second >> 16)


def scale(x: UInt64, factor: Array) -> UInt64:
    """``x * factor // 2**32`` for a uint32 factor."""
    return add(multiply(x.high, factor), widen(high(x.low, factor)))


def high64(a: UInt64, b: UInt64) -> UInt64:
    """The upper 64 bits of the product of two."""
    first = add(multiply(a.low, b.high), widen(high(a.low, b.low)))
    second = add(multiply(a.high, b.low), widen(first.low))
    upper = add(multiply(a.high, b.high), widen(first.high))
    return add(upper, widen(second.high))


def shift_left(x: UInt64, count: Array) -> UInt64:
    """``x * 2**count`` modulo 2**64, for a uint32 count."""
    # A shift of lax by 32 or more gives 0, also where its count wrapped around below 0.
    left, right = lax.shift_left, lax.shift_right_logical
    upper = left(x.high, count) | right(x.low, 32 - count) | left(x.low, count - 32)
    return UInt64(upper, left(x.low, count))


def shift_right(x: UInt64, count: Array) -> UInt64:
    """``x // 2**count`` for a uint32 count, 0 from 64 on."""
    left, right = lax.shift_left, lax.shift_right_logical
    lower = right(x.low, count) | left(x.high, 32 - count) | right(x.high, count - 32)
    return UInt64(right(x.high, count), lower)


def bit_width(x: UInt64) -> Array:
    """Bits of the number without leading zeros, uint32, 0 for 0."""
    return jnp.where(x.high > 0, 64 - lax.clz(x.high), 32 - lax.clz(x.low))


def linear(f: Callable[[Array], Array], x: UInt64) -> UInt64:
    """``f(x)`` for an f that sums uint32, of at most 2**16 numbers a sum; modulo 2**64."""
    first, *others = (f(part) for half in (x.low, x.high) for part in _halves(half))
    total = widen(first)
    for i, part in enumerate(others, start=1):
        total = add(total, shift_left(widen(part), jnp.full_like(part, 16 * i)))
    return total


def _halves(x: Array) -> tuple[Array, Array]:
    """The lower and the upper 16 bits of uint32."""
    return x & 0xFFFF, x >> 16
