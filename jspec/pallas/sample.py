"""Drawing tokens on Mosaic GPU: one pass over the logits, then one tile of each position again."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jspec import tuned
from jspec.dispatch import Backend
from jspec.ops.distribution import Settings
from jspec.ops.sample import Role
from jspec.ops.sampling_limits import refuses_one_pass
from jspec.ops.vocabulary import TILE, Axes, Vocabulary
from jspec.pallas.distribution import (
    Cells,
    NearWeights,
    certain_token,
    cleaned,
    count_reached,
    far_weights,
    find_tile,
    first_token,
    launch,
    load_tile,
    number,
    padded,
    read_masses,
    sum_tile,
    tile_spread,
    total_of,
    width_of,
    without_overlap,
)
from jspec.pallas.mosaic import iota, load, refuses_pallas
from jspec.typing import Array


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Block sizes of the kernels.

    Attributes:
        tiles: of a position, summed by a program.
        ptx: whether `NearWeights` come from PTX.
    """

    tiles: int
    ptx: bool = False


def blocks_for(logits: Array) -> Blocks:
    """Block sizes for logits of this shape, searched with `verify_stochastic`."""
    batch, positions, vocabulary = logits.shape
    sizes = {"batch": batch, "gamma": positions - 1, "vocabulary": vocabulary}
    return Blocks(**tuned.block("verify_stochastic", "pallas", sizes))


def sum_tiles(
    logits: Array, rates: Array, lengths: Array, bonus_positions: int, blocks: Blocks
) -> Cells:
    """The tiles of the first ``lengths [B] + bonus_positions`` positions of each row."""
    batch, positions, vocabulary = logits.shape
    tiles, width = -(-vocabulary // TILE), width_of(vocabulary)
    count = min(blocks.tiles, tiles)
    groups, flat = -(-tiles // count), padded(logits)
    spread = tile_spread(flat)
    near_weights = NearWeights(logits.dtype, spread, blocks.ptx)

    def body(logits_ref, rates_ref, lengths_ref, *refs):
        cells = Cells(*refs)
        program = lax.axis_index("program")
        at = program // groups
        row, position = at // positions, at % positions
        # The last group is laid so that it ends with the position, some tiles summed twice.
        begin = jnp.minimum(program % groups * count, tiles - count)

        @pl.when(position < lengths_ref[row] + bonus_positions)
        def _():
            rate = rates_ref[row]

            def read(i: Array) -> Array:
                first = first_token(begin + i, vocabulary)
                return load(logits_ref.at[at, pl.ds(first, TILE)], spread)

            def step(i: Array, raw: Array) -> Array:
                # The next tile is on its way while this one is summed.
                following = read(jnp.minimum(i + 1, count - 1))
                tile = begin + i
                first = first_token(tile, vocabulary)
                # Only the last tile overlaps, but a loop of its own for that one is compiled wrong
                # by jax 0.11.2: other programs write nothing.
                x = without_overlap(cleaned(raw), first, tile, spread)
                total, top, exponent = sum_tile(x, first, tile, rate, near_weights)
                cells.low[at, tile] = total.astype(jnp.uint32)
                cells.high[at, tile] = (total >> 32).astype(jnp.uint32)
                cells.tops[at, tile] = top
                cells.exponents[at, tile] = exponent
                return following

            lax.fori_loop(jnp.int32(0), jnp.int32(count), step, read(jnp.int32(0)))

    shape = (batch * positions, width)
    dtypes = (jnp.uint32, jnp.uint32, jnp.float32, jnp.int32)
    out = [jax.ShapeDtypeStruct(shape, dtype) for dtype in dtypes]
    programs = batch * positions * groups
    return Cells(*launch(body, out, programs, flat, rates, lengths))


def sample_pallas(
    logits: Array,
    settings: Settings,
    positions: Array,
    *,
    role: Role,
    filtered: bool,
    axis_name: Axes | None,
    blocks: Blocks | None = None,
) -> Array:
    """The Pallas backend of `jspec.ops.sample.sample`."""
    batch, count, vocabulary = logits.shape
    guard, flat = Vocabulary(vocabulary).guard_bits, padded(logits)
    spread = tile_spread(flat)
    none = jnp.zeros(batch, jnp.int32)
    cells = sum_tiles(logits, settings.rate, none, count, blocks or blocks_for(logits))

    def body(logits_ref, rates, seeds, positions_ref, cells, tokens_out):
        at = lax.axis_index("program")
        row = at // count
        rate = rates[row]
        drawn = number(seeds, row, positions_ref[at], jnp.int32(role))
        masses, sums, _, largest = read_masses(cells, at, vocabulary, guard)
        whole = total_of(masses)
        certain = certain_token(cells, at, sums, rate, whole, vocabulary)

        @pl.when(certain >= 0)
        def take_certain():
            tokens_out[at] = certain

        @pl.when(certain < 0)
        def draw():
            tile, left = find_tile(masses, drawn, whole)
            exponent = cells.exponents[at, tile]
            x, first = load_tile(logits_ref, at, tile, spread, vocabulary)
            shift = (largest - exponent).astype(jnp.uint32) + guard
            weights = far_weights(x, rate, exponent)
            tokens_out[at] = first + count_reached(weights, iota(spread), left, shift)

    (tokens,) = launch(
        body,
        [jax.ShapeDtypeStruct((batch * count,), jnp.int32)],
        batch * count,
        flat,
        settings.rate,
        settings.seeds,
        positions.reshape(-1),
        cells,
    )
    return tokens.reshape(batch, count)


def supports(
    logits: Array,
    settings: Settings,
    positions: Array,
    *,
    filtered: bool,
    axis_name: Axes | None,
    **attributes: Any,
) -> str | None:
    """Why the kernels cannot draw from these logits, or None."""
    reason = refuses_one_pass((logits,), (positions,), settings, axis_name, filtered=filtered)
    return reason or refuses_pallas()


SAMPLE = Backend("pallas", sample_pallas, supports)
