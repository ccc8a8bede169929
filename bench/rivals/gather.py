"""Rivals of attention over a selection: FlashAttention-3 and FlashInfer, on pages of one token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from bench.program import Absent, Program
from bench.rivals import flash
from bench.rivals.common import Check, each
from bench.settings import Settings
from jspec.typing import Array

if TYPE_CHECKING:
    from bench.gather import Selected

NAMES = flash.NAMES


def gather(data: Selected, check: Check, settings: Settings) -> list[Program | Absent]:
    """All of them; none copies the cache, and the page tables are made beforehand."""
    arrays, pages, restore = paged(data)
    count = pages.shape[1]
    lengths = np.full(len(pages), count, np.int32)

    def right(out: Any) -> bool:
        return check(restore(np.asarray(out, np.float32)))

    def wrapped(name: str) -> Program | Absent:
        begins = np.arange(len(pages) + 1, dtype=np.int32) * count
        return flash.flashinfer(name, arrays, (begins, pages.ravel(), lengths // count), right)

    makers = {
        "fa3": lambda name: flash.fa3(name, arrays, lengths, right, pages=pages),
        "fa3_jax": lambda name: flash.fa3_jax(name, arrays, lengths, right, pages=pages),
        "flashinfer": wrapped,
        "flashinfer_fa3": wrapped,
    }
    return each(makers, settings)


def paged(
    data: Selected,
) -> tuple[tuple[Array, Array, Array], np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """Queries and the cache as pages of one token, the pages of each row, int32 ``[B, n + T]``, and
    what brings an output back to ``[B, T, N, H]``.

    Where each KV head has its own selection, each is a row of its own, with a cache of one head.
    """
    batch, slots, kv_heads, size = data.k.shape
    tokens, query_heads = data.q.shape[1:3]
    selected, tail = np.asarray(data.selected), np.asarray(data.tail)
    if selected.ndim == 2:
        pages = np.concatenate([selected, tail], axis=1) + np.arange(batch)[:, None] * slots
        shape = (batch * slots, 1, kv_heads, size)
        arrays = (data.q, data.k.reshape(shape), data.v.reshape(shape))
        return arrays, pages.astype(np.int32), lambda out: out
    tails = np.broadcast_to(tail[:, None], (batch, kv_heads, tokens))
    rows = np.arange(batch)[:, None, None] * slots + np.concatenate([selected, tails], axis=2)
    pages = rows * kv_heads + np.arange(kv_heads)[None, :, None]
    group = query_heads // kv_heads
    q = jnp.swapaxes(data.q.reshape(batch, tokens, kv_heads, group, size), 1, 2)
    shape = (batch * slots * kv_heads, 1, 1, size)
    arrays = (
        q.reshape(batch * kv_heads, tokens, group, size),
        data.k.reshape(shape),
        data.v.reshape(shape),
    )

    def restore(out: np.ndarray) -> np.ndarray:
        parts = out.reshape(batch, kv_heads, tokens, group, size)
        return np.swapaxes(parts, 1, 2).reshape(batch, tokens, query_heads, size)

    return arrays, pages.reshape(batch * kv_heads, -1).astype(np.int32), restore
