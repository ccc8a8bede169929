"""Keyed uniform numbers, filtered distributions, and picking a token by inverse CDF.

Every random number belongs to a request, a position and a role, so that a request's tokens do not
depend on its row, its neighbours or how the work was cut into chunks.
"""

from __future__ import annotations

import dataclasses
import enum

import jax
import jax.numpy as jnp
from jax import lax

from jspec.typing import Array

TILE = 1024  # tokens of the vocabulary summed together; every backend sums by these tiles


class Role(enum.IntEnum):
    """What a uniform number is spent on; numbers of different roles are independent."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    BONUS = 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Sampling settings of each row; meanings as in `jspec.SamplingParams`.

    ``temperature``, ``top_p``, ``min_p`` float32 ``[B]``, ``top_k`` int32 ``[B]``, ``seeds`` uint32
    ``[B]``.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seeds: Array


def uniform(seeds: Array, positions: Array, role: Role) -> Array:
    """Uniform float32 in [0, 1), one for each of ``positions [B, ...]`` of the rows' ``seeds [B]``.

    The key is ``fold_in(fold_in(key(seed), position), role)`` of Threefry, whatever JAX's default
    generator is.
    """

    def one(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
        return jax.random.uniform(jax.random.fold_in(key, role), dtype=jnp.float32)

    for _ in range(positions.ndim - 1):
        one = jax.vmap(one, in_axes=(None, 0))
    return jax.vmap(one)(seeds, positions)


def probabilities(logits: Array, rows: Rows, *, filtered: bool) -> Array:
    """The distribution each row samples from, float32 ``[B, T, V]``, of ``logits [B, T, V]``.

    Temperature, then top-k, top-p over what top-k left, then min-p; ties at a threshold stay
    together. A row with temperature 0 gets all mass on its first largest logit. ``filtered=False``
    promises that no row uses a filter and saves the sort.
    """
    logits = logits.astype(jnp.float32)
    temperature = rows.temperature[:, None, None]
    # The largest becomes 0 first: divided by a tiny temperature it must not overflow.
    scaled = logits - logits.max(axis=-1, keepdims=True)
    scaled = scaled / jnp.where(temperature > 0, temperature, 1)
    if filtered:
        scaled = jnp.where(scaled >= _threshold(scaled, rows), scaled, -jnp.inf)
    weights = jnp.exp(scaled)
    weights = weights / _tiles(weights).sum(axis=-1).sum(axis=-1, keepdims=True)
    best = jnp.argmax(logits, axis=-1, keepdims=True)
    greedy = (jnp.arange(logits.shape[-1])[None, None] == best).astype(jnp.float32)
    return jnp.where(temperature > 0, weights, greedy)


def _threshold(scaled: Array, rows: Rows) -> Array:
    """The smallest logit that all filters of a row keep, ``[B, T, 1]``."""
    size = scaled.shape[-1]
    ordered = lax.sort(scaled, dimension=-1)[..., ::-1]
    top_k, top_p, min_p = (x[:, None, None] for x in (rows.top_k, rows.top_p, rows.min_p))

    last = jnp.where(top_k > 0, jnp.minimum(top_k, size), size) - 1
    last = jnp.broadcast_to(last, (*scaled.shape[:-1], 1))
    kth = jnp.take_along_axis(ordered, last, axis=-1)

    weights = jnp.where(ordered >= kth, jnp.exp(ordered - ordered[..., :1]), 0)
    mass = jnp.cumsum(weights, axis=-1)
    enough = mass >= top_p * mass[..., -1:]
    pth = jnp.take_along_axis(ordered, jnp.argmax(enough, axis=-1, keepdims=True), axis=-1)
    pth = jnp.where(top_p < 1, pth, -jnp.inf)

    floor = jnp.where(min_p > 0, ordered[..., :1] + jnp.log(min_p), -jnp.inf)
    return jnp.maximum(kth, jnp.maximum(pth, floor))


def _tiles(weights: Array) -> Array:
    """``[..., V]`` cut into tiles ``[..., ceil(V / TILE), TILE]``, the last padded with zeros."""
    padding = -weights.shape[-1] % TILE
    weights = jnp.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, padding)])
    return weights.reshape(*weights.shape[:-1], -1, TILE)


def inverse_cdf(weights: Array, u: Array) -> Array:
    """The first token whose cumulative weight exceeds ``u`` times the total, int32 ``[...]``.

    ``weights`` float32 ``[..., V]`` at least 0, not normalised, with some mass; ``u [...]`` in
    [0, 1). Sums run in index order, in tiles, then inside the chosen tile. A token without mass is
    never picked, also where ``u`` times the total rounds up to the total.
    """
    tiles = _tiles(weights)
    sums = tiles.sum(axis=-1)
    ends = jnp.cumsum(sums, axis=-1)
    target = u * ends[..., -1]
    tile = _first_over(ends, sums, target)
    before = jnp.take_along_axis(ends - sums, tile[..., None], axis=-1)[..., 0]
    inside = jnp.take_along_axis(tiles, tile[..., None, None], axis=-2)[..., 0, :]
    index = _first_over(jnp.cumsum(inside, axis=-1), inside, target - before)
    return (tile * TILE + index).astype(jnp.int32)


def _first_over(cumulative: Array, weights: Array, target: Array) -> Array:
    """First index with mass whose cumulative weight is over ``target``, else the last with mass."""
    has_mass = weights > 0
    over = has_mass & (cumulative > target[..., None])
    size = weights.shape[-1]
    last = size - 1 - jnp.argmax(has_mass[..., ::-1], axis=-1)
    return jnp.where(over.any(axis=-1), jnp.argmax(over, axis=-1), last)


def sample(logits: Array, rows: Rows, positions: Array, role: Role, *, filtered: bool) -> Array:
    """Draw the tokens at ``positions [B, T]`` from ``logits [B, T, V]``; int32 ``[B, T]``."""
    weights = probabilities(logits, rows, filtered=filtered)
    return inverse_cdf(weights, uniform(rows.seeds, positions, role))
