"""Prompt lookup: a draft that is copied from earlier text (Saxena 2023)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jspec.config import shown, whole_number
from jspec.decode.draft.drafter import Drafted, Drafter, DrafterTraits
from jspec.decode.state import DecodeState, Models
from jspec.typing import Array


@dataclasses.dataclass(frozen=True)
class NgramDraft(Drafter):
    """What followed the latest, longest earlier match of the last tokens.

    A match of fewer than ``min_match`` tokens drafts nothing; ``max_match`` bounds the comparison.
    """

    min_match: int = 3
    max_match: int = 16

    def __post_init__(self) -> None:
        shortest, longest_match = map(whole_number, (self.min_match, self.max_match))
        if shortest is None or longest_match is None or not 1 <= shortest <= longest_match:
            raise ValueError(
                f"min_match={shown(self.min_match)} must be a whole number in "
                f"[1, max_match={shown(self.max_match)}]"
            )

    @property
    def traits(self) -> DrafterTraits:
        return DrafterTraits(default_gamma=8, runs_on_mesh=True)

    def draft(self, models: Models, state: DecodeState, gamma: int) -> tuple[Drafted, DecodeState]:
        tokens, lengths = state.tokens, state.lengths
        agreed = agreement(tokens, jnp.zeros_like(lengths), lengths, self.max_match)
        draft_tokens, longest = continuation(tokens, lengths, agreed, gamma)
        count = jnp.where(longest >= self.min_match, gamma, 0).astype(jnp.int32)
        return Drafted(draft_tokens, count), state


def agreement(text: Array, begins: Array, ends: Array, max_length: int) -> Array:
    """How many tokens up to each position equal the last ones of ``text [B, S]``.

    The text of a row goes up to ``ends [B]``. Its tokens are compared from the last one back, down
    to ``begins [B]`` and at most ``max_length`` of them. Returns int32 ``[B, S]``, which is 0 from
    the last token on, as that would agree with itself.
    """
    batch, capacity = text.shape
    position = jnp.arange(capacity, dtype=jnp.int32)[None]
    agreed = jnp.zeros((batch, capacity), jnp.int32)
    running = position < ends[:, None] - 1
    for back in range(max_length):
        at = ends - 1 - back
        last = jnp.take_along_axis(text, jnp.maximum(at, 0)[:, None], 1)[:, 0]
        expected = jnp.where(at >= begins, last, -2)
        shifted = jnp.pad(text, ((0, 0), (back, 0)), constant_values=-1)[:, :capacity]
        running = running & (shifted == expected[:, None])
        agreed = agreed + running.astype(jnp.int32)
    return agreed


def continuation(text: Array, ends: Array, agreed: Array, gamma: int) -> tuple[Array, Array]:
    """What followed the longest earlier match of the end of ``text``, the latest of equals.

    Args:
        text: int32 ``[B, S]``: the tokens of each row.
        ends: int32 ``[B]``: how many of them there are.
        agreed: int32 ``[B, S]``: as `agreement` returns it.
        gamma: How many tokens to return.

    Returns:
        Tokens int32 ``[B, gamma]``, and the length of the match int32 ``[B]``; where that is 0, the
        tokens mean nothing.
    """
    latest = jnp.argmax(jnp.flip(agreed, axis=1), axis=1).astype(jnp.int32)
    end = text.shape[1] - 1 - latest
    # What follows may reach the end of the text before gamma tokens: it then goes on in a circle,
    # as a text that repeats itself does.
    period = jnp.maximum(ends - 1 - end, 1)[:, None]
    index = end[:, None] + 1 + jnp.arange(gamma, dtype=jnp.int32)[None] % period
    return jnp.take_along_axis(text, index, axis=1), agreed.max(axis=1)
