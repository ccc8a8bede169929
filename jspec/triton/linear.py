"""A matmul as one Triton launch, in tiles of rows."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jspec import tuned
from jspec.dispatch import Backend
from jspec.gpu import refuses_gpu
from jspec.ops.gradient import differentiated_as
from jspec.ops.linear import linear_sizes, linear_xla, on_a_mesh
from jspec.ops.norm import CENTERED, RMS
from jspec.ops.quantized import BLOCK, MXFP4, Quantized, weight_bits
from jspec.triton.call import next_power, refuses_triton, triton_call
from jspec.typing import Array

MAX_ROWS = 1024  # more are a prefill, which XLA multiplies faster
MAX_BYTES = 2**15  # of x in a tile, which has many inputs with weights of 4 bits
FP8 = jnp.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Block sizes of the kernel.

    Attributes:
        width: columns of the result per program.
        bytes: of the weights of a tile.
        stages: of the compiler's pipelining.
        warps: of a program.
    """

    width: int
    bytes: int
    stages: int
    warps: int


@dataclasses.dataclass(frozen=True)
class RowBlocks(Blocks):
    """Block sizes of `linear`.

    Attributes:
        rows: of a tile, a power of 2; at most, where the matmul is not exact.
    """

    rows: int


def linear_triton(
    x: Array,
    kernel: Array | Quantized | MXFP4,
    bias: Array | None,
    norm: RMS | None,
    add: Array | None,
    *,
    gated: bool,
    transposed: bool,
    dtype: np.dtype,
    blocks: RowBlocks | None = None,
    exact: bool = False,
) -> Array:
    """As `jspec.ops.linear.linear`.

    ``exact``: tiles of the same size for any number of rows, so that a row's bits follow from that
    row alone.
    """
    settings = {"gated": gated, "transposed": transposed, "dtype": dtype}
    launch = functools.partial(_launch, **settings, blocks=blocks, exact=exact)
    if isinstance(kernel, Quantized | MXFP4):  # not differentiable
        return launch(x, kernel, bias, norm, add)
    run = differentiated_as(functools.partial(linear_xla, **settings), launch)
    return run(x, kernel, bias, norm, add)


def _launch(x, kernel, bias, norm, add, *, gated, transposed, dtype, blocks, exact=False) -> Array:
    from jspec.triton.linear_kernel import linear_kernel

    lead, inputs = x.shape[:-1], x.shape[-1]
    outputs = kernel.shape[:-1] if transposed else kernel.shape[1:]
    outputs = outputs[1:] if gated else outputs
    rows, columns = math.prod(lead), math.prod(outputs)
    is_packed = isinstance(kernel, Quantized | MXFP4)
    name = "exact" if exact else "triton"
    blocks = blocks or RowBlocks(**tuned.block("linear", name, linear_sizes(x, kernel)))
    tile = blocks.rows if exact else min(blocks.rows, max(16, next_power(rows)))
    width, step, split = cut(blocks, x, kernel, columns, tile)
    (y,) = triton_call(
        linear_kernel,
        *(x, *(jax.tree.leaves(kernel) if is_packed else (kernel, x))),
        x if bias is None else bias,
        *(x if norm is None else norm.scale, x if add is None else add),
        # Read when it runs, so that any number of rows shares one machine program.
        jnp.asarray(np.array([rows], np.int32)) if exact else x,
        out=(jax.ShapeDtypeStruct((*lead, *outputs), dtype),),
        programs=-(-columns // width) * -(-rows // tile),
        warps=blocks.warps,
        ROWS=0 if exact else rows,
        IN=inputs,
        OUT=columns,
        EPS=0.0 if norm is None else norm.eps,
        SCALED=isinstance(kernel, Quantized),
        BIASED=bias is not None,
        NORMED=norm is not None,
        ADDED=add is not None,
        GATED=gated,
        TRANSPOSED=transposed or isinstance(kernel, Quantized),
        TILE=tile,
        STEP=step,
        WIDTH=width,
        STAGES=blocks.stages,
        SPLIT=split,
    )
    return y


def cut(
    blocks: Blocks, x: Array, kernel: Array | Quantized | MXFP4, columns: int, tile: int
) -> tuple[int, int, int]:
    """Columns per program, inputs per tile, and the number of parts in which MXFP4 inputs are
    summed.

    ``tile``: rows of a tile. With 64 columns or more, four warps share a tile of MXFP4, as Hopper's
    matrix units need it; with fewer, each warp takes a part of the inputs and all columns. The
    number of parts is 0 for other weights.
    """
    inputs = x.shape[-1]
    width = min(blocks.width, max(16, next_power(columns)))
    step = min(8 * blocks.bytes // (width * weight_bits(kernel)), next_power(inputs))
    if not isinstance(kernel, MXFP4):
        return width, max(16, step), 0
    split = 1 if width >= 64 else blocks.warps
    step = min(step, MAX_BYTES // (tile * x.dtype.itemsize))
    return width, max(BLOCK * split, step), split


def refuses(x: Array, kernel: Array | Quantized | MXFP4) -> str | None:
    """Why the kernel, unless it is exact, cannot take these arguments, or None."""
    rows = math.prod(x.shape[:-1])
    if rows > MAX_ROWS:
        return f"it takes 1 to {MAX_ROWS} rows, and there are {rows}"
    return refuses_matmul(x, kernel)


def refuses_matmul(x: Array, kernel: Array | Quantized | MXFP4) -> str | None:
    """Why the kernel cannot take these arguments with any number of rows, or None."""
    if 0 in x.shape or 0 in kernel.shape:
        return f"x {x.shape} and kernel {kernel.shape} leave nothing to launch"
    alike = x.dtype == kernel.dtype or isinstance(kernel, Quantized | MXFP4)
    if not alike or x.dtype not in ("bfloat16", "float16", "float32"):
        return f"x {x.dtype} and kernel {kernel.dtype} are not of one type of 16 or 32 bits"
    return on_a_mesh(kernel)


def _supports(x, kernel, bias, norm, *args, **kwargs) -> str | None:
    return refuses(x, kernel) or _supports_exact(x, kernel, bias, norm)


def _supports_exact(x, kernel, bias, norm, *args, **kwargs) -> str | None:
    if norm is not None and norm.centered:
        return CENTERED
    if reason := refuses_matmul(x, kernel) or refuses_triton():
        return reason
    return refuses_gpu((8, 9), "a matmul with fp8") if kernel.dtype == FP8 else None


LINEAR = Backend("triton", linear_triton, _supports)
EXACT = Backend("exact", functools.partial(linear_triton, exact=True), _supports_exact)
