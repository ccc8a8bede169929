"""Room for longer rows while they are decoded: capacity that follows the context."""

from __future__ import annotations

import dataclasses

from jspec.cache.cache import longer
from jspec.config import shown, whole_number
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState

START = 16384  # positions a row that `generate` gives at once where requests need more


def grow_capacity(state: DecodeState, capacity: int, config: StepConfig) -> DecodeState:
    """The same batch with room for ``capacity`` positions per row.

    The cache's columns are copied one after the other, and the old memory of each is freed, so that
    at most one of them is in memory twice. Programs are compiled for each capacity: double it
    rather than add to it. On a mesh each device makes room for its own share, in whole blocks, and
    nothing is sent.

    Args:
        state: The batch. It is donated: use the returned one.
        capacity: Positions per row, at least the present ones.
        config: The config of the steps, whose drafter makes room too.

    Returns:
        The batch with more room.

    Raises:
        ValueError: For a capacity below the present one.
    """
    present = state.tokens.shape[1]
    if (whole_number(capacity) or 0) < present:
        raise ValueError(
            f"capacity={shown(capacity)} must be at least the present one, {present} positions"
        )
    draft = config.draft.grow(state.draft, capacity)
    tokens = longer(state.tokens, capacity, fill=-1)
    return dataclasses.replace(state, cache=state.cache.grown(capacity), tokens=tokens, draft=draft)


def first_capacity(longest_prompt: int, needed: int) -> int:
    """Positions per row that `generate` starts with: twice the prompt or `START`, if so many are
    needed.
    """
    return min(needed, max(START, 2 * longest_prompt))
