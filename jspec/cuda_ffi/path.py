"""Packing of a path by a CUDA kernel: one launch for up to 240 columns."""

from __future__ import annotations

import math

import jax

from jspec.cuda_ffi import library
from jspec.dispatch import Backend
from jspec.typing import Array


def refuses(columns: tuple[Array, ...]) -> str | None:
    """Why the handler cannot take columns of these shapes and types, or None."""
    for column in columns:
        if jax.dtypes.itemsize_bits(column.dtype) % 8:
            return f"columns of {column.dtype} must have elements of whole bytes"
        if not math.prod(column.shape):
            return f"a column of {column.shape} is empty"
        if math.prod(column.shape[2:]) * column.dtype.itemsize >= 2**31:
            return f"entries of {column.shape[2:]} {column.dtype} have over 2^31 - 1 bytes"
    return None


def _supports(columns: tuple[Array, ...], *rest: Array) -> str | None:
    return refuses(columns) or library.refusal("pack")


def _run(columns: tuple[Array, ...], *rest: Array) -> tuple[Array, ...]:
    return library.call(
        "pack_path",
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in columns],
        *(*columns, *rest),
        vmap_method="sequential",
        aliases={i: i for i in range(len(columns))},
    )


PACK_PATH = Backend("cuda", _run, _supports)
