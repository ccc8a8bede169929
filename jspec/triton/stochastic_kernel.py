"""The Triton bodies of stochastic verification, after `tiles_kernel` has summed all tiles."""

import triton
import triton.language as tl

from jspec.triton.distribution_kernel import (
    ACCEPT,
    BONUS,
    ONE_BITS,
    RESIDUAL,
    TILE,
    at_tile,
    certain_token,
    find_tile,
    find_token,
    load_tile,
    masses_of,
    number,
    read_cells,
    shift_down64,
    weights_of,
)

SCALES = tl.constexpr(4)  # words of a position's scale


@triton.jit
def leading_zeros(x):
    """Of a uint64, uint32."""
    return tl.inline_asm_elementwise(
        "clz.b64 $0, $1;", "=r,l", [x], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def scale_of(sums, tops, exponents, position, rate, TILES, WIDTH, GUARD):
    """What turns the weights of a position into probabilities.

    The largest exponent; the two numbers of `jspec.ops.distribution.TokenDistribution`, uint32; the
    token that the position is certain of, or -1.
    """
    tile, total, top, exponent = read_cells(sums, tops, exponents, position, TILES, WIDTH)
    mass, _ = masses_of(total, exponent, GUARD)
    whole = tl.sum(mass, axis=0)
    certain = certain_token(tile, total, top, rate, whole)
    whole = tl.where(certain < 0, whole, 1 << 53)
    width = 64 - leading_zeros(whole)
    upper = whole >> (width - 32).to(tl.uint64)
    reciprocal = (tl.full((), 1 << 62, tl.uint64) // upper).to(tl.uint32)
    return tl.max(exponent, axis=0), reciprocal, width - (ONE_BITS + 1), certain


@triton.jit
def write_scale(scales, exponent, reciprocal, rescale, certain):
    tl.store(scales, exponent)
    tl.store(scales + 1, reciprocal.to(tl.int32, bitcast=True))
    tl.store(scales + 2, rescale.to(tl.int32, bitcast=True))
    tl.store(scales + 3, certain)


@triton.jit
def read_scale(scales):
    reciprocal = tl.load(scales + 1).to(tl.uint32, bitcast=True)
    rescale = tl.load(scales + 2).to(tl.uint32, bitcast=True)
    return tl.load(scales), reciprocal, rescale, tl.load(scales + 3)


@triton.jit
def probabilities(x, token, rate, exponent, largest, reciprocal, rescale, certain, GUARD):
    """Probabilities uint64 in units of 2**-53 of the tokens ``token``, whose logits are ``x``.

    All of a tile of this exponent; ``largest`` to ``certain`` are the position's scale.
    """
    doubled = weights_of(x, rate, exponent) << 1
    factor = reciprocal.to(tl.uint64)
    scaled = (doubled >> 32) * factor + ((doubled & 0xFFFFFFFF) * factor >> 32)
    shift = (largest - exponent).to(tl.uint32, bitcast=True) + GUARD + rescale
    is_certain = (token == certain).to(tl.uint64) << ONE_BITS
    return tl.where(certain < 0, shift_down64(scaled, shift), is_certain)


@triton.jit
def token_probability(
    logits,
    exponents,
    position,
    token,
    rate,
    largest,
    reciprocal,
    rescale,
    certain,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    GUARD: tl.constexpr,
):
    """The probability of a token at a position; 0 for one after the vocabulary's end."""
    inside = token < VOCABULARY
    place = logits + position.to(tl.int64) * VOCABULARY + token
    x = tl.load(place, mask=inside, other=float("-inf")).to(tl.float32)
    exponent = tl.load(exponents + position * TILES + token // TILE, mask=inside, other=0)
    of_token = probabilities(x, token, rate, exponent, largest, reciprocal, rescale, certain, GUARD)
    return tl.where(inside, of_token, 0)


@triton.jit
def judge_kernel(
    draft_tokens,
    target,
    lengths,
    rates,
    seeds,
    positions,
    sums,
    tops,
    exponents,
    draft,
    draft_sums,
    draft_tops,
    draft_exponents,
    accepts_out,
    scales_out,
    draft_scales_out,
    GAMMA: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    GUARD: tl.constexpr,
    HAS_LOGITS: tl.constexpr,
):
    """Whether a position's draft token is accepted, and the position's scales, a program each.

    HAS_LOGITS: the draft has logits; else it is certain of its tokens, and the five arguments from
    ``draft`` on are not read.
    """
    at = tl.program_id(0)
    row, index = at // (GAMMA + 1), at % (GAMMA + 1)
    length = tl.minimum(tl.load(lengths + row), GAMMA)
    if index > length:
        return
    rate = tl.load(rates + row)
    largest, reciprocal, rescale, certain = scale_of(
        sums, tops, exponents, at, rate, TILES, WIDTH, GUARD
    )
    write_scale(scales_out + at * SCALES, largest, reciprocal, rescale, certain)
    if index >= length:
        return
    drafted = row * GAMMA + index
    token = tl.maximum(tl.load(draft_tokens + drafted), 0)
    p = token_probability(
        target,
        exponents,
        at,
        token,
        rate,
        largest,
        reciprocal,
        rescale,
        certain,
        VOCABULARY,
        TILES,
        GUARD,
    )
    q = tl.full((), 1 << 53, tl.uint64)
    if HAS_LOGITS:
        largest, reciprocal, rescale, certain = scale_of(
            draft_sums, draft_tops, draft_exponents, drafted, rate, TILES, WIDTH, GUARD
        )
        scales = draft_scales_out + drafted * SCALES
        write_scale(scales, largest, reciprocal, rescale, certain)
        q = token_probability(
            draft,
            draft_exponents,
            drafted,
            token,
            rate,
            largest,
            reciprocal,
            rescale,
            certain,
            VOCABULARY,
            TILES,
            GUARD,
        )
    drawn = number(seeds, row, tl.load(positions + row) + index, ACCEPT)
    # u < p / q without dividing.
    tl.store(accepts_out + drafted, (tl.umulhi(drawn, q) < p).to(tl.int32))


@triton.jit
def accepted_of(accepts, row, length, GAMMA: tl.constexpr, SPAN: tl.constexpr):
    """The length of the leading run of accepted tokens of a row."""
    index = tl.arange(0, SPAN)
    accept = tl.load(accepts + row * GAMMA + index, mask=index < length, other=0)
    return tl.min(tl.where((accept == 0) & (index < GAMMA), index, GAMMA), axis=0)


@triton.jit
def residual_weights(
    target,
    exponents,
    scales,
    at,
    draft,
    draft_exponents,
    draft_scales,
    drafted,
    index,
    rate,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    GUARD: tl.constexpr,
):
    """``max(p - q, 0)`` of the tokens of a tile, uint64 in units of 2**-53."""
    token = index * TILE + tl.arange(0, TILE)
    largest, reciprocal, rescale, certain = read_scale(scales + at * SCALES)
    exponent = tl.load(exponents + at * TILES + index)
    x = load_tile(target, at, index, VOCABULARY)
    p = probabilities(x, token, rate, exponent, largest, reciprocal, rescale, certain, GUARD)
    largest, reciprocal, rescale, certain = read_scale(draft_scales + drafted * SCALES)
    exponent = tl.load(draft_exponents + drafted * TILES + index)
    y = load_tile(draft, drafted, index, VOCABULARY)
    q = probabilities(y, token, rate, exponent, largest, reciprocal, rescale, certain, GUARD)
    return tl.where(q < p, p - q, 0)


@triton.jit
def residual_kernel(
    target,
    lengths,
    rates,
    exponents,
    draft,
    draft_exponents,
    accepts,
    scales,
    draft_scales,
    residuals_out,
    GAMMA: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    GUARD: tl.constexpr,
    SPAN: tl.constexpr,
):
    """The mass of the residual in a tile of a row, a program each; nothing where none is drawn."""
    row, index = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    length = tl.minimum(tl.load(lengths + row), GAMMA)
    accepted = accepted_of(accepts, row, length, GAMMA, SPAN)
    rate = tl.load(rates + row)
    if (accepted >= length) | (rate == 0):
        return
    weights = residual_weights(
        target,
        exponents,
        scales,
        row * (GAMMA + 1) + accepted,
        draft,
        draft_exponents,
        draft_scales,
        row * GAMMA + accepted,
        index,
        rate,
        VOCABULARY,
        TILES,
        GUARD,
    )
    residuals = residuals_out.to(tl.pointer_type(tl.uint64))
    tl.store(residuals + row * TILES + index, tl.sum(weights, axis=0))


@triton.jit
def finish_kernel(
    draft_tokens,
    target,
    lengths,
    stops,
    rates,
    seeds,
    positions,
    sums,
    tops,
    exponents,
    draft,
    draft_exponents,
    accepts,
    scales,
    draft_scales,
    residuals,
    accepted_out,
    committed_out,
    mismatch_out,
    next_out,
    stopped_out,
    tokens_out,
    GAMMA: tl.constexpr,
    STOPS: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    GUARD: tl.constexpr,
    SPAN: tl.constexpr,
    HAS_LOGITS: tl.constexpr,
):
    """Draw the token that ends a row's block, and write the fields of `Verified`, a program a row.

    Without HAS_LOGITS the draft's logits, exponents, scales and ``residuals`` are not read.
    """
    row = tl.program_id(0)
    length = tl.minimum(tl.load(lengths + row), GAMMA)
    accepted = accepted_of(accepts, row, length, GAMMA, SPAN)
    rejected = accepted < length
    rate = tl.load(rates + row)
    at, drafted = row * (GAMMA + 1) + accepted, row * GAMMA + tl.minimum(accepted, GAMMA - 1)
    role = tl.where(rejected, RESIDUAL, BONUS)
    drawn = number(seeds, row, tl.load(positions + row) + accepted, role)
    following = tl.load(scales + at * SCALES + 3)  # certain, or -1
    if following < 0:
        tile, total, _, exponent = read_cells(sums, tops, exponents, at, TILES, WIDTH)
        mass, shift = masses_of(total, exponent, GUARD)
        if HAS_LOGITS:
            residual = tl.load(
                residuals.to(tl.pointer_type(tl.uint64)) + row * TILES + tile,
                mask=(tile < TILES) & rejected,
                other=0,
            )
            without = tl.full((), -1, tl.int32)
        else:
            # The residual is the target's distribution but for the draft token, whose weight its
            # tile loses.
            without = tl.load(draft_tokens + drafted, mask=rejected, other=-1)
            without = tl.where(without < VOCABULARY, without, -1)
            lost = tl.load(
                target + at.to(tl.int64) * VOCABULARY + without,
                mask=without >= 0,
                other=float("-inf"),
            ).to(tl.float32)
            tile_of_token = tl.where(without >= 0, without // TILE, 0)
            weight = weights_of(lost, rate, at_tile(exponent, tile, tile_of_token))
            weight = tl.where(without >= 0, weight, 0)
            residual = shift_down64(total - tl.where(tile == tile_of_token, weight, 0), shift)
        # p and q that differ by rounding alone can leave nothing: then the target's serves.
        whole = tl.sum(residual, axis=0)
        uses_residual = rejected & (whole > 0)
        whole = tl.where(uses_residual, whole, tl.sum(mass, axis=0))
        mass = tl.where(uses_residual, residual, mass)
        index, left = find_tile(mass, tile, tl.umulhi(drawn, whole))
        if HAS_LOGITS and uses_residual:
            down = tl.full((), 0, tl.uint32)
            weights = residual_weights(
                target,
                exponents,
                scales,
                at,
                draft,
                draft_exponents,
                draft_scales,
                drafted,
                index,
                rate,
                VOCABULARY,
                TILES,
                GUARD,
            )
        else:
            down = at_tile(shift, tile, index)
            x = load_tile(target, at, index, VOCABULARY)
            weights = weights_of(x, rate, at_tile(exponent, tile, index))
            token = index * TILE + tl.arange(0, TILE)
            weights = tl.where(uses_residual & (token == without), 0, weights)
        following = find_token(weights, index, left, down)

    position = tl.arange(0, SPAN)
    token = tl.load(draft_tokens + row * GAMMA + position, mask=position < accepted, other=-1)
    token = tl.where(position == accepted, following, token)
    is_stop = tl.zeros([SPAN], tl.int1)
    for i in tl.static_range(STOPS):
        is_stop |= token == tl.load(stops + row * STOPS + i)
    last = tl.min(tl.where(is_stop & (token >= 0), position, SPAN), axis=0)
    stopped = last < SPAN
    last = tl.minimum(last, accepted)
    cut = last < accepted
    tl.store(accepted_out + row, tl.where(cut, last + 1, accepted))
    tl.store(committed_out + row, last + 1)
    tl.store(mismatch_out + row, rejected & (cut == 0))
    tl.store(next_out + row, tl.where(cut, -1, following))
    tl.store(stopped_out + row, stopped)
    block = tl.where(position <= last, token, -1)
    tl.store(tokens_out + row * (GAMMA + 1) + position, block, mask=position <= GAMMA)
