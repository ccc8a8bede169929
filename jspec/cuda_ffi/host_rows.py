"""Rows of columns in the host's memory by CUDA kernels that read and write it in place."""

from __future__ import annotations

import functools
import math

import jax
import numpy as np

from jspec.cuda_ffi import library
from jspec.dispatch import Backend
from jspec.host import in_host, to_host
from jspec.typing import Array


def refuses(columns: tuple[Array, ...]) -> str | None:
    """Why the handlers cannot take columns of this type, or None."""
    for column in columns:
        if jax.dtypes.itemsize_bits(column.dtype) % 8:
            return f"columns of {column.dtype} must have elements of whole bytes"
        if not math.prod(column.shape):
            return f"a column of {column.shape} is empty"
    return None


def _supports(columns: tuple[Array, ...], *rest: Array | None) -> str | None:
    return refuses(columns) or library.refusal("host")


def _rows_like(columns: tuple[Array, ...], slots: Array) -> list[jax.ShapeDtypeStruct]:
    batch, _, heads, _ = columns[0].shape
    shape = batch, slots.shape[-1], heads
    return [jax.ShapeDtypeStruct((*shape, x.shape[3]), x.dtype) for x in columns]


_call = functools.partial(library.call, vmap_method="sequential")


def _fetch_rows(
    columns: tuple[Array, ...],
    slots: Array,
    device_rows: tuple[Array, ...] | None,
    device_slots: Array | None,
    prefetched_rows: tuple[Array, ...] | None,
    prefetched_slots: Array | None,
) -> tuple[Array, ...]:
    sources = []
    for rows, source_slots in ((device_rows, device_slots), (prefetched_rows, prefetched_slots)):
        sources += [] if rows is None or source_slots is None else [*rows, source_slots]
    return _call(
        "fetch_rows",
        _rows_like(columns, slots),
        *(*columns, slots, *sources),
        near=np.bool_(device_rows is not None),
        ahead=np.bool_(prefetched_rows is not None),
    )


def _fetch_ahead(
    columns: tuple[Array, ...], slots: Array, through: Array, device_slots: Array | None
) -> tuple[Array, ...]:
    count = len(columns)
    like = [*_rows_like(columns, slots), jax.ShapeDtypeStruct(through.shape, through.dtype)]
    near = [] if device_slots is None else [device_slots]
    return _call(
        "fetch_ahead",
        like,
        *(*columns, slots, through, *near),
        aliases={count + 1: count},
        near=np.bool_(device_slots is not None),
    )


def _store_rows(
    columns: tuple[Array, ...], rows: tuple[Array, ...], slots: Array
) -> tuple[Array, ...]:
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in columns]
    aliases = {i: i for i in range(len(columns))}
    stored = _call("store_rows", like, *columns, *rows, slots, aliases=aliases)
    # An FFI call says nothing of the memory of its results; this is where they are already.
    pairs = zip(columns, stored, strict=True)
    return tuple(to_host(after) if in_host(before) else after for before, after in pairs)


FETCH_ROWS = Backend("cuda", _fetch_rows, _supports)
FETCH_AHEAD = Backend("cuda", _fetch_ahead, _supports)
STORE_ROWS = Backend("cuda", _store_rows, _supports)
