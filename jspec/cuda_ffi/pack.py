"""Packing by a CUDA kernel, and how it and its fused form are laid out over a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jspec.cuda_ffi import library
from jspec.dispatch import Backend
from jspec.ops.pack import packed_like
from jspec.typing import Array


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the moving of rows is laid out over a GPU.

    ``threads`` of a block, a multiple of 32 up to 256. ``eager``: a block loads its rows before it
    knows whether they were accepted. ``recounts``: in the fused form, each block counts for itself
    what was accepted before its rows; otherwise a launch of the ballot kernel comes first.
    """

    threads: int
    eager: bool
    recounts: bool = False

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the handlers."""
        return {
            "threads": np.int32(self.threads),
            "eager": np.bool_(self.eager),
            "recounts": np.bool_(self.recounts),
        }


def layout(rows: Array) -> Layout:
    """The layout of stand-alone packing and of appending for ``rows [B, gamma, D]``.

    On an H100, loading early gains a little up to 1 MB. Beyond, where few rows are accepted, it
    costs what reading the others does.
    """
    return Layout(threads=128, eager=rows.nbytes <= 2**20)


def supports(rows: Array, *arguments: Array) -> str | None:
    """Refuses dtypes of less than a byte, and machines where the kernels cannot be built."""
    if not rows.dtype.itemsize or jnp.dtype(rows.dtype).name in ("int2", "int4", "uint2", "uint4"):
        return f"rows {rows.dtype} must have elements of whole bytes"
    return library.refusal("pack")


def _run(rows: Array, accepted: Array) -> tuple[Array, ...]:
    return library.call(
        "pack",
        packed_like(rows),
        rows,
        accepted,
        vmap_method="sequential",
        **layout(rows).attributes,
    )


PACK = Backend("cuda", _run, supports)
