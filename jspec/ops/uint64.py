"""Unsigned 64-bit integers in programs of callers that have not enabled JAX's 64-bit types."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jspec.typing import Array

P = ParamSpec("P")
R = TypeVar("R")


def in_64_bits(function: Callable[P, R]) -> Callable[P, R]:
    """Let ``function`` use uint64, whatever ``jax_enable_x64`` is.

    Python numbers may become 64-bit arrays in it, so it has to name dtypes.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.enable_x64(True):
            return function(*args, **kwargs)

    return run


def widen(x: Array) -> Array:
    """A uint32 array as uint64."""
    return x.astype(jnp.uint64)


def high(a: Array, b: Array) -> Array:
    """The upper 32 bits of the product of two uint32 arrays, uint32."""
    return (widen(a) * widen(b) >> 32).astype(jnp.uint32)


def scale(x: Array, factor: Array) -> Array:
    """``x * factor // 2**32`` for uint64 and a uint32 factor."""
    factor = widen(factor)
    return (x >> 32) * factor + ((x & 0xFFFFFFFF) * factor >> 32)


def high64(a: Array, b: Array) -> Array:
    """The upper 64 bits of the product of two uint64 arrays."""
    # lax.mulhi gives the same, but does not lower inside shard_map.
    (a0, a1), (b0, b1) = _halves(a), _halves(b)
    first = a1 * b0 + (a0 * b0 >> 32)
    second = a0 * b1 + (first & 0xFFFFFFFF)
    return a1 * b1 + (first >> 32) + (second >> 32)


def shift_left(x: Array, count: Array) -> Array:
    """``x * 2**count`` modulo 2**64, for uint64 and a uint32 count, 0 from 64 on."""
    return lax.shift_left(*jnp.broadcast_arrays(x, widen(count)))


def shift_right(x: Array, count: Array) -> Array:
    """``x // 2**count`` for uint64 and a uint32 count, 0 from 64 on."""
    return lax.shift_right_logical(*jnp.broadcast_arrays(x, widen(count)))


def bit_width(x: Array) -> Array:
    """Bits of a uint64 number without leading zeros, uint32, 0 for 0."""
    return 64 - lax.clz(x).astype(jnp.uint32)


def _halves(x: Array) -> tuple[Array, Array]:
    """The lower and the upper 32 bits, uint64."""
    return x & 0xFFFFFFFF, x >> 32
