"""Scores of cached keys by q.k, and the positions of the highest ones."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from jspec.cache import LinearLayout, Stripe
from jspec.cache.layout import Layout
from jspec.ops.select_sharded import select_sharded
from jspec.ops.selection import select
from jspec.typing import Array

# A device's slots for each position that a row selects, up to which devices exchange all scores.
# One selection of all is then faster than one of each device's best and another of those.
SLOTS_PER_PICK = 8


def best_positions(scores: Array, layout: Layout, k: int, **budget: Any) -> Array:
    """The positions of the ``k`` highest of the scores ``[..., S]`` of all slots.

    int32 ``[..., k]``, as `jspec.ops.select` returns; of a `Stripe` those of this device.
    ``budget``: other arguments of `jspec.ops.select`. Minus infinity, or a whole number below 0, is
    not read, unless ``budget`` forces it.
    """
    if not isinstance(layout, Stripe):
        return highest(in_order(scores, layout), k, **budget)
    if layout.size <= SLOTS_PER_PICK * k and not layout.wraps:
        return _local(highest(in_order(scores, layout), k, **budget), layout)
    slots = select_sharded(
        *(scores, layout.slot_positions(budget["lengths"] - 1), k),
        axis_name=layout.axis,
        capacity=layout.capacity,
        **budget,
    )
    positions = jnp.where(slots >= 0, layout.at(slots), -1)
    return _without_unread(scores, slots, positions, **budget)


def _local(positions: Array, layout: Stripe) -> Array:
    """Those of ``positions [..., k]`` that this device has, ascending, int32 ``[..., min(k, n)]``.

    ``n``: its slots; -1 after them.
    """
    is_local = layout.slots(positions) < layout.size
    number = is_local.sum(axis=-1, dtype=jnp.int32)
    size = min(positions.shape[-1], layout.size)
    # 32 values for each kind: with one, all atomic additions of a histogram meet in two places.
    order = jnp.arange(positions.shape[-1], dtype=jnp.int32) % 32
    index = select(jnp.where(is_local, order + 32, order), size, counts=number, highest=63)
    local = jnp.take_along_axis(positions, jnp.maximum(index, 0), axis=-1)
    return jnp.where(index >= 0, local, -1)


def softmax(scores: Array, layout: Layout, context_len: Array) -> Array:
    """The softmax of ``scores [B, K, S]`` over the slots of positions below ``context_len [B]``.

    0 in other slots. Of a `Stripe` over the slots of all devices.
    """
    scores = jnp.where(
        _is_committed(scores, layout, context_len), scores.astype(jnp.float32), -jnp.inf
    )
    top = scores.max(axis=-1, keepdims=True)
    total = jnp.exp(scores - _finite(top)).sum(axis=-1, keepdims=True)
    if isinstance(layout, Stripe):
        # One message: the sum of each device is relative to its own maximum.
        tops, totals = lax.all_gather(jnp.stack([top, total]), layout.axis, axis=1)
        top = tops.max(axis=0)
        total = (totals * jnp.exp(tops - _finite(top)[None])).sum(axis=0)
    # Equal scores have equal weights, on whichever devices they are.
    weights = jnp.exp(scores - _finite(top))
    return weights / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)


def _finite(top: Array) -> Array:
    """``top`` with 0 where it is minus infinity, as it is of no score at all."""
    return jnp.where(jnp.isfinite(top), top, 0)


def max_with_previous(
    scores: Array, layout: Layout, ahead: int, context_len: Array
) -> tuple[Array, LinearLayout | Stripe]:
    """For each position the highest score of itself and of the ``ahead`` ones before it.

    Args:
        scores: ``[..., S]`` of all slots; those of positions from ``context_len`` on do not count.
        layout: The layout of the slots.
        ahead: How many positions before each one count.
        context_len: int32 ``[B]``: committed positions per row.

    Returns:
        Scores, and the layout of their slots.

    Raises:
        ValueError: Where ``ahead`` is larger than the block of a `Stripe`.
    """
    scores = jnp.where(_is_committed(scores, layout, context_len), scores, -jnp.inf)
    if not isinstance(layout, Stripe):
        scores, layout = in_order(scores, layout), LinearLayout(layout.size)
        before = jnp.full((*scores.shape[:-1], ahead), -jnp.inf, scores.dtype)
        return _max_with_previous(before, scores), layout
    if ahead > layout.block:
        raise ValueError(
            f"ahead={ahead} must be at most {layout.block}, the block of positions of a device"
        )
    blocks = scores.reshape(*scores.shape[:-1], -1, layout.block)
    # The preceding block is on the preceding rank; that of rank 0 is the last rank's, one earlier.
    ranks = [(rank, (rank + 1) % layout.ranks) for rank in range(layout.ranks)]
    before = lax.ppermute(blocks[..., layout.block - ahead :], layout.axis, ranks)
    none = jnp.full_like(before[..., :1, :], -jnp.inf)
    shifted = jnp.concatenate([none, before[..., :-1, :]], axis=-2)
    before = jnp.where(lax.axis_index(layout.axis) == 0, shifted, before)
    return _max_with_previous(before, blocks).reshape(scores.shape), layout


def _max_with_previous(before: Array, scores: Array) -> Array:
    """The highest of each of ``scores [..., n]`` and the m scores before it.

    ``before [..., m]``: the scores before the first one.
    """
    whole = jnp.concatenate([before, scores], axis=-1)
    size, ahead = scores.shape[-1], before.shape[-1]
    return functools.reduce(jnp.maximum, (whole[..., i : i + size] for i in range(ahead + 1)))


def _is_committed(scores: Array, layout: Layout, context_len: Array) -> Array:
    """Which slots of ``scores [B, ..., S]`` have a position below ``context_len [B]``."""
    positions = layout.slot_positions(context_len - 1)
    return (positions >= 0).reshape(
        positions.shape[0], *[1] * (scores.ndim - 2), positions.shape[-1]
    )


def in_order(scores: Array, layout: Layout) -> Array:
    """Scores of all slots ``[..., S]`` in the order of their positions.

    Of a `Stripe` those of all devices, which send them to each other.
    """
    if isinstance(layout, LinearLayout):
        return scores
    if isinstance(layout, Stripe):
        blocks = scores.reshape(*scores.shape[:-1], -1, layout.block)
        every = lax.all_gather(blocks, layout.axis, axis=blocks.ndim - 1)
        return every.reshape(*scores.shape[:-1], layout.capacity)
    order = layout.slots(jnp.arange(layout.size, dtype=jnp.int32))
    return jnp.take(scores, order, axis=-1)


def highest(scores: Array, k: int, **budget: Any) -> Array:
    """The indices of the ``k`` highest scores, int32 ``[..., k]``, as `jspec.ops.select` returns.

    Minus infinity, or a whole number below 0, is not read, unless ``budget`` forces it.
    """
    chosen = select(scores, k, **budget)
    return _without_unread(scores, chosen, chosen, **budget)


def _without_unread(
    scores: Array,
    slots: Array,
    positions: Array,
    *,
    lengths: Array,
    sinks: int,
    recent: int,
    **others: Any,
) -> Array:
    """The selected ``positions``, -1 for those whose scores say that they are not to be read.

    ``scores``: of all slots; ``slots``: those of the positions. Sinks and recent positions are read
    whatever they score.
    """
    none = -jnp.inf if jnp.issubdtype(scores.dtype, jnp.floating) else -1
    end = lengths.reshape(-1, *[1] * (positions.ndim - 1))
    forced = (positions < sinks) | (positions >= end - recent)
    is_readable = jnp.take_along_axis(scores, jnp.maximum(slots, 0), axis=-1) > none
    return jnp.where(forced | is_readable, positions, -1)
