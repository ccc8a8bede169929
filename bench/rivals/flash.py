"""Shared by rivals of attention: FlashAttention-3 and FlashInfer, both through PyTorch.

On an H200 FlashAttention-3 through JAX took 1 to 4 % longer than through PyTorch, and FlashInfer's
kernels for Hopper longer than its others in all 19 cases.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from bench.clocks import wall
from bench.program import Absent, Program
from bench.rivals.common import Check, module, program
from jspec.typing import Array

NAMES = ("fa3", "flashinfer")
PAGED_OFF = "FLASHATTENTION_DISABLE_PAGEDKV"
WORKSPACE = 2**29  # bytes that FlashInfer keeps partial outputs in
TRIALS = 5  # calls that choose between numbers of splits
Arrays = tuple[Array, Array, Array]  # queries [B, T, N, H], keys and values [B, S, K, H]


@dataclasses.dataclass(frozen=True)
class Pages:
    """A view of a cache as pages: each key and value array viewed as ``[P, page, K, H]``.

    ``table``, int32 ``[B, n]``: the pages of each row; those after its last one are unused.
    """

    shape: tuple[int, int, int, int]
    table: np.ndarray

    def lists(self, lengths: np.ndarray) -> tuple[np.ndarray, ...]:
        """FlashInfer's form for rows of ``lengths [B]``, int32: where the pages of each row begin,
        which they are, and how many slots of a row's last page count."""
        page = self.shape[1]
        counts = -(-lengths // page)
        which = [row[:count] for row, count in zip(self.table, counts, strict=True)]
        begins = np.concatenate([[0], np.cumsum(counts)])
        lists = (begins, np.concatenate(which), lengths - (counts - 1) * page)
        return tuple(x.astype(np.int32) for x in lists)


def fa3(
    name: str,
    arrays: Arrays,
    lengths: np.ndarray,
    check: Check,
    *,
    pages: Pages | None = None,
) -> Program | Absent:
    """FlashAttention-3 through PyTorch, `fa3-fwd`: the fastest of a few numbers of splits."""
    torch = module("torch")
    if not torch.cuda.is_available():
        return Absent(name, "fa3-fwd needs a GPU")
    interface, built = module("fa3_fwd_interface"), module("fa3_fwd_config")
    if pages is not None and built.CONFIG["build_flags"][PAGED_OFF]:
        return Absent(name, "fa3-fwd is built without caches in pages")
    q, k, v = map(torch.from_dlpack, arrays)
    settings = {"cache_seqlens": torch.from_numpy(lengths).to(q.device), "causal": q.shape[1] > 1}
    if pages is not None:
        k, v = k.view(pages.shape), v.view(pages.shape)
        settings["page_table"] = torch.from_numpy(pages.table).to(q.device)
    # Query heads that share keys go into one tile.
    settings["pack_gqa"] = True if q.shape[2] > k.shape[2] else None
    attend = partial(interface.flash_attn_with_kvcache, q, k, v, **settings)
    # 0 leaves the number of splits to the library.
    calls = (partial(attend, num_splits=splits) for splits in (0, 8, 16, 32))
    return fastest(program(name, call, lambda out: check(numbers(out))) for call in calls)


def flashinfer(
    name: str,
    arrays: Arrays,
    lengths: np.ndarray,
    check: Check,
    *,
    pages: Pages,
) -> Program | Absent:
    """FlashInfer's attention over pages, by its kernels for any GPU."""
    torch, library = module("torch"), module("flashinfer")
    if not torch.cuda.is_available():
        return Absent(name, "FlashInfer needs a GPU")
    q, k, v = map(torch.from_dlpack, arrays)
    k, v = k.view(pages.shape), v.view(pages.shape)
    batch, tokens, query_heads, size = q.shape
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD", backend="fa2")
    begins, which, last = map(torch.from_numpy, pages.lists(lengths))
    queries = torch.arange(batch + 1, dtype=torch.int32) * tokens
    sizes = (query_heads, k.shape[2], size, k.shape[1])
    causal = tokens > 1
    wrapper.plan(queries, begins, which, last, *sizes, causal=causal, q_data_type=q.dtype)
    flat = q.reshape(batch * tokens, query_heads, size)
    call = partial(wrapper.run, flat, (k, v), out=torch.empty_like(flat))
    return program(name, call, lambda out: check(numbers(out).reshape(q.shape)))


@functools.cache
def _workspace() -> Any:
    torch = module("torch")
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")


def fastest(programs: Iterable[Program]) -> Program:
    """The fastest of the programs whose output is right, or of all if none is."""
    every = list(programs)
    right = [x for x in every if x.check(x.wait(x.start()))]
    return min(right or every, key=lambda x: statistics.median(wall(x, TRIALS)))


def numbers(out: Any) -> np.ndarray:
    """A tensor as a float32 array of the host."""
    return out.float().cpu().numpy()
