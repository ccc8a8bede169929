"""Greedy verification with the bookkeeping of a step in Triton: one launch, or two."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jspec.dispatch import Backend
from jspec.ops.commit import committed_like
from jspec.triton.call import next_power, passes_aliases_twice, refuses_triton, triton_call
from jspec.triton.verify import refuses as refuses_tokens
from jspec.typing import Array

DTYPES = ("float32", "bfloat16", "float16")
MAX_LOGITS = 2**14  # of a row that its program looks at itself; others are cut into parts before
PART = 2**11
MAX_TILE = 2**14  # largest logits of parts, of all positions of a row: they stay in registers


def commit_triton(
    draft_tokens: Array,
    logits: Array,
    draft_lengths: Array,
    stop_tokens: Array,
    limits: Array,
    tokens: Array,
    cached: Array,
    done: Array,
    *,
    max_logits: int = MAX_LOGITS,
    part: int = PART,
) -> tuple[Array, ...]:
    """The Triton backend of `jspec.ops.commit.verify_and_commit`: updates the rows in place.

    A row of more than ``max_logits`` logits, padding included, is cut into parts of ``part`` logits
    of a position, whose largest ones a launch before finds.
    """
    from jspec.triton.commit_kernel import commit_kernel, commit_kernel_0_3

    batch, gamma = draft_tokens.shape
    stops, vocabulary = stop_tokens.shape[1], logits.shape[2]
    whole = next_power(gamma + 1) * next_power(vocabulary) <= max_logits
    width = vocabulary if whole else -(-vocabulary // part)
    # Arrays of no elements have no memory to point to, and are never read.
    nothing = draft_lengths
    tops, firsts = (logits, nothing) if whole else _parts(logits, part)
    tile = next_power(gamma + 1) * next_power(width)
    target = jax.ShapeDtypeStruct((batch, gamma + 1), jnp.int32)
    _, *outputs = triton_call(
        commit_kernel_0_3 if passes_aliases_twice() else commit_kernel,
        *(tokens, cached, done, draft_tokens if gamma else nothing, tops, firsts, draft_lengths),
        *(stop_tokens if stops else nothing, limits),
        out=(target, *committed_like(draft_tokens, tokens)),
        aliases={0: 8, 1: 9, 2: 10},
        programs=batch,
        warps=max(1, min(8, tile // 512)),
        SLOTS=tokens.shape[1],
        GAMMA=gamma,
        STOPS=stops,
        WHOLE=whole,
        WIDTH=width,
        POSITIONS=next_power(gamma + 1),
        COLUMNS=next_power(width),
        TILE=min(32, next_power(gamma)),
    )
    return tuple(outputs)


def _parts(logits: Array, part: int) -> tuple[Array, ...]:
    """The largest logit of each part of a position, and the first token that has it."""
    from jspec.triton.commit_kernel import parts_kernel

    *positions, vocabulary = logits.shape
    parts = -(-vocabulary // part)
    shape = (*positions, parts)
    return triton_call(
        parts_kernel,
        logits,
        out=(jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)),
        programs=positions[0] * positions[1] * parts,
        warps=4,
        VOCABULARY=vocabulary,
        PARTS=parts,
        PART=part,
    )


def _supports(draft_tokens, logits, draft_lengths, stop_tokens, *rest) -> str | None:
    positions, vocabulary = logits.shape[1:]
    if str(logits.dtype) not in DTYPES:
        return f"logits of {logits.dtype} are none of {', '.join(DTYPES)}"
    if vocabulary == 0:
        return "V=0 leaves no token to take"
    if next_power(positions) * next_power(-(-vocabulary // PART)) > MAX_TILE:
        return f"{positions} positions of {vocabulary} logits are over {MAX_TILE} parts of {PART}"
    return refuses_tokens(draft_tokens, stop_tokens) or refuses_triton()


VERIFY_AND_COMMIT = Backend("triton", commit_triton, _supports)
