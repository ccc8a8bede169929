"""Verification of trees on Mosaic GPU: a program a row, its nodes in scalar registers."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.dispatch import Backend
from jspec.ops.tree import tree_like
from jspec.pallas import verify
from jspec.pallas.mosaic import Spread, floor_power, largest, refuses_pallas, store
from jspec.pallas.verify import TokenRefs, arguments_of, is_stop, piece_slices
from jspec.sharding import opaque
from jspec.typing import Array


def verify_tree_pallas(
    draft_tokens: Array,
    target_tokens: Array,
    parents: Array,
    draft_lengths: Array,
    stop_tokens: Array,
) -> tuple[Array, ...]:
    """The Pallas backend of `jspec.ops.verify_tree`: the fields of `Verified`, and the path."""

    def verify_tree(parents, *refs):
        tokens, (*outputs, path) = TokenRefs.split(refs, stop_tokens.shape[1])
        row = lax.axis_index("row")
        _write(row, _Walk.of(row, parents, tokens), tokens, outputs, path)

    call = plgpu.kernel(
        verify_tree,
        out_type=tree_like(draft_tokens),
        grid=(len(draft_tokens),),
        grid_names=("row",),
        # No memory is both read and written, so nothing has to wait for a write.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    arguments = arguments_of(draft_tokens, target_tokens, draft_lengths, stop_tokens)
    return opaque(call, parents, *arguments)


@dataclasses.dataclass(frozen=True)
class _Walk:
    """The accepted path of a row, scalars.

    Attributes:
        drafted: the draft token of each node but the root, in order.
        nodes: bit i is set for node i of the path, the root included.
        last: the node that ends it.
        count: nodes of it below the root.
        continues: whether the last one has a child.
    """

    drafted: list[Any]
    nodes: Any
    last: Any
    count: Any
    continues: Any

    @classmethod
    def of(cls, row: Any, parents: Any, tokens: TokenRefs) -> _Walk:
        gamma, length = tokens.draft.shape[1], tokens.lengths[row]
        # All is read before it is compared, so that the reads wait together.
        drafted = [tokens.draft[row, i] for i in range(gamma)]
        parent = [jnp.clip(parents[row, i], 0, i) for i in range(gamma)]
        expected = [tokens.target[row, at] for at in parent]
        zero = jnp.int32(0)
        ancestors, depths = [jnp.int32(1)], [zero]  # of a node that is not accepted: 0 and below 0
        nodes, last, count = jnp.int32(1), zero, zero
        for i, at in enumerate(parent):
            above, depth = zero, zero
            for j, pair in enumerate(zip(ancestors, depths, strict=True)):
                above, depth = (
                    jnp.where(at == j, x, y) for x, y in zip(pair, (above, depth), strict=True)
                )
            accepts = (i < length) & (above != 0) & (drafted[i] == expected[i])
            bit = 1 << (i + 1) if i < 30 else -(2**31)
            ancestors.append(jnp.where(accepts, above | bit, 0))
            depths.append(depth + 1)
            is_deeper = accepts & (depth + 1 > count)
            nodes = jnp.where(is_deeper, ancestors[-1], nodes)
            last = jnp.where(is_deeper, i + 1, last)
            count = jnp.where(is_deeper, depth + 1, count)
        children = [(i < length) & (at == last) for i, at in enumerate(parent)]
        return cls(drafted, nodes, last, count, functools.reduce(jnp.logical_or, children))


def _write(row: Any, walk: _Walk, tokens: TokenRefs, outputs: Any, path: Any) -> None:
    """Write the row's fields of `Verified`, and its path."""
    accepted_out, committed_out, mismatch_out, next_out, stopped_out, block_out = outputs
    gamma, count, stop_ids = len(walk.drafted), walk.count, tokens.stop_ids(row)
    following = tokens.target[row, walk.last]
    # The first stop token of the block has the largest distance from its end.
    bonus = jnp.where(count == gamma, following, -1)
    stop = is_stop(bonus, stop_ids)
    pieces = []
    for place, index in piece_slices(row, gamma, Spread(floor_power(gamma))):
        token = jnp.where(index == count, following, jnp.full_like(index, -1, following.dtype))
        node, at = jnp.zeros_like(index), jnp.int32(0)
        for i, drafted in enumerate(walk.drafted, 1):
            is_on = (walk.nodes >> i) & 1
            is_at = (index == at) & (is_on == 1)
            token, node = jnp.where(is_at, drafted, token), jnp.where(is_at, i, node)
            at = at + is_on
        pieces.append((place, index, token, node))
        stop = jnp.maximum(stop, largest((gamma + 1 - index) * is_stop(token, stop_ids)))
    committed = jnp.where(stop > 0, gamma + 2 - stop, count + 1)
    accepted, cut = jnp.minimum(count, committed), committed <= count
    accepted_out[row] = accepted
    committed_out[row] = committed
    mismatch_out[row] = (committed > count) & walk.continues
    next_out[row] = jnp.where(cut, -1, following)
    stopped_out[row] = stop > 0
    for place, index, token, node in pieces:
        store(block_out.at[place], jnp.where(index < committed, token, -1))
        store(path.at[place], jnp.where(index < accepted, node, 0))
    block_out[row, gamma] = jnp.where(committed == gamma + 1, bonus, -1)


def _supports(draft_tokens: Array, target_tokens: Array, *rest: Array) -> str | None:
    return verify.refuses(draft_tokens, rest[-1]) or refuses_pallas()


VERIFY_TREE = Backend("pallas", verify_tree_pallas, _supports)
