"""Selection by CUDA kernels that count digits of scores."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.cuda_ffi import library
from jspec.dispatch import Backend
from jspec.gpu import multiprocessors
from jspec.ops.selection import selected_like
from jspec.typing import Array

MIN_CHUNK, MAX_CHUNK = 1024, 32768  # slots of a row that a block takes
# Slots whose keys fit the registers of a block, and blocks of a cluster, as in src/select/plan.h.
REGISTER_SLOTS, MAX_CLUSTER = 16384, 8
MIN_CLUSTER_CHUNK = 4096  # slots of a block in a cluster
MAX_SLOTS = 2**30  # of a row, and of a selection
MAX_BINS = 4096  # of a histogram


@dataclasses.dataclass(frozen=True)
class Cut:
    """How rows are divided on a GPU, in powers of 2 in 256..32768.

    Attributes:
        counted: slots that a block counts. Where up to `MAX_CLUSTER` blocks of `REGISTER_SLOTS`
            or less are a whole row, they are a cluster, and one launch does all of it.
        collected: slots from which a block collects the selected ones, at least ``counted``.
    """

    counted: int
    collected: int

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the handlers."""
        return {"counted": np.int32(self.counted), "taken": np.int32(self.collected)}


def selection_cut(rows: int, n: int) -> Cut:
    """How to divide ``rows`` of ``n`` scores each among the blocks of a GPU."""
    processors = multiprocessors()

    def blocks(size: int) -> int:
        return rows * -(-n // size)

    whole = max(256, 1 << max(n - 1, 0).bit_length())
    size = min(whole, REGISTER_SLOTS)
    if n <= REGISTER_SLOTS or (
        n <= REGISTER_SLOTS * MAX_CLUSTER and 2 * blocks(size) <= 3 * processors
    ):
        # Clusters start late: many small ones cost more than they share.
        while (
            size > MIN_CLUSTER_CHUNK
            and n <= size // 2 * MAX_CLUSTER
            and 4 * blocks(size) <= processors
        ):
            size //= 2
        return Cut(size, size)
    size = min(whole, MAX_CHUNK)
    # Not so small that the launch would take a cluster for a row.
    while size > MIN_CHUNK and n > size // 2 * MAX_CLUSTER and blocks(size) < 1.5 * processors:
        size //= 2
    return Cut(size, size)


def bins_of(keys: int) -> list[int]:
    """Bins of the histogram of each digit of scores that have ``keys`` values, as `Digits`."""
    if keys <= MAX_BINS:
        return [-(-keys // 64) * 64]
    return [MAX_BINS, 64] if keys <= 2**16 else [MAX_BINS, 1024, 1024]


def workspace_words(keys: int, n: int, cut: Cut) -> int:
    """Words of 4 bytes that a row keeps between launches, in the layout of `Plan`.

    The handlers refuse another size.
    """
    chunks, bins = max(1, -(-n // cut.counted)), bins_of(keys)
    words = 4
    if chunks > 1:
        words += chunks * (bins[0] + 64) // 2
    listed = len(bins) > 1 and (chunks > 1 or cut.counted > REGISTER_SLOTS)
    return words + (2 * (-(-n // 4) * 4) if listed else 0)


def keys_of(dtype: Any, highest: int | None) -> int:
    """How many values scores can have, as far as it is known and useful."""
    if highest is not None and highest + 2 <= MAX_BINS:
        return highest + 2
    return 1 << jnp.dtype(dtype).itemsize * 8


def _refusal(n: int, k: int) -> str | None:
    if max(n, k) > MAX_SLOTS:
        return f"n={n} and k={k} must be at most {MAX_SLOTS}"
    return library.refusal("select")


def _supports(scores: Array, counts: Array, lengths: Array, *, k: int, **rest: Any) -> str | None:
    return _refusal(scores.shape[-1], k)


def select_cuda(
    scores: Array,
    counts: Array,
    lengths: Array,
    *,
    k: int,
    sinks: int,
    recent: int,
    highest: int | None,
    cut: Cut | None = None,
) -> Array:
    """The CUDA backend of `jspec.ops.select`; ``cut``: another one than that for these sizes."""
    lead, n = scores.shape[:-1], scores.shape[-1]
    keys = keys_of(scores.dtype, highest)
    cut = cut or selection_cut(math.prod(lead), n)
    words = workspace_words(keys, n, cut)
    outputs = (selected_like(scores, k), jax.ShapeDtypeStruct((*lead, words), jnp.uint32))
    return library.call(
        "select",
        outputs,
        *(scores, counts, lengths),
        vmap_method="broadcast_all",
        sinks=np.int32(sinks),
        recent=np.int32(recent),
        highest=np.int32(-1 if highest is None else highest),
        **cut.attributes,
    )[0]


SELECT = Backend("cuda", select_cuda, _supports)
