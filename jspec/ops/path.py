"""Packing of an accepted path: cache entries of a tree's nodes move into the slots of its tokens.

A draft that is a tree lies in the cache node by node. What is accepted is one path, whose entries
must follow the committed ones; a path that is a chain already does. The caches are updated in
place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.cached import FLOAT8
from jspec.typing import Array


def pack_path(
    columns: Sequence[Array],
    source_slots: Array,
    target_slots: Array,
    counts: Array,
    *,
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """Move entries within each row of all ``columns`` from their source to their target slots.

    Donate the columns to update them without a copy. An entry whose source is its target does not
    move. Entries move as if all at once: sources and targets of a row may overlap, as those of a
    path do, but no target may be the source of a later entry. Then moving them one after the other
    is the same, which backends do.

    Args:
        columns: arrays ``[B, S, ...]`` of any dtypes, such as the keys and values of several
            layers, updated.
        source_slots: int32 ``[B, n]`` in 0..S - 1.
        target_slots: int32 ``[B, n]`` in 0..S - 1, distinct in a row.
        counts: int32 ``[B]`` in 0..n: how many entries of a row move; the slots of others are
            ignored.
        implementation: the backend by name; None is the best one.

    Returns:
        The columns after it.

    Raises:
        ValueError: for shapes or dtypes that do not fit together.
    """
    columns = tuple(columns)
    _check(columns, source_slots, target_slots, counts)
    if not columns or not source_slots.shape[1]:
        return columns
    arguments = (columns, source_slots, target_slots, counts)
    return PACK_PATH(*arguments, implementation=implementation)


def _check(columns: tuple[Array, ...], source: Array, target: Array, counts: Array) -> None:
    shapes = {x.shape[:2] for x in columns}
    batch = len(counts)
    if len(shapes) > 1 or any(len(shape) < 2 or shape[0] != batch for shape in shapes):
        raise ValueError(
            f"columns {[x.shape for x in columns]} must all be [B, S, ...] with B={batch}"
        )
    if source.ndim != 2 or target.shape != source.shape or len(source) != batch:
        raise ValueError(
            f"source_slots {source.shape}, target_slots {target.shape} and counts {counts.shape} "
            "must be [B, n], [B, n] and [B]"
        )
    if {x.dtype for x in (source, target, counts)} != {jnp.dtype(jnp.int32)}:
        raise ValueError(
            f"source_slots {source.dtype}, target_slots {target.dtype} and counts {counts.dtype} "
            "must be int32"
        )


def _xla(columns, source_slots, target_slots, counts) -> tuple[Array, ...]:
    """The reference of `pack_path`."""
    index = jnp.arange(source_slots.shape[1], dtype=jnp.int32)[None]
    moves = (index < counts[:, None]) & (source_slots != target_slots)
    rows = jnp.arange(len(counts))[:, None]

    def moved(x: Array) -> Array:
        target = jnp.where(moves, target_slots, x.shape[1])
        return x.at[rows, target].set(x.at[rows, source_slots].get(mode="clip"), mode="drop")

    return tuple(map(moved, columns))


def path_sizes(columns: tuple[Array, ...], source_slots: Array, *rest: Array) -> dict[str, int]:
    """The sizes that backends are ordered by: the batch, n, and bytes of a row's entries."""
    batch, moves = source_slots.shape
    entry = sum(x.nbytes // max(x.shape[0] * x.shape[1], 1) for x in columns)
    return {"batch": batch, "moves": moves, "run_bytes": moves * entry}


def _paths(batch: int, slots: int, moves: int) -> tuple[np.ndarray, ...]:
    """Paths through drafts of two nodes per move, from some position on in a ring of ``slots``.

    Row 0 has no entry to move, and those of row 1 are in place already. In every third row the
    slots of entries that do not move are outside of the cache.
    """
    rng = np.random.default_rng([batch, slots, moves])
    first = rng.integers(0, slots, (batch, 1))
    nodes = [np.sort(rng.permutation(2 * moves)[:moves]) for _ in range(batch)]
    offsets = np.arange(moves)
    source, target = (first + 1 + x for x in (np.stack(nodes), offsets))
    counts = rng.integers(1, moves + 1, batch)
    counts[0], source[1 % batch] = 0, target[1 % batch]
    source, target = source % slots, target % slots
    is_outside = (offsets >= counts[:, None]) & (np.arange(batch) % 3 == 2)[:, None]
    source[is_outside], target[is_outside] = slots + 7, -1
    return source.astype(np.int32), target.astype(np.int32), counts.astype(np.int32)


Entry = tuple[tuple[int, ...], str]
# Rows, slots, most moves, and shape and dtype of the entries of each column, by name.
_SHAPES: dict[str, tuple[int, int, int, tuple[Entry, ...]]] = {
    "one-column": (2, 12, 3, (((2, 8), "float32"),)),
    "layers": (5, 40, 16, (((2, 64), "bfloat16"), ((2, 2), "uint32"), ((2, 48), "bfloat16")) * 2),
    "odd-bytes": (3, 21, 7, (((3, 5), "int8"), ((3,), "bool"), ((), "float16"), ((7,), "int32"))),
    "8-bits": (3, 33, 15, (((2, 64), str(FLOAT8)), ((2, 80), str(FLOAT8)))),
}


def path_cases() -> list[Case]:
    """Ragged paths that wrap around, over columns of every kind, and the result of NumPy."""

    def case(name: str, batch: int, slots: int, moves: int, entries: tuple[Entry, ...]) -> Case:
        def build() -> tuple[Any, ...]:
            columns = []
            for seed, (shape, dtype) in enumerate(entries):
                whole = np.random.default_rng(seed).integers(-50, 50, (batch, slots, *shape))
                columns.append(whole.astype(jnp.dtype(dtype)))
            return tuple(columns), *_paths(batch, slots, moves)

        def expected() -> tuple[np.ndarray, ...]:
            columns, source, target, counts = build()
            after = tuple(x.copy() for x in columns)
            for row, count in enumerate(counts):
                for new, old in zip(after, columns, strict=True):
                    new[row, target[row, :count]] = old[row, source[row, :count]]
            return after

        return Case(name, build, small=True, expected=expected)

    return [case(name, *sizes) for name, sizes in _SHAPES.items()]


# Backends return the columns.
PACK_PATH = Operation(
    "pack_path",
    {
        "xla": Backend("xla", _xla, always),
        "cuda": "jspec.cuda_ffi.path:PACK_PATH",
        "triton": "jspec.triton.path:PACK_PATH",
        "pallas": "jspec.pallas.path:PACK_PATH",
    },
    path_sizes,
    path_cases,
)
