"""Scores of keys and of pages of keys in Triton."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec import tuned
from jspec.dispatch import Backend
from jspec.ops.key_scores import key_sizes
from jspec.triton.call import next_power, refuses_triton, triton_call
from jspec.typing import Array

MAX_SIZE = 512  # channels of a key or a query: a program holds them in registers


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Block sizes of the kernels.

    Attributes:
        chunk: slots that a program scores, a multiple of its tiles.
        tile: elements of the keys that it loads at once, a power of 2.
        warps: of a program.
    """

    chunk: int
    tile: int
    warps: int


def dot_scores_triton(
    q: Array, keys: Array, projection: Array | None, *, blocks: Blocks | None = None
) -> Array:
    """The Triton backend of `jspec.ops.key_scores.dot_scores`."""
    from jspec.triton.key_scores_kernel import dot_score_kernel

    blocks = blocks or Blocks(**tuned.block("dot_scores", "triton", key_sizes(q, keys)))
    padded = next_power(keys.shape[3])
    constants = {"CHANNELS": keys.shape[3], "PADDED": padded, "PROJECTED": projection is not None}
    # A kernel has a pointer for each argument: without a projection any array serves.
    arrays = q, keys, q if projection is None else projection
    return _launch(dot_score_kernel, *arrays, padded=padded, blocks=blocks, **constants)


def page_scores_triton(q: Array, low: Array, high: Array, *, blocks: Blocks | None = None) -> Array:
    """The Triton backend of `jspec.ops.key_scores.page_scores`."""
    from jspec.triton.key_scores_kernel import page_score_kernel

    blocks = blocks or Blocks(**tuned.block("page_scores", "triton", key_sizes(q, low)))
    return _launch(page_score_kernel, q, low, high, padded=next_power(low.shape[3]), blocks=blocks)


def _launch(
    kernel: Any,
    q: Array,
    keys: Array,
    other: Array,
    *,
    padded: int,
    blocks: Blocks,
    **constants: Any,
) -> Array:
    """Launch a kernel over all rows, KV heads and chunks of slots."""
    (_, tokens, heads, size), (batch, slots, kv_heads, _) = q.shape, keys.shape
    tile = max(blocks.tile // padded, 1)
    chunk = max(blocks.chunk // tile, 1) * tile
    chunks = -(-slots // chunk)
    return triton_call(
        kernel,
        *(q, keys, other),
        out=(jax.ShapeDtypeStruct((batch, kv_heads, slots), jnp.float32),),
        programs=batch * chunks * kv_heads,
        warps=blocks.warps,
        TOKENS=tokens,
        SLOTS=slots,
        HEADS=kv_heads,
        QUERIES=heads // kv_heads,
        SIZE=size,
        SIZE_PADDED=next_power(size),
        CHUNKS=chunks,
        CHUNK=chunk,
        TILE=tile,
        **constants,
    )[0]


def refuses_scores(q: Array, keys: Array) -> str | None:
    """Why the kernels cannot take these shapes, or None."""
    if 0 in q.shape or 0 in keys.shape:
        return f"q {q.shape} and keys {keys.shape} leave nothing to launch"
    if (size := max(q.shape[3], keys.shape[3])) > MAX_SIZE:
        return f"{size} channels are over {MAX_SIZE}"
    return None


def _supports(q: Array, keys: Array, *rest: Array | None) -> str | None:
    return refuses_scores(q, keys) or refuses_triton(keys)


DOT_SCORES = Backend("triton", dot_scores_triton, _supports)
PAGE_SCORES = Backend("triton", page_scores_triton, _supports)
