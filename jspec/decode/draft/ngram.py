"""Prompt lookup: a draft that is copied from earlier text (Saxena 2023)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import jax.numpy as jnp

from jspec.config import shown, whole_number
from jspec.decode.draft.base import Drafted, Drafter
from jspec.decode.state import DecodeState, Models

if TYPE_CHECKING:
    from jspec.decode.settings import StepConfig


@dataclasses.dataclass(frozen=True)
class NgramDraft(Drafter):
    """What followed the latest, longest earlier match of the last tokens.

    A match of fewer than ``min_match`` tokens drafts nothing; ``max_match`` bounds the comparison.
    """

    usual_gamma: ClassVar[int] = 8

    min_match: int = 3
    max_match: int = 16

    def __post_init__(self) -> None:
        least, most = map(whole_number, (self.min_match, self.max_match))
        if least is None or most is None or not 1 <= least <= most:
            raise ValueError(
                f"min_match={shown(self.min_match)} must be a whole number in "
                f"[1, max_match={shown(self.max_match)}]"
            )

    def draft(
        self, models: Models, state: DecodeState, config: StepConfig
    ) -> tuple[Drafted, DecodeState]:
        tokens, lengths, gamma = state.tokens, state.lengths, config.gamma
        batch, capacity = tokens.shape
        ends = jnp.arange(capacity, dtype=jnp.int32)[None]
        matched = jnp.zeros((batch, capacity), jnp.int32)
        running = ends < lengths[:, None] - 1
        for back in range(self.max_match):
            at = jnp.maximum(lengths - 1 - back, 0)
            last = jnp.take_along_axis(tokens, at[:, None], 1)[:, 0]
            wanted = jnp.where(lengths > back, last, -2)
            shifted = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-1)[:, :capacity]
            running = running & (shifted == wanted[:, None])
            matched = matched + running.astype(jnp.int32)
        best = matched.max(axis=1)
        latest = jnp.argmax(jnp.flip(matched, axis=1), axis=1).astype(jnp.int32)
        end = capacity - 1 - latest
        # What follows may reach the end of the text before gamma tokens: it then goes on in a
        # circle, as a text that repeats itself does.
        period = jnp.maximum(lengths - 1 - end, 1)[:, None]
        index = end[:, None] + 1 + jnp.arange(gamma, dtype=jnp.int32)[None] % period
        found = jnp.take_along_axis(tokens, index, axis=1)
        count = jnp.where(best >= self.min_match, gamma, 0).astype(jnp.int32)
        return Drafted(found, count), state
