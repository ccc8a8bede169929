"""Batch-invariant matmuls and attention of decoding, by one kernel for a shape of weights or heads.

A row's bits are the same in any batch only if the same kernel computes them: kernels are ordered by
sizes that no batch, number of tokens or capacity changes, and refuse for no reason of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax

from jspec.dispatch import Backend, BackendError, Operation
from jspec.ops.attention import dense, scored
from jspec.ops.linear import LINEAR, linear, linear_sizes
from jspec.ops.linear_chain import Arrays, chain_shapes, run_chain
from jspec.ops.quantized import MXFP4, Quantized
from jspec.typing import Array

NAME = "exact_decode"


def weight_sizes(
    x: Array | jax.ShapeDtypeStruct, kernel: Array | Quantized | MXFP4, *args, **kwargs
) -> dict[str, int]:
    """The sizes of `jspec.ops.linear` without those of the rows."""
    sizes = linear_sizes(x, kernel)
    return {name: sizes[name] for name in ("inputs", "outputs", "bits")}


def head_sizes(q: Array, k: Array, *args, **kwargs) -> dict[str, int]:
    """KV heads, query heads of each, channels of a key and bits of a channel."""
    kv_heads, channels = k.shape[2:]
    sizes = {"kv_heads": kv_heads, "group": q.shape[2] // kv_heads, "channels": channels}
    return sizes | {"bits": 8 * k.dtype.itemsize}


def _kernels(
    name: str, operation: Operation, backend: str, sizes: Callable[..., Mapping[str, int]]
) -> Operation:
    """The kernels that compute ``operation`` exactly; ``backend``: where modules have them."""
    kernels = {"triton": f"jspec.triton.{backend}", "cuda": f"jspec.cuda_ffi.{backend}"}
    return Operation(name, kernels, sizes, operation.cases, default_order=tuple(kernels))


EXACT_LINEAR = _kernels("exact_linear", LINEAR, "linear:EXACT", weight_sizes)
# Of one name, and so of one order: drafters that collect and others take the same kernel.
EXACT_ATTENTION = _kernels("exact_attention", dense.ATTENTION, "attention:EXACT", head_sizes)
EXACT_SCORED = _kernels("exact_attention", scored.SCORED, "attention:EXACT_SCORED", head_sizes)


def _backend(operation: Operation) -> Backend:
    """The backend of an operation that runs its exact one."""

    def supports(*args, **kwargs) -> str | None:
        try:
            operation.choose(None, *args, **kwargs)
        except BackendError as error:
            return str(error)
        return None

    return Backend(NAME, operation, supports)


def _chain(
    x: Array, ops: Sequence[Arrays], *, added: Sequence[int | None], gated: Sequence[bool]
) -> tuple[Array, ...]:
    """One call of CUDA if its kernel takes each matmul, else one after the other: the same bits."""
    from jspec.cuda_ffi.linear import linear_chain_cuda

    *reads, _ = chain_shapes(x, ops, added=added, gated=gated)
    static = {"transposed": False, "dtype": x.dtype}
    names = {
        EXACT_LINEAR.choose(None, read, *op, gated=gates, **static).name
        for read, op, gates in zip(reads, ops, gated, strict=True)
    }
    if names == {"cuda"}:
        return linear_chain_cuda(x, ops, added=added, gated=gated, exact=True)
    return run_chain(_matmul, x, ops, added=added, gated=gated)


def _matmul(x, kernel, bias, norm, add, *, gated, dtype) -> Array:
    options = {"norm": norm, "add": add, "gated": gated, "dtype": dtype}
    return linear(x, kernel, bias, **options, implementation=NAME)


def _supports_chain(x, ops, *, added, gated, sums=()) -> str | None:
    if any(sums):
        return "an exact matmul is not summed over devices"
    *reads, _ = chain_shapes(x, ops, added=added, gated=gated)
    static = {"transposed": False, "dtype": x.dtype}
    reasons = (
        LINEAR_BACKEND.supports(read, *op, gated=gates, **static)
        for read, op, gates in zip(reads, ops, gated, strict=True)
    )
    return next((f"ops[{i}]: {reason}" for i, reason in enumerate(reasons) if reason), None)


LINEAR_BACKEND = _backend(EXACT_LINEAR)
CHAIN_BACKEND = Backend(NAME, _chain, _supports_chain)
ATTENTION_BACKEND, SCORED_BACKEND = _backend(EXACT_ATTENTION), _backend(EXACT_SCORED)
