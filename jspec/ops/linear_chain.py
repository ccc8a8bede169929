"""A chain of matmuls, each of the result of the one before it.

`linear_chain` is the public operation; ``xla`` is the reference, ``one_by_one`` calls `linear` for
each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.all_to_all import By, all_reduce
from jspec.ops.linear import linear, linear_sizes, linear_xla, result_shape
from jspec.ops.norm import RMS
from jspec.ops.quantized import MXFP4, Quantized, quantized
from jspec.ops.vocabulary import Axes
from jspec.typing import Array


class Sum(NamedTuple):
    """A sum over the devices of an enclosing `jax.shard_map`, by `jspec.ops.all_to_all.all_reduce`.

    Attributes:
        axes: mesh axes.
        by: how to send.
    """

    axes: Axes
    by: By


class ChainOp(NamedTuple):
    """A matmul of a chain, with the arguments of `linear`.

    Attributes:
        kernel: the weights.
        bias: as in `linear`.
        norm: as in `linear`.
        add: an array as in `linear`, or the index of an earlier op, whose result is added.
        gated: as in `linear`.
        sum: of a matmul over this device's inputs alone, with those of the other devices: in
            float32, before ``add``. It takes no ``bias`` and is not ``gated``.
    """

    kernel: Array | Quantized | MXFP4
    bias: Array | None = None
    norm: RMS | None = None
    add: Array | int | None = None
    gated: bool = False
    sum: Sum | None = None


# The arrays of an op.
Arrays = tuple[Array | Quantized | MXFP4, Array | None, RMS | None, Array | None]


def linear_chain(
    x: Array, ops: Sequence[ChainOp], *, implementation: str | None = None
) -> tuple[Array, ...]:
    """A chain of matmuls: the first of ``x``, each other of the result of the one before.

    For few rows and weights of one kind, CUDA runs the chain in one call, in which a matmul starts
    to read its weights while the one before it ends, or while its results travel to be summed.

    Args:
        x: ``[..., in]``.
        ops: the matmuls, in order.
        implementation: the backend by name; None is the best one.

    Returns:
        The result of each op.

    Raises:
        ValueError: for shapes that do not fit together, and for no ops.
    """
    if not ops:
        raise ValueError("ops must have at least one matmul; it is empty")
    for i, op in enumerate(ops):
        if isinstance(op.add, int) and not 0 <= op.add < i:
            raise ValueError(f"ops[{i}].add={op.add} must be the number of an op before it")
        if op.sum is not None and (op.gated or op.bias is not None):
            raise ValueError(f"ops[{i}] has a sum; leave gated and bias out, which come after it")
    arrays = tuple(
        (op.kernel, op.bias, op.norm, None if isinstance(op.add, int) else op.add) for op in ops
    )
    added = tuple(op.add if isinstance(op.add, int) else None for op in ops)
    static: dict[str, Any] = {"added": added, "gated": tuple(op.gated for op in ops)}
    if any(op.sum for op in ops):
        static["sums"] = tuple(op.sum for op in ops)
    chain_shapes(x, arrays, **static)
    return LINEAR_CHAIN(x, arrays, **static, implementation=implementation)


def chain_shapes(
    x: Array,
    ops: Sequence[Arrays],
    *,
    added: Sequence[int | None],
    gated: Sequence[bool],
    sums: Sequence[Sum | None] = (),
) -> list[jax.ShapeDtypeStruct]:
    """x and the result of each op, as shapes; raises `ValueError` where one does not fit."""
    del sums  # which have the shape of what is summed
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    for (kernel, bias, _, add), other, gates in zip(ops, added, gated, strict=True):
        adds = add if other is None else shapes[other + 1]
        shape = result_shape(shapes[-1].shape, kernel, bias, adds, gated=gates)
        shapes.append(jax.ShapeDtypeStruct(shape, x.dtype))
    return shapes


def run_chain(
    matmul: Callable[..., Array],
    x: Array,
    ops: Sequence[Arrays],
    *,
    added: Sequence[int | None],
    gated: Sequence[bool],
    sums: Sequence[Sum | None] = (),
) -> tuple[Array, ...]:
    """Run a `linear_chain` with ``matmul`` for each op.

    ``ops``: the arrays of each; ``added``: the index of the earlier op whose result it adds, or
    None; ``gated``: whether it is gated; ``sums``: over which devices it is summed, empty for none.
    """
    results: list[Array] = []
    each = zip(ops, added, gated, sums or (None,) * len(ops), strict=True)
    for (kernel, bias, norm, add), other, gates, total in each:
        add = add if other is None else results[other]
        if total is None:
            y = matmul(x, kernel, bias, norm, add, gated=gates, dtype=x.dtype)
        else:
            y = matmul(x, kernel, None, norm, None, gated=False, dtype=jnp.float32)
            y = all_reduce(y, total.axes, by=total.by, dtype=x.dtype, add=add)
        results.append(y)
        x = y
    return tuple(results)


def _linear(x, kernel, bias, norm, add, *, gated, dtype) -> Array:
    return linear(x, kernel, bias, norm=norm, add=add, gated=gated, dtype=dtype)


def _linear_xla(x, kernel, bias, norm, add, *, gated, dtype) -> Array:
    return linear_xla(x, kernel, bias, norm, add, gated=gated, transposed=False, dtype=dtype)


one_by_one = functools.partial(run_chain, _linear)
chain_xla = functools.partial(run_chain, _linear_xla)


def chain_sizes(x: Array, ops: Sequence[Arrays], **static: Any) -> dict[str, int]:
    """The sizes that backends are ordered by: each size of `linear`, the largest of all matmuls."""
    reads = chain_shapes(x, ops, **static)[:-1]
    each = [linear_sizes(read, kernel) for read, (kernel, *_) in zip(reads, ops, strict=True)]
    return {name: max(sizes[name] for sizes in each) for name in each[0]}


def _cases() -> list[Case]:
    """A layer after attention, with weights of each kind; and a chain whose first op is gated."""

    def build(
        rows: int,
        *shapes: tuple[int, ...],
        normed: Sequence[int],
        add: bool = False,
        kind: str = "",
    ):
        def made():
            rng = np.random.default_rng(rows)

            def normal(*shape: int, scale: float = 1.0) -> Any:
                values = scale * rng.standard_normal(shape, np.float32)
                return values.astype(jnp.bfloat16)

            x = normal(rows, shapes[0][0])
            ops = []
            for i, shape in enumerate(shapes):
                # Small, so that roundings of bfloat16 stay small after several matmuls.
                kernel = normal(*shape, scale=0.3 * shape[0] ** -0.5)
                kernel = jax.tree.map(np.asarray, quantized(kernel, kind)) if kind else kernel
                norm = RMS(normal(shape[0])) if i in normed else None
                bias = normal(*shape[1:], scale=0.3) if i == 1 else None
                addend = normal(rows, *shape[1:], scale=0.3) if add and i == 0 else None
                ops.append((kernel, bias, norm, addend))
            return x, tuple(ops)

        return made

    def layer(rows: int, width: int, kind: str = ""):
        shapes = (96, 64), (64, 2, width), (width, 64), (64, 40)
        return build(rows, *shapes, normed=(1, 3), add=True, kind=kind)

    static = {"added": (None, None, 0, None), "gated": (False, True, False, False)}
    gate = build(16, (64, 2, 32), (32, 24), normed=(0,))
    return [
        Case("layer", layer(3, 128), static, small=True),
        Case("large", layer(4, 1056), static, small=True),
        Case("rows", layer(20, 128), static, small=True),
        Case("int8", layer(9, 128, "int8"), static, small=True),
        Case("mxfp4", layer(2, 1056, "mxfp4"), static, small=True),
        Case("gated", gate, {"added": (None, None), "gated": (True, False)}, small=True),
    ]


LINEAR_CHAIN = Operation(
    "linear_chain",
    {
        "xla": Backend("xla", chain_xla, always),
        "one_by_one": Backend("one_by_one", one_by_one, always, composite=True),
        "cuda": "jspec.cuda_ffi.linear:LINEAR_CHAIN",
        "exact_decode": "jspec.ops.exact:CHAIN_BACKEND",
    },
    chain_sizes,
    _cases,
    default_order=("one_by_one",),
)
