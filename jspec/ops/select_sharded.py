"""Exact selection of the best positions of rows whose scores are shared by several devices.

Each device selects the best of its own slots, which are the only ones that the best of all can be
among, and one all-gather brings their scores and positions to all devices. How much that is follows
from the budget, not from the scores.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.ops.hash import lengths_or
from jspec.ops.selection import check_budget, select, sort_keys
from jspec.ops.vocabulary import Axes
from jspec.typing import Array


def select_sharded(
    scores: Array,
    positions: Array,
    k: int,
    *,
    axis_name: Axes,
    capacity: int,
    counts: Array | None = None,
    lengths: Array,
    sinks: int = 0,
    recent: int = 0,
    highest: int | None = None,
) -> Array:
    """This device's slots among the ``k`` best positions of each row, in ascending order.

    Called inside a `jax.shard_map`. Over all devices, the selection is that of `jspec.ops.select`
    with the scores in the order of their positions. It takes one collective.

    Args:
        scores: ``[B, n]`` or ``[B, K, n]``, of this device's slots. Without ``highest``, int32
            scores of -2**31 count as -2**31 + 1.
        positions: int32 ``[B or 1, n]``, ascending and below ``capacity``, -1 for an empty slot; no
            two devices of the axis have the same one.
        k: positions that are selected of a row, at most.
        axis_name: the mesh axes that share the positions.
        capacity: the bound of the positions.
        counts: as in `jspec.ops.select`.
        lengths: int32 ``[B]``, positions of each row over all devices.
        sinks: as in `jspec.ops.select`.
        recent: as in `jspec.ops.select`.
        highest: as in `jspec.ops.select`.

    Returns:
        int32 ``[..., min(k, n)]``: slots, then -1.

    Raises:
        ValueError: for a budget that does not fit.
    """
    check_budget(k, sinks, recent)
    lead, local_k = scores.shape[:-1], min(k, scores.shape[-1])
    lengths = lengths_or(lengths, lead, capacity)[..., None]
    max_counts = jnp.minimum(k, lengths)
    counts = (
        max_counts
        if counts is None
        else jnp.minimum(lengths_or(counts, lead, k)[..., None], max_counts)
    )
    positions = positions.reshape(-1, *[1] * (scores.ndim - 2), positions.shape[-1])
    positions = jnp.broadcast_to(positions, scores.shape)
    exists = (positions >= 0) & (positions < lengths)
    forced = _Forced(sinks, lengths, jnp.maximum(lengths - recent, sinks))
    is_forced = exists & ((positions < sinks) | (positions >= lengths - recent))
    selected = is_forced & (forced.before(positions) < counts)
    # The others have the rest of the budget.
    need = jnp.maximum(counts - forced.before(lengths), 0)[..., 0]
    keys = _keys(scores, exists & ~is_forced, highest)
    threshold, last = _threshold(keys, positions, local_k, k, need, axis_name, capacity)
    reaches = (keys.values > threshold) | ((keys.values == threshold) & (positions <= last))
    selected = selected | (reaches & (keys.values > keys.none))
    number = selected.sum(axis=-1, dtype=jnp.int32)
    return select(selected.astype(jnp.int32), local_k, counts=number, highest=1)


class _Forced(NamedTuple):
    """The positions of a row that are selected whatever they score: its ends.

    ``sinks``: the first ones; ``lengths [..., 1]``: the row's; ``begin [..., 1]``: of the last ones
    that are no sinks.
    """

    sinks: int
    lengths: Array
    begin: Array

    def before(self, positions: Array) -> Array:
        """How many of them come before each of ``positions``."""
        first = jnp.minimum(positions, self.sinks)
        return first + jnp.maximum(positions - self.begin, 0)


class _Keys(NamedTuple):
    """Scores as integers: int32 ``values [..., n]``, ``none`` for slots that are not scored.

    All others are above ``none``. ``highest``: their bound, where it is small.
    """

    values: Array
    none: int
    highest: int | None


def _keys(scores: Array, is_scored: Array, highest: int | None) -> _Keys:
    if highest is not None:
        return _Keys(jnp.where(is_scored, scores + 2, 0), 0, highest + 2)
    none = -(2**31)
    keys = lax.bitcast_convert_type(sort_keys(scores) ^ np.uint32(2**31), jnp.int32)
    return _Keys(jnp.where(is_scored, jnp.maximum(keys, none + 1), none), none, None)


def _threshold(
    keys: _Keys,
    positions: Array,
    local_k: int,
    k: int,
    need: Array,
    axis_name: Axes,
    capacity: int,
) -> tuple[Array, Array]:
    """The key ``[..., 1]`` that the ``need [...]`` best of all devices reach.

    And the position of the last of them that has just this key.
    """
    slots = select(keys.values, local_k, counts=need, highest=keys.highest)
    best = _at(keys.values, slots, keys.none)
    message = jnp.stack([best, _at(positions, slots, -1)])
    values, where = lax.all_gather(message, axis_name, axis=message.ndim - 1, tiled=True)
    k = min(k, values.shape[-1])
    chosen = select(values, k, counts=need, highest=keys.highest)
    reached = _at(values, chosen, 2**31 - 1)
    threshold = reached.min(axis=-1, keepdims=True)
    # Devices are in the order of their ranks here, and ties in that of their positions.
    ties = ((chosen >= 0) & (reached == threshold)).sum(axis=-1, dtype=jnp.int32)
    earlier = jnp.where(values == threshold, capacity - 1 - where, -1)
    first = select(earlier, k, counts=ties, highest=capacity - 1)
    return threshold, _at(where, first, -1).max(axis=-1, keepdims=True)


def _at(x: Array, index: Array, other: int) -> Array:
    """``x [..., n]`` at ``index [..., m]``, ``other`` where that is -1."""
    return jnp.where(index >= 0, jnp.take_along_axis(x, jnp.maximum(index, 0), axis=-1), other)
