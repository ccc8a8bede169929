"""Greedy verification on Mosaic GPU: one launch, flat in the acceptance rate."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec import tuned
from jspec.dispatch import Backend
from jspec.ops.verify import greedy_sizes, verified_like
from jspec.pallas.mosaic import (
    Spread,
    floor_power,
    iota,
    largest,
    load,
    refuses_pallas,
    starts,
    store,
)
from jspec.sharding import opaque
from jspec.typing import Array

MAX_STOPS = 32  # the kernel unrolls over them
MAX_GAMMA = 1024  # a row stays in registers


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Block sizes of the kernel.

    Attributes:
        rows: of the batch, per program.
        piece: positions of a vector, a power of 2 and at most gamma.
    """

    rows: int
    piece: int


def blocks_for(sizes: Mapping[str, int]) -> Blocks:
    """Block sizes for draft tokens of these sizes."""
    # A program has four warps that all do the same: many small ones cost more than a few longer.
    block = tuned.block("verify_greedy", "pallas", sizes)
    return Blocks(block["rows"], piece=min(block["piece"], floor_power(sizes["gamma"])))


def verify_pallas(
    draft_tokens: Array,
    target_tokens: Array,
    draft_lengths: Array,
    stop_tokens: Array,
    *,
    blocks: Blocks | None = None,
) -> tuple[Array, ...]:
    """The Pallas backend of `jspec.ops.verify.verify_greedy`: the fields of `Verified`."""
    batch, gamma = draft_tokens.shape
    stops = stop_tokens.shape[1]
    blocks = blocks or blocks_for(greedy_sizes(draft_tokens))
    spread = Spread(blocks.piece)

    # A committed token is the target's own: the draft serves only to count. A block ends at its
    # first position where the draft is rejected or the target stops. One maximum finds it (a warp
    # has no instruction for a minimum), over the distance from the end with the two flags in the
    # lowest bits.
    def verify(draft, target, lengths, *refs):
        *stop_refs, accepted_out, committed_out, mismatch_out, next_out, stopped_out, block_out = (
            refs
        )

        def read(row):
            length = jnp.minimum(lengths[row], gamma)
            stop_ids = [ref[row, m] for ref in stop_refs for m in range(stops)]
            pieces = []
            for start in starts(gamma, spread.size):
                piece_slice = (row, pl.ds(start, spread.size)) if spread.size > 1 else (row, start)
                target_piece = load(target.at[piece_slice], spread)
                pieces.append(
                    (
                        piece_slice,
                        start + iota(spread),
                        load(draft.at[piece_slice], spread),
                        target_piece,
                    )
                )
            return row, length, stop_ids, target[row, gamma], pieces

        def is_stop(tokens, stop_ids):
            """0 or 1. An id of -1 is padding, among the stop tokens as elsewhere."""
            matches = [(tokens == stop) & (tokens >= 0) for stop in stop_ids]
            return functools.reduce(jnp.logical_or, matches).astype(jnp.int32) if matches else 0

        def judge(length, stop_ids, bonus, pieces):
            # The bonus token follows a whole accepted draft, as if one had been rejected there.
            event = 2 + is_stop(bonus, stop_ids)
            for _, index, drafted, target_piece in pieces:
                rejected = (drafted != target_piece) | (index >= length)
                flags = 2 * rejected.astype(jnp.int32) + is_stop(target_piece, stop_ids)
                last_event = jnp.where(flags > 0, 4 * (gamma - index) + flags, 0)
                event = jnp.maximum(event, largest(last_event))
            return event

        def write(row, length, bonus, pieces, event):
            end = gamma - (event >> 2)
            rejected = (event & 2) != 0
            accepted_out[row] = jnp.where(rejected, end, end + 1)
            committed_out[row] = end + 1
            mismatch_out[row] = rejected & (end < length)
            next_out[row] = jnp.where(rejected, target[row, end], -1)
            stopped_out[row] = (event & 1) != 0
            for piece_slice, index, _, target_piece in pieces:
                store(block_out.at[piece_slice], jnp.where(index <= end, target_piece, -1))
            block_out[row, gamma] = jnp.where(end == gamma, bonus, -1)

        # The last program's rows end with the batch, some of them done twice and alike. All is
        # read before anything is written, so that the reads of several rows wait together.
        first = jnp.minimum(lax.axis_index("rows") * blocks.rows, batch - blocks.rows)
        rows = [read(first + i) for i in range(blocks.rows)]
        events = [judge(*x[1:]) for x in rows]
        for (row, length, _, bonus, pieces), event in zip(rows, events, strict=True):
            write(row, length, bonus, pieces, event)

    call = plgpu.kernel(
        verify,
        out_type=verified_like(draft_tokens),
        grid=(-(-batch // blocks.rows),),
        grid_names=("rows",),
        # No memory is both read and written, so nothing has to wait for a write.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    # An array without elements has no pointer to give.
    arguments = (draft_tokens, target_tokens, draft_lengths, stop_tokens)
    return opaque(call, *arguments[: 4 if stops else 3])


def refuses(draft_tokens: Array, stop_tokens: Array) -> str | None:
    """Why the kernel cannot take these shapes, or None."""
    batch, gamma = draft_tokens.shape
    stops = stop_tokens.shape[1]
    if batch == 0 or gamma == 0:
        return f"B={batch}, gamma={gamma} leave nothing to compare"
    if gamma > MAX_GAMMA:
        return f"gamma={gamma} is over {MAX_GAMMA}"
    if stops > MAX_STOPS:
        return f"{stops} stop tokens a row are over {MAX_STOPS}"
    return None


def _supports(
    draft_tokens: Array, target_tokens: Array, draft_lengths: Array, stop_tokens: Array
) -> str | None:
    return refuses(draft_tokens, stop_tokens) or refuses_pallas()


VERIFY_GREEDY = Backend("pallas", verify_pallas, _supports)
