"""What a decoder layer does between one attention and the next.

`feed_forward` is the public operation; ``xla`` is the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.linear import Projection, linear_sizes, linear_xla
from jspec.ops.norm import RMS
from jspec.typing import Array


def feed_forward(
    attended: Array,
    x: Array,
    out: Projection,
    gate_up: Projection,
    down: Projection,
    following: Projection | None = None,
    *,
    implementation: str | None = None,
) -> tuple[Array, Array | None]:
    """Add attention's projected output and a SwiGLU of the sum to ``x``, all of it ``[..., D]``.

    ``attended [..., N * H']`` goes through ``out``; ``gate_up`` has a norm and a kernel
    ``[D, 2, F]``, ``down`` one ``[F, D]``; ``following``, the next layer's queries, keys and values
    or None, has a norm. Returns the sum and what ``following`` gives of it. Each product is one of
    `jspec.ops.linear.linear`. Raises `ValueError` for shapes that do not fit.
    """
    sizes = out.kernel.shape[0], gate_up.kernel.shape[0], down.kernel.shape[0]
    width, wide = x.shape[-1], gate_up.kernel.shape[-1]
    fits = out.kernel.shape[1:] == down.kernel.shape[1:] == (width,)
    fits = fits and gate_up.kernel.shape[1:] == (2, wide) and sizes[1:] == (width, wide)
    if following is not None:
        fits = fits and following.kernel.shape[0] == width
    if not fits or attended.shape != (*x.shape[:-1], sizes[0]):
        kernels = (
            f"{name} {projection.kernel.shape}"
            for name, projection in (
                *(("out", out), ("gate_up", gate_up), ("down", down)),
                ("following", following),
            )
            if projection is not None
        )
        raise ValueError(
            f"attended {attended.shape}, x {x.shape}, {', '.join(kernels)} must be [..., A], "
            "[..., D], [A, D], [D, 2, F], [F, D] and [D, ...]"
        )
    return FEED_FORWARD(
        attended, x, out, gate_up, down, following, implementation=implementation
    )


def composed(
    multiply: Callable[..., Array],
    attended: Array,
    x: Array,
    out: Projection,
    gate_up: Projection,
    down: Projection,
    following: Projection | None,
) -> tuple[Array, Array | None]:
    """As `feed_forward`, of products by ``multiply``, a backend of `jspec.ops.linear.linear`."""

    def product(x: Array, of: Projection, add: Array | None = None, gated: bool = False) -> Array:
        settings = {"gated": gated, "transposed": False, "dtype": x.dtype}
        return multiply(x, of.kernel, of.bias, of.norm, add, **settings)

    x = product(attended, out, x)
    x = product(product(x, gate_up, gated=True), down, x)
    return x, None if following is None else product(x, following)


def _cases() -> list[Case]:
    """A layer between others, and the last one."""

    def build(rows: int, last: bool):
        def made():
            rng = np.random.default_rng(rows)

            def normal(*shape):
                return rng.standard_normal(shape, np.float32) * shape[0] ** -0.5

            x, attended = normal(rows, 32), normal(rows, 24)
            out, down = Projection(normal(24, 32)), Projection(normal(40, 32), normal(32))
            gate_up = Projection(normal(32, 2, 40), None, RMS(normal(32)))
            following = Projection(normal(32, 2, 16), normal(2, 16), RMS(normal(32)))
            return attended, x, out, gate_up, down, None if last else following

        return made

    return [
        Case("between", build(3, False), small=True),
        Case("last", build(1, True), small=True),
    ]


FEED_FORWARD = Operation(
    "feed_forward",
    {
        "xla": Backend("xla", partial(composed, linear_xla), always),
        "triton": "jspec.triton.linear:FEED_FORWARD",
        "cuda": "jspec.cuda_ffi.linear:FEED_FORWARD",
    },
    linear_sizes,
    _cases,
)
