"""Distributions in whole numbers, and drawing a token by inverse CDF.

Sums of integers do not depend on the order of summation, so that every backend, and every split of
the vocabulary over devices, draws the same token from the same random number:

- A token's weight is ``2**(logit * rate - n)`` in units of 2**-26, rounded down, where rate is
  log2(e) / temperature and n the whole number at or below the largest ``logit * rate`` of its tile
  of the vocabulary: the tile's exponent. The largest weight of a tile is in 1..2. A weight is off
  by less than 4e-7 of itself and a unit.
- A tile's scale is the probability of a weight of 1 in it, in units of 2**-30. Random numbers are
  multiples of 2**-23: theirs is the coarser grid.

A logit that is NaN counts as minus infinity, plus infinity as the largest float32. A row without
any finite logit gives token 0.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.ops import wide
from jspec.ops.vocabulary import NO_TOKEN, Vocabulary
from jspec.ops.wide import Wide
from jspec.typing import Array

ONE = 2**30  # a probability of 1
WEIGHT = 2**26  # a weight of 1
LARGEST = float(np.finfo(np.float32).max)
BOUND = 2.0**100  # of logit * rate: 2**23 of it is still a float32


class Settings(NamedTuple):
    """How rows sample, as backends get it, so that each starts from the same bits.

    ``rate`` float32 ``[B]``: log2(e) / temperature to 16 bits, 0 for a greedy row; the rest as in
    `jspec.ops.sample.Sampling`. ``top_p`` and ``min_p`` count in units of 2**-30, rounded down.
    """

    rate: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seeds: Array


class Distribution(NamedTuple):
    """Rows to draw from: ``weights`` uint32 ``[..., L, TILE]`` of the tokens and ``scale`` uint32
    ``[..., L]`` of the tiles."""

    weights: Array
    scale: Array

    def probabilities(self) -> Array:
        """Of the tokens, uint32 ``[..., L, TILE]`` in units of 2**-30, rounded down."""
        return wide.high(self.weights * (2 * ONE // WEIGHT), (self.scale << 1)[..., None])


def distribution(
    logits: Array, settings: Settings, vocabulary: Vocabulary, *, filtered: bool
) -> Distribution:
    """What each row samples from, of ``logits [B, T, size]``.

    Temperature, then top-k, top-p over what top-k left, then min-p; ties at a threshold stay
    together. A greedy row gets all mass on its first largest logit. ``filtered=False`` promises
    that no row uses a filter and saves the search for thresholds.
    """
    logits = logits.astype(jnp.float32)
    logits = jnp.where(jnp.isnan(logits), -jnp.inf, jnp.minimum(logits, LARGEST))
    tiles = vocabulary.tiles(logits, -jnp.inf)
    top = jnp.maximum(vocabulary.tile_max(tiles.max(axis=-1)), -LARGEST)
    largest = vocabulary.max(top.max(axis=-1, keepdims=True))
    greedy = settings.rate[:, None, None] == 0
    rate = jnp.where(greedy, 1, settings.rate[:, None, None])
    exponent = jnp.floor(_power(top, rate))
    weights = _weights(_power(tiles, rate[..., None]), exponent[..., None])
    below = vocabulary.max(exponent.max(axis=-1, keepdims=True)) - exponent
    if filtered:
        relative = _weights(_power(tiles - largest[..., None], rate[..., None]), jnp.float32(0))
        kept = relative >= _units(settings.min_p) // (ONE // WEIGHT)
        kept = kept & (_keys(tiles) >= _threshold(tiles, weights, below, settings, vocabulary))
        weights = jnp.where(kept, weights, 0)
    scale = _scale(_sums(weights, vocabulary), below, vocabulary)

    ids = vocabulary.ids_like(tiles)
    first = jnp.where(tiles == largest[..., None], ids, NO_TOKEN).min(axis=(-2, -1), keepdims=True)
    first = vocabulary.min(first)
    is_first = (ids == first) & (first != NO_TOKEN)
    one = jnp.where(is_first, WEIGHT, 0).astype(jnp.uint32)
    rows = Distribution(
        jnp.where(greedy[..., None], one, weights),
        jnp.where(greedy, jnp.uint32(ONE), scale),
    )
    # XLA would work out the weights anew for each of their uses, and take minutes to compile that.
    return lax.optimization_barrier(rows)


def draw(rows: Distribution, number: Array, vocabulary: Vocabulary) -> Array:
    """The first token whose cumulative mass exceeds ``number / 2**23`` of all, int32 ``[...]``.

    ``number`` uint32 ``[...]`` below 2**23. A token without mass is never drawn.
    """
    mass = _mass(_sums(rows.weights, vocabulary), rows.scale)
    own = vocabulary.own(mass)
    in_shard = own.sum(axis=-1, dtype=jnp.uint32)
    target = wide.high(number << 9, vocabulary.sum(in_shard))[..., None]
    ends = vocabulary.before(in_shard)[..., None] + jnp.cumsum(own, axis=-1, dtype=jnp.uint32)
    here = (ends - mass <= target) & (target < ends)
    tile = jnp.argmax(here, axis=-1)[..., None]

    weights, ids = (
        jnp.take_along_axis(x, tile[..., None], axis=-2)[..., 0, :]
        for x in (rows.weights, vocabulary.ids_like(rows.weights))
    )
    reached = wide.linear(lambda x: jnp.cumsum(x, axis=-1, dtype=jnp.uint32), *wide.halves(weights))
    earlier = _sums(rows.weights, vocabulary, vocabulary.tile_before)
    reached = wide.add(reached, Wide(*(jnp.take_along_axis(x, tile, axis=-1) for x in earlier)))
    left = jnp.take_along_axis(target - (ends - mass), tile, axis=-1)
    scale = jnp.take_along_axis(rows.scale, tile, axis=-1)
    over = here.any(axis=-1)[..., None] & (_mass(reached, scale) > left)
    token = vocabulary.min(jnp.where(over, ids, NO_TOKEN).min(axis=-1))
    return jnp.where(token == NO_TOKEN, 0, token)


def total(rows: Distribution, vocabulary: Vocabulary) -> Array:
    """The mass of each row, uint32 ``[...]``."""
    mass = _mass(_sums(rows.weights, vocabulary), rows.scale)
    return vocabulary.sum(vocabulary.own(mass).sum(axis=-1, dtype=jnp.uint32))


def exp2(y: Array) -> tuple[Array, Array]:
    """``2**y`` for float32 y within `BOUND`, as ``mantissa * 2**(whole - 23)``.

    ``mantissa`` uint32 in 2**23..2**24, ``whole`` float32, the floor of y; off by less than 4e-7 of
    the value, and never falling where y rises. In integers, since a compiler may fuse
    floating-point products and sums or not; a float32 kernel whose fused products round towards
    zero finds the same bits in numbers so small that all have the same last place.
    """
    fixed = jnp.floor(y * 2**23)
    whole = jnp.floor(fixed * 2.0**-23)
    u = (fixed - whole * 2**23).astype(jnp.uint32) | 2**23
    # Horner's rule in u * 2**-24, which is in 1/2..1; without a fourth power.
    p = wide.high(jnp.full_like(u, 489975), u << 8)
    for c in (2512872, 3678130, 5913167, 4183072):
        p = c + wide.high(p, u << 8)
    return p, whole


def _power(logits: Array, rate: Array) -> Array:
    """``logits * rate``, within `BOUND` unless a logit is minus infinity."""
    # Its place is taken before the product: 0 * infinity is no number.
    power = jnp.clip(jnp.maximum(logits, -LARGEST) * rate, -BOUND, BOUND)
    return jnp.where(logits == -jnp.inf, logits, power)


def _weights(power: Array, exponent: Array) -> Array:
    mantissa, whole = exp2(jnp.maximum(power, -BOUND))
    weights = lax.shift_right_logical(mantissa * (WEIGHT >> 23), _shift(exponent - whole))
    return jnp.where(power == -jnp.inf, 0, weights)


def _shift(below: Array) -> Array:
    """Whole float32 from 0 on as a count of bits to shift by: none of 64 is left from 63 on."""
    return jnp.minimum(below, 63).astype(jnp.uint32)


def _sums(weights: Array, vocabulary: Vocabulary, over_shards=None) -> Wide:
    """Sums over whole tiles."""
    over_shards = over_shards or vocabulary.tile_sum
    return wide.linear(
        lambda x: over_shards(x.sum(axis=-1, dtype=jnp.uint32)), *wide.halves(weights)
    )


def _mass(sums: Wide, scale: Array) -> Array:
    """``sums * scale``, as a probability in units of 2**-30, rounded down."""
    bits = jnp.full_like(scale, WEIGHT.bit_length() - 1)
    return wide.shift_right(wide.scale(sums, scale), bits).low


def _scale(sums: Wide, below: Array, vocabulary: Vocabulary) -> Array:
    """The scale of tiles whose weights sum to ``sums``, and whose exponents lie ``below`` the
    largest of the row."""
    shift = _shift(below)
    mass = wide.shift_right(wide.scale(sums, jnp.full_like(shift, ONE // WEIGHT)), shift)

    def over_row(x: Array) -> Array:
        return vocabulary.sum(vocabulary.own(x).sum(axis=-1, keepdims=True, dtype=jnp.uint32))

    row = wide.linear(over_row, *wide.halves(mass.low), mass.high)
    empty = (row.high == 0) & (row.low == 0)
    zeros = jnp.where(row.high > 0, lax.clz(row.high), 32 + lax.clz(row.low))
    exponent = jnp.where(empty, 0, 33 - zeros)
    normal = jnp.where(empty, jnp.uint32(ONE), wide.shift_right(row, exponent).low)
    scale = lax.shift_right_logical(_reciprocal(normal), 1 + shift + exponent)
    return jnp.where(empty, 0, scale)


def _threshold(
    logits: Array,
    weights: Array,
    below: Array,
    settings: Settings,
    vocabulary: Vocabulary,
) -> Array:
    """The key of the smallest logit that top-k and top-p keep, uint32 ``[B, T, 1, 1]``."""
    keys = _keys(logits)
    top_k, top_p = settings.top_k[:, None, None, None], _units(settings.top_p)

    def enough_tokens(key: Array) -> Array:
        kept = (keys >= key).sum(axis=(-2, -1), keepdims=True, dtype=jnp.int32)
        return vocabulary.sum(kept) >= top_k

    kth = jnp.where(top_k > 0, _largest_key(enough_tokens, keys, vocabulary), 0)
    weights = jnp.where(keys >= kth, weights, 0)
    left = Distribution(weights, _scale(_sums(weights, vocabulary), below, vocabulary))
    probabilities = left.probabilities()

    def mass(key: Array) -> Array:
        kept = jnp.where(keys >= key, probabilities, 0)
        return vocabulary.sum(kept.sum(axis=(-2, -1), keepdims=True, dtype=jnp.uint32))

    needed = wide.multiply(jnp.broadcast_to(jnp.maximum(top_p, 1), kth.shape), mass(kth))

    def enough_mass(key: Array) -> Array:
        here = mass(key)
        return ~wide.less(wide.multiply(here, jnp.full_like(here, ONE)), needed)

    pth = jnp.where(top_p < ONE, _largest_key(enough_mass, keys, vocabulary), 0)
    return jnp.maximum(kth, pth)


def _units(x: Array) -> Array:
    """Float32 ``[B]`` in 0..1 in units of 2**-30, uint32 ``[B, 1, 1, 1]``."""
    return (x * ONE).astype(jnp.uint32)[:, None, None, None]


def _keys(logits: Array) -> Array:
    """Float32 without NaN as uint32 of the same order; the two zeros are one."""
    bits = lax.bitcast_convert_type(jnp.where(logits == 0, 0, logits), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(2**31))


def _largest_key(holds, keys: Array, vocabulary: Vocabulary) -> Array:
    """The largest key for which ``holds``, which does for 0, ``[B, T, 1, 1]``, by bisection."""

    def decide(step: Array, found: Array) -> Array:
        key = found | (jnp.uint32(2**31) >> step.astype(jnp.uint32))
        return jnp.where(holds(key), key, found)

    # A zero that varies over the mesh as the result does.
    zero = vocabulary.max(keys.max(axis=(-2, -1), keepdims=True)) & 0
    return lax.fori_loop(0, 32, decide, zero)


def _reciprocal(x: Array) -> Array:
    """``2**61 // x`` for ``x`` in 2**30..2**31, by long division, a bit at a time."""
    quotient, rest = (x == ONE).astype(jnp.uint32), jnp.where(x == ONE, 0, jnp.uint32(ONE))
    for _ in range(31):
        rest = rest << 1
        fits = rest >= x
        quotient, rest = (quotient << 1) | fits.astype(jnp.uint32), jnp.where(fits, rest - x, rest)
    return quotient
