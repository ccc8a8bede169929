"""The Triton body that draws tokens from summed tiles."""

import triton
import triton.language as tl

from jspec.triton.distribution_kernel import (
    at_tile,
    certain_token,
    find_tile,
    find_token,
    load_tile,
    masses_of,
    number,
    read_cells,
    weights_of,
)


@triton.jit
def draw_kernel(
    logits,
    rates,
    seeds,
    positions,
    sums,
    tops,
    exponents,
    tokens_out,
    VOCABULARY: tl.constexpr,
    POSITIONS: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    GUARD: tl.constexpr,
    ROLE: tl.constexpr,
):
    """Draw the token of a position from the results of `tiles_kernel`, a program a position."""
    position = tl.program_id(0)
    row = position // POSITIONS
    rate = tl.load(rates + row)
    drawn = number(seeds, row, tl.load(positions + position), ROLE)
    tile, total, top, exponent = read_cells(sums, tops, exponents, position, TILES, WIDTH)
    mass, shift = masses_of(total, exponent, GUARD)
    whole = tl.sum(mass, axis=0)
    token = certain_token(tile, total, top, rate, whole)
    if token < 0:
        index, left = find_tile(mass, tile, tl.umulhi(drawn, whole))
        x = load_tile(logits, position, index, VOCABULARY)
        weights = weights_of(x, rate, at_tile(exponent, tile, index))
        token = find_token(weights, index, left, at_tile(shift, tile, index))
    tl.store(tokens_out + position, token)
