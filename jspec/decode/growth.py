"""Room for longer rows while they are decoded: capacity that follows the context."""

from __future__ import annotations

import dataclasses

from jspec.cache.cache import longer
from jspec.config import shown, whole_number
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState

START = 16384  # positions a row that `generate` gives at once where requests need more


def grow_capacity(state: DecodeState, capacity: int, config: StepConfig) -> DecodeState:
    """The same batch with room for ``capacity`` positions a row.

    ``state`` is donated: use the returned one. Each column of the cache is copied once, one after
    the other, and its old memory is freed, so that at most one is held twice. Programs are compiled
    for each capacity: double it rather than add to it. ``config``: of the steps, whose drafter
    makes room as well. On a mesh each device makes room for its own share, in whole blocks, and
    nothing is sent. Raises `ValueError` for a capacity below the present one.
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
    """What `generate` starts with where rows may need more: twice the prompt, or `START`."""
    return min(needed, max(START, 2 * longest_prompt))
