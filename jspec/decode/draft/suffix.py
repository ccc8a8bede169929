"""Suffix drafts: lookup by the longest match of any length, whose lengths are kept in the state."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jspec.cache.cache import longer
from jspec.config import shown, whole_number
from jspec.decode.draft.drafter import Drafted, Drafter, DrafterTraits, TargetPass
from jspec.decode.draft.ngram import agreement, continuation
from jspec.decode.state import DecodeState, Models
from jspec.ops.verify import Verified
from jspec.typing import Array

GROUP = 16  # tokens that are added to the index at a time, so that long prompts cost few passes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SuffixIndex:
    """How long the text up to each position agrees with the end of the text.

    Attributes:
        text: int32 ``[B, S]``: the tokens so far, -1 after them.
        length: int32 ``[B]``: how many there are.
        agreed: int32 ``[B, S]``: the longest common suffix of ``text[:j + 1]`` and the whole, 0
            from the last token on.
    """

    text: Array
    length: Array
    agreed: Array

    @classmethod
    def empty(cls, batch: int, capacity: int) -> SuffixIndex:
        return cls(
            text=jnp.full((batch, capacity), -1, jnp.int32),
            length=jnp.zeros((batch,), jnp.int32),
            agreed=jnp.zeros((batch, capacity), jnp.int32),
        )

    def append(self, tokens: Array, counts: Array) -> SuffixIndex:
        """Append the first ``counts [B]`` of ``tokens [B, n]``.

        A match that goes on with all new tokens grows by them; any other match ends within them. So
        the cost depends on n alone, however long matches are.
        """
        batch, capacity = self.text.shape
        new = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        at = jnp.where(new < counts[:, None], self.length[:, None] + new, capacity)
        text = self.text.at[jnp.arange(batch)[:, None], at].set(tokens, mode="drop")
        length = self.length + counts
        within = agreement(text, self.length, length, tokens.shape[1])
        before = jnp.arange(capacity, dtype=jnp.int32)[None] - counts[:, None]
        old = jnp.take_along_axis(self.agreed, jnp.maximum(before, 0), axis=1)
        old = jnp.where(before >= 0, old, 0)
        agreed = within + jnp.where(within == counts[:, None], old, 0)
        return SuffixIndex(text, length, agreed)

    def extended(self, tokens: Array, lengths: Array, max_tokens: int) -> SuffixIndex:
        """The index of the first ``lengths [B]`` of ``tokens [B, S]``, or ``max_tokens`` more."""
        at = self.length[:, None] + jnp.arange(max_tokens, dtype=jnp.int32)[None]
        new = jnp.take_along_axis(tokens, jnp.minimum(at, tokens.shape[1] - 1), axis=1)
        return self.append(new, jnp.clip(lengths - self.length, 0, max_tokens))


@dataclasses.dataclass(frozen=True)
class SuffixDraft(Drafter):
    """What followed the longest earlier match of the text's end, of any length, and the latest.

    A match of m tokens drafts up to ``factor`` times m of them, and one of fewer than ``min_match``
    nothing: longer matches are right for longer (SuffixDecoding, arXiv 2411.04975, section 4.2).
    The index of matches is part of the state, two integers a position.
    """

    min_match: int = 3
    factor: float = 4.0

    def __post_init__(self) -> None:
        if (whole_number(self.min_match) or 0) < 1:
            raise ValueError(f"min_match={shown(self.min_match)} must be at least 1")
        if not math.isfinite(self.factor) or self.factor * self.min_match < 1:
            raise ValueError(
                f"factor={shown(self.factor)} must be finite and, times min_match="
                f"{self.min_match}, at least 1, so that the shortest match drafts a token"
            )

    @property
    def traits(self) -> DrafterTraits:
        return DrafterTraits(default_gamma=8, runs_on_mesh=True)

    def init(self, models: Models, batch: int, capacity: int, max_gamma: int) -> SuffixIndex:
        return SuffixIndex.empty(batch, capacity)

    def sync(
        self,
        models: Models,
        drafter_state: SuffixIndex,
        tokens: Array,
        lengths: Array,
        max_tokens: int,
    ) -> SuffixIndex:
        # An index cannot be cut, and need not be: `draft` does not change it.
        lengths = jnp.minimum(lengths, drafter_state.length + max_tokens)
        return lax.fori_loop(
            *(0, -(-max_tokens // GROUP)),
            lambda _, index: index.extended(tokens, lengths, GROUP),
            drafter_state,
        )

    def grow(self, drafter_state: Any, capacity: int) -> SuffixIndex:
        text, agreed = drafter_state.text, drafter_state.agreed
        text, agreed = longer(text, capacity, fill=-1), longer(agreed, capacity)
        return SuffixIndex(text, drafter_state.length, agreed)

    def draft(self, models: Models, state: DecodeState, gamma: int) -> tuple[Drafted, DecodeState]:
        whole = state.draft.append(state.last_token[:, None], jnp.ones_like(state.lengths))
        draft_tokens, longest = continuation(whole.text, whole.length, whole.agreed, gamma)
        allowed = jnp.minimum(self.factor * longest.astype(jnp.float32), gamma)
        count = jnp.where(longest >= self.min_match, allowed.astype(jnp.int32), 0)
        return Drafted(draft_tokens, count), state

    def learn(self, state: DecodeState, target_pass: TargetPass, verified: Verified) -> DecodeState:
        max_tokens = verified.tokens.shape[1]
        index = state.draft.extended(state.tokens, state.cache.lengths, max_tokens)
        return dataclasses.replace(state, draft=index)
