"""Scores by shared hash buckets in Triton."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jspec import tuned
from jspec.dispatch import Backend
from jspec.ops.collisions import MIN_COLLISIONS, code_words, collision_sizes
from jspec.triton.call import next_power, refuses_triton, triton_call
from jspec.typing import Array

MAX_UNROLLED = 8  # queries in a round of the kernel's loop: more is much to compile


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Block sizes of the kernel.

    Attributes:
        tile: a program takes as many keys as give ``tile`` threads' work, a power of 2.
        each: groups of 32 tables of a key per thread, at most.
        warps: of a program.
    """

    tile: int
    each: int
    warps: int


def collisions_triton(
    q_codes: Array, k_codes: Array, lengths: Array, *, tables: int, blocks: Blocks | None = None
) -> Array:
    """The Triton backend of `jspec.ops.collisions.collision_scores`; ``lengths``: int32 ``[B]``."""
    from jspec.triton.collisions_kernel import collision_score_kernel

    batch, slots, heads, words = k_codes.shape
    sizes = collision_sizes(q_codes, k_codes, tables=tables)
    blocks = blocks or Blocks(**tuned.block("collision_scores", "triton", sizes))
    groups = code_words(tables, 1)
    lanes = next_power(-(-groups // blocks.each))
    chunk = max(1, blocks.tile // lanes)
    chunks = -(-slots // chunk)
    queries = q_codes.shape[2] // heads
    return triton_call(
        collision_score_kernel,
        *(q_codes, k_codes, lengths),
        out=(jax.ShapeDtypeStruct((batch, heads, slots), jnp.int32),),
        programs=batch * chunks * heads,
        warps=blocks.warps,
        TOKENS=q_codes.shape[1],
        SLOTS=slots,
        HEADS=heads,
        QUERIES=queries,
        TABLES=tables,
        MIN_COLLISIONS=MIN_COLLISIONS,
        BITS=words // groups,
        GROUPS=groups,
        LANES=lanes,
        UNROLLED=max(n for n in range(1, MAX_UNROLLED + 1) if queries % n == 0),
        CHUNKS=chunks,
        CHUNK=chunk,
    )[0]


def refuses_collisions(q_codes: Array, k_codes: Array) -> str | None:
    """Why the kernel cannot score these codes, or None."""
    if 0 in q_codes.shape or 0 in k_codes.shape:
        return f"q_codes {q_codes.shape} and k_codes {k_codes.shape} leave nothing to launch"
    return None


def _supports(q_codes: Array, k_codes: Array, *rest: Array, tables: int) -> str | None:
    return refuses_collisions(q_codes, k_codes) or refuses_triton()


COLLISION_SCORES = Backend("triton", collisions_triton, _supports)
