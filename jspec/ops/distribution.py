"""A position's distribution in whole numbers, and drawing a token from it by inverse CDF.

Sums of integers do not depend on the order of summation. So every backend, and every split of the
vocabulary over devices, draws the same token from the same random number. `docs/sampling.md` has
the bit layouts, the error bounds and their proofs; in short:

- The power of a logit is ``logit * rate``, exact, with rate = log2(e) / temperature.
- The weight of a token is ``2**(power - n)`` in units of 2**-53, where n is the tile's exponent:
  the floor of the largest power among the 1024 tokens of its tile. A weight is right to 4e-7 of
  itself, and 0 where it is below 2**-31.
- The mass of a tile is the sum of its weights, shifted right by what its exponent lies below the
  largest of the row, and by a few bits more, so that the sum over the row fits 64 bits.

A logit that is NaN counts as minus infinity, plus infinity as the largest float32. A row without
any finite logit is certain of token 0.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.ops import uint64
from jspec.ops.uint64 import in_64_bits
from jspec.ops.vocabulary import NO_TOKEN, Vocabulary
from jspec.typing import Array

ONE_BITS = 53  # a probability is in units of 2**-53
ONE = 2**ONE_BITS  # a probability of 1, and a weight of 1
LARGEST = float(np.finfo(np.float32).max)
BELOW_ONE = np.float32(1 - 2**-24)
# Of 2**u as a polynomial in (1 + u) / 4: the fifth power, the third, and down to the constant.
POLYNOMIAL = (7839600, 10051532, 7356243, 5913159, 2091539)


class Settings(NamedTuple):
    """Sampling settings as backends get them, so that all start from the same bits.

    Attributes:
        rate: float32 ``[B]``, log2(e) / temperature to 16 bits, 0 for a greedy row.
        top_k: int32 ``[B]``.
        top_p: float32 ``[B]``.
        min_p: float32 ``[B]``.
        seeds: uint32 ``[B, 2]``, upper and lower words.
    """

    rate: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seeds: Array


class TokenDistribution(NamedTuple):
    """Distributions over tokens, one for each of ``[...]``.

    Attributes:
        weights: uint64 ``[..., L, TILE]`` of the tokens.
        shift: uint32 ``[..., L]``; the mass of a tile is the sum of its weights, shifted right by
            it.
        reciprocal: uint32 ``[..., 1]``; with ``rescale`` it turns weights into probabilities.
        rescale: uint32 ``[..., 1]``.
    """

    weights: Array
    shift: Array
    reciprocal: Array
    rescale: Array

    @in_64_bits
    def probabilities(self) -> Array:
        """Probabilities, uint64 ``[..., L, TILE]`` in units of 2**-53: right to 2**-29 and 1."""
        scaled = uint64.scale(self.weights << 1, self.reciprocal[..., None])
        return uint64.shift_right(scaled, (self.shift + self.rescale)[..., None])


def cleaned(logits: Array) -> Array:
    """``logits`` as float32 without NaN and plus infinity."""
    logits = logits.astype(jnp.float32)
    return jnp.where(jnp.isnan(logits), -jnp.inf, jnp.minimum(logits, LARGEST))


@in_64_bits
def distribution(
    logits: Array, settings: Settings, vocabulary: Vocabulary, *, filtered: bool
) -> TokenDistribution:
    """The distributions that the rows of ``logits [B, T, size]`` sample from.

    Temperature, then top-k, top-p over the tokens that top-k keeps, then min-p; tokens that tie
    with a threshold are kept. A greedy row has all mass on its first largest logit.
    ``filtered=False`` promises that no row uses a filter, and saves the search for thresholds.
    """
    greedy = settings.rate[:, None, None] == 0
    rate = jnp.where(greedy, 1, settings.rate[:, None, None])
    tiles, largest, weights, shift = _weighted(logits, rate, vocabulary)
    if filtered:
        threshold = _threshold(tiles, largest, weights, shift, rate, settings, vocabulary)
        weights = jnp.where(keys(tiles) >= threshold, weights, 0)
    sampled, total = _normalised(weights, shift, vocabulary)

    certain = greedy | (total == 0)
    ids = vocabulary.ids_like(tiles)
    first = jnp.where(tiles == largest[..., None], ids, NO_TOKEN).min(axis=(-2, -1), keepdims=True)
    first = vocabulary.min(first)
    is_first = ids == jnp.where(first == NO_TOKEN, 0, first)
    one = jnp.where(is_first, jnp.uint64(ONE), 0)
    rows = TokenDistribution(
        jnp.where(certain[..., None], one, weights),
        jnp.where(certain, 0, shift),
        jnp.where(certain, jnp.uint32(2**31), sampled.reciprocal),
        jnp.where(certain, 0, sampled.rescale),
    )
    # Without it XLA computes the weights again for each use, which takes minutes to compile.
    return lax.optimization_barrier(rows)


def _weighted(
    logits: Array, rate: Array, vocabulary: Vocabulary
) -> tuple[Array, Array, Array, Array]:
    """``logits`` in tiles, the largest of a row ``[B, T, 1]``, and the weights without filters.

    Weights and shift as in `TokenDistribution`; ``rate`` float32 ``[B, 1, 1]``, positive.
    """
    tiles = vocabulary.tiles(cleaned(logits), -jnp.inf)
    top = jnp.maximum(vocabulary.tile_max(tiles.max(axis=-1)), -LARGEST)
    largest = vocabulary.max(top.max(axis=-1, keepdims=True))
    exponent = power(top, rate).whole
    weights = _weights(power(tiles, rate[..., None]), exponent[..., None])
    weights = jnp.where(tiles > -jnp.inf, weights, 0)
    below = vocabulary.max(exponent.max(axis=-1, keepdims=True)) - exponent
    shift = lax.bitcast_convert_type(below, jnp.uint32) + vocabulary.guard_bits
    return tiles, largest, weights, shift


@in_64_bits
def smallest_kept(logits: Array, settings: Settings, vocabulary: Vocabulary) -> Array:
    """The smallest of ``logits [B, T, size]`` that all filters keep, float32 ``[B, T]``.

    Minus infinity in rows without a filter; any number in greedy ones.
    """
    rate = settings.rate[:, None, None]
    rate = jnp.where(rate == 0, 1, rate)
    tiles, largest, weights, shift = _weighted(logits, rate, vocabulary)
    # Else XLA computes the weights again for each step of the bisections.
    weights = lax.optimization_barrier(weights)
    key = _threshold(tiles, largest, weights, shift, rate, settings, vocabulary)
    return _logit_of(key)[..., 0, 0]


@in_64_bits
def draw(weights: Array, shift: Array, number: Array, vocabulary: Vocabulary) -> Array:
    """The first token whose cumulative mass exceeds ``number / 2**64`` of the total, int32
    ``[...]``.

    ``weights`` and ``shift`` as in `TokenDistribution`, ``number`` uint64 ``[...]``. A token
    without mass is never drawn; 0 where no token has mass.
    """
    mass = uint64.shift_right(_sums(weights, vocabulary), shift)
    shard_mass = vocabulary.mask_to_shard(mass)
    in_shard = shard_mass.sum(axis=-1, dtype=jnp.uint64)
    target = uint64.high64(number, vocabulary.sum(in_shard))[..., None]
    ends = vocabulary.before(in_shard)[..., None] + jnp.cumsum(shard_mass, axis=-1)
    begins = ends - mass
    is_tile = (target >= begins) & (target < ends)
    tile = lax.argmax(is_tile, is_tile.ndim - 1, jnp.int32)[..., None]

    def at_tile(x: Array) -> Array:
        return jnp.take_along_axis(x, tile, axis=-1)

    def in_tile(x: Array) -> Array:
        return jnp.take_along_axis(x, tile[..., None], axis=-2)[..., 0, :]

    earlier = at_tile(_sums(weights, vocabulary, vocabulary.tile_before))
    reached = jnp.cumsum(in_tile(weights), axis=-1) + earlier
    over = at_tile(target - begins) < uint64.shift_right(reached, at_tile(shift))
    over = over & is_tile.any(axis=-1)[..., None]
    ids = in_tile(vocabulary.ids_like(weights))
    token = vocabulary.min(jnp.where(over, ids, NO_TOKEN).min(axis=-1))
    return jnp.where(token == NO_TOKEN, 0, token)


@in_64_bits
def total(weights: Array, shift: Array, vocabulary: Vocabulary) -> Array:
    """The mass of all tokens, uint64 ``[..., 1]``."""
    mass = uint64.shift_right(_sums(weights, vocabulary), shift)
    return vocabulary.sum(vocabulary.mask_to_shard(mass).sum(axis=-1, keepdims=True))


class Power(NamedTuple):
    """``whole + fraction * 2**-23``: int32, within 2**30 of 0, and uint32 below 2**23."""

    whole: Array
    fraction: Array


@in_64_bits
def power(logits: Array, rate: Array) -> Power:
    """``logits * rate``, exact but for what lies below 2**-23, which is rounded down.

    ``rate`` float32 of 16 significant bits, at least 2**-100. In integers: a product of float32
    would be rounded, or not where a compiler fuses it with what follows.
    """
    x = lax.bitcast_convert_type(logits, jnp.uint32)
    r = lax.bitcast_convert_type(rate, jnp.uint32)
    biased = x >> 23 & 0xFF
    mantissa = x & 0x7FFFFF | jnp.where(biased > 0, jnp.uint32(2**23), 0)
    product = uint64.widen(mantissa) * uint64.widen((r & 0x7FFFFF | 2**23) >> 8)
    # The exponents count from -150 and, after the shift above, from -142; 23 bits are fraction.
    up = jnp.maximum(biased, 1) + (r >> 23) - jnp.uint32(150 + 142 - 23)
    rises = up >> 31 == 0
    # -n is ~(n - 1), and rounding n - 1 down rounds -n down.
    negative = ((x >> 31) == 1) & (product > 0)
    less_one = negative.astype(jnp.uint64)
    whole = uint64.shift_left(product, up) - less_one
    rounded = uint64.shift_right(product - less_one, -up)
    beyond = rises & (uint64.bit_width(product) + up > 53)
    fixed = jnp.where(rises, whole, rounded)
    fixed = jnp.where(beyond, jnp.uint64(2**53) - less_one, fixed)
    fixed = jnp.where(negative, ~fixed, fixed)
    whole = lax.bitcast_convert_type((fixed >> 23).astype(jnp.uint32), jnp.int32)
    return Power(whole, fixed.astype(jnp.uint32) & 0x7FFFFF)


@in_64_bits
def exp2_fixed(fraction: Array) -> Array:
    """``2**u`` for u = fraction / 2**23 in [0, 1), off by less than 3.1e-7 of the value.

    A kernel computes the same bits in float32 by fused multiply-adds that round towards zero, of
    numbers so small that all have the same last place.

    Args:
        fraction: uint32, 0 to 2**23 - 1.

    Returns:
        ``2**u`` in units of 2**-22: uint32, 2**22 to 2**23, which never falls as u rises.
    """
    quarter = (fraction | 2**23) << 7  # (1 + u) / 4 in units of 2**-32
    fifth, *others = POLYNOMIAL
    p = uint64.high(jnp.full_like(quarter, fifth), quarter)  # to the third: there is no fourth
    for coefficient in others:
        p = coefficient + uint64.high(p, quarter)
    return p


def keys(logits: Array) -> Array:
    """Float32 without NaN as uint32 of the same order; the two zeros are one."""
    bits = lax.bitcast_convert_type(jnp.where(logits == 0, 0, logits), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(2**31))


def _weights(power: Power, exponent: Array) -> Array:
    """``2**(power - exponent)`` in units of 2**-53, uint64; 0 below 2**-31."""
    mantissa = uint64.widen(exp2_fixed(power.fraction)) << 31
    below = lax.bitcast_convert_type(exponent - power.whole, jnp.uint32)
    return jnp.where(below < 32, uint64.shift_right(mantissa, below), 0)


def _sums(weights: Array, vocabulary: Vocabulary, over_shards=None) -> Array:
    """The sums of ``weights [..., L, TILE]`` over whole tiles, ``[..., L]``.

    ``over_shards``: `Vocabulary.tile_sum`, the default, or `Vocabulary.tile_before`.
    """
    over_shards = over_shards or vocabulary.tile_sum
    return over_shards(weights.sum(axis=-1))


def _normalised(
    weights: Array, shift: Array, vocabulary: Vocabulary
) -> tuple[TokenDistribution, Array]:
    """The distribution of these weights, and their total mass."""
    mass = total(weights, shift, vocabulary)
    width = uint64.bit_width(mass)
    upper = uint64.shift_right(mass, width - 32)
    return TokenDistribution(weights, shift, _reciprocal(upper), width - (ONE_BITS + 1)), mass


def _reciprocal(x: Array) -> Array:
    """``2**62 // x`` for uint64 ``x`` in 2**31..2**32; uint32."""
    return (jnp.uint64(2**62) // x).astype(jnp.uint32)


def _threshold(
    logits: Array,
    largest: Array,
    weights: Array,
    shift: Array,
    rate: Array,
    settings: Settings,
    vocabulary: Vocabulary,
) -> Array:
    """The key of the smallest logit that all filters keep, uint32 ``[B, T, 1, 1]``."""
    of_tokens = keys(logits)
    top_k, top_p, min_p = (
        x[:, None, None, None] for x in (settings.top_k, settings.top_p, settings.min_p)
    )
    # A zero that varies over the mesh as the results do.
    zero = vocabulary.max(of_tokens.max(axis=(-2, -1), keepdims=True)) & 0

    def enough_tokens(key: Array) -> Array:
        count = (of_tokens >= key).sum(axis=(-2, -1), keepdims=True, dtype=jnp.int32)
        return vocabulary.sum(count) >= top_k

    kth = jnp.where(top_k > 0, _largest_key(enough_tokens, zero), 0)
    left, _ = _normalised(jnp.where(of_tokens >= kth, weights, 0), shift, vocabulary)
    probabilities = left.probabilities()

    def mass(key: Array) -> Array:
        remaining = jnp.where(of_tokens >= key, probabilities, 0)
        return vocabulary.sum(remaining.sum(axis=(-2, -1), keepdims=True))

    share = (jnp.minimum(top_p, BELOW_ONE) * np.float32(2.0**32)).astype(jnp.uint32)
    needed = jnp.maximum(uint64.scale(mass(kth), share), 1)
    pth = _largest_key(lambda key: mass(key) >= needed, zero)
    pth = jnp.where(top_p < 1, pth, 0)

    top = largest[..., None]
    least = lax.bitcast_convert_type(min_p, jnp.uint32)

    def too_small(key: Array) -> Array:
        share = _relative(_logit_of(key), top, rate[..., None])
        return (key <= keys(top)) & (share < least)

    mth = jnp.where(min_p > 0, _largest_key(too_small, zero) + 1, 0)
    return jnp.maximum(jnp.maximum(kth, pth), mth)


def _largest_key(holds, zero: Array) -> Array:
    """The largest key for which ``holds``, uint32 ``[B, T, 1, 1]``, by bisection from 0."""

    def decide(step: Array, prefix: Array) -> Array:
        key = prefix | (jnp.uint32(2**31) >> step.astype(jnp.uint32))
        return jnp.where(holds(key), key, prefix)

    return lax.fori_loop(0, 32, decide, zero)


def _logit_of(key: Array) -> Array:
    """The float32 of a key; minus infinity for what is the key of none."""
    logit = lax.bitcast_convert_type(
        jnp.where(key >> 31 == 1, key ^ jnp.uint32(2**31), ~key), jnp.float32
    )
    return jnp.where(jnp.isnan(logit), -jnp.inf, logit)


def _relative(logits: Array, largest: Array, rate: Array) -> Array:
    """The bits of a float32: ``2**(power - power of the largest)``, 0 where that is below 2**-126.

    A weight is such a number too, but only down to 2**-31.
    """
    logit_power, top_power = power(logits, rate), power(largest, rate)
    borrow = logit_power.fraction < top_power.fraction
    whole = top_power.whole - logit_power.whole + borrow.astype(jnp.int32)
    below = lax.bitcast_convert_type(whole, jnp.uint32)
    mantissa = exp2_fixed((logit_power.fraction - top_power.fraction) & 0x7FFFFF)
    bits = ((127 - below) << 23) + ((mantissa - 2**22) << 1)
    return jnp.where((below > 126) | (logits == -jnp.inf), 0, bits)
