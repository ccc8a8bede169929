"""Verification of trees in Triton: a program a row."""

from __future__ import annotations

from jspec.dispatch import Backend
from jspec.ops.tree import tree_like
from jspec.triton.call import next_power, refuses_triton, triton_call
from jspec.triton.verify import refuses
from jspec.typing import Array


def verify_tree_triton(
    draft_tokens: Array,
    target_tokens: Array,
    parents: Array,
    draft_lengths: Array,
    stop_tokens: Array,
) -> tuple[Array, ...]:
    """The Triton backend of `jspec.ops.verify_tree`: the fields of `Verified`, and the path."""
    from jspec.triton.tree_kernel import tree_kernel

    batch, gamma = draft_tokens.shape
    nodes = next_power(gamma + 1)
    return triton_call(
        tree_kernel,
        *(draft_tokens, target_tokens, parents, draft_lengths, stop_tokens),
        out=tree_like(draft_tokens),
        programs=batch,
        warps=1,
        GAMMA=gamma,
        STOPS=stop_tokens.shape[1],
        NODES=nodes,
        ROUNDS=(nodes - 1).bit_length(),
    )


def _supports(draft_tokens: Array, target_tokens: Array, *rest: Array) -> str | None:
    if not draft_tokens.shape[1]:
        return "gamma=0 leaves no tree"
    return refuses(draft_tokens, rest[-1]) or refuses_triton()


VERIFY_TREE = Backend("triton", verify_tree_triton, _supports)
