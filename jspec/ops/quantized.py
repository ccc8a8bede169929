"""Weights of 8 bits with a scale for each column, and how they are made of wider ones."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.typing import Array

# The dtype of each kind, and its largest number.
KINDS = {"int8": (jnp.int8, 127.0), "fp8": (jnp.float8_e4m3fn, 448.0)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A matrix ``[in, *out]`` of weights: ``values [*out, in]`` of 8 bits times ``scale [*out]``.

    ``scale`` is float32. Products take the values as they are, and scale their sums. A
    column's inputs are contiguous, as matrix units read operands of 8 bits.
    """

    values: Array
    scale: Array

    @property
    def shape(self) -> tuple[int, ...]:
        *outputs, inputs = self.values.shape
        return (inputs, *outputs)

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    @property
    def size(self) -> int:
        return self.values.size


@functools.partial(jax.jit, static_argnames="kind")
def quantized(kernel: Array, kind: str) -> Quantized:
    """``kernel [in, *out]`` as ``int8`` or ``fp8`` (e4m3), each column by its largest weight.

    A weight is off by half a scale at most with int8; with fp8 by 1/16 of itself, or 2^-10 of a
    scale where that is more. A scale is the largest weight over 127 or 448.
    """
    dtype, most = KINDS[kind]
    wide = kernel.astype(jnp.float32)
    scale = jnp.abs(wide).max(axis=0) / most
    values = wide / jnp.where(scale > 0, scale, 1)[None]
    if kind == "int8":
        values = jnp.round(values)
    return Quantized(jnp.moveaxis(values.astype(dtype), 0, -1), scale)
