"""Greedy verification with the bookkeeping of a step: one Triton launch."""

from __future__ import annotations

from jspec.dispatch import Backend
from jspec.ops.commit import committed_like
from jspec.ops.verify import greedy_sizes
from jspec.triton.call import aliases_are_given_twice, refuses_triton, triton_call
from jspec.triton.verify import Blocks, blocks_for
from jspec.triton.verify import refuses as refuses_tokens
from jspec.typing import Array


def commit_triton(
    draft_tokens: Array,
    target_tokens: Array,
    draft_lengths: Array,
    stop_tokens: Array,
    limits: Array,
    tokens: Array,
    cached: Array,
    done: Array,
    *,
    blocks: Blocks | None = None,
) -> tuple[Array, ...]:
    """As `jspec.ops.commit.verify_and_commit`; the rows are updated in place."""
    from jspec.triton.commit_kernel import commit_kernel, commit_kernel_0_3

    batch, gamma = draft_tokens.shape
    stops = stop_tokens.shape[1]
    blocks = blocks or blocks_for(greedy_sizes(draft_tokens))
    *fresh, known, count, flag = committed_like(draft_tokens, tokens)
    out = triton_call(
        commit_kernel_0_3 if aliases_are_given_twice() else commit_kernel,
        *(tokens, cached, done),
        # Arrays of no elements have no memory to point to, and are never read.
        *(draft_tokens if gamma else draft_lengths, target_tokens, draft_lengths),
        *(stop_tokens if stops else draft_lengths, limits),
        out=(known, count, flag, *fresh),
        aliases={0: 0, 1: 1, 2: 2},
        programs=-(-batch // blocks.rows),
        warps=1,  # the rows are read before they are written
        BATCH=batch,
        SLOTS=tokens.shape[1],
        GAMMA=gamma,
        STOPS=stops,
        ROWS=blocks.rows,
        TILE=blocks.tile,
    )
    return *out[3:], *out[:3]


def _supports(draft_tokens, target_tokens, draft_lengths, stop_tokens, *rest) -> str | None:
    return refuses_tokens(draft_tokens, stop_tokens) or refuses_triton()


VERIFY_AND_COMMIT = Backend("triton", commit_triton, _supports)
