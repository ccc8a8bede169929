"""Products by groups of rows as one Triton launch."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jspec import tuned
from jspec.dispatch import Backend
from jspec.ops.gradient import differentiated_as
from jspec.ops.grouped import grouped_linear_xla, grouped_sizes
from jspec.ops.linear import on_a_mesh
from jspec.triton.call import next_power, refuses_triton, triton_call
from jspec.triton.linear import Blocks
from jspec.typing import Array

MOST = 64  # rows of a tile


def grouped_linear_triton(
    x: Array, kernel: Array, counts: Array, *, blocks: Blocks | None = None
) -> Array:
    """As `jspec.ops.grouped.grouped_linear`."""
    run = differentiated_as(
        functools.partial(grouped_linear_xla, counts=counts),
        functools.partial(_launch, counts=counts, blocks=blocks),
    )
    return run(x, kernel)


def _launch(x: Array, kernel: Array, *, counts: Array, blocks: Blocks | None) -> Array:
    from jspec.triton.grouped_kernel import grouped_kernel

    groups, inputs, outputs = kernel.shape
    blocks = blocks or Blocks(
        **tuned.block("grouped_linear", "triton", grouped_sizes(x, kernel, counts))
    )
    width = min(blocks.width, max(16, next_power(outputs)))
    step = blocks.bytes // (width * kernel.dtype.itemsize)
    parts = -(-outputs // width)
    starts = jnp.pad(jnp.cumsum(counts, dtype=jnp.int32), (1, 0))
    (y,) = triton_call(
        grouped_kernel,
        *(x, kernel, starts),
        out=(jax.ShapeDtypeStruct((len(x), outputs), jnp.float32),),
        programs=groups * parts,
        warps=blocks.warps,
        IN=inputs,
        OUT=outputs,
        PARTS=parts,
        # As many as a group has in the mean: with more, rows that are not there are multiplied.
        TILE=min(MOST, max(16, next_power(-(-len(x) // groups)))),
        STEP=max(16, min(step, next_power(inputs))),
        WIDTH=width,
        STAGES=blocks.stages,
    )
    return y


def refuses(x: Array, kernel: Array) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    if 0 in x.shape or 0 in kernel.shape:
        return f"x {x.shape}, kernel {kernel.shape} leave nothing to launch"
    if x.dtype != kernel.dtype or x.dtype not in ("bfloat16", "float16", "float32"):
        return f"x {x.dtype} and kernel {kernel.dtype} are not of one type of 16 or 32 bits"
    return on_a_mesh(kernel)


def _supports(x: Array, kernel: Array, counts: Array) -> str | None:
    return refuses(x, kernel) or refuses_triton()


GROUPED = Backend("triton", grouped_linear_triton, _supports)
