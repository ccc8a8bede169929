"""The sampling law in Mosaic GPU kernels, bit for bit that of `jspec.ops.distribution`.

Mosaic has no rounding modes, so weights come from integers, or from PTX instructions that round as
`docs/sampling.md` says. A bfloat16 logit has 8 significant bits and a rate has 16: their float32
product is exact, and 32 bits of integers hold what counts of it. Products with float32 logits, and
those far from 0, take 64 bits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.ops import uint64
from jspec.ops.distribution import LARGEST, ONE, ONE_BITS, POLYNOMIAL, exp2_fixed
from jspec.ops.vocabulary import NO_TOKEN, TILE
from jspec.pallas.mosaic import LANES, WARPS, Spread, iota, load
from jspec.sharding import opaque
from jspec.typing import Array

UNITS = np.float32(2**23)  # of a fraction
NEAR = 2**20  # largest size of an exponent for which float32 products serve
LEAST_RATE = np.float32(2**-23)  # from which on no product vanishes
LOWEST_EXPONENT = -(2**30)  # of all
LARGEST_LOGIT = np.float32(LARGEST)
QUARTERS = np.float32(3 * 2**20)  # a float32 of this size counts quarters
QUARTERS_BITS = np.uint32(QUARTERS.view(np.uint32))
SCALE_WORDS = 4
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


class Cells(NamedTuple):
    """The tiles of positions, summed; arrays or their refs, ``[positions, width]``.

    Attributes:
        low: uint32, the lower words of sums of weights. Of a greedy row a sum is the index of the
            largest logit's first place in the tile, TILE for a tile without one.
        high: uint32, the upper words.
        tops: float32, the largest logits without NaN and infinities.
        exponents: int32.
    """

    low: Any
    high: Any
    tops: Any
    exponents: Any


class Scale(NamedTuple):
    """What turns the weights of a position into probabilities, as scalars.

    Attributes:
        exponent: int32, the largest of its tiles.
        reciprocal: uint32, as in `jspec.ops.distribution.TokenDistribution`.
        rescale: uint32.
        certain: int32, the token that the position is certain of, or -1.
    """

    exponent: Array
    reciprocal: Array
    rescale: Array
    certain: Array


def width_of(vocabulary: int) -> int:
    """Tiles of a vector that has all of a position's: a power of 2."""
    tiles = -(-vocabulary // TILE)
    return max(WARPS * LANES, 1 << (tiles - 1).bit_length())


def tile_spread(logits: Array) -> Spread:
    """How a tile of ``logits [..., V]`` lies over a warpgroup: a lane moves 16 bytes at once where
    every position of the logits begins at a multiple of that."""
    vector = math.gcd(16 // logits.dtype.itemsize, logits.shape[-1])
    return Spread(TILE, vector=vector, warps=WARPS)


def padded(logits: Array) -> Array:
    """``logits [B, T, V]`` as ``[B * T, V]``, padded to a tile where V is less."""
    batch, positions, vocabulary = logits.shape
    flat = logits.reshape(batch * positions, vocabulary)
    if vocabulary >= TILE:
        return flat
    return jnp.pad(flat, ((0, 0), (0, TILE - vocabulary)), constant_values=-jnp.inf)


def launch(
    body: Callable[..., None], out: Sequence[jax.ShapeDtypeStruct], programs: int, *arrays: Any
) -> tuple[Array, ...]:
    """Run a kernel that uses uint64, on a one-dimensional grid ``program``.

    ``body`` gets the refs of ``arrays`` in the same trees, then those of the outputs.
    """
    leaves, structure = jax.tree.flatten(arrays)

    def kernel(*refs: Any) -> None:
        body(*structure.unflatten(refs[: len(leaves)]), *refs[len(leaves) :])

    with jax.enable_x64(True):
        call = plgpu.kernel(
            kernel,
            out_type=tuple(out),
            grid=(programs,),
            grid_names=("program",),
            # No memory is both read and written, so nothing has to wait for a write.
            compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        )
        return opaque(call, *leaves)


# --- in kernels --------------------------------------------------------------------------------


def bits_of(x: Array) -> Array:
    """The bits of a float32 vector or scalar, uint32."""
    if x.ndim:
        return lax.bitcast_convert_type(x, jnp.uint32)
    # Mosaic cannot take the bits of a scalar: those of equal elements.
    signed = lax.bitcast_convert_type(jnp.broadcast_to(x, (WARPS * LANES,)), jnp.int32)
    return jnp.max(signed).astype(jnp.uint32)


def cleaned(x: Array) -> Array:
    """Logits as float32 without NaN."""
    x = x.astype(jnp.float32)
    return jnp.where(x == x, x, -jnp.inf)


def choose(flag: Array, x: Array, y: Array) -> Array:
    """Of two vectors the first where the scalar ``flag`` holds, by which Mosaic cannot select."""
    return jnp.where(jnp.broadcast_to(flag, x.shape), x, y)


def shift_down(x: Array, count: Array) -> Array:
    """``x >> count`` of uint64 and a uint32 count, 0 from 64 on, where Mosaic's is undefined."""
    count = jnp.broadcast_to(count, x.shape)
    return jnp.where(count < 64, x >> jnp.minimum(count, 63).astype(jnp.uint64), 0)


def total_of(x: Array) -> Array:
    """The sum of a uint64 vector."""
    return jnp.sum(x, dtype=jnp.uint64)


def power(x: Array, rate: Array) -> tuple[Array, Array]:
    """`jspec.ops.distribution.power`, with shifts that are defined in Mosaic."""
    bits, rate_bits = bits_of(x), bits_of(rate)
    biased = bits >> 23 & 0xFF
    mantissa = bits & 0x7FFFFF | jnp.where(biased > 0, jnp.uint32(2**23), 0)
    product = uint64.widen(mantissa) * uint64.widen((rate_bits & 0x7FFFFF | 2**23) >> 8)
    up = jnp.maximum(biased, 1).astype(jnp.int32) + (rate_bits >> 23).astype(jnp.int32)
    up = up - (150 + 142 - 23)
    negative = (bits >> 31 == 1) & (product > 0)
    # -n is ~(n - 1), and rounding n - 1 down rounds -n down.
    less_one = negative.astype(jnp.uint64)
    fits = product >> jnp.clip(53 - up, 0, 63).astype(jnp.uint64) == 0
    raised = jnp.where(fits, product, 0) << jnp.clip(up, 0, 63).astype(jnp.uint64)
    raised = jnp.where(fits, raised, jnp.uint64(2**53)) - less_one
    lowered = product - less_one >> jnp.clip(-up, 0, 63).astype(jnp.uint64)
    size = jnp.where(up >= 0, raised, lowered)
    fixed = jnp.where(negative, 0 - size - 1, size)
    whole = (fixed >> 23).astype(jnp.uint32).astype(jnp.int32)
    return whole, fixed.astype(jnp.uint32) & 0x7FFFFF


def _weights(mantissa: Array, distance: Array) -> Array:
    """From mantissas, and distances below 64, uint32."""
    # A shift by 32 and more is defined of 64 bits alone.
    factor = (jnp.uint64(2**31) >> distance.astype(jnp.uint64)).astype(jnp.uint32)
    return uint64.widen(mantissa) * uint64.widen(factor)


def far_weights(x: Array, rate: Array, exponent: Array) -> Array:
    """Weights uint64 of clean logits in a tile of this exponent, in units of 2**-53."""
    whole, fraction = power(jnp.minimum(x, LARGEST_LOGIT), rate)
    distance = jnp.minimum((exponent - whole).astype(jnp.uint32), 32)
    return jnp.where(x > -jnp.inf, _weights(exp2_fixed(fraction), distance), 0)


def floor(x: Array) -> Array:
    """The floor of float32 within 2**31, int32. Mosaic has none: a conversion rounds towards 0."""
    truncated = x.astype(jnp.int32)
    return truncated - (truncated.astype(jnp.float32) > x).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class NearWeights:
    """Weights of tiles whose exponents are near 0, of clean logits of ``dtype`` in this layout: by
    integers of 32 bits, which serve bfloat16, or by ``ptx``."""

    dtype: Any
    layout: Any
    ptx: bool

    @property
    def serve(self) -> bool:
        """Whether they serve this dtype."""
        return self.ptx or self.dtype == jnp.bfloat16

    def serve_at(self, rate: Array, size: Array) -> Array:
        """Whether they serve a tile whose exponent or largest power has this absolute ``size``."""
        return (size <= NEAR) & (self.ptx | (rate >= LEAST_RATE))

    def exponent(self, top: Array, rate: Array) -> Array:
        """The exponents of tiles whose largest logits are ``top``."""
        if self.dtype != jnp.bfloat16:
            return power(top, rate)[0]
        exponent = floor(top * rate)
        # A product that vanishes is rounded down all the same.
        return jnp.where(top < 0, jnp.minimum(exponent, -1), exponent)

    def __call__(self, x: Array, rate: Array, exponent: Array) -> Array:
        """As `far_weights`."""
        return (self._by_ptx if self.ptx else self._by_integers)(x, rate, exponent)

    def _by_integers(self, x: Array, rate: Array, exponent: Array) -> Array:
        # The products less a whole number near them are exact where a weight is not 0, and below
        # 2**31 units. It does not matter whether the compiler fuses the subtraction.
        base = jnp.where(jnp.abs(exponent) >= 128, exponent, 0)
        units = x * (rate * UNITS) - base.astype(jnp.float32) * UNITS
        # A distance of 32 is the least without weight.
        units = jnp.maximum(units, (exponent - base - 32).astype(jnp.float32) * UNITS)
        fixed = floor(units)
        distance = (exponent - base - (fixed >> 23)).astype(jnp.uint32)
        return _weights(exp2_fixed(fixed.astype(jnp.uint32) & 0x7FFFFF), distance)

    def _by_ptx(self, x: Array, rate: Array, exponent: Array) -> Array:
        def of_all(instruction: str, *operands: Array | np.float32) -> Array:
            full = [jnp.broadcast_to(jnp.float32(operand), x.shape) for operand in operands]
            return rounded(instruction, self.layout, *full)

        quarter = rate * np.float32(0.25)
        offset = QUARTERS + exponent.astype(jnp.float32) * np.float32(0.25)
        below = of_all("fma.rp.f32", x, -quarter, offset)
        # (1 + fraction) / 4; the sum in brackets is exact.
        v = of_all("fma.rz.f32", x, quarter, below - (offset - np.float32(0.25)))
        # The bits of small float32 numbers count units of 2**-149.
        fifth, *others = (np.uint32(c).view(np.float32) for c in POLYNOMIAL)
        p = of_all("mul.rz.f32", v, fifth)
        for coefficient in others:
            p = of_all("fma.rz.f32", p, v, coefficient)
        return _weights(bits_of(p), jnp.minimum(bits_of(below) - QUARTERS_BITS, 32))


def rounded(instruction: str, layout: Any, *operands: Array) -> Array:
    """The result of a PTX instruction of float32 arrays of one shape, in this layout.

    The interpreter runs no inline code.
    """
    from jax.experimental.mosaic import gpu as mgpu

    result = plgpu.ShapeDtypeStruct(operands[0].shape, jnp.float32, layout)

    @plgpu.inline_mgpu(arg_types=(layout,) * len(operands), return_type=result)
    def run(_, first, *others):
        return first._pointwise(mgpu.FragmentedArray._lift_fast_instr(instruction), *others)

    return run(*(plgpu.layout_cast(x, layout) for x in operands))  # pyright: ignore[reportCallIssue]


def threefry(key: tuple[Array, Array], x0: Array, x1: Array) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds of the counter ``(x0, x1)``, uint32 scalars."""
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for i in range(5):
        for turn in ROTATIONS[i % 2]:
            x0 = x0 + x1
            x1 = (x1 << turn | x1 >> (32 - turn)) ^ x0
        x0, x1 = x0 + keys[(i + 1) % 3], x1 + keys[(i + 2) % 3] + (i + 1)
    return x0, x1


def number(seeds: Any, row: Array, position: Array, role: Array) -> Array:
    """`jspec.ops.sample.number` of a row's seed, uint64."""
    zero = jnp.uint32(0)
    key = threefry((seeds[row, 0], seeds[row, 1]), zero, position.astype(jnp.uint32))
    high, low = threefry(threefry(key, zero, role.astype(jnp.uint32)), zero, zero)
    return uint64.widen(high) << 32 | uint64.widen(low)


def first_token(tile: Array, vocabulary: int) -> Array:
    """The id of the first token that is read for a tile: the last tile of a position is read so
    that it ends with the position."""
    return jnp.minimum(tile * TILE, max(vocabulary, TILE) - TILE)


def without_overlap(x: Array, first: Array, tile: Array, spread: Spread) -> Array:
    """``x``, the clean logits from token ``first`` on, minus infinity where they are of the tile
    before."""
    return jnp.where(first + iota(spread) >= tile * TILE, x, -jnp.inf)


def load_tile(
    logits: Any, at: Array, tile: Array, spread: Spread, vocabulary: int
) -> tuple[Array, Array]:
    """The clean logits of a tile of a position, float32 ``[TILE]``, and `first_token`."""
    first = first_token(tile, vocabulary)
    x = cleaned(load(logits.at[at, pl.ds(first, TILE)], spread))
    return without_overlap(x, first, tile, spread), first


def read_sums(low: Any, high: Any, at: Array, spread: Spread, tiles: int) -> Array:
    """Sums of a position's tiles, uint64, 0 after the last."""
    parts = [load(ref.at[at, pl.ds(0, spread.size)], spread) for ref in (low, high)]
    return jnp.where(iota(spread) < tiles, uint64.widen(parts[1]) << 32 | uint64.widen(parts[0]), 0)


def read_masses(
    cells: Cells, at: Array, vocabulary: int, guard: int
) -> tuple[Array, Array, Array, Array]:
    """Of a position's tiles the masses, the sums, how far these are shifted, and the largest
    exponent."""
    spread, tiles = Spread(width_of(vocabulary), warps=WARPS), -(-vocabulary // TILE)
    sums = read_sums(cells.low, cells.high, at, spread, tiles)
    exponents = load(cells.exponents.at[at, pl.ds(0, spread.size)], spread)
    exponents = jnp.where(iota(spread) < tiles, exponents, LOWEST_EXPONENT)
    largest = jnp.max(exponents)
    shift = (largest - exponents).astype(jnp.uint32) + guard
    return shift_down(sums, shift), sums, shift, largest


def certain_token(
    cells: Cells, at: Array, sums: Array, rate: Array, mass: Array, vocabulary: int
) -> Array:
    """The token that a position is certain of, or -1: of a greedy row the first of the largest, 0
    of a row without ``mass``."""
    spread, tiles = Spread(width_of(vocabulary), warps=WARPS), -(-vocabulary // TILE)
    index = iota(spread)
    tops = load(cells.tops.at[at, pl.ds(0, spread.size)], spread)
    tops = jnp.where(index < tiles, tops, -jnp.inf)
    is_best = (tops == jnp.max(tops)) & (sums < TILE)
    first = jnp.min(jnp.where(is_best, index * TILE + sums.astype(jnp.int32), NO_TOKEN))
    first = jnp.where(first == NO_TOKEN, 0, first)
    return jnp.where(rate == 0, first, jnp.where(mass == 0, 0, -1)).astype(jnp.int32)


def scale_of(cells: Cells, at: Array, rate: Array, vocabulary: int, guard: int) -> Scale:
    """The scale of a position from its cells."""
    masses, sums, _, exponent = read_masses(cells, at, vocabulary, guard)
    mass = total_of(masses)
    certain = certain_token(cells, at, sums, rate, mass, vocabulary)
    mass = jnp.where(certain < 0, mass, jnp.uint64(ONE))
    width = 64 - lax.clz(mass).astype(jnp.uint32)
    reciprocal = jnp.uint64(2**62) // (mass >> (width - 32).astype(jnp.uint64))
    return Scale(exponent, reciprocal.astype(jnp.uint32), width - (ONE_BITS + 1), certain)


def write_scale(ref: Any, at: Array, scale: Scale) -> None:
    for i, x in enumerate(scale):
        ref[at, i] = x.astype(jnp.int32)


def read_scale(ref: Any, at: Array) -> Scale:
    exponent, reciprocal, rescale, certain = (ref[at, i] for i in range(SCALE_WORDS))
    return Scale(exponent, reciprocal.astype(jnp.uint32), rescale.astype(jnp.uint32), certain)


def probabilities(
    weights: Array, tokens: Array, exponent: Array, scale: Scale, guard: int
) -> Array:
    """Probabilities uint64 in units of 2**-53 of ``tokens``, all of a tile of this exponent."""
    scaled = uint64.scale(weights << 1, scale.reciprocal)
    shift = (scale.exponent - exponent).astype(jnp.uint32) + guard + scale.rescale
    is_certain = jnp.where(tokens == scale.certain, jnp.uint64(ONE), 0)
    return choose(scale.certain < 0, shift_down(scaled, shift), is_certain)


def count_reached(weights: Array, index: Array, value: Array, shift: Array | int) -> Array:
    """How many elements have a cumulative sum, shifted, that is at most ``value``: not all of them.

    By bisection, since Mosaic has no cumulative sum.
    """
    size = weights.shape[0]
    shift = jnp.asarray(shift, jnp.uint32)

    def step(i: Array, count: Array) -> Array:
        trial = count + (jnp.int32(size // 2) >> i.astype(jnp.int32))
        reached = total_of(jnp.where(index < trial, weights, 0))
        return jnp.where(shift_down(reached, shift) <= value, trial, count)

    return lax.fori_loop(0, size.bit_length() - 1, step, jnp.int32(0))


def find_tile(masses: Array, drawn: Array, whole: Array) -> tuple[Array, Array]:
    """The tile that the number ``drawn`` takes of masses that sum to ``whole``, and what is left of
    its share of ``whole`` after the tiles before."""
    index = iota(Spread(masses.shape[0], warps=WARPS))
    value = uint64.high64(drawn, whole)
    tile = count_reached(masses, index, value, 0)
    return tile, value - total_of(jnp.where(index < tile, masses, 0))
