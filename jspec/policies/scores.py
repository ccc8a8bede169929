"""Scores of cached keys by products with queries, and the positions of the highest ones."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental.layout import Layout as Order
from jax.experimental.layout import with_layout_constraint

from jspec.cache import Linear, Stripe
from jspec.cache.layout import Layout
from jspec.ops.select import select
from jspec.ops.select_sharded import select_sharded
from jspec.typing import Array


def pooled(q: Array, kv_heads: int) -> Array:
    """``q [B, T, N, H]`` summed over tokens and the heads of a group, float32 ``[B, K, H]``.

    A product with it is the sum of the products with each query, as products are linear.
    """
    batch, tokens, heads, size = q.shape
    q = q.reshape(batch, tokens, kv_heads, heads // kv_heads, size)
    return q.astype(jnp.float32).sum(axis=(1, 3))


def dots(*pairs: tuple[Array, Array]) -> Array:
    """``q [B, K, H]`` times each of ``k [B, S, K, H]``, summed in float32: ``[B, K, S]``.

    Of several pairs ``q, k`` the sum, as one kernel. No matrix product: XLA would bring all keys
    into another order for it. Nor may it choose an order for a column that no kernel of jspec's
    fixes: a chunk of steps would begin and end with a copy of the whole column.
    """
    products = (
        with_layout_constraint(k, Order((0, 1, 2, 3))).astype(jnp.float32) * q[:, None]
        for q, k in pairs
    )
    return jnp.swapaxes(functools.reduce(jnp.add, products).sum(axis=-1), 1, 2)


def best_positions(scores: Array, layout: Layout, most: int, **budget: Any) -> Array:
    """The positions with the ``most`` highest of the scores ``[..., S]`` of all slots.

    int32 ``[..., most]``, as `jspec.select` gives; of a `Stripe` those that this device holds.
    ``budget`` is what else that takes. Minus infinity is not read, unless ``budget`` forces it.
    """
    if not isinstance(layout, Stripe):
        return highest(in_order(scores, layout), most, **budget)
    slots = select_sharded(
        *(scores, layout.held(budget["lengths"] - 1), most),
        axis_name=layout.axis,
        capacity=layout.capacity,
        **budget,
    )
    positions = jnp.where(slots >= 0, layout.at(slots), -1)
    return _read_of(scores, slots, positions, **budget)


def in_order(scores: Array, layout: Layout) -> Array:
    """Scores of all slots ``[..., S]`` in the order of the positions that live in them."""
    if isinstance(layout, Linear):
        return scores
    order = layout.slots(jnp.arange(layout.size, dtype=jnp.int32))
    return jnp.take(scores, order, axis=-1)


def highest(scores: Array, most: int, **budget: Any) -> Array:
    """The places of the ``most`` highest scores, int32 ``[..., most]``, as `jspec.select` gives.

    Minus infinity is not read, unless ``budget`` forces it.
    """
    chosen = select(scores, most, **budget)
    return _read_of(scores, chosen, chosen, **budget)


def _read_of(
    scores: Array,
    slots: Array,
    positions: Array,
    *,
    lengths: Array,
    sinks: int,
    recent: int,
    **others: Any,
) -> Array:
    """The chosen ``positions``, -1 for those whose scores, in ``slots``, are minus infinity."""
    if not jnp.issubdtype(scores.dtype, jnp.floating):
        return positions
    end = lengths.reshape(-1, *[1] * (positions.ndim - 1))
    forced = (positions < sinks) | (positions >= end - recent)
    found = jnp.take_along_axis(scores, jnp.maximum(slots, 0), axis=-1) > -jnp.inf
    return jnp.where(forced | found, positions, -1)
