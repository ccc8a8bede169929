"""Routing of a few tokens as two Triton launches."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jspec import tuned
from jspec.dispatch import Backend
from jspec.ops.gradient import differentiated_as
from jspec.ops.linear import on_a_mesh
from jspec.ops.norm import CENTERED, RMS
from jspec.ops.route import Routed, route_sizes, route_xla
from jspec.parts import Experts
from jspec.triton.call import next_power, refuses_triton, triton_call
from jspec.typing import Array

MAX_TOKENS = 128
MAX_EXPERTS = 256
MAX_PAIRS = 1024  # of a token and an expert that it chooses
FLOATS = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Block sizes of the two kernels.

    Attributes:
        splits: parts of the inputs, each summed by other programs.
        step: inputs of a tile.
        width: experts per program of the logits.
        warps: of a program of the logits.
        last_warps: of the one program that chooses.
    """

    splits: int
    step: int
    width: int
    warps: int
    last_warps: int


def route_triton(
    x: Array,
    kernel: Array,
    bias: Array | None,
    correction: Array | None,
    norm: RMS | None,
    *,
    experts: Experts,
    blocks: Blocks | None = None,
) -> Routed:
    """The Triton backend of `jspec.ops.route.route`: the norm is not rounded to the dtype of x."""
    run = differentiated_as(
        functools.partial(route_xla, experts=experts),
        functools.partial(_launch, experts=experts, blocks=blocks),
    )
    return run(x, kernel, bias, correction, norm)


def _launch(x, kernel, bias, correction, norm, *, experts: Experts, blocks) -> Routed:
    from jspec.triton.route_kernel import route_kernel, route_logits_kernel

    rows, inputs = x.shape
    count, chosen = experts.routed, experts.chosen
    blocks = blocks or Blocks(
        **tuned.block("route", "triton", route_sizes(x, kernel, experts=experts))
    )
    span = -(-inputs // (blocks.splits * blocks.step)) * blocks.step
    splits = -(-inputs // span)
    width = min(blocks.width, max(16, next_power(count)))
    parts = -(-count // width)
    logits, squares = triton_call(
        route_logits_kernel,
        *(x, kernel, x if norm is None else norm.scale),
        out=(
            jax.ShapeDtypeStruct((splits, rows, count), jnp.float32),
            jax.ShapeDtypeStruct((splits, rows), jnp.float32),
        ),
        programs=splits * parts,
        warps=blocks.warps,
        ROWS=rows,
        IN=inputs,
        EXPERTS=count,
        NORMED=norm is not None,
        PARTS=parts,
        SPAN=span,
        TILE=max(16, next_power(rows)),
        STEP=blocks.step,
        WIDTH=width,
    )
    pairs = rows * chosen
    return Routed(
        *triton_call(
            route_kernel,
            *(logits, squares),
            *(logits if vector is None else vector for vector in (bias, correction)),
            out=(
                jax.ShapeDtypeStruct((rows, chosen), jnp.int32),
                jax.ShapeDtypeStruct((rows, chosen), jnp.float32),
                jax.ShapeDtypeStruct((pairs,), jnp.int32),
                jax.ShapeDtypeStruct((count + 1,), jnp.int32),
            ),
            programs=1,
            warps=blocks.last_warps,
            ROWS=rows,
            IN=inputs,
            EXPERTS=count,
            CHOSEN=chosen,
            SPLITS=splits,
            EPS=0.0 if norm is None else norm.eps,
            FACTOR=experts.factor,
            NORMED=norm is not None,
            BIASED=bias is not None,
            CORRECTED=correction is not None,
            SOFTMAX=experts.score == "softmax",
            NORMALIZED=experts.normalized,
            TILE=next_power(rows),
            EXPERTS_WIDTH=next_power(count),
            CHOICES=next_power(chosen),
            PAIRS=next_power(pairs),
            CHUNK=min(16, next_power(pairs)),
        )
    )


def refuses(x: Array, kernel: Array, norm: RMS | None, experts: Experts) -> str | None:
    """Why the kernels cannot take these arguments, or None."""
    if not 0 < len(x) <= MAX_TOKENS or len(x) * experts.chosen > MAX_PAIRS:
        return (
            f"it takes 1 to {MAX_TOKENS} tokens that choose {MAX_PAIRS} experts in all, and "
            f"{len(x)} choose {experts.chosen} each"
        )
    if experts.routed > MAX_EXPERTS:
        return f"it chooses of at most {MAX_EXPERTS} experts, and there are {experts.routed}"
    if experts.chosen_groups < experts.groups:
        return "XLA chooses experts within groups"
    if x.dtype not in FLOATS or kernel.dtype not in FLOATS:
        return f"x {x.dtype} and kernel {kernel.dtype} must be of {', '.join(FLOATS)}"
    if norm is not None and norm.centered:
        return CENTERED
    return on_a_mesh(kernel)


def _supports(x, kernel, bias, correction, norm, *, experts: Experts) -> str | None:
    return refuses(x, kernel, norm, experts) or refuses_triton()


ROUTE = Backend("triton", route_triton, _supports)
