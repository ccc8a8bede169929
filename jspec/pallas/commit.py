"""Greedy verification with the bookkeeping of a step on Mosaic GPU: one launch, or two."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec import tuned
from jspec.dispatch import Backend
from jspec.ops.commit import commit_sizes, committed_like
from jspec.ops.distribution import cleaned
from jspec.pallas import verify
from jspec.pallas.mosaic import (
    LANES,
    WARPS,
    Spread,
    floor_power,
    iota,
    largest,
    load,
    refuses_pallas,
    starts,
    store,
    tile_layout,
)
from jspec.sharding import opaque, varying_axes
from jspec.typing import Array

DTYPES = ("float32", "bfloat16", "float16")
MAX_POSITIONS = 256  # of a row: the kernel unrolls over pieces of them
NO_TOKEN = -(2**31 - 1)  # the negative of a token after all others
WORD = 16  # bytes a lane reads at once


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Block sizes of the kernels.

    Attributes:
        whole: logits of a row, at most, that its program reads itself; of others a launch before
            finds the largest of each part.
        part: logits of a part, a power of 2.
        tile: logits, or parts, that a row's program holds at a time.
    """

    whole: int
    part: int
    tile: int


def blocks_for(sizes: Mapping[str, int]) -> Blocks:
    """Block sizes for logits of these sizes."""
    return Blocks(**tuned.block("verify_and_commit", "pallas", sizes))


def commit_pallas(
    draft_tokens: Array,
    logits: Array,
    draft_lengths: Array,
    stop_tokens: Array,
    limits: Array,
    tokens: Array,
    cached: Array,
    done: Array,
    *,
    blocks: Blocks | None = None,
) -> tuple[Array, ...]:
    """The Pallas backend of `jspec.ops.commit.verify_and_commit`: updates the rows in place."""
    blocks = blocks or blocks_for(commit_sizes(draft_tokens, logits))
    _, positions, vocabulary = logits.shape
    read = (logits,)
    # A vocabulary of one part has nothing to share, and Mosaic no layout for one column.
    part = min(blocks.part, floor_power(vocabulary))
    if positions * vocabulary > blocks.whole and vocabulary > part:
        read = opaque(functools.partial(_parts, part=part), logits)
    arrays = (draft_tokens, draft_lengths, stop_tokens, limits, tokens, cached, done, *read)
    *results, tokens, cached, done = opaque(
        functools.partial(_committed, tile_size=blocks.tile), *arrays
    )
    return *results, tokens, cached, done


def _parts(logits: Array, *, part: int) -> tuple[Array, Array]:
    """The largest logit of each part of a position, and the first token that has it.

    float32 and int32 ``[B, T, parts]``. The last part ends with the vocabulary.
    """
    batch, positions, vocabulary = logits.shape
    begins = starts(vocabulary, part)
    aligned = math.gcd(vocabulary, part, WORD // logits.dtype.itemsize)
    spread = Spread(part, vector=aligned, warps=WARPS)

    def largest_of_parts(logits, tops, firsts):
        row, at, part_index = (lax.axis_index(name) for name in ("row", "position", "part"))
        begin = pl.multiple_of(jnp.minimum(part_index * part, vocabulary - part), aligned)
        x = cleaned(load(logits.at[row, at, pl.ds(begin, part)], spread))
        top = largest(x)
        tops[row, at, part_index] = top
        firsts[row, at, part_index] = -largest(
            jnp.where(x == top, -(begin + iota(spread)), NO_TOKEN)
        )

    shape = (batch, positions, len(begins))
    call = plgpu.kernel(
        largest_of_parts,
        out_type=(
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.int32),
        ),
        grid=shape,
        grid_names=("row", "position", "part"),
        # No memory is both read and written, so nothing has to wait for a write.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    return call(logits)


def _committed(
    draft_tokens: Array,
    draft_lengths: Array,
    stop_tokens: Array,
    limits: Array,
    tokens: Array,
    cached: Array,
    done: Array,
    *read: Array,
    tile_size: int,
) -> tuple[Array, ...]:
    """All results, from the logits, or from the largest of their parts and the tokens of these."""
    batch, gamma = draft_tokens.shape
    width = read[0].shape[2]
    size = min(floor_power(max(gamma, 1)), floor_power(max(tile_size // width, 1)))
    tile = _Tile(size, floor_power(width))

    def commit(known, cached, done, lengths, limits, *refs):
        read_refs, refs = refs[: len(read)], refs[len(read) :]
        # Arrays without elements have no pointer, and are no arguments.
        draft, refs = (refs[0], refs[1:]) if gamma else (None, refs)
        stops, refs = (refs[0], refs[1:]) if stop_tokens.size else (None, refs)
        *verified, block = refs
        at = lax.axis_index("row")
        cached_before, ended, limit = cached[at], done[at], limits[at]
        tokens = verify.TokenRefs(draft, None, lengths, stops)
        begins = starts(gamma, tile.size) if gamma else []
        pieces = [
            (
                (at, tile.at(start)),
                tile.positions(start),
                tile.fetch_positions(tokens.draft.at[at, tile.at(start)]),
                tile.first_of_largest(read_refs, at, start),
            )
            for start in begins
        ]
        bonus = _Tile(1, tile.columns).first_of_largest(read_refs, at, gamma)
        length = jnp.minimum(lengths[at], gamma)
        row = verify.Row(at, length, tokens.stop_ids(at), bonus, pieces)
        event = verify.end_event(row, gamma)
        verify.write_row(row, event, functools.partial(_token_at, row, gamma), verified)

        active = jnp.logical_not(ended)
        committed = jnp.where(active, gamma - (event >> 2) + 1, 0)
        after = cached_before + committed
        cached[at] = after
        done[at] = ended | ((event & 1) != 0) | (after + 1 >= limit)
        block[at, 0] = jnp.where(active, verify.accepted_of(event, gamma), 0)
        block[at, 1] = committed
        block[at, 2 + gamma] = jnp.where(committed > gamma, bonus, -1)
        first = cached_before + 1
        _store_token(known.at[at], first + gamma, bonus, committed > gamma)
        for start, (_, index, _, target) in zip(begins, pieces, strict=True):
            store(block.at[at, tile.at(2 + start)], jnp.where(index < committed, target, -1))
            _append(known.at[at], first, start, (index, target), committed, tile)

    call = plgpu.kernel(
        commit,
        out_type=committed_like(draft_tokens, tokens)[:7],
        grid=(batch,),
        grid_names=("row",),
    )
    rows = [jax.new_ref(x) for x in (tokens, cached, done)]
    more = [x for x in (draft_tokens, stop_tokens) if x.size]
    results = call(*rows, draft_lengths, limits, *read, *more)
    return *results, *(jax.freeze(row) for row in rows)


@dataclasses.dataclass(frozen=True)
class _Tile:
    """``size`` positions of a row, with ``columns`` of their logits or parts: powers of 2.

    What belongs to one position is a scalar, to several a vector that lies as rows of the tile do.
    """

    size: int
    columns: int

    @property
    def layout(self):
        # A warp has neighbouring lanes at neighbouring columns.
        return tile_layout(self.size, min(self.columns, WARPS * LANES // min(self.size, WARPS)))

    @property
    def spread(self) -> Spread:
        return Spread(self.columns, warps=WARPS)

    def at(self, start: int) -> Any:
        """The index of the positions from ``start`` on."""
        return pl.ds(start, self.size) if self.size > 1 else start

    def positions(self, start: int) -> Array:
        if self.size == 1:
            return jnp.int32(start)
        layout = self.layout.reduce(1)
        return start + plgpu.broadcasted_iota(jnp.int32, (self.size,), 0, layout=layout)

    def fetch_positions(self, ref: Any) -> Array:
        """What ``ref`` holds, one element a position."""
        return ref[...] if self.size == 1 else _fetch(ref, self.layout.reduce(1))

    def first_of_largest(self, read: tuple[Any, ...], row: Any, start: int) -> Array:
        """The target's tokens at the positions from ``start`` on.

        ``read``: the logits, or the largest of their parts and the tokens of these.
        """
        begins = starts(read[0].shape[2], self.columns)
        values = [cleaned(self._fetch(read[0], row, start, column)) for column in begins]
        tokens = [
            self._fetch(read[1], row, start, column) if len(read) > 1 else self._index(column)
            for column in begins
        ]
        top = functools.reduce(jnp.maximum, map(self._largest, values))
        negatives = [
            self._largest(jnp.where(x == self._over_columns(top), -token, NO_TOKEN))
            for x, token in zip(values, tokens, strict=True)
        ]
        return -functools.reduce(jnp.maximum, negatives)

    def _fetch(self, ref: Any, row: Any, start: int, column: int) -> Array:
        across = pl.ds(column, self.columns) if self.columns > 1 or self.size > 1 else column
        tile_ref = ref.at[row, self.at(start), across]
        return load(tile_ref, self.spread) if self.size == 1 else _fetch(tile_ref, self.layout)

    def _index(self, column: int) -> Array:
        if self.size == 1:
            return column + iota(self.spread)
        shape = self.size, self.columns
        return column + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=self.layout)

    def _largest(self, x: Array) -> Array:
        return largest(x) if self.size == 1 else x.max(axis=1)

    def _over_columns(self, x: Array) -> Array:
        return x if self.size == 1 else lax.broadcast_in_dim(x, (self.size, self.columns), [0])


def _fetch(ref: Any, layout: Any) -> Array:
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]


def _token_at(row: verify.Row, gamma: int, at: Any) -> Any:
    """The target's token at a position, a scalar."""
    token = jnp.where(at == gamma, row.bonus, -1)
    for _, index, _, target in row.pieces:
        token = jnp.maximum(token, largest(jnp.where(index == at, target, -1)))
    return token


def _store_token(known: Any, slot: Any, token: Any, is_written: Any) -> None:
    """Put a token into a row ``[S]`` unless the slot is past its end."""

    @pl.when(is_written & (slot < known.shape[0]))
    def _():
        known[slot] = token


def _append(
    known: Any, first: Any, start: int, piece: tuple[Any, Any], committed: Any, tile: _Tile
) -> None:
    """Put those of a piece's tokens that are committed into a row ``[S]`` at ``first + index``."""
    index, target = piece
    slots = known.shape[0]
    if tile.size == 1:
        _store_token(known, first + start, target, start < committed)
        return
    fits = first + start + tile.size <= slots
    if tile.size <= slots:

        @pl.when(fits)
        def _():
            # A vector is stored as a whole: with what the slots after the block held before.
            window = known.at[pl.ds(first + start, tile.size)]
            before = tile.fetch_positions(window)
            store(window, jnp.where(index < committed, target, before))

    @pl.when(jnp.logical_not(fits))
    def _():
        @pl.loop(0, tile.size)
        def _(i):
            token = largest(jnp.where(index == start + i, target, -1))
            _store_token(known, first + start + i, token, start + i < committed)


def _supports(draft_tokens, logits, draft_lengths, stop_tokens, *rest) -> str | None:
    batch, positions, vocabulary = logits.shape
    if str(logits.dtype) not in DTYPES:
        return f"logits of {logits.dtype} are none of {', '.join(DTYPES)}"
    if batch * vocabulary == 0:
        return f"B={batch}, V={vocabulary} leave nothing to verify"
    if positions > MAX_POSITIONS:
        return f"{positions} positions a row are over {MAX_POSITIONS}"
    if logits.size >= 2**31:
        return f"logits {logits.shape} have more elements than int32 counts"
    if (stops := stop_tokens.shape[1]) > verify.MAX_STOPS:
        return f"{stops} stop tokens a row are over {verify.MAX_STOPS}"
    if axes := varying_axes((draft_tokens, logits, draft_lengths, stop_tokens, rest)):
        return f"arrays vary over the mesh axes {sorted(axes)}; it writes none of those in place"
    return refuses_pallas()


VERIFY_AND_COMMIT = Backend("pallas", commit_pallas, _supports)
