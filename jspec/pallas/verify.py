"""Greedy verification on Mosaic GPU: one launch, flat in the acceptance rate."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

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


@dataclasses.dataclass(frozen=True)
class TokenRefs:
    """The arguments of verification in memory; ``stops`` is None where no row has a stop token."""

    draft: Any
    target: Any
    lengths: Any
    stops: Any

    @classmethod
    def split(cls, refs: tuple[Any, ...], stops: int) -> tuple[TokenRefs, tuple[Any, ...]]:
        """The arguments among ``refs``, as `arguments_of` passes them, and the refs after them."""
        draft, target, lengths, *rest = refs
        return cls(draft, target, lengths, rest[0] if stops else None), tuple(rest[stops > 0 :])

    @property
    def stop_count(self) -> int:
        """Stop tokens of a row."""
        return 0 if self.stops is None else self.stops.shape[1]

    def stop_ids(self, row: Any) -> list[Any]:
        """The stop tokens of a row, scalars."""
        return [self.stops[row, m] for m in range(self.stop_count)]


@dataclasses.dataclass(frozen=True)
class Row:
    """The tokens of a batch row in registers.

    Attributes:
        index: of the row in the batch.
        length: of its draft, at most gamma.
        stop_ids: its stop tokens, scalars.
        bonus: the target's token after the whole draft, a scalar.
        pieces: for each vector of positions: where it lies in an array ``[B, gamma]``, the
            positions, the draft's tokens and the target's.
    """

    index: Any
    length: Any
    stop_ids: list[Any]
    bonus: Any
    pieces: list[tuple[Any, Array, Array, Array]]


def piece_slices(row: Any, gamma: int, spread: Spread) -> list[tuple[Any, Array]]:
    """Vectors that cover a row of an array ``[B, gamma]``: where each lies, and its positions."""
    return [
        (
            (row, pl.ds(start, spread.size)) if spread.size > 1 else (row, start),
            start + iota(spread),
        )
        for start in starts(gamma, spread.size)
    ]


def read_row(row: Any, refs: TokenRefs, spread: Spread) -> Row:
    """Load a row of the batch."""
    gamma = refs.draft.shape[1]
    pieces = [
        (at, index, load(refs.draft.at[at], spread), load(refs.target.at[at], spread))
        for at, index in piece_slices(row, gamma, spread)
    ]
    length = jnp.minimum(refs.lengths[row], gamma)
    return Row(row, length, refs.stop_ids(row), refs.target[row, gamma], pieces)


def is_stop(tokens: Array, stop_ids: list[Any]) -> Array | int:
    """0 or 1. An id of -1 is padding, among the stop tokens as elsewhere."""
    matches = [(tokens == stop) & (tokens >= 0) for stop in stop_ids]
    return functools.reduce(jnp.logical_or, matches).astype(jnp.int32) if matches else 0


def events(index: Array, rejected: Array, stops: Array | int, gamma: int) -> Array:
    """0 for positions that a block goes past; the largest of the others is that of its end.

    An event is the distance from the end with two flags in the lowest bits, rejected and stop: one
    maximum finds the first position (a warp has no instruction for a minimum).
    """
    flags = 2 * rejected.astype(jnp.int32) + stops
    return jnp.where(flags > 0, 4 * (gamma - index) + flags, 0)


def end_event(row: Row, gamma: int) -> Any:
    """The event at the end of a row's block.

    A committed token is the target's own: the draft serves only to count. A block ends at its first
    position where the draft is rejected or the target stops.
    """
    # The bonus token follows a whole accepted draft, as if one had been rejected there.
    event = 2 + is_stop(row.bonus, row.stop_ids)
    for _, index, drafted, target in row.pieces:
        rejected = (drafted != target) | (index >= row.length)
        event = jnp.maximum(
            event, largest(events(index, rejected, is_stop(target, row.stop_ids), gamma))
        )
    return event


def accepted_of(event: Array, gamma: int) -> Array:
    """Accepted draft tokens of blocks that end with ``event``, a stop token among them."""
    return gamma - (event >> 2) + jnp.where((event & 2) != 0, 0, 1)


def write_row(row: Row, event: Array, following: Callable[[Any], Any], outputs: Any) -> None:
    """Write a row's fields of `Verified`; ``following``: the target's token at a position."""
    accepted, committed, mismatch, next_token, stopped, block = outputs
    at, gamma = row.index, block.shape[1] - 1
    end = gamma - (event >> 2)
    rejected = (event & 2) != 0
    accepted[at] = accepted_of(event, gamma)
    committed[at] = end + 1
    mismatch[at] = rejected & (end < row.length)
    next_token[at] = jnp.where(rejected, following(end), -1)
    stopped[at] = (event & 1) != 0
    for piece, index, _, target in row.pieces:
        store(block.at[piece], jnp.where(index <= end, target, -1))
    block[at, gamma] = jnp.where(end == gamma, row.bonus, -1)


def arguments_of(*arguments: Array) -> tuple[Array, ...]:
    """The arguments of verification for a kernel: an array without elements has no pointer."""
    return arguments if arguments[3].size else arguments[:3]


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

    def verify(*refs):
        tokens, outputs = TokenRefs.split(refs, stops)
        # The last program's rows end with the batch, some of them done twice and alike. All is
        # read before anything is written, so that the reads of several rows wait together.
        first = jnp.minimum(lax.axis_index("rows") * blocks.rows, batch - blocks.rows)
        rows = [read_row(first + i, tokens, Spread(blocks.piece)) for i in range(blocks.rows)]
        ends = [end_event(row, gamma) for row in rows]
        for row, event in zip(rows, ends, strict=True):
            write_row(row, event, lambda at, i=row.index: tokens.target[i, at], outputs)

    call = plgpu.kernel(
        verify,
        out_type=verified_like(draft_tokens),
        grid=(-(-batch // blocks.rows),),
        grid_names=("rows",),
        # No memory is both read and written, so nothing has to wait for a write.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    return opaque(call, *arguments_of(draft_tokens, target_tokens, draft_lengths, stop_tokens))


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
