"""Gathered attention in Triton: it reads what was selected where it lies, and copies nothing."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jspec import tuned
from jspec.dispatch import Backend
from jspec.ops.attention.gathered import gathered_sizes
from jspec.triton.attention import (
    LEAST,
    keys_of_tile,
    part_types,
    refuses,
    rows_of_tile,
    tile_shape,
)
from jspec.triton.call import next_power, refuses_triton, triton_call
from jspec.typing import Array

MOST_LISTED = 1024  # slots that a program keeps, 8 a thread
LATE = 2  # steps in the time that the tail's own loop waits for memory
MERGED_PARTS, MERGED_COLUMNS = 16, 128  # that a program merges at a time


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the work is cut: ``chunk`` of the selected slots a program at most, ``bytes`` of keys and
    values a tile, ``rows`` of queries a tile and KV ``heads`` a program at most (both powers of 2),
    ``stages`` of tiles on their way, ``warps`` to run a program.

    They may follow from n and from T, never from B or counts: a row's arithmetic must not depend on
    its neighbours.
    """

    chunk: int
    bytes: int
    rows: int
    heads: int
    stages: int
    warps: int


def gathered_triton(
    q: Array,
    k: Array,
    v: Array | None,
    positions: Array,
    selected: Array,
    tail: Array,
    until: Array,
    *,
    counts: Array | None,
    scale: float,
    softcap: float | None,
    value_size: int | None,
    blocks: Blocks | None = None,
) -> tuple[Array, Array]:
    """As `jspec.gathered_attention`."""
    from jspec.triton.gathered_kernel import gathered_kernel

    sizes = gathered_sizes(q, k, v, positions, selected)
    blocks = blocks or Blocks(**tuned.block("gathered_attention", "triton", sizes))
    batch, tokens, heads, _ = q.shape
    slots, kv_heads = k.shape[1:3]
    shared, group, count = selected.ndim == 2, heads // kv_heads, selected.shape[-1]
    together = heads_together(kv_heads, tokens * group, blocks.heads) if shared else 1
    shape = tile_shape(k, v, value_size)
    keys = keys_of_tile(shape, k, v, blocks.bytes)
    rows = rows_of_tile(together * tokens * group, q, k, blocks.rows)
    tiles = -(-together * tokens * group // rows)
    cut = cut_of(count, tail.shape[1], tokens, keys // together, blocks.chunk)
    chunks = cut["CHUNKS"]
    parts = triton_call(
        gathered_kernel,
        *(q, k, k if v is None else v, positions, selected),
        selected if counts is None else counts,
        tail if tail.size else selected,
        until,
        out=part_types(q, kv_heads, chunks, shape["VALUE"]),
        programs=batch * chunks * tiles * (kv_heads // together),
        warps=blocks.warps,
        stages=blocks.stages,
        TOKENS=tokens,
        SLOTS=slots,
        KV_HEADS=kv_heads,
        GROUP=group,
        SCALE=float(scale),
        SOFTCAP=softcap,
        SELECTED=count,
        TAIL=tail.shape[1],
        SHARED=shared,
        COUNTED=counts is not None,
        HEADS=together,
        TILES=tiles,
        ROWS=rows,
        KEYS=keys,
        **cut,
        **shape,
    )
    return _merged(q, kv_heads, chunks, *parts)


def _merged(q: Array, kv_heads: int, chunks: int, out: Array, lse: Array) -> tuple[Array, Array]:
    """Output ``[B, T, N, H']`` in the dtype of ``q`` and log-sum-exp of all chunks."""
    from jspec.triton.gathered_kernel import gathered_merge_kernel

    if chunks == 1:
        return out, lse
    batch, tokens, heads, _ = q.shape
    value, lead = out.shape[-1], (batch, tokens, heads)
    columns = min(MERGED_COLUMNS, next_power(value))
    blocks = -(-value // columns)
    out, lse = triton_call(
        gathered_merge_kernel,
        *(out, lse),
        out=(
            jax.ShapeDtypeStruct((*lead, value), q.dtype),
            jax.ShapeDtypeStruct(lead, jnp.float32),
        ),
        programs=batch * tokens * heads * blocks,
        warps=1,
        TOKENS=tokens,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        VALUE=value,
        CHUNKS=chunks,
        SOME=min(MERGED_PARTS, next_power(chunks)),
        COLUMNS=columns,
        BLOCKS=blocks,
    )
    return out, lse


def cut_of(count: int, tail: int, tokens: int, step: int, chunk: int) -> dict[str, int]:
    """How the steps of ``step`` slots are shared out, as the kernel takes it.

    ``count`` selected slots are cut for chunks of ``chunk`` at most; the steps of the ``tail`` come
    first.
    """
    selected = -(-count // step)
    chunks = -(-selected // -(-chunk // step))
    before = -(-tail // step)
    if before and tokens > 1:
        before += LATE
    steps = selected + before
    listed = next_power(-(-steps // chunks) * step)
    return {
        "STEPS": steps,
        "BEFORE": before,
        "LISTED": listed if listed <= MOST_LISTED else 0,
        "CHUNKS": chunks,
    }


def heads_together(kv_heads: int, rows: int, most: int) -> int:
    """How many KV heads of ``rows`` query rows share a program, as many as fill the least tile.

    A tile of fewer rows costs the same, so that the heads that share one cost nothing.
    """
    together = 1
    while 2 * together <= most and 2 * together * rows <= LEAST and kv_heads % (2 * together) == 0:
        together *= 2
    return together


def _supports(q, k, v, positions, selected, *args, **kwargs) -> str | None:
    if not selected.shape[-1]:
        return f"selected {selected.shape} leaves nothing to gather"
    return refuses(q, k, v) or refuses_triton()


GATHERED = Backend("triton", gathered_triton, _supports)
