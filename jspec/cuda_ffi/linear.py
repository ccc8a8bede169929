"""A matmul of a few rows by one CUDA kernel, and a chain of them by one call."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.cuda_ffi import library
from jspec.cuda_ffi.all_to_all import MAX_BYTES, PATIENCE
from jspec.dispatch import Backend, named_backend
from jspec.gpu import gpu_in_use
from jspec.ops.gradient import differentiated_as
from jspec.ops.linear import linear_xla, on_a_mesh
from jspec.ops.linear_chain import Arrays, Sum, chain_shapes, one_by_one
from jspec.ops.norm import CENTERED, RMS
from jspec.ops.quantized import BLOCK, MXFP4, Quantized, weight_bits
from jspec.typing import Array

# As in src/linear/linear.h.
GROUP, INT8_GROUP = 32, 16  # the inputs are a multiple of it
MAX_ROWS, MAX_INPUTS = 24, 2**20
SMALL_ROWS, SMALL_INPUTS = 16, 1024  # at most, for transposed weights
# At most, on Hopper, for weights of 16 bits that are not transposed; the inputs of over MAX_ROWS,
# and of an exact matmul.
TILE_ROWS, TILE_INPUTS = 128, 2**15
SQUARED = 64  # inputs of one sum of squares that the matmul ahead of a norm writes
# The most rows, and rows times bytes of weights, for which tiles scale the rows for a norm
# themselves; a kernel of its own does so for more.
NORMED_ROWS, NORMED_WORK = 128, 2**29


def linear_cuda(
    x: Array,
    kernel: Array | Quantized | MXFP4,
    bias: Array | None,
    norm: RMS | None,
    add: Array | None,
    *,
    gated: bool,
    transposed: bool,
    dtype: np.dtype,
    exact: bool = False,
) -> Array:
    """The CUDA backend of `jspec.ops.linear.linear`, with None for what is left out.

    ``exact``: whether a row's bits follow from that row alone.
    """
    settings = {"gated": gated, "transposed": transposed, "dtype": dtype}
    launch = functools.partial(_launch, **settings, exact=exact)
    if isinstance(kernel, Quantized | MXFP4):  # not differentiable
        return launch(x, kernel, bias, norm, add)
    run = differentiated_as(functools.partial(linear_xla, **settings), launch)
    return run(x, kernel, bias, norm, add)


def _launch(x, kernel, bias, norm, add, *, gated, transposed, dtype, exact) -> Array:
    outputs = kernel.shape[:-1] if transposed else kernel.shape[1:]
    outputs = outputs[1:] if gated else outputs
    rows = math.prod(x.shape[:-1])
    scaled = [(rows, kernel.shape[0])] if _is_scaled_ahead(rows, kernel, norm, exact) else []
    y, *_ = library.call(
        "linear",
        (jax.ShapeDtypeStruct((*x.shape[:-1], *outputs), dtype), *_scaled_rows(scaled)),
        *(x, *_arguments(x, kernel, bias, norm, add)),
        vmap_method="sequential",
        bits=np.int32(weight_bits(kernel)),
        biased=np.bool_(bias is not None),
        normed=np.bool_(norm is not None),
        added=np.bool_(add is not None),
        gated=np.bool_(gated),
        transposed=np.bool_(transposed or isinstance(kernel, Quantized | MXFP4)),
        exact=np.bool_(exact),
        eps=np.float32(0 if norm is None else norm.eps),
    )
    return y


def _is_scaled_ahead(
    rows: int, kernel: Array | Quantized | MXFP4, norm: RMS | None, exact: bool
) -> bool:
    """Whether a kernel of its own scales the rows for the norm before a product on Hopper."""
    if norm is None or isinstance(kernel, Quantized | MXFP4) or not (exact or rows > MAX_ROWS):
        return False
    return rows > NORMED_ROWS or rows * kernel.nbytes >= NORMED_WORK


def _scaled_rows(
    shapes: Sequence[tuple[int, int]], *, squared: int | None = None
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Scratch for the scaled rows of matmuls, one after the other, and for the sums of their
    squares. ``shapes``: the rows and inputs of each; ``squared``: how many inputs each sum is of,
    None for one sum per row."""
    if not shapes:
        return ()
    scaled = max(rows * inputs for rows, inputs in shapes)
    sums = max(rows * (1 if squared is None else -(-inputs // squared)) for rows, inputs in shapes)
    return jax.ShapeDtypeStruct((scaled,), jnp.bfloat16), jax.ShapeDtypeStruct((sums,), jnp.float32)


def _arguments(x, kernel, bias, norm, add) -> list[Array]:
    """The inputs of a handler after x; x itself stands for an input that is None."""
    weights = jax.tree.leaves(kernel) if isinstance(kernel, Quantized | MXFP4) else [kernel, x]
    optional = (bias, None if norm is None else norm.scale, add)
    return [*weights, *(x if one is None else one for one in optional)]


def refuses(
    x: Array | jax.ShapeDtypeStruct,
    kernel: Array | Quantized | MXFP4,
    bias: Array | None,
    norm: RMS | None,
    add: Array | None,
    *,
    gated: bool,
    transposed: bool,
    dtype: np.dtype,
    exact: bool = False,
) -> str | None:
    """Why the kernel cannot take these arguments, or None.

    ``exact``: as `linear_cuda` takes it; then no reason is one of the rows, so that no number of
    them changes the kernel.
    """
    is_quantized = isinstance(kernel, Quantized | MXFP4)
    if isinstance(kernel, Quantized) and kernel.dtype != jnp.int8:
        return f"its weights are {kernel.dtype}"
    if norm is not None and norm.centered:
        return CENTERED
    rows, inputs = math.prod(x.shape[:-1]), x.shape[-1]
    columns = math.prod(kernel.shape) // max(inputs, 1)
    max_rows = MAX_ROWS if transposed or is_quantized else TILE_ROWS
    if exact:
        if transposed or is_quantized:
            return "an exact matmul takes weights of 16 bits that are not transposed"
    elif not 1 <= rows <= max_rows:
        return f"it takes 1 to {max_rows} rows, and there are {rows}"
    gpu = gpu_in_use()
    if (exact or rows > MAX_ROWS) and gpu is not None and gpu[1] != (9, 0):
        capability = ".".join(map(str, gpu[1]))
        what = "exact matmuls" if exact else f"{rows} rows"
        return f"{what} need compute capability 9.0, and {gpu[0]} has {capability}"
    group = {4: BLOCK, 8: INT8_GROUP}.get(weight_bits(kernel), GROUP)
    max_inputs = TILE_INPUTS if exact or rows > MAX_ROWS else MAX_INPUTS
    if not 1 <= inputs <= max_inputs or inputs % group:
        return f"{inputs} inputs are no multiple of {group} up to {max_inputs}"
    if not (transposed or is_quantized) and (not columns or columns % (16 if gated else 8)):
        return f"kernel {kernel.shape} does not have its columns in eights"
    if (gated and transposed) or not 1 <= columns <= 2**20:
        return f"kernel {kernel.shape} with gated={gated}, transposed={transposed} has no kernel"
    if transposed and (rows > SMALL_ROWS or inputs > SMALL_INPUTS):
        return (
            f"transposed, it takes up to {SMALL_ROWS} rows and {SMALL_INPUTS} inputs, and there "
            f"are {rows} and {inputs}"
        )
    scale = None if norm is None else norm.scale
    arrays = (x, None if is_quantized else kernel, bias, scale, add)
    if any(a is not None and a.dtype != jnp.bfloat16 for a in arrays):
        return "x, kernel, bias, norm or add is not bfloat16"
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"the result is of {dtype}, neither bfloat16 nor float32"
    return on_a_mesh(kernel)


def _supports(*args, **settings) -> str | None:
    return refuses(*args, **settings) or library.refusal("linear")


def linear_chain_cuda(
    x: Array,
    ops: Sequence[Arrays],
    *,
    added: Sequence[int | None],
    gated: Sequence[bool],
    sums: Sequence[Sum | None] = (),
    exact: bool = False,
) -> tuple[Array, ...]:
    """The CUDA backend of `jspec.ops.linear_chain.linear_chain`.

    ``ops``: the arrays of each; ``added``: the index of the earlier op whose result it adds, or
    None; ``gated``: whether it is gated; ``sums``: over which devices it is summed, empty for none;
    ``exact``: as `linear_cuda` takes it.
    """
    settings = {"added": tuple(added), "gated": tuple(gated), "sums": tuple(sums)}
    launch = functools.partial(_launch_chain, **settings, exact=exact)
    if isinstance(ops[0][0], Quantized | MXFP4):  # not differentiable
        return launch(x, ops)
    return differentiated_as(functools.partial(one_by_one, **settings), launch)(x, ops)


def _launch_chain(x, ops, *, added, gated, sums, exact) -> tuple[Array, ...]:
    _, *results = chain_shapes(x, ops, added=added, gated=gated)
    rows_of = [math.prod(y.shape[:-1]) for y in (x, *results[:-1])]  # each matmul
    summed = [total is not None for total in sums or (None,) * len(ops)]
    parts = [
        jax.ShapeDtypeStruct(y.shape, jnp.float32)
        for y, is_summed in zip(results, summed, strict=True)
        if is_summed
    ]
    axes = next((total.axes for total in sums if total), None)
    ahead = [
        _is_scaled_ahead(rows, kernel, norm, exact)
        for rows, (kernel, _, norm, _) in zip(rows_of, ops, strict=True)
    ]
    # Whether a matmul may scale its results for the norm of the next.
    may_scale_next = not exact and weight_bits(ops[0][0]) == 16
    scaled = [
        (rows, kernel.shape[0])
        for i, (rows, (kernel, _, norm, _)) in enumerate(zip(rows_of, ops, strict=True))
        if ahead[i] or (may_scale_next and i > 0 and norm is not None)
    ]

    def each(values, dtype: type[np.generic] = np.int32):
        return np.asarray(list(values), dtype)

    made = library.call(
        "linear_chain",
        (*results, *parts, *_scaled_rows(scaled, squared=SQUARED if may_scale_next else None)),
        *(x, *(one for op in ops for one in _arguments(x, *op))),
        vmap_method="sequential",
        bits=np.int32(weight_bits(ops[0][0])),
        exact=np.bool_(exact),
        ranks=np.int64(0 if axes is None else lax.axis_size(axes)),
        patience=np.int64(PATIENCE * 1e9),
        biased=each(bias is not None for _, bias, _, _ in ops),
        normed=each(norm is not None for _, _, norm, _ in ops),
        scaled=each(ahead),
        added=each(
            (-2 if add is None else -1) if other is None else other
            for (*_, add), other in zip(ops, added, strict=True)
        ),
        gated=each(gated),
        summed=each(summed),
        eps=each((0 if norm is None else norm.eps for _, _, norm, _ in ops), np.float32),
    )
    return made[: len(results)]


def _refuses_chain(x, ops, *, added, gated, sums=()) -> str | None:
    """Why one call cannot run this chain, or None."""
    if named_backend("linear") not in (None, "cuda"):
        return f"linear={named_backend('linear')!r} is asked for"
    reads = chain_shapes(x, ops, added=added, gated=gated)
    bits = {weight_bits(kernel) for kernel, *_ in ops}
    if len(bits) > 1:
        return f"its weights are of {' and '.join(map(str, sorted(bits)))} bits"
    for i, (op, gates) in enumerate(zip(ops, gated, strict=True)):
        static = {"gated": gates, "transposed": False, "dtype": x.dtype}
        reason = refuses(reads[i], *op, **static)
        if reason := reason or refuses_sum(sums[i] if sums else None, reads[i + 1]):
            return f"ops[{i}]: {reason}"
    axes = {total.axes for total in sums if total}
    return f"sums are over {len(axes)} groups of devices" if len(axes) > 1 else None


def refuses_sum(total: Sum | None, y: jax.ShapeDtypeStruct) -> str | None:
    """Why ``y`` cannot be summed over devices so, or None."""
    if total is None:
        return None
    if total.by != "cuda":
        return f"it is summed by {total.by}"
    size = 4 * math.prod(y.shape)
    return f"a message of {size} bytes is too large" if size > MAX_BYTES else None


def _supports_chain(*args, **settings) -> str | None:
    return _refuses_chain(*args, **settings) or library.refusal("linear")


LINEAR = Backend("cuda", linear_cuda, _supports)
LINEAR_CHAIN = Backend("cuda", linear_chain_cuda, _supports_chain)
EXACT = Backend(
    "cuda",
    functools.partial(linear_cuda, exact=True),
    functools.partial(_supports, exact=True),
)
