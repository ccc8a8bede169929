"""Triton functions of the sampling law, bit for bit that of `jspec.ops.distribution`.

Float32 products that are rounded towards zero, or up, give the bits of the reference's integers:
`docs/sampling.md` has the proof. Triton has no rounding modes, so they are PTX instructions.
"""

import triton
import triton.language as tl

from jspec.ops import distribution, sample, vocabulary

TILE = tl.constexpr(vocabulary.TILE)
ONE_BITS = tl.constexpr(distribution.ONE_BITS)
LARGEST = tl.constexpr(distribution.LARGEST)
LOWEST_EXPONENT = tl.constexpr(-(2**30))  # of all
NEAR = tl.constexpr(2**20)  # largest size of an exponent for which float32 products serve
QUARTERS = tl.constexpr(3.0 * 2**20)  # a float32 of this size counts quarters
QUARTERS_BITS = tl.constexpr(0x4A400000)
POWER5, POWER3, POWER2, POWER1, POWER0 = map(tl.constexpr, distribution.POLYNOMIAL)
ACCEPT = tl.constexpr(int(sample.Role.ACCEPT))
RESIDUAL = tl.constexpr(int(sample.Role.RESIDUAL))
BONUS = tl.constexpr(int(sample.Role.BONUS))


@triton.jit
def multiply_down(a, b):
    """``a * b`` rounded towards zero, float32."""
    return tl.inline_asm_elementwise(
        "mul.rz.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def fuse_down(a, b, c):
    """``a * b + c`` rounded towards zero, float32."""
    return tl.inline_asm_elementwise(
        "fma.rz.f32 $0, $1, $2, $3;",
        "=f,f,f,f",
        [a, b, c],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def fuse_up(a, b, c):
    """``a * b + c`` rounded up, float32."""
    return tl.inline_asm_elementwise(
        "fma.rp.f32 $0, $1, $2, $3;",
        "=f,f,f,f",
        [a, b, c],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def shift_down(x, count):
    """``x >> count`` of uint32, 0 from 32 on, where Triton's own shift is undefined."""
    return tl.inline_asm_elementwise(
        "shr.b32 $0, $1, $2;", "=r,r,r", [x, count], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def shift_down64(x, count):
    """``x >> count`` of uint64 and a uint32 count, 0 from 64 on."""
    return tl.where(count < 64, x >> tl.minimum(count, 63).to(tl.uint64), 0)


@triton.jit
def power(x, rate):
    """``x * rate`` as whole int32 and fraction uint32 in units of 2**-23, rounded down.

    As `jspec.ops.distribution.power`.
    """
    bits = x.to(tl.uint32, bitcast=True)
    rate_bits = rate.to(tl.uint32, bitcast=True)
    biased = (bits >> 23) & 0xFF
    mantissa = (bits & 0x7FFFFF) | tl.where(biased > 0, 0x800000, 0).to(tl.uint32)
    rate_mantissa = ((rate_bits & 0x7FFFFF) | 0x800000) >> 8
    product = mantissa.to(tl.uint64) * rate_mantissa.to(tl.uint64)
    up = tl.maximum(biased, 1).to(tl.int32) + (rate_bits >> 23).to(tl.int32) - (150 + 142 - 23)
    negative = ((bits >> 31) == 1) & (product > 0)
    # -n is ~(n - 1), and rounding n - 1 down rounds -n down.
    less_one = negative.to(tl.uint64)
    fits = (product >> tl.minimum(tl.maximum(53 - up, 0), 63).to(tl.uint64)) == 0
    raised = tl.where(fits, product, 0) << tl.minimum(tl.maximum(up, 0), 63).to(tl.uint64)
    raised = tl.where(fits, raised, 1 << 53) - less_one
    lowered = (product - less_one) >> tl.minimum(tl.maximum(-up, 0), 63).to(tl.uint64)
    size = tl.where(up >= 0, raised, lowered).to(tl.int64, bitcast=True)
    fixed = tl.where(negative, ~size, size)
    return (fixed >> 23).to(tl.int32), (fixed & 0x7FFFFF).to(tl.uint32)


@triton.jit
def exp2_fixed(fraction):
    """``2 ** (fraction * 2**-23)`` in units of 2**-22: `jspec.ops.distribution.exp2_fixed`."""
    quarter = (fraction | 0x800000) << 7
    p = tl.umulhi(tl.full(quarter.shape, POWER5, tl.uint32), quarter)
    p = tl.umulhi(p, quarter) + POWER3
    p = tl.umulhi(p, quarter) + POWER2
    p = tl.umulhi(p, quarter) + POWER1
    return tl.umulhi(p, quarter) + POWER0


@triton.jit
def small(units, shape):
    """``units`` of 2**-149, as which the bits of a small float32 count."""
    return tl.full(shape, units, tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def near_weights(x, rate, exponent):
    """Weights of logits ``x`` by float32 products, for ``exponent`` within NEAR of 0.

    NaN and infinities have none.
    """
    quarter = rate * 0.25
    offset = QUARTERS + exponent.to(tl.float32) * 0.25
    below = fuse_up(x, -quarter, offset)
    # (1 + fraction) / 4; the sum in brackets is exact.
    v = fuse_down(x, quarter, below - (offset - 0.25))
    p = multiply_down(small(POWER5, v.shape), v)
    p = fuse_down(p, v, small(POWER3, v.shape))
    p = fuse_down(p, v, small(POWER2, v.shape))
    p = fuse_down(p, v, small(POWER1, v.shape))
    p = fuse_down(p, v, small(POWER0, v.shape))
    distance = below.to(tl.uint32, bitcast=True) - QUARTERS_BITS
    factor = shift_down(tl.full(distance.shape, 0x80000000, tl.uint32), distance)
    return p.to(tl.uint32, bitcast=True).to(tl.uint64) * factor.to(tl.uint64)


@triton.jit
def far_weights(x, rate, exponent):
    """The same for any exponent, in 64-bit integers."""
    x = tl.where(x != x, float("-inf"), tl.minimum(x, LARGEST))
    whole, fraction = power(x, rate)
    distance = (exponent - whole).to(tl.uint32, bitcast=True)
    factor = shift_down(tl.full(distance.shape, 0x80000000, tl.uint32), distance)
    weights = exp2_fixed(fraction).to(tl.uint64) * factor.to(tl.uint64)
    return tl.where(x == float("-inf"), 0, weights)


@triton.jit
def weights_of(x, rate, exponent):
    """Weights uint64 of logits ``x`` in a tile of this exponent, in units of 2**-53."""
    if tl.abs(exponent) <= NEAR:
        weights = near_weights(x, rate, exponent)
    else:
        weights = far_weights(x, rate, exponent)
    return weights


@triton.jit
def sum_far_weights(base, first, rate, exponent, VOCABULARY: tl.constexpr):
    """The sum of a tile's weights, which begins at token ``first``, for any exponent.

    In a loop that reads the logits again: registers for all of them would cost the usual path.
    """
    PIECE: tl.constexpr = 64
    weights = tl.zeros([PIECE], tl.uint64)
    for start in range(0, TILE, PIECE):
        token = first + start + tl.arange(0, PIECE)
        x = tl.load(base + token, mask=token < VOCABULARY, other=float("-inf"))
        weights += far_weights(x.to(tl.float32), rate, exponent)
    return tl.sum(weights, axis=0)


@triton.jit
def mix(x0, x1, by: tl.constexpr):
    """A round of Threefry."""
    x0 += x1
    return x0, ((x1 << by) | (x1 >> (32 - by))) ^ x0


@triton.jit
def mix_even(x0, x1):
    """Four rounds, the first and every second time."""
    x0, x1 = mix(x0, x1, 13)
    x0, x1 = mix(x0, x1, 15)
    x0, x1 = mix(x0, x1, 26)
    return mix(x0, x1, 6)


@triton.jit
def mix_odd(x0, x1):
    """Four rounds, the other times."""
    x0, x1 = mix(x0, x1, 17)
    x0, x1 = mix(x0, x1, 29)
    x0, x1 = mix(x0, x1, 16)
    return mix(x0, x1, 24)


@triton.jit
def threefry(key0, key1, x0, x1):
    """Threefry-2x32 with 20 rounds of the counter ``(x0, x1)``, uint32 scalars."""
    key2 = key0 ^ key1 ^ 0x1BD11BDA
    x0, x1 = mix_even(x0 + key0, x1 + key1)
    x0, x1 = mix_odd(x0 + key1, x1 + key2 + 1)
    x0, x1 = mix_even(x0 + key2, x1 + key0 + 2)
    x0, x1 = mix_odd(x0 + key0, x1 + key1 + 3)
    x0, x1 = mix_even(x0 + key1, x1 + key2 + 4)
    return x0 + key2, x1 + key0 + 5


@triton.jit
def number(seeds, row, position, role):
    """`jspec.ops.sample.number` of a row's seed, uint64."""
    zero = tl.full((), 0, tl.uint32)
    x0, x1 = threefry(
        tl.load(seeds + row * 2), tl.load(seeds + row * 2 + 1), zero, position.to(tl.uint32)
    )
    x0, x1 = threefry(x0, x1, zero, zero + role)
    x0, x1 = threefry(x0, x1, zero, zero)
    return (x0.to(tl.uint64) << 32) | x1.to(tl.uint64)


@triton.jit
def tiles_kernel(
    logits,
    rates,
    lengths,
    sums,
    tops,
    exponents,
    VOCABULARY: tl.constexpr,
    POSITIONS: tl.constexpr,
    BONUS_POSITIONS: tl.constexpr,
    TILES: tl.constexpr,
    EACH: tl.constexpr,
):
    """Sum the weights of EACH tiles of a position a program.

    The ``lengths[row] + BONUS_POSITIONS`` first positions of a row count; others are not read, and
    their results are not written. For each of the TILES tiles: its sum of weights uint64, its
    largest logit without NaN and infinities, and its exponent. Of a greedy row, the sum is the
    index of the largest logit's first place in the tile, TILE for a tile without one.
    """
    groups: tl.constexpr = (TILES + EACH - 1) // EACH
    program = tl.program_id(0)
    position, row = program // groups, program // groups // POSITIONS
    first = program % groups * EACH
    if position % POSITIONS >= tl.load(lengths + row) + BONUS_POSITIONS:
        return
    rate = tl.load(rates + row)
    index = tl.arange(0, TILE)
    base = logits + position.to(tl.int64) * VOCABULARY
    sums = sums.to(tl.pointer_type(tl.uint64))
    token = first * TILE + index
    following = tl.load(base + token, mask=token < VOCABULARY, other=float("-inf"))
    for i in tl.static_range(EACH):
        tile = first + i
        # The next tile is on its way while this one is summed.
        x, token = following.to(tl.float32), token + TILE
        if i + 1 < EACH:
            following = tl.load(base + token, mask=token < VOCABULARY, other=float("-inf"))
        # A maximum with a number drops NaN.
        top = tl.minimum(tl.maximum(tl.max(x, axis=0), -LARGEST), LARGEST)
        if rate == 0:
            exponent = tl.full((), 0, tl.int32)
            is_top = (tl.minimum(x, LARGEST) == top) & (x == x)
            total = tl.min(tl.where(is_top, index, TILE), axis=0).to(tl.uint64)
        else:
            exponent, _ = power(top, rate)
            if tl.abs(exponent) <= NEAR:
                total = tl.sum(near_weights(x, rate, exponent), axis=0)
            else:
                total = sum_far_weights(base, tile * TILE, rate, exponent, VOCABULARY)
        tl.store(sums + position * TILES + tile, total, mask=tile < TILES)
        tl.store(tops + position * TILES + tile, top, mask=tile < TILES)
        tl.store(exponents + position * TILES + tile, exponent, mask=tile < TILES)


@triton.jit
def read_cells(sums, tops, exponents, position, TILES: tl.constexpr, WIDTH: tl.constexpr):
    """The results of `tiles_kernel` for a position, WIDTH wide, without mass after the end."""
    tile = tl.arange(0, WIDTH)
    inside = tile < TILES
    sums = sums.to(tl.pointer_type(tl.uint64))
    total = tl.load(sums + position * TILES + tile, mask=inside, other=0)
    top = tl.load(tops + position * TILES + tile, mask=inside, other=float("-inf"))
    exponent = tl.load(exponents + position * TILES + tile, mask=inside, other=LOWEST_EXPONENT)
    return tile, total, top, exponent


@triton.jit
def certain_token(tile, total, top, rate, mass):
    """The token that a position is certain of, or -1: of a greedy row the first of the largest, 0
    of a row without ``mass``."""
    is_best = (top == tl.max(tl.maximum(top, -LARGEST), axis=0)) & (total < TILE)
    nowhere: tl.constexpr = 0x7FFFFFFF
    first = tl.min(tl.where(is_best, tile * TILE + total.to(tl.int32), nowhere), axis=0)
    first = tl.where(first == nowhere, 0, first)
    return tl.where(rate == 0, first, tl.where(mass == 0, 0, -1))


@triton.jit
def masses_of(total, exponent, GUARD: tl.constexpr):
    """Masses of tiles, and by how much their sums of weights are shifted, uint32."""
    largest = tl.max(exponent, axis=0)
    shift = (largest - exponent).to(tl.uint32, bitcast=True) + GUARD
    return shift_down64(total, shift), shift


@triton.jit
def find_tile(mass, tile, value):
    """The tile in which the cumulative mass first exceeds ``value``, and what of ``value`` is left
    of the tiles before it."""
    reached = tl.cumsum(mass, axis=0)
    before = reached <= value
    return tl.sum(before.to(tl.int32), axis=0), value - tl.max(tl.where(before, reached, 0), axis=0)


@triton.jit
def at_tile(x, tile, index):
    """The element of a vector at ``index``, a scalar."""
    return tl.sum(tl.where(tile == index, x, 0), axis=0)


@triton.jit
def find_token(weights, index, left, shift):
    """The first token of a tile whose cumulative weight, shifted, exceeds ``left``."""
    before = shift_down64(tl.cumsum(weights, axis=0), shift) <= left
    return index * TILE + tl.sum(before.to(tl.int32), axis=0)


@triton.jit
def load_tile(logits, position, index, VOCABULARY: tl.constexpr):
    """The logits of a tile of a position, float32, minus infinity after the end."""
    token = index * TILE + tl.arange(0, TILE)
    base = logits + position.to(tl.int64) * VOCABULARY
    return tl.load(base + token, mask=token < VOCABULARY, other=float("-inf")).to(tl.float32)
