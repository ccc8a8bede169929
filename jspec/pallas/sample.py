"""Drawing tokens on Mosaic GPU: one pass over the logits, then one tile of each position again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jspec.dispatch import Backend
from jspec.ops.distribution import Settings
from jspec.ops.sample import Role
from jspec.ops.sampling_limits import refuses_one_pass
from jspec.ops.vocabulary import Axes, Vocabulary
from jspec.pallas.distribution import (
    certain_token,
    count_reached,
    far_weights,
    find_tile,
    launch,
    load_tile,
    number,
    padded,
    read_masses,
    tile_spread,
    total_of,
)
from jspec.pallas.mosaic import iota, refuses_pallas
from jspec.pallas.tile_sums import Blocks, blocks_for, sum_tiles
from jspec.typing import Array


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
