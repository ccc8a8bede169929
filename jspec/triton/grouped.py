"""Grouped matmul as one Triton launch."""

from __future__ import annotations

import functools
import math

import jax
import numpy as np

from jspec import tuned
from jspec.dispatch import Backend
from jspec.ops.gradient import differentiated_as
from jspec.ops.grouped import grouped_linear_xla, grouped_sizes
from jspec.ops.linear import on_a_mesh
from jspec.ops.norm import CENTERED, RMS
from jspec.ops.quantized import MXFP4
from jspec.parts import ClampedSwiGLU
from jspec.triton.call import next_power, refuses_triton, triton_call
from jspec.triton.linear import Blocks, cut
from jspec.typing import Array

MAX_TILE_ROWS = 128  # rows of a tile


def grouped_linear_triton(
    x: Array,
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
    blocks: Blocks | None = None,
) -> Array:
    """The Triton backend of `jspec.ops.grouped.grouped_linear`, with None for what is left out."""
    settings = {"gated": gated, "clamped": clamped, "dtype": dtype}
    launch = functools.partial(_launch, **settings, blocks=blocks)
    if isinstance(kernel, MXFP4):  # not differentiable
        return launch(x, kernel, starts, bias, gather_indices, scatter_indices, norm, weights)
    run = differentiated_as(functools.partial(grouped_linear_xla, **settings), launch)
    return run(x, kernel, starts, bias, gather_indices, scatter_indices, norm, weights)


def _launch(
    x,
    kernel,
    starts,
    bias,
    gather_indices,
    scatter_indices,
    norm,
    weights,
    *,
    gated,
    clamped,
    dtype,
    blocks,
) -> Array:
    from jspec.triton.grouped_kernel import grouped_linear_kernel

    groups, inputs = kernel.shape[:2]
    outputs = math.prod(kernel.shape[3 if gated else 2 :])
    rows = len(x) if gather_indices is None else len(gather_indices)
    sizes = grouped_sizes(x, kernel, starts, bias, gather_indices)
    blocks = blocks or Blocks(**tuned.block("grouped_linear", "triton", sizes))
    # The mean rows of a group: larger tiles would multiply more padding.
    tile = min(MAX_TILE_ROWS, max(16, next_power(sizes["each"])))
    width, step, split = cut(blocks, x, kernel, outputs, tile)
    parts = -(-outputs // width)
    (y,) = triton_call(
        grouped_linear_kernel,
        *(x, *(jax.tree.leaves(kernel) if isinstance(kernel, MXFP4) else (kernel, x)), starts),
        *(x if array is None else array for array in (bias, gather_indices, scatter_indices)),
        *(x if norm is None else norm.scale, x if weights is None else weights),
        out=(jax.ShapeDtypeStruct((rows, *kernel.shape[3 if gated else 2 :]), dtype),),
        # At most as many groups as there are rows have a row.
        programs=min(groups, rows) * parts,
        warps=blocks.warps,
        GROUPS=groups,
        IN=inputs,
        OUT=outputs,
        SHARE=rows // len(x),
        EPS=0.0 if norm is None else norm.eps,
        LIMIT=0.0 if clamped is None else clamped.limit,
        ALPHA=1.0 if clamped is None else clamped.alpha,
        BIASED=bias is not None,
        GATHERED=gather_indices is not None,
        SCATTERED=scatter_indices is not None,
        NORMED=norm is not None,
        WEIGHTED=weights is not None,
        GATED=gated,
        CLAMPED=clamped is not None,
        SEARCHED=rows < groups,
        PARTS=parts,
        TILE=tile,
        STEP=step,
        WIDTH=width,
        GROUPS_WIDTH=next_power(groups),
        STAGES=blocks.stages,
        SPLIT=split,
    )
    return y


def refuses(x: Array, kernel: Array | MXFP4, norm: RMS | None = None) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    if 0 in x.shape or 0 in kernel.shape:
        return f"x {x.shape}, kernel {kernel.shape} leave nothing to launch"
    alike = x.dtype == kernel.dtype or isinstance(kernel, MXFP4)
    if not alike or x.dtype not in ("bfloat16", "float16", "float32"):
        return f"x {x.dtype} and kernel {kernel.dtype} are not of one type of 16 or 32 bits"
    if norm is not None and norm.centered:
        return CENTERED
    return on_a_mesh(kernel)


def _supports(
    x, kernel, starts, bias, gather_indices, scatter_indices, norm, *args, **kwargs
) -> str | None:
    return refuses(x, kernel, norm) or refuses_triton()


GROUPED = Backend("triton", grouped_linear_triton, _supports)
