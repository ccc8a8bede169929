"""Matmuls of tiles by a warpgroup on Mosaic GPU, one at a time or two that overlap.

A tile has 64 rows. The accumulator is in registers, the second operand in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.typing import Array

TILE = 64  # rows that a warpgroup multiplies at a time


def swizzled(shape: tuple[int, ...], dtype: jnp.dtype):
    """Shared memory in the swizzled layout that matmuls read."""
    channels = swizzled_channels(shape[-1])
    swizzle = plgpu.SwizzleTransform(channels * jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, channels)), swizzle))


def swizzled_channels(channels: int) -> int:
    """How many channels are contiguous in the swizzled layout."""
    return next(c for c in (64, 32, 16) if channels % c == 0)


def _accumulator(columns: int):
    return plgpu.ACC((TILE, columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]


def matmul(a, b) -> Array:
    """The matmul of two tiles in shared memory."""

    def multiply(product):
        plgpu.wgmma(product, a, b)
        return product[...]

    return pl.run_scoped(multiply, _accumulator(b.shape[1]))


def add_matmul(acc: Array, a: Array, b) -> Array:
    """``acc`` plus the matmul of a tile in registers and one in shared memory."""

    def add(result):
        result[...] = acc
        plgpu.wgmma(result, a, b)
        return result[...]

    return pl.run_scoped(add, _accumulator(b.shape[1]))


def overlapped_matmuls(
    q, k, ready: Callable[[], None], sums, between: Callable[[Array], tuple[Array, ...]]
):
    """``between(q @ k)``, overlapped with ``acc + a @ b`` of ``sums`` once ``b`` is ``ready``."""
    acc, a, b = sums

    def run(product, result):
        result[...] = acc
        plgpu.wgmma(product, q, k)
        ready()
        plgpu.wgmma(result, a, b)
        intermediates = between(plgpu.wgmma_accumulator_load(product, wait_n=1))
        # All of it comes before the wait for the second matmul, and nothing else does: what is
        # `a` of the next one must not be written while this one reads it.
        intermediates = lax.optimization_barrier(intermediates)
        return lax.optimization_barrier((intermediates, result[...]))

    return pl.run_scoped(run, _accumulator(k.shape[1]), _accumulator(b.shape[1]))
