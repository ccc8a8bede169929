"""Suffix drafts: lookup by the longest match of any length, whose lengths are kept in the state."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jspec.cache.cache import longer
from jspec.config import shown, whole_number
from jspec.decode.draft.base import Drafted, Drafter, TargetPass
from jspec.decode.draft.lookup import agreement, continuation
from jspec.decode.state import DecodeState, Models
from jspec.ops.verify import Verified
from jspec.typing import Array

if TYPE_CHECKING:
    from jspec.decode.settings import StepConfig

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


@dataclasses.dataclass(frozen=True)
class SuffixDraft(Drafter):
    """What followed the longest earlier match of the text's end, of any length, and the latest.

    A match of m tokens drafts up to ``factor`` times m of them, and one of fewer than ``min_match``
    nothing: longer matches are right for longer (SuffixDecoding, arXiv 2411.04975, section 4.2).
    The index of matches is part of the state, two integers a position.
    """

    usual_gamma: ClassVar[int] = 8

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

    def init(self, models: Models, lengths: Array, capacity: int, gamma: int) -> SuffixIndex:
        return SuffixIndex.empty(len(lengths), capacity)

    def prefill(
        self,
        models: Models,
        drafter_state: Any,
        tokens: Array,
        positions: Array,
        config: StepConfig,
    ) -> SuffixIndex:
        def grouped(x: Array) -> Array:
            x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % GROUP)), constant_values=-1)
            return x.reshape(len(x), -1, GROUP).swapaxes(0, 1)

        def take(
            drafter_state: SuffixIndex, group: tuple[Array, Array]
        ) -> tuple[SuffixIndex, None]:
            tokens, positions = group
            return drafter_state.append(tokens, (positions >= 0).sum(axis=1, dtype=jnp.int32)), None

        return lax.scan(take, drafter_state, (grouped(tokens), grouped(positions)))[0]

    def grow(self, drafter_state: Any, capacity: int) -> SuffixIndex:
        text, agreed = (
            longer(drafter_state.text, capacity, fill=-1),
            longer(drafter_state.agreed, capacity),
        )
        return SuffixIndex(text, drafter_state.length, agreed)

    def draft(
        self, models: Models, state: DecodeState, config: StepConfig
    ) -> tuple[Drafted, DecodeState]:
        whole = state.draft.append(state.last_token[:, None], jnp.ones_like(state.lengths))
        draft_tokens, longest = continuation(whole.text, whole.length, whole.agreed, config.gamma)
        allowed = jnp.minimum(self.factor * longest.astype(jnp.float32), config.gamma)
        count = jnp.where(longest >= self.min_match, allowed.astype(jnp.int32), 0)
        return Drafted(draft_tokens, count), state

    def learn(self, state: DecodeState, target_pass: TargetPass, verified: Verified) -> DecodeState:
        index: SuffixIndex = state.draft
        new = jnp.arange(verified.tokens.shape[1], dtype=jnp.int32)[None]
        at = jnp.minimum(index.length[:, None] + new, state.tokens.shape[1] - 1)
        tokens = jnp.take_along_axis(state.tokens, at, axis=1)
        index = index.append(tokens, state.cache.lengths - index.length)
        return dataclasses.replace(state, draft=index)
