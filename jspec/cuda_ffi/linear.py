"""Products of a few rows by a CUDA kernel, one after the other in one call.

Each launch of a chain reads its first weights while the one before it still works, which hides
what a launch costs: about 3 microseconds on an H200.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jspec import tuned
from jspec.cuda_ffi import library
from jspec.dispatch import Backend
from jspec.gpu import refuses_gpu
from jspec.ops.feed_forward import composed
from jspec.ops.gradient import differentiated_as
from jspec.ops.linear import Projection, linear_sizes, linear_xla
from jspec.ops.norm import RMS
from jspec.typing import Array

MOST_ROWS = 64
NORM, BIAS, GATED, ADD, ADD_SECOND_LAST = 1, 2, 4, 8, 16  # flags as in linear_ffi.cc


@dataclasses.dataclass(frozen=True)
class Link:
    """A product of a chain; ``add`` is an array, or True for the result before the last one."""

    of: Projection
    add: Array | bool = False
    gated: bool = False

    @property
    def flags(self) -> int:
        added = 0 if self.add is False else ADD_SECOND_LAST if self.add is True else ADD
        normed = 0 if self.of.norm is None else NORM
        return normed | added | (self.of.bias is not None) * BIAS | self.gated * GATED

    @property
    def arrays(self) -> list[Array]:
        scale = None if self.of.norm is None else self.of.norm.scale
        add = None if isinstance(self.add, bool) else self.add
        return [x for x in (self.of.kernel, scale, self.of.bias, add) if x is not None]

    @property
    def outputs(self) -> tuple[int, ...]:
        return self.of.kernel.shape[1 + self.gated :]


def chain(x: Array, links: list[Link]) -> tuple[Array, ...]:
    """What each of ``links`` gives of what the one before it gave, the first of ``x [..., in]``."""
    lead, rows = x.shape[:-1], linear_sizes(x)
    blocks = []
    for link in links:
        inputs, *outputs = link.of.kernel.shape
        sizes = rows | {"inputs": inputs, "outputs": math.prod(outputs)}
        blocks.append(tuned.block("linear", "cuda", sizes))
    widths = [link.outputs for link in links]
    widths += [link.of.norm.scale.shape for link in links if link.of.norm]
    results = library.call(
        "linear_chain",
        tuple(jax.ShapeDtypeStruct((*lead, *width), x.dtype) for width in widths),
        *(x, *(array for link in links for array in link.arrays)),
        vmap_method="sequential",
        flags=np.array([link.flags for link in links], np.int64),
        splits=np.array([block["splits"] for block in blocks], np.int64),
        stages=np.array([block["stages"] for block in blocks], np.int64),
        eps=np.array([link.of.norm.eps if link.of.norm else 0.0 for link in links], np.float32),
    )
    return results[: len(links)]


def linear_cuda(
    x: Array,
    kernel: Array,
    bias: Array | None,
    norm: RMS | None,
    add: Array | None,
    *,
    gated: bool,
    transposed: bool,
    dtype: np.dtype,
) -> Array:
    """As `jspec.ops.linear.linear`."""

    def run(x, kernel, bias, norm, add):
        link = Link(Projection(kernel, bias, norm), False if add is None else add, gated)
        return chain(x, [link])[0]

    settings = {"gated": gated, "transposed": transposed, "dtype": dtype}
    reference = functools.partial(linear_xla, **settings)
    return differentiated_as(reference, run)(x, kernel, bias, norm, add)


def feed_forward_cuda(
    attended: Array,
    x: Array,
    out: Projection,
    gate_up: Projection,
    down: Projection,
    following: Projection | None,
) -> tuple[Array, Array | None]:
    """As `jspec.ops.feed_forward.feed_forward`."""

    def run(attended, x, out, gate_up, down, following):
        links = [Link(out, add=x), Link(gate_up, gated=True), Link(down, add=True)]
        if following is None:
            return chain(attended, links)[2], None
        return chain(attended, [*links, Link(following)])[2:]

    reference = functools.partial(composed, linear_xla)
    return differentiated_as(reference, run)(attended, x, out, gate_up, down, following)


def refuses(x: Array, *kernels: Array) -> str | None:
    """Why the kernel cannot take these rows and weights, or None."""
    rows = math.prod(x.shape[:-1])
    if not 1 <= rows <= MOST_ROWS:
        return f"it takes 1 to {MOST_ROWS} rows, and there are {rows}"
    for array in (x, *kernels):
        if array.dtype != jnp.bfloat16:
            return f"it multiplies bfloat16, and there is {array.dtype}"
    for kernel in kernels:
        inputs, outputs = kernel.shape[0], kernel.shape[1:]
        if inputs % 8 or outputs[-1] % 8 or 0 in kernel.shape:
            return f"kernel {kernel.shape} must be of inputs and outputs by eights"
        mesh = jax.typeof(kernel).sharding.mesh
        if not mesh.are_all_axes_manual and mesh.size > 1:
            return "XLA would gather weights that lie on a mesh; call it inside jax.shard_map"
    if jax.default_backend() == "gpu" and (reason := refuses_gpu((9, 0), "a chain of products")):
        return reason
    return library.refusal("linear")


def _supports(x, kernel, bias, norm, add, *, gated, transposed, dtype) -> str | None:
    if transposed:
        return "it takes kernels [in, *out]"
    if dtype != jnp.bfloat16:
        return f"it gives bfloat16, not {dtype}"
    return refuses(x, kernel)


def _supports_all(attended, x, out, gate_up, down, following) -> str | None:
    projections = (out, gate_up, down, *(() if following is None else (following,)))
    return refuses(x, *(projection.kernel for projection in projections))


LINEAR = Backend("cuda", linear_cuda, _supports)
FEED_FORWARD = Backend("cuda", feed_forward_cuda, _supports_all)
