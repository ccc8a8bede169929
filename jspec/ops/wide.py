"""Unsigned 64-bit integers as pairs of uint32: JAX has its own only behind a global switch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jspec.typing import Array


class Wide(NamedTuple):
    """``high * 2**32 + low``, two uint32 arrays of one shape."""

    high: Array
    low: Array


def add(a: Wide, b: Wide) -> Wide:
    """``a + b``, modulo 2**64."""
    low = a.low + b.low
    return Wide(a.high + b.high + (low < b.low).astype(jnp.uint32), low)


def high(a: Array, b: Array) -> Array:
    """The upper 32 bits of the product of two uint32 arrays."""
    # lax.mulhi gives the same, but does not lower inside shard_map.
    (a0, a1), (b0, b1) = halves(a), halves(b)
    first = a1 * b0 + (a0 * b0 >> 16)
    second = a0 * b1 + (first & 0xFFFF)
    return a1 * b1 + (first >> 16) + (second >> 16)


def multiply(a: Array, b: Array) -> Wide:
    """The whole product of two uint32 arrays."""
    return Wide(high(a, b), a * b)


def scale(x: Wide, factor: Array) -> Wide:
    """``x * factor``, modulo 2**64."""
    product = multiply(x.low, factor)
    return Wide(product.high + x.high * factor, product.low)


def shift_right(x: Wide, count: Array) -> Wide:
    """``x // 2**count``, for ``count`` uint32 in 0..63."""
    # A shift of lax by 32 or more gives 0, also where its count wrapped around below 0.
    right, left = lax.shift_right_logical, lax.shift_left
    low = right(x.low, count) | left(x.high, 32 - count) | right(x.high, count - 32)
    return Wide(right(x.high, count), low)


def less(a: Wide, b: Wide) -> Array:
    """``a < b``."""
    return (a.high < b.high) | ((a.high == b.high) & (a.low < b.low))


def halves(x: Array) -> tuple[Array, Array]:
    """The lower and the upper 16 bits of uint32."""
    return x & 0xFFFF, x >> 16


def linear(f: Callable[[Array], Array], *parts: Array) -> Wide:
    """``f(x)`` of ``x = sum(part * 2**(16 * i))``, for an f that sums: at most 2**16 numbers.

    Sums of parts below 2**16 fit 32 bits; the third and last part gives the upper 32.
    """
    sums = [f(part) for part in parts]
    zero = jnp.zeros_like(sums[0])
    total = add(Wide(zero, sums[0]), Wide(sums[1] >> 16, sums[1] << 16))
    for part in sums[2:]:
        total = add(total, Wide(part, zero))
    return total
