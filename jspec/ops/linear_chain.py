"""Products in a row, each of what the one before it gives.

`linear_chain` is the public operation; ``xla`` is the reference, ``one_by_one`` a `linear` each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.linear import linear, linear_sizes, linear_xla, result_shape
from jspec.ops.norm import RMS
from jspec.ops.quantized import MXFP4, Quantized, quantized
from jspec.typing import Array


class ChainOp(NamedTuple):
    """A product of a chain, with the arguments of `linear`.

    ``add``: an array, or the number of an op before this one, whose result is added.
    """

    kernel: Array | Quantized | MXFP4
    bias: Array | None = None
    norm: RMS | None = None
    add: Array | int | None = None
    gated: bool = False


# The arrays of an op.
Arrays = tuple[Array | Quantized | MXFP4, Array | None, RMS | None, Array | None]


def linear_chain(
    x: Array, ops: Sequence[ChainOp], *, implementation: str | None = None
) -> tuple[Array, ...]:
    """The result of each of ``ops``, the first of ``x [..., in]``, each other of the one before.

    What each op gives is `linear` of its input. Where CUDA serves, which is for few rows and
    weights of one kind, all of them are one call, in which a product begins to read its weights
    while the one before it ends. Raises `ValueError` for shapes that do not fit, and for no ops.
    """
    if not ops:
        raise ValueError("ops must have at least one product; it is empty")
    for i, op in enumerate(ops):
        if isinstance(op.add, int) and not 0 <= op.add < i:
            raise ValueError(f"ops[{i}].add={op.add} must be the number of an op before it")
    arrays = tuple(
        (op.kernel, op.bias, op.norm, None if isinstance(op.add, int) else op.add) for op in ops
    )
    added = tuple(op.add if isinstance(op.add, int) else None for op in ops)
    gated = tuple(op.gated for op in ops)
    chain_shapes(x, arrays, added=added, gated=gated)
    return LINEAR_CHAIN(x, arrays, added=added, gated=gated, implementation=implementation)


def chain_shapes(
    x: Array, ops: Sequence[Arrays], *, added: Sequence[int | None], gated: Sequence[bool]
) -> list[jax.ShapeDtypeStruct]:
    """x and the result of each op, as shapes; raises `ValueError` where one does not fit."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    for (kernel, bias, _, add), other, gates in zip(ops, added, gated, strict=True):
        adds = add if other is None else shapes[other + 1]
        shape = result_shape(shapes[-1].shape, kernel, bias, adds, gated=gates)
        shapes.append(jax.ShapeDtypeStruct(shape, x.dtype))
    return shapes


def _run_chain(
    product: Callable[..., Array],
    x: Array,
    ops: Sequence[Arrays],
    *,
    added: Sequence[int | None],
    gated: Sequence[bool],
) -> tuple[Array, ...]:
    """As `linear_chain` by one ``product`` after the other.

    ``added``: the number of the op whose result each adds, or None.
    """
    results: list[Array] = []
    for (kernel, bias, norm, add), other, gates in zip(ops, added, gated, strict=True):
        add = add if other is None else results[other]
        results.append(product(x, kernel, bias, norm, add, gated=gates))
        x = results[-1]
    return tuple(results)


def _linear(x, kernel, bias, norm, add, *, gated) -> Array:
    return linear(x, kernel, bias, norm=norm, add=add, gated=gated)


def _linear_xla(x, kernel, bias, norm, add, *, gated) -> Array:
    return linear_xla(x, kernel, bias, norm, add, gated=gated, transposed=False, dtype=x.dtype)


one_by_one = functools.partial(_run_chain, _linear)
chain_xla = functools.partial(_run_chain, _linear_xla)


def chain_sizes(x: Array, ops: Sequence[Arrays], **static: Any) -> dict[str, int]:
    """What backends are ordered by: the sizes of `linear`, each the largest of all products."""
    reads = chain_shapes(x, ops, **static)[:-1]
    each = [linear_sizes(read, kernel) for read, (kernel, *_) in zip(reads, ops, strict=True)]
    return {name: max(sizes[name] for sizes in each) for name in each[0]}


def _cases() -> list[Case]:
    """What a layer does behind its attention, with weights of each kind; and a chain that begins
    with a gated product."""

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
                # Small, so that roundings of bfloat16 stay small behind several products.
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
        "one_by_one": Backend("one_by_one", one_by_one, always),
        "cuda": "jspec.cuda_ffi.linear:LINEAR_CHAIN",
    },
    chain_sizes,
    _cases,
    elsewhere=("one_by_one",),
)
