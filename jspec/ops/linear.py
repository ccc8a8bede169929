"""A matmul with a matrix of weights, with the norm before it and the operations after it.

`linear` is the public operation; ``xla`` is the reference.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.norm import RMS
from jspec.ops.quantized import MXFP4, Quantized, dequantize_with_input, quantized, weight_bits
from jspec.typing import Array

# Multiplications of a single row up to which XLA on a GPU turns a matmul into a reduction: the
# bound of `IsMatrixMultiplicationTooSmallForRewriting` in its algebraic simplifier.
REWRITTEN = 10**7
# Multiplications of a single row from which on XLA multiplies two rows in less time, on an H200. It
# does with weights of 4096 x 4096, and does not with 2880 x 5120.
DOUBLED = 2**24


def linear(
    x: Array,
    kernel: Array | Quantized | MXFP4,
    bias: Array | None = None,
    *,
    norm: RMS | None = None,
    add: Array | None = None,
    gated: bool = False,
    transposed: bool = False,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Array:
    """Matmul of ``x`` with a matrix of weights, with norm, bias, SwiGLU and residual.

    Sums are float32. For few rows, CUDA and Triton do all of it in one launch.

    Args:
        x: ``[..., in]``.
        kernel: ``[in, *out]``, or ``[*out, in]`` if ``transposed``. A `Quantized` or `MXFP4` kernel
            is not transposed and has no leading axes.
        bias: ``out``, added to the result of the matmul.
        norm: applied to x before the matmul.
        add: of the shape of the result, added at the end.
        gated: ``out`` is ``(2, width)``, gate and up, and the result is ``silu(gate) * up``
            (SwiGLU, Shazeer 2020).
        transposed: the layout of ``kernel``.
        dtype: of the result; by default that of x.
        implementation: the backend by name; None is the best one.

    Returns:
        ``[..., *out]``, or ``[..., width]`` if ``gated``.

    Raises:
        ValueError: for shapes that do not fit together.
    """
    result_shape(x.shape, kernel, bias, add, gated=gated, transposed=transposed)
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    return LINEAR(
        *(x, kernel, bias, norm, add),
        gated=gated,
        transposed=transposed,
        dtype=dtype,
        implementation=implementation,
    )


def result_shape(
    x: tuple[int, ...],
    kernel: Array | Quantized | MXFP4,
    bias: Array | None,
    add: Array | jax.ShapeDtypeStruct | None,
    *,
    gated: bool,
    transposed: bool = False,
) -> tuple[int, ...]:
    """The shape of `linear` for an x of shape ``x``; `ValueError` for shapes that do not fit."""
    inputs = kernel.shape[-1 if transposed else 0]
    outputs = kernel.shape[:-1] if transposed else kernel.shape[1:]
    fits = x[-1:] == (inputs,) and (bias is None or bias.shape == outputs)
    if gated:
        fits = fits and len(outputs) == 2 and outputs[0] == 2
        outputs = outputs[1:]
    fits = fits and not (transposed and isinstance(kernel, Quantized | MXFP4))
    fits = fits and not (isinstance(kernel, MXFP4) and kernel.leading)
    if not fits or (add is not None and add.shape != (*x[:-1], *outputs)):
        shapes = f"x {x}, kernel {kernel.shape}"
        for name, value in (("bias", bias), ("add", add)):
            shapes += "" if value is None else f", {name} {value.shape}"
        raise ValueError(
            f"{shapes} with gated={gated}, transposed={transposed} must be [..., in], [in, *out] "
            "([*out, in] if transposed), out and [..., *out], out being (2, width) if gated"
        )
    return (*x[:-1], *outputs)


def linear_xla(
    x: Array,
    kernel: Array | Quantized | MXFP4,
    bias: Array | None,
    norm: RMS | None,
    add: Array | None,
    *,
    gated: bool,
    transposed: bool,
    dtype: np.dtype,
) -> Array:
    """The reference of `linear`: rounded to ``dtype`` after each operation."""
    x = x if norm is None else norm(x)
    if isinstance(kernel, Quantized):
        # Numbers of 8 bits are exact in every wider type.
        y = _matmul(x, jnp.moveaxis(kernel.values, -1, 0).astype(x.dtype), np.dtype(np.float32))
        y = (y * jnp.expand_dims(kernel.scale, range(x.ndim - 1))).astype(dtype)
    else:
        x, kernel = dequantize_with_input(x, kernel) if isinstance(kernel, MXFP4) else (x, kernel)
        y = _matmul(x, jnp.moveaxis(kernel, -1, 0) if transposed else kernel, dtype)
    if bias is not None:
        y = y + jnp.expand_dims(bias, range(x.ndim - 1)).astype(dtype)
    if gated:
        y = jax.nn.silu(y[..., 0, :]) * y[..., 1, :]
    return y if add is None else add.astype(dtype) + y


def _matmul(x: Array, kernel: Array, dtype: np.dtype) -> Array:
    """``x [..., in]`` times ``kernel [in, ...]``, summed in float32."""
    is_row = x.size == x.shape[-1] and jax.default_backend() == "gpu"
    if not is_row or REWRITTEN < kernel.size < DOUBLED:
        return jnp.tensordot(x, kernel, axes=1, preferred_element_type=dtype)
    # XLA would write the products of a small row to memory, rounded, and add them up after.
    count = 8 if kernel.size <= REWRITTEN else 2
    rows = jnp.pad(x.reshape(1, -1), ((0, count - 1), (0, 0)))
    y = jnp.tensordot(rows, kernel, axes=1, preferred_element_type=dtype)
    return y[0].reshape(*x.shape[:-1], *kernel.shape[1:])


def on_a_mesh(kernel: Array | Quantized | MXFP4) -> str | None:
    """Why a kernel of jspec should not take these weights, or None."""
    (array, *_) = jax.tree.leaves(kernel)
    mesh = jax.typeof(array).sharding.mesh
    if not mesh.are_all_axes_manual and mesh.size > 1:
        return "XLA would gather weights that lie on a mesh; call it inside jax.shard_map"
    return None


def linear_sizes(
    x: Array | jax.ShapeDtypeStruct, kernel: Array | Quantized | MXFP4, *args, **kwargs
) -> dict[str, int]:
    """The sizes that backends are ordered by; ``bits`` of a weight."""
    rows, inputs = math.prod(x.shape[:-1]), x.shape[-1]
    outputs = math.prod(kernel.shape) // max(inputs, 1)
    sizes = {"rows": rows, "inputs": inputs, "outputs": outputs}
    return sizes | {"bits": weight_bits(kernel)}


def _cases() -> list[Case]:
    """The matmuls of a layer in bfloat16 with float32 results, and one that no tile divides."""

    def build(
        rows: int,
        dtype: str,
        *,
        inputs: int = 64,
        outputs: tuple[int, ...] = (24,),
        kind: str = "",
        **flags: bool,
    ):
        def made():
            rng = np.random.default_rng(rows)

            def normal(*shape, scale: float = 1.0) -> Any:
                values = scale * rng.standard_normal(shape, np.float32)
                return values.astype(jnp.dtype(dtype))

            x = normal(rows, inputs)
            shape = (*outputs, inputs) if flags.get("transposed") else (inputs, *outputs)
            kernel = normal(*shape, scale=inputs**-0.5)
            kernel = jax.tree.map(np.asarray, quantized(kernel, kind)) if kind else kernel
            bias = normal(*outputs) if flags.get("bias") else None
            norm = RMS(normal(inputs)) if flags.get("norm") else None
            add = normal(rows, *outputs) if flags.get("add") else None
            return x, kernel, bias, norm, add

        return made

    def static(**overrides: bool):
        return {"gated": False, "transposed": False, "dtype": np.dtype("float32")} | overrides

    half, gate, flipped = "bfloat16", static(gated=True), static(transposed=True)
    return [
        Case("plain", build(3, half), static(), small=True),
        Case("normed", build(1, half, norm=True, bias=True), static(), small=True),
        Case("gated", build(5, half, outputs=(2, 48), norm=True), gate, small=True),
        Case("added", build(16, half, add=True), static(), small=True),
        Case("int8", build(4, half, kind="int8", norm=True, bias=True), static(), small=True),
        Case("fp8", build(2, half, outputs=(2, 48), kind="fp8"), gate, small=True),
        Case("mxfp4", build(3, half, kind="mxfp4", norm=True, add=True), static(), small=True),
        Case("transposed", build(2, half, transposed=True, norm=True), flipped, small=True),
        Case("odd", build(17, "float32", inputs=40, outputs=(21,), norm=True, bias=True), static()),
    ]


LINEAR = Operation(
    "linear",
    {
        "xla": Backend("xla", linear_xla, always),
        "cuda": "jspec.cuda_ffi.linear:LINEAR",
        "triton": "jspec.triton.linear:LINEAR",
        "exact": "jspec.triton.linear:EXACT",
        "exact_decode": "jspec.ops.exact:LINEAR_BACKEND",
    },
    linear_sizes,
    _cases,
)
