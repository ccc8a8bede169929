"""Grouped matmul: groups of rows, each times its own matrix, as the experts of a mixture are.

`grouped_linear` is the public operation; ``xla`` is the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.typing import DTypeLike

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.norm import RMS
from jspec.ops.quantized import BLOCK, MXFP4, dequantize_with_input, quantized, weight_bits
from jspec.parts import ClampedSwiGLU
from jspec.typing import Array


def grouped_linear(
    x: Array,
    kernel: Array | MXFP4,
    starts: Array,
    bias: Array | None = None,
    *,
    gather_indices: Array | None = None,
    scatter_indices: Array | None = None,
    norm: RMS | None = None,
    weights: Array | None = None,
    gated: bool = False,
    clamped: ClampedSwiGLU | None = None,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Array:
    """Grouped matmul: each group of rows of x times its own matrix, as experts of a mixture are.

    Sums are float32. Triton, and CUDA for MXFP4 and few rows, read only the matrices of groups
    that have rows, in one launch.

    Args:
        x: ``[P, in]``, or ``[P / k, in]`` with ``gather_indices``.
        kernel: ``[E, in, *out]``, a matrix for each group; an `MXFP4` has one leading axis.
        starts: int32 ``[E + 1]``, the first row of each group, ascending from 0, and one past the
            last row.
        bias: ``[E, *out]``, added to the rows of each group.
        gather_indices: int32 ``[P]``, a permutation; row i of the matmul is
            ``x[gather_indices[i] // k]``.
        scatter_indices: int32 ``[P]``, a permutation; row i of the matmul is row
            ``scatter_indices[i]`` of the result.
        norm: applied to x before the matmul.
        weights: float32 ``[P]``, factors of the rows of the result, in the order of the result.
        gated: ``out`` is ``(2, width)``, gate and up, and the result is ``silu(gate) * up``.
        clamped: the activation that takes the place of SwiGLU if ``gated``.
        dtype: of the result; by default that of x.
        implementation: the backend by name; None is the best one.

    Returns:
        ``[P, *out]``, or ``[P, width]`` if ``gated``. Rows after the last group are not specified.

    Raises:
        ValueError: for shapes or dtypes that do not fit together.
    """
    rows = len(x) if gather_indices is None else len(gather_indices)
    outputs = kernel.shape[2:]
    fits = x.ndim == 2 and kernel.ndim == 3 + gated and x.shape[1] == kernel.shape[1]
    fits = fits and (not isinstance(kernel, MXFP4) or kernel.leading == 1)
    fits = fits and (not gated or outputs[0] == 2) and (gated or clamped is None)
    fits = fits and starts.shape == (len(kernel) + 1,) and starts.dtype == jnp.int32
    fits = fits and (len(x) == 0 or rows % len(x) == 0)
    fits = fits and (bias is None or bias.shape == (len(kernel), *outputs))
    for order in (gather_indices, scatter_indices):
        fits = fits and (order is None or (order.shape, order.dtype) == ((rows,), jnp.int32))
    if not fits or (weights is not None and weights.shape != (rows,)):
        optional = {
            "gather_indices": gather_indices,
            "scatter_indices": scatter_indices,
            "bias": bias,
            "weights": weights,
        }
        more = "".join(
            f", {n} {a.dtype}{list(a.shape)}" for n, a in optional.items() if a is not None
        )
        raise ValueError(
            f"x {x.shape}, kernel {kernel.shape}, starts {starts.dtype}{list(starts.shape)}{more} "
            f"with gated={gated}, clamped={clamped} must be [P, in] (or fewer rows that divide P, "
            "with gather_indices), [E, in, *out] and int32 [E + 1], out being (2, width) if gated, "
            "with int32 [P], int32 [P], [E, *out] and [P]"
        )
    return GROUPED(
        *(x, kernel, starts, bias, gather_indices, scatter_indices, norm, weights),
        gated=gated,
        clamped=clamped,
        dtype=jnp.dtype(x.dtype if dtype is None else dtype),
        implementation=implementation,
    )


def grouped_linear_xla(
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
) -> Array:
    """The reference of `grouped_linear`: all that follows the matmul is float32."""
    x = x if norm is None else norm(x)
    x = x if gather_indices is None else x[gather_indices // (len(gather_indices) // len(x))]
    x, kernel = dequantize_with_input(x, kernel) if isinstance(kernel, MXFP4) else (x, kernel)
    flat = kernel.reshape(*kernel.shape[:2], -1)
    y = lax.ragged_dot(x, flat, jnp.diff(starts), preferred_element_type=jnp.float32)
    if bias is not None:
        group = (jnp.arange(len(y))[:, None] >= starts[None, 1:]).sum(axis=1)
        flat_bias = bias.reshape(len(bias), -1).astype(jnp.float32)
        y += jnp.take(flat_bias, group, axis=0, mode="clip")
    if gated:
        gate, up = jnp.split(y, 2, axis=1)
        y = _activation(gate, up, clamped)
    y = y if scatter_indices is None else y[jnp.argsort(scatter_indices)]
    y = y if weights is None else y * weights[:, None]
    return y.astype(dtype)


def _activation(gate: Array, up: Array, clamped: ClampedSwiGLU | None) -> Array:
    """``silu(gate) * up``, or the activation of gpt-oss where it is ``clamped``."""
    if clamped is None:
        return jax.nn.silu(gate) * up
    limit, alpha = clamped.limit, clamped.alpha
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


def grouped_sizes(
    x: Array,
    kernel: Array | MXFP4,
    starts: Array,
    bias: Any,
    gather_indices: Array | None,
    *args,
    **kwargs,
) -> dict[str, int]:
    """The sizes that backends are ordered by.

    ``rows`` of all groups, ``products`` a row, ``each``: the mean rows of a group, rounded up,
    ``bits`` of a weight.
    """
    rows = len(x) if gather_indices is None else len(gather_indices)
    groups, inputs = kernel.shape[:2]
    outputs = math.prod(kernel.shape[2:])
    sizes = {"rows": rows, "groups": groups, "inputs": inputs, "outputs": outputs}
    sizes |= {"products": kernel.ndim - 2, "each": -(-rows // max(groups, 1))}
    return sizes | {"bits": weight_bits(kernel)}


def _build(
    counts: list[int],
    dtype: str,
    *,
    inputs: int = 48,
    outputs: tuple[int, ...] = (40,),
    share: int = 1,
    kind: str = "",
    **flags: bool,
) -> Callable[[], tuple[Any, ...]]:
    """What makes the arguments of a case: groups of so many rows each."""

    def made() -> tuple[Any, ...]:
        rng = np.random.default_rng(sum(counts))

        def normal(*shape: int, scale: float = 1.0) -> Any:
            values = scale * rng.standard_normal(shape, np.float32)
            return values.astype(jnp.dtype(dtype))

        rows, groups = sum(counts), len(counts)
        kernel = normal(groups, inputs, *outputs, scale=inputs**-0.5)
        if kind:
            kernel = jax.tree.map(np.asarray, quantized(kernel, kind, leading=1))
        x = normal(rows // share, inputs)
        bias = normal(groups, *outputs) if flags.get("bias") else None
        gather_indices, scatter_indices = (
            rng.permutation(rows).astype(np.int32) if flags.get(name) else None
            for name in ("gather_indices", "scatter_indices")
        )
        norm = RMS(normal(inputs)) if flags.get("norm") else None
        weights = rng.random(rows, np.float32) if flags.get("weights") else None
        starts = np.cumsum([0, *counts]).astype(np.int32)
        return x, kernel, starts, bias, gather_indices, scatter_indices, norm, weights

    return made


def _expected(
    made: Callable[[], tuple[Any, ...]], static: dict[str, Any]
) -> Callable[[], np.ndarray]:
    """What computes the results of a case from the definition, in float64."""

    def multiplied() -> np.ndarray:
        x, kernel, *others = made()
        kernel = _numbers(kernel) if isinstance(kernel, MXFP4) else kernel
        x, kernel, starts, bias, gather_indices, scatter_indices, norm, weights = jax.tree.map(
            lambda leaf: np.asarray(leaf, np.float64), (x, kernel, *others)
        )
        if norm is not None:
            x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + norm.eps) * norm.scale
        if gather_indices is not None:
            x = x[gather_indices.astype(int) // (len(gather_indices) // len(x))]
        groups = np.repeat(np.arange(len(kernel)), np.diff(starts).astype(int))
        y = np.einsum("mi,mi...->m...", x, kernel[groups])
        y = y if bias is None else y + bias[groups]
        if (clamped := static["clamped"]) is not None:
            gate = np.minimum(y[:, 0], clamped.limit)
            up = np.clip(y[:, 1], -clamped.limit, clamped.limit)
            y = gate / (1 + np.exp(-clamped.alpha * gate)) * (up + 1)
        elif static["gated"]:
            y = y[:, 0] / (1 + np.exp(-y[:, 0])) * y[:, 1]
        if scatter_indices is not None:
            unsorted = np.empty_like(y)
            unsorted[scatter_indices.astype(int)] = y
            y = unsorted
        return (y if weights is None else y * weights[:, None]).astype(np.float32)

    return multiplied


def _cases() -> list[Case]:
    """Empty groups, all rows in one group, one row alone, and the matmuls of an expert."""
    plain = {"gated": False, "clamped": None, "dtype": np.dtype("float32")}
    gate = plain | {"gated": True}
    clamp = gate | {"clamped": ClampedSwiGLU(limit=1.5)}
    first: Any = {"gather_indices": True, "norm": True}
    last: Any = {"scatter_indices": True, "weights": True}
    both: Any = {"outputs": (2, 20), "share": 3}
    four: Any = {"inputs": 96, "kind": "mxfp4"}
    few = [0, 0, 2, 0, 0, 1, 3, 0, 0, 0]
    every = {
        "some-empty": (_build([0, 3, 0, 17, 1, 0], "float32"), plain),
        "in-one": (_build([0, 9, 0], "float16"), plain),
        "one-row": (_build([0, 0, 0, 1], "float16", inputs=40, outputs=(21,)), plain),
        "gated": (_build(few, "float32", **both, **first), gate),
        "clamped": (_build([4, 0, 20], "float32", **both, **first, bias=True), clamp),
        "weighted": (_build(few, "float32", **last), plain),
        "biased": (_build([4, 0, 20], "float16", **last, bias=True), plain),
        "mxfp4-gated": (_build(few, "float32", **both, **first, **four), gate),
        "mxfp4-clamped": (
            _build([20, 0, 4], "float32", **both, **first, **four, bias=True),
            clamp,
        ),
        "mxfp4-biased": (_build([0, 4, 20], "float16", **last, **four, bias=True), plain),
        "mxfp4-few": (_build(few, "bfloat16", **last, **four, bias=True), plain),
        "mxfp4-many": (
            _build([3, 0, 27], "bfloat16", **both, **four, gather_indices=True, bias=True),
            clamp,
        ),
    }
    return [
        Case(name, made, static, small=True, expected=_expected(made, static))
        for name, (made, static) in every.items()
    ]


def _numbers(kernel: MXFP4) -> Any:
    """The weights as the dtypes of their parts have them, in float64."""
    codes, scales = np.asarray(kernel.codes), np.asarray(kernel.scales)
    pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    factors = np.repeat(scales.view(jnp.float8_e8m0fnu).astype(np.float64), BLOCK, axis=-1)
    return np.moveaxis(pairs.view(jnp.float4_e2m1fn).astype(np.float64) * factors, -1, 1)


GROUPED = Operation(
    "grouped_linear",
    {
        "xla": Backend("xla", grouped_linear_xla, always),
        "triton": "jspec.triton.grouped:GROUPED",
        "cuda": "jspec.cuda_ffi.grouped:GROUPED",
    },
    grouped_sizes,
    _cases,
)
