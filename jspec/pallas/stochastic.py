"""Stochastic verification on Mosaic GPU: one pass over the logits, then few tiles again.

The residual of a draft with logits reads both tiles of the rejected position again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jspec.dispatch import Backend
from jspec.ops import uint64
from jspec.ops.distribution import ONE, Settings
from jspec.ops.sample import Role
from jspec.ops.sampling_limits import refuses_one_pass
from jspec.ops.verify import greedy_sizes, verified_like
from jspec.ops.vocabulary import TILE, Axes, Vocabulary
from jspec.pallas import verify
from jspec.pallas.distribution import (
    SCALE_WORDS,
    Cells,
    NearWeights,
    Scale,
    choose,
    cleaned,
    count_reached,
    far_weights,
    find_tile,
    first_token,
    launch,
    load_tile,
    number,
    padded,
    probabilities,
    read_masses,
    read_scale,
    read_sums,
    scale_of,
    shift_down,
    tile_spread,
    total_of,
    width_of,
    write_scale,
)
from jspec.pallas.mosaic import WARPS, Spread, iota, largest, load, refuses_pallas
from jspec.pallas.tile_sums import Blocks, blocks_for, sum_tiles
from jspec.typing import Array


class Rows(NamedTuple):
    """What each row brings: arguments of `verify_pallas`, arrays or their refs.

    ``stops`` is None where no row has a stop token: an array without elements has no pointer.
    """

    tokens: Any
    lengths: Any
    stops: Any
    rates: Any
    seeds: Any
    positions: Any


class Source(NamedTuple):
    """Target or draft, arrays or their refs; positions count over all rows.

    Attributes:
        logits: ``[positions, V]``.
        cells: of the positions.
        scales: int32 ``[positions, SCALE_WORDS]``; None before they are known.
    """

    logits: Any
    cells: Cells
    scales: Any = None


class Tile(NamedTuple):
    """A tile of a position of a source, in a kernel."""

    logits: Any
    at: Array
    exponent: Array
    scale: Scale


class Kernels:
    """The kernels of verifications of one size."""

    def __init__(self, target_logits: Array, draft_logits: Array | None, *, ptx: bool):
        self.batch, count, self.vocabulary = target_logits.shape
        self.gamma = count - 1
        self.tiles, self.width = -(-self.vocabulary // TILE), width_of(self.vocabulary)
        self.guard = Vocabulary(self.vocabulary).guard_bits
        # How a tile lies, one way for both sources, and a vector of a row's draft tokens.
        sources = (target_logits, target_logits if draft_logits is None else draft_logits)
        self.spread = min(map(tile_spread, sources), key=lambda spread: spread.vector)
        self.near = [NearWeights(x.dtype, self.spread.layout(), ptx) for x in sources]
        self.span = Spread(max(32, 1 << (self.gamma - 1).bit_length()))

    def judge(
        self, rows: Rows, target: Source, draft: Source | None
    ) -> tuple[Array, Source, Source | None]:
        """Whether each draft token is accepted, int32 ``[B, span]``, and the sources with scales.

        A program each position of the target.
        """
        gamma, guard, vocabulary = self.gamma, self.guard, self.vocabulary

        def probability(source: Source, at: Array, token: Array, rate: Array, scale: Scale):
            """That of a token, 0 for one after the vocabulary's end."""
            inside = jnp.minimum(token, vocabulary - 1)
            exponent = source.cells.exponents[at, inside // TILE]
            weight = far_weights(cleaned(source.logits[at, inside]), rate, exponent)
            p = probabilities(weight, token, exponent, scale, guard)
            return jnp.where(token < vocabulary, p, 0)

        def body(rows, target, draft, accepts_out, *scales_out):
            at = lax.axis_index("program")
            row, index = at // (gamma + 1), at % (gamma + 1)
            length = jnp.minimum(rows.lengths[row], gamma)
            rate = rows.rates[row]

            @pl.when(index <= length)
            def _():
                scale = scale_of(target.cells, at, rate, vocabulary, guard)
                write_scale(scales_out[0], at, scale)

                @pl.when(index < length)
                def _():
                    token = jnp.maximum(rows.tokens[row, index], 0)
                    p, q = probability(target, at, token, rate, scale), jnp.uint64(ONE)
                    if draft is not None:
                        drafted = row * gamma + index
                        scale_q = scale_of(draft.cells, drafted, rate, vocabulary, guard)
                        write_scale(scales_out[1], drafted, scale_q)
                        q = probability(draft, drafted, token, rate, scale_q)
                    drawn = number(
                        rows.seeds, row, rows.positions[row] + index, jnp.int32(Role.ACCEPT)
                    )
                    # u < p / q without dividing.
                    accepts_out[row, index] = (uint64.high64(drawn, q) < p).astype(jnp.int32)

        counts = [self.batch * (gamma + 1)] + [self.batch * gamma] * (draft is not None)
        out = [jax.ShapeDtypeStruct((self.batch, self.span.size), jnp.int32)]
        out += [jax.ShapeDtypeStruct((count, SCALE_WORDS), jnp.int32) for count in counts]
        accepts, *scales = launch(body, out, counts[0], rows, target, draft)
        return (
            accepts,
            target._replace(scales=scales[0]),
            None if draft is None else draft._replace(scales=scales[1]),
        )

    def accepted(self, accepts: Any, row: Array, length: Array) -> Array:
        """In a kernel: the length of the leading run of accepted tokens of a row."""
        accept = load(accepts.at[row, pl.ds(0, self.span.size)], self.span)
        index = iota(self.span)
        return jnp.min(jnp.where((accept == 0) | (index >= length), index, length))

    def rejected_tiles(
        self, target: Source, draft: Source, row: Array, index: Array, tile: Array
    ) -> list[Tile]:
        """In a kernel: of target and draft a tile of position ``index`` of a row."""
        places = (target, row * (self.gamma + 1) + index), (draft, row * self.gamma + index)
        return [
            Tile(x.logits, at, x.cells.exponents[at, tile], read_scale(x.scales, at))
            for x, at in places
        ]

    def excess(
        self,
        tiles: list[Tile],
        tile: Array,
        rate: Array,
        weights_of: Sequence[Callable[..., Array]],
    ) -> Array:
        """In a kernel: ``max(p - q, 0)`` of a tile's tokens, uint64 in units of 2**-53.

        ``weights_of``: what computes the weights of the target's tile, and of the draft's.
        """
        p_q = []
        for of, weights in zip(tiles, weights_of, strict=True):
            x, first = load_tile(of.logits, of.at, tile, self.spread, self.vocabulary)
            tokens = first + iota(self.spread)
            of_tile = weights(x, rate, of.exponent)
            p_q.append(probabilities(of_tile, tokens, of.exponent, of.scale, self.guard))
        p, q = p_q
        return jnp.where(q < p, p - q, 0)

    def residual(
        self, rows: Rows, target: Source, draft: Source, accepts: Array
    ) -> tuple[Array, Array]:
        """The masses of the residual in the tiles of each row, uint32 ``[B, width]`` twice: lower
        and upper words. A program each tile; nothing is written where no residual is drawn from."""

        def body(rows, target, draft, accepts, low, high):
            program = lax.axis_index("program")
            row, tile = program // self.tiles, program % self.tiles
            length = jnp.minimum(rows.lengths[row], self.gamma)
            accepted, rate = self.accepted(accepts, row, length), rows.rates[row]

            @pl.when((accepted < length) & (rate != 0))
            def _():
                tiles = self.rejected_tiles(target, draft, row, accepted, tile)

                def mass_by(weights_of: Sequence[Callable[..., Array]]) -> Array:
                    return total_of(self.excess(tiles, tile, rate, weights_of))

                far = (far_weights, far_weights)
                if all(near.serve for near in self.near):
                    near_both = functools.reduce(
                        jnp.logical_and,
                        (
                            near.serve_at(rate, jnp.abs(x.exponent))
                            for near, x in zip(self.near, tiles, strict=True)
                        ),
                    )
                    mass = lax.cond(near_both, lambda: mass_by(self.near), lambda: mass_by(far))
                else:
                    mass = mass_by(far)
                low[row, tile] = mass.astype(jnp.uint32)
                high[row, tile] = (mass >> 32).astype(jnp.uint32)

        shape = jax.ShapeDtypeStruct((self.batch, self.width), jnp.uint32)
        programs = self.batch * self.tiles
        low, high = launch(body, [shape, shape], programs, rows, target, draft, accepts)
        return low, high

    def finish(
        self,
        rows: Rows,
        target: Source,
        draft: Source | None,
        accepts: Array,
        residuals: tuple[Array, Array] | None,
    ) -> tuple[Array, ...]:
        """The fields of `Verified`. A program each row."""
        gamma, vocabulary, guard, spread = self.gamma, self.vocabulary, self.guard, self.spread
        of_row = Spread(self.width, warps=WARPS)
        piece = Spread(verify.blocks_for(greedy_sizes(rows.tokens)).piece)

        def body(rows, target, draft, accepts, residuals, *outputs):
            row = lax.axis_index("program")
            length = jnp.minimum(rows.lengths[row], gamma)
            accepted, rate = self.accepted(accepts, row, length), rows.rates[row]
            rejected = accepted < length
            at, last = row * (gamma + 1) + accepted, jnp.minimum(accepted, gamma - 1)
            role = jnp.where(rejected, jnp.int32(Role.RESIDUAL), jnp.int32(Role.BONUS))
            drawn = number(rows.seeds, row, rows.positions[row] + accepted, role)
            certain = read_scale(target.scales, at).certain

            def draw() -> Array:
                masses, sums, shift, top = read_masses(target.cells, at, vocabulary, guard)
                without = jnp.int32(-1)
                if draft is None:
                    # The residual is the target's distribution but for the draft token, whose
                    # weight its tile loses.
                    token = rows.tokens[row, last]
                    without = jnp.where(rejected & (token < vocabulary), token, -1)
                    inside = jnp.maximum(without, 0)
                    exponent = target.cells.exponents[at, inside // TILE]
                    weight = far_weights(cleaned(target.logits[at, inside]), rate, exponent)
                    is_tile = (iota(of_row) == inside // TILE) & (without >= 0)
                    residual = shift_down(sums - jnp.where(is_tile, weight, 0), shift)
                else:
                    low, high = residuals
                    residual = read_sums(low, high, row, of_row, self.tiles)
                    residual = choose(rejected, residual, jnp.zeros_like(residual))
                # p and q that differ by rounding alone can leave nothing: then the target's serves.
                whole = total_of(residual)
                uses_residual = rejected & (whole > 0)
                whole = jnp.where(uses_residual, whole, total_of(masses))
                tile, left = find_tile(choose(uses_residual, residual, masses), drawn, whole)

                def of_target():
                    exponent = target.cells.exponents[at, tile]
                    x, first = load_tile(target.logits, at, tile, spread, vocabulary)
                    is_draft = (first + iota(spread) == without) & uses_residual
                    weights = jnp.where(is_draft, 0, far_weights(x, rate, exponent))
                    down = (top - exponent).astype(jnp.uint32) + guard
                    return count_reached(weights, iota(spread), left, down)

                def of_residual():
                    tiles = self.rejected_tiles(target, draft, row, last, tile)
                    weights = self.excess(tiles, tile, rate, (far_weights, far_weights))
                    return count_reached(weights, iota(spread), left, 0)

                if draft is None:
                    count = of_target()
                else:
                    count = lax.cond(uses_residual, of_residual, of_target)
                return first_token(tile, vocabulary) + count

            following = lax.cond(certain >= 0, lambda: certain, draw)
            tokens = verify.TokenRefs(rows.tokens, None, rows.lengths, rows.stops)
            stop_ids, pieces = tokens.stop_ids(row), []
            event = jnp.int32(2) + verify.is_stop(following, stop_ids)
            for place, index in verify.piece_slices(row, gamma, piece):
                drafted = load(rows.tokens.at[place], piece)
                committed = jnp.where(index == accepted, following, drafted)
                pieces.append((place, index, drafted, committed))
                is_stop = verify.is_stop(committed, stop_ids)
                of_piece = verify.events(index, index >= accepted, is_stop, gamma)
                event = jnp.maximum(event, largest(of_piece))
            block = verify.Row(row, length, stop_ids, following, pieces)
            verify.write_row(block, event, lambda _: following, outputs)

        out = verified_like(rows.tokens)
        return launch(body, out, self.batch, rows, target, draft, accepts, residuals)


def verify_pallas(
    draft_tokens: Array,
    target_logits: Array,
    draft_lengths: Array,
    stop_tokens: Array,
    settings: Settings,
    positions: Array,
    draft_logits: Array | None,
    *,
    rule: str,
    filtered: bool,
    axis_name: Axes | None,
    blocks: Blocks | None = None,
) -> tuple[Array, ...]:
    """The Pallas backend of `jspec.ops.stochastic.verify_stochastic`: the fields of `Verified`."""
    blocks = blocks or blocks_for(target_logits)
    kernels = Kernels(target_logits, draft_logits, ptx=blocks.ptx)
    stops = stop_tokens if stop_tokens.size else None
    rows = Rows(draft_tokens, draft_lengths, stops, settings.rate, settings.seeds, positions)

    def source(logits: Array, bonus_positions: int) -> Source:
        cells = sum_tiles(logits, rows.rates, draft_lengths, bonus_positions, blocks)
        return Source(padded(logits), cells)

    target, draft = source(target_logits, 1), None
    if draft_logits is not None:
        draft = source(draft_logits, 0)
    accepts, target, draft = kernels.judge(rows, target, draft)
    residuals = None if draft is None else kernels.residual(rows, target, draft, accepts)
    return kernels.finish(rows, target, draft, accepts, residuals)


def supports(
    draft_tokens: Array,
    target_logits: Array,
    draft_lengths: Array,
    stop_tokens: Array,
    settings: Settings,
    positions: Array,
    draft_logits: Array | None,
    *,
    rule: str,
    filtered: bool,
    axis_name: Axes | None,
) -> str | None:
    """Why the kernels cannot verify these tokens, or None."""
    reason = refuses_one_pass(
        (target_logits, draft_logits),
        (draft_tokens, stop_tokens, positions),
        settings,
        axis_name,
        filtered=filtered,
        rule=rule,
    )
    return reason or verify.refuses(draft_tokens, stop_tokens) or refuses_pallas()


VERIFY = Backend("pallas", verify_pallas, supports)
