"""Selection by hash codes in Triton, two launches: scores with their histograms, then slots."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec import tuned
from jspec.dispatch import Backend
from jspec.gpu import multiprocessors
from jspec.ops.hash import max_score
from jspec.ops.hash_selection import hash_select_sizes
from jspec.triton.call import next_power, refuses_triton, triton_call
from jspec.triton.hash import refuses_scores
from jspec.typing import Array

MAX_SCORE = 4094  # of the histograms
MAX_SLOTS = 2**30  # of a row, and of a selection
MAX_CHUNK = 2**14  # slots: a scan has two counts of them in a word
_LINE = 32  # words of a slot that a program reads at most: four whole sectors
_RECORD = 2**15  # counts of a row that a program reads at most


@dataclasses.dataclass(frozen=True)
class SelectBlocks:
    """Block sizes of selection.

    Attributes:
        chunk: slots that a program scores, a power of 2 up to `MAX_CHUNK`.
        step: slots of a chunk that are scored at a time, a power of 2.
        warps: of a program.
    """

    chunk: int
    step: int
    warps: int


def hash_select_triton(
    q_codes: Array,
    k_codes: Array,
    counts: Array,
    lengths: Array,
    *,
    k: int,
    sinks: int,
    recent: int,
    blocks: SelectBlocks | None = None,
) -> Array:
    """The Triton backend of `jspec.ops.hash_selection.hash_select`.

    ``counts``, ``lengths``: int32 ``[B, K]``.
    """
    from jspec.triton.hash_select_kernel import score_and_count_kernel, select_kernel

    batch, slots, heads, words = k_codes.shape
    sizes = hash_select_sizes(q_codes, k_codes, k=k)
    blocks = blocks or SelectBlocks(**tuned.block("hash_select", "triton", sizes))
    highest = max_score(q_codes, k_codes) + 1
    bins = next_power(highest + 1)
    # Longer rows have longer chunks: each program of the second launch reads all of a row's counts.
    chunk = min(blocks.chunk, MAX_CHUNK, next_power(slots))
    while chunk < MAX_CHUNK and next_power(-(-slots // chunk)) * bins > _RECORD:
        chunk *= 2
    chunks, tile = -(-slots // chunk), min(_LINE // words, next_power(heads))
    shared: dict[str, Any] = {"SLOTS": slots, "K": k, "SINKS": sinks, "RECENT": recent}
    shared |= {"CHUNKS": chunks, "CHUNK": chunk, "BINS": bins}
    keys, records = triton_call(
        score_and_count_kernel,
        *(q_codes, k_codes, counts, lengths),
        out=(
            jax.ShapeDtypeStruct(
                (batch, heads, slots), jnp.uint8 if highest < 2**8 else jnp.uint16
            ),
            jax.ShapeDtypeStruct((batch, heads, chunks, bins), jnp.uint16),
        ),
        programs=batch * -(-heads // tile) * chunks,
        warps=blocks.warps,
        TOKENS=q_codes.shape[1],
        HEADS=heads,
        GROUP=q_codes.shape[2] // heads,
        WORDS=words,
        STEP=min(blocks.step, chunk),
        TILE=tile,
        **shared,
    )
    rows = batch * heads
    parts = min(chunks, max(4 * multiprocessors() // rows, 1))
    return triton_call(
        select_kernel,
        *(keys, records, counts, lengths),
        out=(jax.ShapeDtypeStruct((batch, heads, k), jnp.int32),),
        programs=rows * parts,
        warps=blocks.warps,
        PARTS=parts,
        ALL_CHUNKS=next_power(chunks),
        FILLED=min(next_power(k), 1024),
        **shared,
    )[0]


def refuses(q_codes: Array, k_codes: Array, k: int) -> str | None:
    """Why the kernels cannot select by these codes, or None."""
    if (highest := max_score(q_codes, k_codes)) > MAX_SCORE:
        return f"scores to G T R = {highest} are over {MAX_SCORE}"
    if max(k_codes.shape[1], k) > MAX_SLOTS:
        return f"S={k_codes.shape[1]} and k={k} must be at most {MAX_SLOTS}"
    return refuses_scores(q_codes, k_codes)


def _supports(
    q_codes: Array, k_codes: Array, counts: Array, lengths: Array, *, k: int, **rest: int
) -> str | None:
    return refuses(q_codes, k_codes, k) or refuses_triton()


HASH_SELECT = Backend("triton", hash_select_triton, _supports)
