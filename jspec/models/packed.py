"""Experts of a layer in one tensor, as checkpoints of gpt-oss have them, plain or in MXFP4.

A plain tensor is ``[E, in, out]``, its bias ``[E, out]``. Gate and up are one matmul, whose
outputs alternate.
"""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np

from jspec.ops.quantized import BLOCK
from jspec.typing import Array

_PACKED = re.compile(r"layers\.[0-9]+\.mlp\.experts\.[a-z]")

# MXFP4 (OCP Microscaling Formats 1.0): blocks of numbers of 4 bits, E2M1, with one scale, E8M0.
LARGEST = 252  # byte of a scale: 6 times the next power of two is beyond float32, and 255 is NaN
_NUMBERS = np.arange(16, dtype=np.uint8).view(jnp.float4_e2m1fn).astype(np.float32)
# The two numbers of each byte, the one in the low bits first.
_PAIRS = _NUMBERS[np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=1)]


def is_packed(parameter: str) -> bool:
    """Whether a parameter, or a part of one, is of all experts of a layer."""
    return _PACKED.match(parameter) is not None


def is_kernel(parameter: str) -> bool:
    """Whether a parameter is a kernel of all experts of a layer, which may be in MXFP4."""
    return is_packed(parameter) and parameter.endswith(".kernel")


def stored_shape(parameter: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the plain tensor of a parameter that has ``shape``."""
    return (*shape[:-2], 2 * shape[-1]) if ".gate_up." in parameter else shape


def mxfp4_shapes(name: str, plain: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes, by name, of the tensors that hold a kernel of the ``plain`` shape in MXFP4.

    Blocks run along the inputs: bytes are ``[E, out, in / 32, 16]``, scales ``[E, out, in / 32]``.
    """
    count, inputs, outputs = plain
    scales = (count, outputs, -(-inputs // BLOCK))
    blocks, scale = mxfp4_names(name)
    return {blocks: (*scales, BLOCK // 2), scale: scales}


def mxfp4_names(name: str) -> tuple[str, str]:
    """The tensors that hold the blocks and the scales of the kernel ``name``."""
    return f"{name}_blocks", f"{name}_scales"


def check_scales(scales: np.ndarray | Array) -> None:
    """Raise `ValueError` for a scale that is NaN or may give more than float32 has."""
    if scales.max(initial=0) > LARGEST:
        raise ValueError(f"byte {scales.max()} is no scale of weights; they are at most {LARGEST}")


def dequantized(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Numbers float32 ``[..., 32 n]`` of bytes ``blocks [..., n, 16]`` and ``scales [..., n]``.

    A number is its E2M1 times ``2 ** (scale - 127)``.
    """
    numbers = _PAIRS[blocks].reshape(*blocks.shape[:-1], BLOCK)
    factors = scales.view(jnp.float8_e8m0fnu).astype(np.float32)
    return (numbers * factors[..., None]).reshape(*scales.shape[:-1], -1)


def fill(out: np.ndarray, stored: np.ndarray) -> None:
    """Fill ``out`` of one expert, in jspec's shape, with what a file has of it."""
    if out.shape != stored.shape:
        stored = np.moveaxis(stored.reshape(*stored.shape[:-1], -1, 2), -1, -2)
    out[...] = stored


def fill_packed(out: np.ndarray, stored: np.ndarray) -> None:
    """As `fill`, of codes or scales, whose outputs come first."""
    fill(np.moveaxis(out, -1, 0), np.moveaxis(stored.reshape(len(stored), -1), -1, 0))
