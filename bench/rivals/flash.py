"""What the rivals of attention share: FlashAttention-3, twice, and FlashInfer."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import numpy as np

from bench.clocks import wall
from bench.program import Absent, Program
from bench.rivals.common import Check, module, program
from jspec.typing import Array

NAMES = ("fa3", "fa3_jax", "flashinfer", "flashinfer_fa3")
PAGED_OFF = "FLASHATTENTION_DISABLE_PAGEDKV"
WORKSPACE = 2**29  # bytes that FlashInfer keeps partial outputs in
TRIALS = 5  # calls that choose between numbers of splits
Arrays = tuple[Array, Array, Array]  # queries, keys and values
Pages = tuple[np.ndarray, np.ndarray, np.ndarray]


def fa3(
    name: str,
    arrays: Arrays,
    lengths: np.ndarray,
    check: Check,
    *,
    pages: np.ndarray | None = None,
) -> Program | Absent:
    """FlashAttention-3 through PyTorch, `fa3-fwd`: the fastest of a few numbers of splits.

    ``arrays``: queries, keys and values; with ``pages [B, n]`` keys and values are pages.
    """
    torch = module("torch")
    interface, built = module("fa3_fwd_interface"), module("fa3_fwd_config")
    if pages is not None and built.CONFIG["build_flags"][PAGED_OFF]:
        return Absent(name, "fa3-fwd is built without caches in pages")
    q, k, v = map(torch.from_dlpack, arrays)
    given = {"cache_seqlens": torch.from_numpy(lengths).to(q.device), "causal": q.shape[1] > 1}
    if pages is not None:
        given["page_table"] = torch.from_numpy(pages).to(q.device)
    # Query heads that share keys go into one tile.
    given["pack_gqa"] = True if q.shape[2] > k.shape[2] else None
    attend = partial(interface.flash_attn_with_kvcache, q, k, v, **given)
    # 0 leaves the number of splits to the library.
    calls = (partial(attend, num_splits=splits) for splits in (0, 8, 16, 32))
    return fastest(program(name, call, lambda out: check(numbers(out))) for call in calls)


def fa3_jax(
    name: str,
    arrays: Arrays,
    lengths: np.ndarray,
    check: Check,
    *,
    pages: np.ndarray | None = None,
) -> Program | Absent:
    """FlashAttention-3 through JAX, `flash-attn3-jax`, in the same way."""
    if jax.default_backend() != "gpu":
        return Absent(name, "flash-attn3-jax needs a GPU")
    attend = module("flash_attn3_jax").flash_mha_with_kvcache
    tokens, size = arrays[0].shape[1], arrays[0].shape[3]
    if size != 128:
        return Absent(name, f"flash-attn3-jax is built for H=128, not for H={size}")
    arguments = (*arrays, *map(jax.device_put, (lengths, pages)))

    def call(splits: int, q: Array, k: Array, v: Array, lengths: Array, pages: Array | None):
        more = {"cache_seqlens": lengths, "page_table": pages, "num_splits": splits}
        return attend(q, k, v, is_causal=tokens > 1, **more)

    def compiled(splits: int) -> Program:
        ready = jax.jit(partial(call, splits)).lower(*arguments).compile()
        return Program(name, partial(ready, *arguments), check)

    return fastest(map(compiled, (1, 8, 16, 32)))


def flashinfer(
    name: str,
    arrays: Arrays,
    pages: Pages,
    check: Check,
) -> Program | Absent:
    """FlashInfer's attention over pages, by its kernels for any GPU or those for Hopper.

    ``arrays``: queries ``[B, T, N, H]``, keys and values in pages ``[P, page, K, H]``. ``pages``,
    int32: where those of each row begin ``[B + 1]``, which they are, and how many slots of a row's
    last page count ``[B]``.
    """
    torch, library = module("torch"), module("flashinfer")
    if not torch.cuda.is_available():
        return Absent(name, "FlashInfer needs a GPU")
    q, k, v = map(torch.from_dlpack, arrays)
    batch, tokens, query_heads, size = q.shape
    backend = "fa3" if name.endswith("fa3") else "fa2"
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD", backend=backend)
    begins, which, last = map(torch.from_numpy, pages)
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
    """The one whose calls take least, of a few."""
    return min(programs, key=lambda x: statistics.median(wall(x, TRIALS)))


def numbers(out: Any) -> np.ndarray:
    """A tensor as a float32 array of the host."""
    return out.float().cpu().numpy()


def pages_of(lengths: np.ndarray, slots: int, page: int) -> Pages:
    """The pages of caches of ``slots`` that lie one behind the other, for `flashinfer`."""
    counts = -(-lengths // page)
    which = [row * (slots // page) + np.arange(count) for row, count in enumerate(counts)]
    begins = np.concatenate([[0], np.cumsum(counts)])
    last = lengths - (counts - 1) * page
    return (
        begins.astype(np.int32),
        np.concatenate(which).astype(np.int32),
        last.astype(np.int32),
    )
