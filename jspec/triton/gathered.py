"""Gathered attention in Triton, which reads the selected slots in place, without a copy."""

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
    refuses_key_size,
    rows_of_tile,
    tile_shape,
)
from jspec.triton.call import next_power, triton_call
from jspec.typing import Array

LEAST_STEPS = 4  # of a chunk, where there are several; fewer wait for memory more than they read
MERGED_PARTS = 16  # of a query row that a program merges at a time


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Block sizes of the kernel.

    They may follow from n, T and the heads, never from B or counts: a row's arithmetic must not
    depend on its neighbours.

    Attributes:
        chunk: selected slots per program, at most.
        programs: of a batch row, at least: chunks are smaller where there would be fewer.
        listed: up to so many slots of a chunk are read at once and kept; more are read tile by
            tile.
        bytes: of keys and values of a tile, a power of 2.
        rows: of queries of a tile, at most, a power of 2.
        heads: KV heads per program, at most, a power of 2.
        stages: of the compiler's pipelining.
        warps: of a program.
    """

    chunk: int
    programs: int
    listed: int
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
    context_len: Array,
    *,
    counts: Array | None,
    log_weights: Array | None = None,
    scale: float,
    softcap: float | None,
    value_size: int | None,
    blocks: Blocks | None = None,
) -> tuple[Array, Array]:
    """The Triton backend of `jspec.ops.gathered_attention`."""
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
    least = -(-blocks.programs * together // (kv_heads * tiles))
    cut = cut_of(count, tail.shape[1], keys // together, least, blocks)
    chunks = cut["CHUNKS"]
    parts = triton_call(
        gathered_kernel,
        *(q, k, k if v is None else v, positions, selected),
        selected if counts is None else counts,
        tail if tail.size else selected,
        context_len,
        q if log_weights is None else log_weights,
        out=part_types(q, kv_heads, chunks, shape["VALUE"], whole=chunks == 1),
        programs=batch * chunks * tiles * (kv_heads // together),
        warps=blocks.warps,
        stages=blocks.stages,
        TOKENS=tokens,
        SLOTS=slots if len(k) == batch else 0,
        KV_HEADS=kv_heads,
        GROUP=group,
        SCALE=float(scale),
        SOFTCAP=softcap,
        SELECTED=count,
        TAIL=tail.shape[1],
        SHARED=shared,
        COUNTED=counts is not None,
        WEIGHTED=log_weights is not None,
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
    channels = min(128 if chunks <= MERGED_PARTS else 64, next_power(value))
    programs_per_row = -(-value // channels)
    out, lse = triton_call(
        gathered_merge_kernel,
        *(out, lse),
        out=(
            jax.ShapeDtypeStruct((*lead, value), q.dtype),
            jax.ShapeDtypeStruct(lead, jnp.float32),
        ),
        programs=batch * tokens * heads * programs_per_row,
        warps=1,
        TOKENS=tokens,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        VALUE=value,
        CHUNKS=chunks,
        PARTS_AT_ONCE=min(MERGED_PARTS, next_power(chunks)),
        CHANNELS_AT_ONCE=channels,
        PROGRAMS_PER_ROW=programs_per_row,
    )
    return out, lse


def cut_of(count: int, tail: int, step: int, least: int, blocks: Blocks) -> dict[str, int]:
    """How ``count`` selected slots and the ``tail`` are shared out, in steps of ``step`` slots.

    There are at least ``least`` chunks, as long as each has `LEAST_STEPS`. Returns constants of
    `gathered_kernel`.
    """
    selected, tail_steps = -(-count // step), -(-tail // step)
    max_steps = max(blocks.chunk // step, 1)
    chunks = max(-(-selected // max_steps), min(least, selected // LEAST_STEPS))
    listed = next_power(-(-(selected + tail_steps) // chunks) * step)
    return {
        "STEPS": selected + tail_steps,
        "TAIL_STEPS": tail_steps,
        "LISTED": listed if listed <= blocks.listed else 0,
        "CHUNKS": chunks,
    }


def heads_together(kv_heads: int, rows: int, max_heads: int) -> int:
    """How many KV heads of ``rows`` query rows share a program: as many as fill the smallest tile.

    A tile with fewer rows costs the same, so sharing it is free.
    """
    together = 1
    while (
        2 * together <= max_heads
        and 2 * together * rows <= LEAST
        and kv_heads % (2 * together) == 0
    ):
        together *= 2
    return together


def _supports(q, k, v, positions, selected, *args, value_size=None, **kwargs) -> str | None:
    if not selected.shape[-1]:
        return f"selected {selected.shape} leaves nothing to gather"
    return refuses(q, k, v, value_size) or refuses_key_size(k)


GATHERED = Backend("triton", gathered_triton, _supports)
