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

if TYPE_CHECKING:
    from bench.gather import Selected

NAMES = flash.NAMES


def gather(data: Selected, check: Check, settings: Settings) -> list[Program | Absent]:
    """All rivals; none copies the cache, and page tables are made beforehand."""
    arrays, pages, restore = paged(data)
    rows, count = pages.table.shape
    lengths = np.full(rows, count, np.int32)

    def right(out: Any) -> bool:
        return check(restore(np.asarray(out, np.float32)))

    makes = {"fa3": flash.fa3, "fa3_jax": flash.fa3_jax}
    makes |= dict.fromkeys(("flashinfer", "flashinfer_fa3"), flash.flashinfer)
    makers = {
        name: lambda name, make=make: make(name, arrays, lengths, right, pages=pages)
        for name, make in makes.items()
    }
    return each(makers, settings)


def paged(data: Selected) -> tuple[flash.Arrays, flash.Pages, Callable[[np.ndarray], np.ndarray]]:
    """Queries, keys and values, the cache as pages of one token, and a function that restores the
    output shape ``[B, T, N, H]``.

    Where each KV head has its own selection, each is a row of its own, with pages of one head.
    """
    batch, slots, kv_heads, size = data.k.shape
    tokens, query_heads = data.q.shape[1:3]
    selected, tail = np.asarray(data.selected), np.asarray(data.tail)
    if selected.ndim == 2:
        table = np.concatenate([selected, tail], axis=1) + np.arange(batch)[:, None] * slots
        pages = flash.Pages((batch * slots, 1, kv_heads, size), table.astype(np.int32))
        return (data.q, data.k, data.v), pages, lambda out: out
    tails = np.broadcast_to(tail[:, None], (batch, kv_heads, tokens))
    rows = np.arange(batch)[:, None, None] * slots + np.concatenate([selected, tails], axis=2)
    table = rows * kv_heads + np.arange(kv_heads)[None, :, None]
    table = table.reshape(batch * kv_heads, -1).astype(np.int32)
    group = query_heads // kv_heads
    q = jnp.swapaxes(data.q.reshape(batch, tokens, kv_heads, group, size), 1, 2)
    q = q.reshape(batch * kv_heads, tokens, group, size)

    def restore(out: np.ndarray) -> np.ndarray:
        parts = out.reshape(batch, kv_heads, tokens, group, size)
        return np.swapaxes(parts, 1, 2).reshape(batch, tokens, query_heads, size)

    return (q, data.k, data.v), flash.Pages((batch * slots * kv_heads, 1, 1, size), table), restore
