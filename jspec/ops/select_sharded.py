"""Exact selection of the best positions of rows whose scores are shared by several devices.

A radix select: the digits of a score, then, among equal scores, those of its position. For each
digit the devices sum their histograms; nothing but counts is exchanged.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from jspec.ops.hash import lengths_or
from jspec.ops.selection import check_budget, select, sort_keys
from jspec.ops.vocabulary import Axes
from jspec.typing import Array

DIGIT = 11  # bits of a score in a histogram: three of them, of 8 KiB a row


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
    with the scores in the order of their positions.

    Args:
        scores: ``[B, n]`` or ``[B, K, n]``, of this device's slots.
        positions: int32 ``[B or 1, n]``, ascending and below ``capacity``, -1 for an empty slot; no
            two devices of the axis have the same one.
        k: positions that are selected of a row, at most.
        axis_name: the mesh axes that share the positions.
        capacity: the bound of the positions.
        counts: as in `jspec.ops.select`.
        lengths: int32 ``[B]``, positions of each row over all devices.
        sinks: as in `jspec.ops.select`.
        recent: as in `jspec.ops.select`.
        highest: as in `jspec.ops.select`; with it one histogram is exchanged, without it three.

    Returns:
        int32 ``[..., min(k, n)]``: slots, then -1.

    Raises:
        ValueError: for a budget that does not fit.
    """
    check_budget(k, sinks, recent)
    lead = scores.shape[:-1]
    lengths = lengths_or(lengths, lead, capacity)[..., None]
    max_counts = jnp.minimum(k, lengths)
    counts = (
        max_counts
        if counts is None
        else jnp.minimum(lengths_or(counts, lead, k)[..., None], max_counts)
    )
    positions = positions.reshape(-1, *[1] * (scores.ndim - 2), positions.shape[-1])
    positions = jnp.broadcast_to(positions, scores.shape)
    among = (positions >= 0) & (positions < lengths)
    forced = (positions < sinks) | (positions >= lengths - recent)
    digits = [*_of_scores(scores, forced, highest), *_of_positions(positions, capacity)]
    selected = jnp.zeros(scores.shape, bool)
    need = jnp.maximum(counts, 0)
    for digit, base in digits:
        above, among, need = _split(digit, base, among, need, axis_name)
        selected = selected | above
    selected = selected | (among & (need > 0))
    number = selected.sum(axis=-1, dtype=jnp.int32)
    return select(selected.astype(jnp.int32), min(k, scores.shape[-1]), counts=number, highest=1)


def _of_scores(scores: Array, forced: Array, highest: int | None) -> list[tuple[Array, int]]:
    """Digits of scores, each with its base; forced positions are equal and above all others."""
    if highest is not None:
        return [(jnp.where(forced, highest + 2, scores + 1), highest + 3)]
    keys = jnp.where(forced, 0, sort_keys(scores))
    above = 2 ** (32 - 2 * DIGIT)
    first = jnp.where(forced, above, (keys >> 2 * DIGIT).astype(jnp.int32))
    pieces = (keys >> DIGIT, keys)
    rest = [((piece & (2**DIGIT - 1)).astype(jnp.int32), 2**DIGIT) for piece in pieces]
    return [(first, above + 1), *rest]


def _of_positions(positions: Array, capacity: int) -> list[tuple[Array, int]]:
    """Digits that are larger for earlier positions; together they are unique."""
    bits = max(capacity - 1, 1).bit_length()
    low = bits // 2
    later = capacity - 1 - positions
    return [(later >> low, 2 ** (bits - low)), (later & (2**low - 1), 2**low)]


def _split(
    digit: Array, base: int, among: Array, need: Array, axis_name: Axes
) -> tuple[Array, Array, Array]:
    """Split ``among`` at the digit with which ``need [..., 1]`` positions are reached.

    Returns the positions above that digit, those at it, and how many of the latter are needed.
    """
    rows = digit.reshape(-1, digit.shape[-1])
    where = jnp.where(among.reshape(rows.shape), base - 1 - rows, base)
    index = jnp.arange(len(rows), dtype=jnp.int32)[:, None]
    falling = jnp.zeros((len(rows), base), jnp.int32).at[index, where].add(1, mode="drop")
    reached = jnp.cumsum(lax.psum(falling, axis_name), axis=-1)
    reached = reached.reshape(*digit.shape[:-1], base)
    # Where fewer are among them than needed, it is past the last digit, and all of them are above.
    at = (reached < need).sum(axis=-1, keepdims=True, dtype=jnp.int32)
    before = jnp.take_along_axis(reached, jnp.maximum(at - 1, 0), axis=-1)
    before = jnp.where(at > 0, before, 0)
    threshold = base - 1 - at
    return among & (digit > threshold), among & (digit == threshold), need - before
