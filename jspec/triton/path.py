"""Packing of a path in Triton: one launch for all columns."""

from __future__ import annotations

import math

import jax

from jspec.dispatch import Backend
from jspec.triton.call import next_power, passes_aliases_twice, refuses_triton, triton_call
from jspec.triton.pack import carry, refuses_elements, uncarry
from jspec.typing import Array

SPAN = 512  # elements of an entry that a program moves, at most
TILE = 2**13  # elements that a program has in registers, at most


def pack_path_triton(
    columns: tuple[Array, ...], source_slots: Array, target_slots: Array, counts: Array
) -> tuple[Array, ...]:
    """The Triton backend of `jspec.ops.path.pack_path`."""
    from jspec.triton.path_kernel import path_kernel

    batch, moves = source_slots.shape
    carried = tuple(carry(x.reshape(*x.shape[:2], -1)) for x in columns)
    widths = tuple(x.shape[2] for x in carried)
    together = next_power(moves)
    span = min(SPAN, TILE // together, next_power(max(widths)))
    chunks = -(-max(widths) // span)
    moved = triton_call(
        path_kernel,
        *(carried, source_slots, target_slots, counts),
        out=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in carried),
        aliases={i: i for i in range(len(carried))},
        programs=batch * len(carried) * chunks,
        warps=4,
        WIDTHS=widths,
        SLOTS=carried[0].shape[1],
        MOVES=moves,
        CHUNKS=chunks,
        SPAN=span,
        TOGETHER=together,
    )
    pairs = zip(moved, columns, strict=True)
    return tuple(uncarry(x, old.dtype).reshape(old.shape) for x, old in pairs)


def refuses(columns: tuple[Array, ...], source_slots: Array) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    for column in columns:
        if not math.prod(column.shape):
            return f"a column of {column.shape} is empty"
        if reason := refuses_elements(column, "a column"):
            return reason
    if source_slots.shape[1] > TILE:
        return f"n={source_slots.shape[1]} is over {TILE}"
    return None


def _supports(columns: tuple[Array, ...], source_slots: Array, *rest: Array) -> str | None:
    reason = refuses(columns, source_slots) or refuses_triton()
    if reason is None and passes_aliases_twice():
        return "jax-triton before 0.4 passes no tuples of arrays; pip install 'jax-triton>=0.4'"
    return reason


PACK_PATH = Backend("triton", pack_path_triton, _supports)
