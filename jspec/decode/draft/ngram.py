"""Prompt lookup: a draft that is copied from earlier text (Saxena 2023)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import jax.numpy as jnp

from jspec.config import shown, whole_number
from jspec.decode.draft.base import Drafted, Drafter
from jspec.decode.draft.lookup import agreement, continuation
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
        shortest, longest_match = map(whole_number, (self.min_match, self.max_match))
        if shortest is None or longest_match is None or not 1 <= shortest <= longest_match:
            raise ValueError(
                f"min_match={shown(self.min_match)} must be a whole number in "
                f"[1, max_match={shown(self.max_match)}]"
            )

    def draft(
        self, models: Models, state: DecodeState, config: StepConfig
    ) -> tuple[Drafted, DecodeState]:
        tokens, lengths = state.tokens, state.lengths
        agreed = agreement(tokens, jnp.zeros_like(lengths), lengths, self.max_match)
        draft_tokens, longest = continuation(tokens, lengths, agreed, config.gamma)
        count = jnp.where(longest >= self.min_match, config.gamma, 0).astype(jnp.int32)
        return Drafted(draft_tokens, count), state
