"""Verification with packing on Mosaic GPU: one launch, for batches small enough to verify twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec import tuned
from jspec.dispatch import Backend
from jspec.ops.fused import fused_sizes
from jspec.ops.verify import verified_like
from jspec.pallas import pack, verify
from jspec.pallas.mosaic import (
    LANES,
    Spread,
    floor_power,
    refuses_pallas,
    starts,
    tile_layout,
)
from jspec.pallas.verify import TokenRefs
from jspec.sharding import opaque
from jspec.typing import Array

MAX_TOKENS = 8192  # drafted in a batch: a program verifies all of the rows before its own


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Block sizes of the kernel, powers of 2 but for ``row_programs``.

    Attributes:
        span: bytes that a program copies at a time.
        row_programs: programs of a batch row.
        rows: earlier rows that are verified at a time, at most the batch.
        tile: positions of each of them at a time, at most gamma and a warp's lanes.
    """

    span: int
    row_programs: int
    rows: int
    tile: int


def blocks_for(sizes: Mapping[str, int]) -> Blocks:
    """Block sizes for draft tokens and KV rows of these sizes."""
    block = tuned.block("verify_and_pack", "pallas", sizes)
    span = min(block["span"], floor_power(sizes["run_bytes"]))
    row_programs = min(max(1, block["programs"] // sizes["batch"]), -(-sizes["run_bytes"] // span))
    tile = min(LANES, floor_power(sizes["gamma"]))
    rows = min(floor_power(max(block["positions"] // tile, 1)), floor_power(sizes["batch"]))
    return Blocks(span, row_programs, rows, tile)


def verify_and_pack_pallas(
    draft_tokens: Array,
    target_tokens: Array,
    draft_lengths: Array,
    stop_tokens: Array,
    kv: Array,
    *,
    blocks: Blocks | None = None,
) -> tuple[Array, ...]:
    """The Pallas backend of `verify_and_pack`: the fields of `Verified` and of `Packed`."""
    batch, gamma, width = kv.shape
    stops = stop_tokens.shape[1]
    tokens = (draft_tokens, target_tokens, draft_lengths, stop_tokens)
    blocks = blocks or blocks_for(fused_sizes(*tokens, kv))
    spread = verify.blocks_for({"batch": batch, "gamma": gamma, "drafted": batch * gamma}).piece
    span = blocks.span // kv.dtype.itemsize

    def verify_and_pack(source, *refs):
        tokens, (*verified, packed, offsets, total) = TokenRefs.split(refs, stops)
        at, part = lax.axis_index("row"), lax.axis_index("part")
        row = verify.read_row(at, tokens, Spread(spread))
        offset = _accepted_before(at, tokens, blocks)
        event = verify.end_event(row, gamma)
        row_count = verify.accepted_of(event, gamma)

        @pl.when(part == 0)
        def _():
            verify.write_row(row, event, lambda i: tokens.target[at, i], verified)
            offsets[at] = offset

            @pl.when(at == batch - 1)
            def _():
                total[0] = offset + row_count

        chunks = lax.div(row_count * width + span - 1, jnp.int32(span))

        chunk_count = lax.div(
            chunks - part + blocks.row_programs - 1, jnp.int32(blocks.row_programs)
        )

        @pl.loop(jnp.int32(0), chunk_count)
        def _(i):
            chunk = part + i * blocks.row_programs
            pack.copy_chunk((source.at[at], packed), offset, row_count, chunk, (gamma, width, span))

    carried = pack.carry(kv)
    call = plgpu.kernel(
        verify_and_pack,
        out_type=(
            *verified_like(draft_tokens),
            jax.ShapeDtypeStruct((batch * gamma * width,), carried.dtype),
            jax.ShapeDtypeStruct((batch,), jnp.int32),
            jax.ShapeDtypeStruct((1,), jnp.int32),
        ),
        grid=(batch, blocks.row_programs),
        grid_names=("row", "part"),
        # No memory is both read and written, so nothing has to wait for a write.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    *verified, packed, offsets, total = opaque(call, carried, *verify.arguments_of(*tokens))
    return *verified, pack.uncarry(packed, kv), offsets, total[0]


def _accepted_before(row: Any, tokens: TokenRefs, blocks: Blocks) -> Array:
    """The accepted tokens of all batch rows before ``row``, a tile of rows at a time."""
    batch, gamma = tokens.draft.shape
    if batch == 1:
        return jnp.int32(0)
    shape = blocks.rows, blocks.tile
    layout = tile_layout(*shape)
    by_row = layout.reduce(1)

    def fetch(ref, layout):
        return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]

    def over_columns(x):
        return lax.broadcast_in_dim(x, shape, [0])

    def add(i, total):
        # The last tile ends with the batch: those of its rows that the one before had do not count.
        first = jnp.minimum(i * blocks.rows, batch - blocks.rows)
        tile_rows = pl.ds(first, blocks.rows)
        number = plgpu.broadcasted_iota(jnp.int32, (blocks.rows,), 0, layout=by_row) + first
        stop_ids = [
            over_columns(fetch(tokens.stops.at[tile_rows, m], by_row))
            for m in range(tokens.stop_count)
        ]
        length = jnp.minimum(fetch(tokens.lengths.at[tile_rows], by_row), gamma)
        # A whole accepted draft ends as if one had been rejected after it.
        event = plgpu.layout_cast(jnp.full((blocks.rows,), 2, jnp.int32), by_row)
        for start in starts(gamma, blocks.tile):
            positions = tile_rows, pl.ds(start, blocks.tile)
            index = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout) + start
            target = fetch(tokens.target.at[positions], layout)
            drafted = fetch(tokens.draft.at[positions], layout)
            rejected = (drafted != target) | (index >= over_columns(length))
            stop = verify.is_stop(target, stop_ids)
            event = jnp.maximum(event, verify.events(index, rejected, stop, gamma).max(axis=1))
        counts = verify.accepted_of(event, gamma)
        return total + jnp.where((number >= i * blocks.rows) & (number < row), counts, 0)

    zero = plgpu.layout_cast(jnp.zeros((blocks.rows,), jnp.int32), by_row)
    before = lax.div(row + blocks.rows - 1, jnp.int32(blocks.rows))
    return lax.fori_loop(jnp.int32(0), before, add, zero).sum(dtype=jnp.int32)


def _supports(
    draft_tokens: Array,
    target_tokens: Array,
    draft_lengths: Array,
    stop_tokens: Array,
    kv: Array,
) -> str | None:
    if draft_tokens.size > MAX_TOKENS:
        return (
            f"B * gamma = {draft_tokens.size} draft tokens are over {MAX_TOKENS}; verify them, "
            "then pack"
        )
    return verify.refuses(draft_tokens, stop_tokens) or pack.refuses(kv) or refuses_pallas()


VERIFY_AND_PACK = Backend("pallas", verify_and_pack_pallas, _supports)
