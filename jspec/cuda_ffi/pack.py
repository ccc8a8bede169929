"""Packing by a CUDA kernel, and how it and its fused form are cut for a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jspec import tuned
from jspec.cuda_ffi import library
from jspec.dispatch import Backend
from jspec.ops.packing import kv_sizes, packed_like
from jspec.typing import Array


@dataclasses.dataclass(frozen=True)
class Cut:
    """How the copying of KV rows is divided on a GPU.

    Attributes:
        threads: of a block, a multiple of 32 up to 256.
        loads_early: whether a block loads its rows before it knows whether they were accepted.
        recounts: in the fused form, whether each block counts the accepted rows before its own
            itself; otherwise the ballot kernel runs first.
    """

    threads: int
    loads_early: bool
    recounts: bool = False

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the handlers."""
        return {
            "threads": np.int32(self.threads),
            "eager": np.bool_(self.loads_early),
            "recounts": np.bool_(self.recounts),
        }


def packing_cut(operation: str, sizes: Mapping[str, int]) -> Cut:
    """How to divide the packing of KV rows of these sizes among the blocks of a GPU, as tuned.

    A block that loads its rows before it knows whether they were accepted gains a little while
    there is little to load. With more, it costs the time to read the rows that were rejected.

    Args:
        operation: ``"pack"``, or ``"verify_and_pack"`` for the fused form.
        sizes: The operation's sizes by name; ``bytes``, of all KV rows, decides about early loads.
    """
    settings = tuned.block(operation, "cuda", sizes)
    loads_early = sizes["bytes"] <= settings.pop("eager_bytes")
    return Cut(loads_early=loads_early, **settings)


MAX_ROWS = 2**31 - 2  # B and gamma: the handlers count them in int32


def refuses(kv: Array) -> str | None:
    """Why the handlers cannot take KV rows of this shape and type, or None."""
    batch, gamma, _ = kv.shape
    if jax.dtypes.itemsize_bits(kv.dtype) % 8:
        return f"kv {kv.dtype} must have elements of whole bytes"
    if not 1 <= batch <= MAX_ROWS or gamma > MAX_ROWS:
        return f"B={batch} must be in 1..{MAX_ROWS}, and gamma={gamma} at most as much"
    return None


def _supports(kv: Array, accepted: Array) -> str | None:
    return refuses(kv) or library.refusal("pack")


def _run(kv: Array, accepted: Array) -> tuple[Array, ...]:
    return library.call(
        "pack",
        packed_like(kv),
        kv,
        accepted,
        vmap_method="sequential",
        **packing_cut("pack", kv_sizes(kv)).attributes,
    )


PACK = Backend("cuda", _run, _supports)
