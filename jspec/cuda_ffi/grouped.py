"""Grouped matmul of few rows by one CUDA kernel, with weights in MXFP4."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jspec.cuda_ffi import library
from jspec.dispatch import Backend
from jspec.ops.linear import on_a_mesh
from jspec.ops.norm import CENTERED, RMS
from jspec.ops.quantized import BLOCK, MXFP4
from jspec.parts import ClampedSwiGLU
from jspec.typing import Array

# As in src/grouped/grouped.h and src/linear/linear.h.
MAX_GROUPS, MAX_INPUTS = 1024, 2**20
MAX_ROWS_PER_GROUP = 24  # in the mean over the groups


def grouped_linear_cuda(
    x: Array,
    kernel: MXFP4,
    starts: Array,
    bias: Array | None,
    gather_indices: Array | None,
    scatter_indices: Array | None,
    norm: RMS | None,
    weights: Array | None,
    *,
    gated: bool,
    clamped: ClampedSwiGLU | None,
    dtype: np.dtype,
) -> Array:
    """The CUDA backend of `jspec.ops.grouped.grouped_linear`, with None for what is left out."""
    rows = len(x) if gather_indices is None else len(gather_indices)
    scale = None if norm is None else norm.scale
    # x stands for an input that is None.
    optional = (
        x if one is None else one for one in (bias, gather_indices, scatter_indices, scale, weights)
    )
    (y,) = library.call(
        "grouped_linear",
        (jax.ShapeDtypeStruct((rows, *kernel.shape[3 if gated else 2 :]), dtype),),
        *(x, kernel.codes, kernel.scales, starts, *optional),
        vmap_method="sequential",
        biased=np.bool_(bias is not None),
        takes=np.bool_(gather_indices is not None),
        puts=np.bool_(scatter_indices is not None),
        normed=np.bool_(norm is not None),
        weighted=np.bool_(weights is not None),
        gated=np.bool_(gated),
        clamped=np.bool_(clamped is not None),
        eps=np.float32(0 if norm is None else norm.eps),
        limit=np.float32(0 if clamped is None else clamped.limit),
        alpha=np.float32(1 if clamped is None else clamped.alpha),
    )
    return y


def refuses(
    x: Array | jax.ShapeDtypeStruct,
    kernel: Array | MXFP4,
    starts: Array,
    bias: Array | None,
    gather_indices: Array | None,
    scatter_indices: Array | None,
    norm: RMS | None,
    weights: Array | None,
    *,
    gated: bool,
    clamped: ClampedSwiGLU | None,
    dtype: np.dtype,
) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    if not isinstance(kernel, MXFP4):
        return f"its weights are {kernel.dtype}, not MXFP4"
    if norm is not None and norm.centered:
        return CENTERED
    rows, (groups, inputs) = (
        len(x) if gather_indices is None else len(gather_indices),
        kernel.shape[:2],
    )
    columns = math.prod(kernel.shape[2:])
    if not 1 <= groups <= MAX_GROUPS:
        return f"it takes 1 to {MAX_GROUPS} groups, and there are {groups}"
    if not 1 <= rows <= MAX_ROWS_PER_GROUP * groups:
        return (
            f"it takes 1 to {MAX_ROWS_PER_GROUP} rows a group in the mean, and there are {rows} in "
            f"{groups}"
        )
    if not 1 <= inputs <= MAX_INPUTS or inputs % BLOCK:
        return f"{inputs} inputs are no multiple of {BLOCK} up to {MAX_INPUTS}"
    if not 1 <= columns <= 2**20 or x.size >= 2**31 or columns * inputs >= 2**36:
        return f"x {x.shape}, kernel {kernel.shape} are empty or too large"
    arrays = (x, bias, None if norm is None else norm.scale)
    if any(a is not None and a.dtype != jnp.bfloat16 for a in arrays):
        return "x, bias or the norm's scale is not bfloat16"
    if weights is not None and weights.dtype != jnp.float32:
        return f"the weights of the rows are {weights.dtype}, not float32"
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"the result is of {dtype}, neither bfloat16 nor float32"
    return on_a_mesh(kernel)


def _supports(*args, **settings) -> str | None:
    return refuses(*args, **settings) or library.refusal("grouped")


GROUPED = Backend("cuda", grouped_linear_cuda, _supports)
