"""Weights of 8 bits with a scale for each column, or of 4 bits with one for each block of inputs,
and how they are made of wider ones."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jspec.typing import Array

# The dtype of each kind of 8 bits, and its largest number.
EIGHT_BITS = {"int8": (jnp.int8, 127.0), "fp8": (jnp.float8_e4m3fn, 448.0)}
KINDS = (*EIGHT_BITS, "mxfp4")
BLOCK = 32  # inputs that share a scale in MXFP4
# The numbers of E2M1 by their bits: a sign, two of exponent, one of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Between two of them, a number goes to the one on its side of the middle, and from the middle to
# the one whose last bit is 0: a bound is the largest number that goes down.
_BOUNDS = tuple(
    np.nextafter((a + b) / 2, 0, dtype=np.float32) if i % 2 else np.float32((a + b) / 2)
    for i, (a, b) in enumerate(itertools.pairwise(_E2M1))
)
_MIN_SCALE, _MAX_SCALE = 1, 252  # above, 6 times a scale may be beyond float32
_NAN = 255


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A matrix ``[in, *out]`` of weights: ``values [*out, in]`` of 8 bits times ``scale [*out]``.

    ``scale`` is float32. Matmuls take the values as they are, and scale the sums. A
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MXFP4:
    """Matrices ``[*lead, in, *out]`` of weights of 4 bits (OCP Microscaling Formats 1.0).

    A weight is its E2M1 times ``2 ** (scale - 127)`` of its block of `BLOCK` inputs. ``codes``
    uint8 ``[*lead, *out, in / 2]``: two inputs a byte, the first in the low bits. ``scales`` uint8
    ``[*lead, *out, in / 32]``: E8M0. ``leading``: how many axes ``lead`` has. Matmuls take each
    weight as it is, which bfloat16 has exactly. Kernels may take a scale of 0 as no weight at all,
    and one above 160, whose weights are 2 ** 32 and more, as infinite.
    """

    codes: Array
    scales: Array
    leading: int = dataclasses.field(default=0, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        *outputs, half = self.codes.shape
        return (*outputs[: self.leading], 2 * half, *outputs[self.leading :])

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(jnp.float4_e2m1fn)

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    @property
    def size(self) -> int:
        return 2 * self.codes.size

    def __len__(self) -> int:
        return self.shape[0]


def weight_bits(kernel: Array | Quantized | MXFP4) -> int:
    """The bits that a weight has in memory, without scales."""
    return 4 if isinstance(kernel, MXFP4) else 8 * kernel.dtype.itemsize


def dequantized(kernel: MXFP4, dtype: DTypeLike) -> Array:
    """The weights ``[*lead, in, *out]`` of ``kernel``, of ``dtype``."""
    codes = jnp.stack([kernel.codes & 15, kernel.codes >> 4], axis=-1)
    numbers = jnp.array([*_E2M1, *(-x for x in _E2M1)], jnp.float32)[codes]
    blocks = numbers.reshape(*kernel.scales.shape, BLOCK)
    # Not `exp2`, which is off by a rounding on some devices.
    factors = jax.lax.bitcast_convert_type(kernel.scales, jnp.float8_e8m0fnu).astype(jnp.float32)
    weights = (blocks * factors[..., None]).reshape(*kernel.codes.shape[:-1], -1)
    return jnp.moveaxis(weights, -1, kernel.leading).astype(dtype)


def dequantize_with_input(x: Array, kernel: MXFP4) -> tuple[Array, Array]:
    """``x``, and the weights of ``kernel`` in the dtype of x, which are computed after x.

    Otherwise XLA would hoist the weights of all layers out of a loop and keep them in memory.
    """
    x, kernel = jax.lax.optimization_barrier((x, kernel))
    return x, dequantized(kernel, x.dtype)


@functools.partial(jax.jit, static_argnames=("kind", "leading"))
def quantized(kernel: Array, kind: str, leading: int = 0) -> Quantized | MXFP4:
    """``kernel [*lead, in, *out]`` as one of `KINDS`.

    ``int8`` and ``fp8`` (e4m3): each column by its largest weight, which its scale has at 127 or
    448. A weight is off by half a scale at most with int8; with fp8 by 1/16 of itself, or 2^-10 of
    a scale where that is more. ``mxfp4``: each block by the power of two that leaves the smaller
    error of the two that come into question: the least by which no weight is over 6, and half of
    it. ``leading``: how many axes ``lead`` has, none for weights of 8 bits. A weight that is not
    finite makes results of its column, or its block, NaN. Raises `ValueError` for MXFP4 where
    the inputs are no multiple of `BLOCK`.
    """
    weights = kernel.astype(jnp.float32)
    if kind == "mxfp4":
        return _mxfp4(weights, leading)
    dtype, max_value = EIGHT_BITS[kind]
    scale = jnp.abs(weights).max(axis=0) / max_value
    values = weights / jnp.where(scale > 0, scale, 1)[None]
    if kind == "int8":
        values = jnp.round(values)
    return Quantized(jnp.moveaxis(values.astype(dtype), 0, -1), scale)


def _mxfp4(kernel: Array, leading: int) -> MXFP4:
    """``kernel [*lead, in, *out]``, float32, in MXFP4."""
    if kernel.shape[leading] % BLOCK:
        raise ValueError(
            f"a kernel {kernel.shape} of {kernel.shape[leading]} inputs has no MXFP4: they must be "
            f"a multiple of {BLOCK}; take int8"
        )
    flat = jnp.moveaxis(kernel, leading, -1)
    blocks = flat.reshape(*flat.shape[:-1], -1, BLOCK)
    largest = jnp.abs(blocks).max(axis=-1)
    # largest = mantissa * 2 ** exponent with a mantissa in [0.5, 1): 6 is 0.75 * 2 ** 3.
    mantissa, exponent = jnp.frexp(largest)
    least = exponent + jnp.where(mantissa > 0.75, 1, 0) - 3

    def rounded(power: Array) -> tuple[Array, Array, Array]:
        """Codes, scales, and each block's sum of squared errors, for scales of ``2**power``."""
        scales = jnp.clip(power + 127, _MIN_SCALE, _MAX_SCALE)
        scaled = jnp.ldexp(blocks, 127 - scales[..., None])
        codes = jnp.searchsorted(jnp.array(_BOUNDS), jnp.abs(scaled), method="compare_all")
        error = jnp.abs(scaled) - jnp.array(_E2M1, jnp.float32)[codes]
        codes = codes + jnp.where(scaled < 0, 8, 0)
        return codes.astype(jnp.uint8), scales.astype(jnp.uint8), jnp.square(error).sum(axis=-1)

    # Errors are in units of their scales. Where both scales were clipped, so are both the same.
    (whole, scales, error), (half, halves, other) = rounded(least), rounded(least - 1)
    is_half = other / 4 < error
    codes = jnp.where(is_half[..., None], half, whole)
    scales = jnp.where(is_half, halves, scales)
    # 0 times a scale that is NaN, or that a kernel takes as infinite, is NaN.
    finite = jnp.isfinite(largest)
    codes = jnp.where(finite[..., None], codes, 0).reshape(*flat.shape[:-1], -1, 2)
    scales = jnp.where(finite, scales, _NAN).astype(jnp.uint8)
    return MXFP4(codes[..., 0] | codes[..., 1] << 4, scales, leading)
