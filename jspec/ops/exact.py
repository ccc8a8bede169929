"""Batch-invariant matmuls and attention of decoding, by one kernel for a shape of weights or heads.

A row's bits are the same in any batch only if the same kernel computes them: kernels are ordered by
sizes that no batch, number of tokens or capacity changes, and refuse for no reason of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jspec.dispatch import Backend, BackendError, Operation
from jspec.ops.attention import dense, scored
from jspec.ops.linear import LINEAR, linear, linear_sizes
from jspec.ops.linear_chain import Arrays, Sum, chain_shapes, run_chain
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
    x: Array,
    ops: Sequence[Arrays],
    *,
    added: Sequence[int | None],
    gated: Sequence[bool],
    sums: Sequence[Sum | None] = (),
) -> tuple[Array, ...]:
    """One call of CUDA if its kernel takes each matmul, else one after the other: the same bits."""
    from jspec.cuda_ffi.linear import linear_chain_cuda, refuses_sum

    _, *results = chain_shapes(x, ops, added=added, gated=gated)
    names = {
        EXACT_LINEAR.choose(None, *arguments, **settings).name
        for arguments, settings in _matmuls(x, ops, added=added, gated=gated, sums=sums)
    }
    static: dict[str, Any] = {"added": added, "gated": gated, "sums": sums}
    if names != {"cuda"} or any(map(refuses_sum, sums, results)):
        return run_chain(_matmul, x, ops, **static)
    return linear_chain_cuda(x, ops, **static, exact=True)


def _matmuls(
    x: Array,
    ops: Sequence[Arrays],
    *,
    added: Sequence[int | None],
    gated: Sequence[bool],
    sums: Sequence[Sum | None],
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of `linear` of each matmul of a chain; of a sum those of its terms."""
    *reads, _ = chain_shapes(x, ops, added=added, gated=gated)
    each = zip(reads, ops, gated, sums or (None,) * len(ops), strict=True)
    for read, (kernel, bias, norm, add), gates, total in each:
        static = {"gated": gates, "transposed": False}
        if total is None:
            yield (read, kernel, bias, norm, add), static | {"dtype": x.dtype}
        else:
            dtype = np.dtype(np.float32)
            yield (read, kernel, None, norm, None), static | {"dtype": dtype}


def _matmul(x, kernel, bias, norm, add, *, gated, dtype) -> Array:
    options = {"norm": norm, "add": add, "gated": gated, "dtype": dtype}
    return linear(x, kernel, bias, **options, implementation=NAME)


def _supports_chain(x, ops, *, added, gated, sums=()) -> str | None:
    if any(total and total.by != "cuda" for total in sums):
        return "an exact matmul is summed over devices by cuda alone, in the order of the ranks"
    reasons = (
        LINEAR_BACKEND.supports(*arguments, **static)
        for arguments, static in _matmuls(x, ops, added=added, gated=gated, sums=sums)
    )
    return next((f"ops[{i}]: {reason}" for i, reason in enumerate(reasons) if reason), None)


LINEAR_BACKEND = _backend(EXACT_LINEAR)
CHAIN_BACKEND = Backend(NAME, _chain, _supports_chain)
ATTENTION_BACKEND, SCORED_BACKEND = _backend(EXACT_ATTENTION), _backend(EXACT_SCORED)
