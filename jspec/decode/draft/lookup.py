"""Prompt lookup: drafts that are copied from earlier text (Saxena 2023)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jspec.cache.cache import longer
from jspec.config import positive, shown, whole_number
from jspec.decode.draft.drafter import Drafted, Drafter, DrafterTraits, TargetPass
from jspec.decode.state import DecodeState, Models
from jspec.ops.verify import Verified
from jspec.typing import Array

COMPARED = 32  # tokens up to which matches in other rows are compared
DECAY = 0.7  # of the weight of a branch, per token
GROUP = 16  # tokens that are added to the index at a time, so that long prompts cost few passes


@dataclasses.dataclass(frozen=True)
class NgramDraft(Drafter):
    """What followed the latest, longest earlier match of the last tokens.

    A match of fewer than ``min_match`` tokens drafts nothing; ``max_match`` bounds the comparison.

    With several ``branches`` a draft is a tree of what followed so many of the longest matches, and
    gamma, at most 31, bounds its tokens; docs/drafting.md says where that pays.
    """

    min_match: int = 3
    max_match: int = 16
    branches: int = 1

    def __post_init__(self) -> None:
        shortest, longest_match = map(whole_number, (self.min_match, self.max_match))
        if shortest is None or longest_match is None or not 1 <= shortest <= longest_match:
            raise ValueError(
                f"min_match={shown(self.min_match)} must be a whole number in "
                f"[1, max_match={shown(self.max_match)}]"
            )
        positive("branches", self.branches)

    @property
    def traits(self) -> DrafterTraits:  # pyright: ignore[reportIncompatibleVariableOverride]
        branches = self.branches > 1
        return DrafterTraits(default_gamma=8, one_hot=True, branches=branches, runs_on_mesh=True)

    def draft(self, models: Models, state: DecodeState, gamma: int) -> tuple[Drafted, DecodeState]:
        tokens, lengths = state.tokens, state.lengths
        agreed = agreement(tokens, jnp.zeros_like(lengths), lengths, self.max_match)
        if self.branches > 1:
            agreed = jnp.where(agreed >= self.min_match, agreed, 0)
            return continuations(tokens, lengths, agreed, gamma, self.branches), state
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
    """What followed the longest earlier match of the end of ``text [B, S]``, the latest of equals.

    ``ends [B]``: tokens of each row; ``agreed [B, S]``: as `agreement` returns it. Returns tokens
    int32 ``[B, gamma]``, and the length of the match int32 ``[B]``; where that is 0, the tokens
    mean nothing.
    """
    latest = jnp.argmax(jnp.flip(agreed, axis=1), axis=1).astype(jnp.int32)
    end = text.shape[1] - 1 - latest
    # What follows may reach the end of the text before gamma tokens: it then goes on in a circle,
    # as a text that repeats itself does.
    period = jnp.maximum(ends - 1 - end, 1)[:, None]
    index = end[:, None] + 1 + jnp.arange(gamma, dtype=jnp.int32)[None] % period
    return jnp.take_along_axis(text, index, axis=1), agreed.max(axis=1)


def continuations(text: Array, ends: Array, agreed: Array, gamma: int, branches: int) -> Drafted:
    """A tree of what followed the ``branches`` longest earlier matches, the latest of equals.

    Of all continuations it has the gamma likeliest beginnings: matches count twice as much with
    each token that they are longer, and less with each token that follows. What followed the
    longest match comes first. Arguments as `continuation` takes them.
    """
    batch, capacity = text.shape
    row = jnp.arange(batch)[:, None]
    matched, back = lax.top_k(jnp.flip(agreed, axis=1), min(branches, capacity))
    end = capacity - 1 - back.astype(jnp.int32)
    period = jnp.maximum(ends[:, None] - 1 - end, 1)
    depth = jnp.arange(gamma, dtype=jnp.int32)[None, None]
    tokens = text[row[..., None], end[..., None] + 1 + depth % period[..., None]]
    # Two continuations have a node in common where they are the same up to there. [B, m, m, gamma]
    is_match = (matched > 0)[:, None, :, None]
    is_same = (tokens[:, :, None] == tokens[:, None]) & is_match
    is_same = jnp.cumprod(is_same.astype(jnp.int32), axis=3) == 1
    weight = jnp.exp2(jnp.maximum(matched - matched[:, :1], -64).astype(jnp.float32))
    weights = jnp.where(is_same, weight[:, None, :, None], 0).sum(axis=2)
    weights = weights * DECAY ** depth.astype(jnp.float32)
    # A node belongs to the first continuation that has it. [B, m, gamma]
    owner = jnp.argmax(is_same, axis=2).astype(jnp.int32)
    is_node = (owner == jnp.arange(matched.shape[1])[None, :, None]) & (matched > 0)[..., None]
    weights = jnp.where(is_node, weights, 0).reshape(batch, -1)
    heaviest, chosen = lax.top_k(weights, gamma)
    lengths = (heaviest > 0).sum(axis=1, dtype=jnp.int32)
    # In order of continuations and depths, in which a node comes after its parent.
    chosen = jnp.sort(jnp.where(heaviest > 0, chosen.astype(jnp.int32), weights.shape[1]), axis=1)
    number = jnp.zeros((batch, weights.shape[1]), jnp.int32)
    number = number.at[row, chosen].set(1 + depth[0], mode="drop").reshape(owner.shape)
    # A parent has more weight than its children: it was chosen where they were.
    parents = jnp.take_along_axis(number, owner, axis=1)
    parents = jnp.pad(parents, ((0, 0), (0, 0), (1, 0)))[..., :-1]
    tokens, parents = (
        jnp.take_along_axis(x.reshape(batch, -1), chosen, axis=1, mode="clip")
        for x in (tokens, parents)
    )
    return Drafted(tokens, lengths, parents=parents)


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


def _from_other_rows(
    text: Array, ends: Array, min_match: int, gamma: int
) -> tuple[Array, Array, Array]:
    """What followed a match of the end of each row of ``text [B, S]`` in another row.

    In each other row the latest match of the last ``min_match`` tokens counts, and of these the one
    that goes back furthest, by `COMPARED` tokens at most. ``ends [B]``: tokens of each row. Returns
    tokens int32 ``[B, gamma]``, the length of the match and how many tokens follow it, int32
    ``[B]``; where there is no match, the first two mean nothing and 0.
    """
    batch, capacity = text.shape
    row, position = (jnp.arange(n, dtype=jnp.int32) for n in (batch, capacity))

    def last(back: Array) -> Array:
        """The token so many before the last one of each row, -2 where it has none."""
        at = ends[:, None] - 1 - back[None]
        return jnp.where(at >= 0, jnp.take_along_axis(text, jnp.maximum(at, 0), axis=1), -2)

    is_other = row[:, None] != row[None]
    equal = is_other[..., None] & (position[None] < ends[:, None] - 1)[None]
    newest = last(jnp.arange(min_match, dtype=jnp.int32))
    for back in range(min_match):
        shifted = jnp.pad(text, ((0, 0), (back, 0)), constant_values=-1)[:, :capacity]
        equal = equal & (shifted[None] == newest[:, back, None, None])
    end = jnp.where(equal, position[None, None], -1).max(axis=2)  # [B, B]: -1 for no match
    back = jnp.arange(max(COMPARED, min_match), dtype=jnp.int32)
    at = end[..., None] - back[None, None]
    earlier = jnp.where(at >= 0, text[row[None, :, None], jnp.maximum(at, 0)], -1)
    agrees = earlier == last(back)[:, None]
    lengths = jnp.cumprod(agrees.astype(jnp.int32), axis=2).sum(axis=2, dtype=jnp.int32)
    best = jnp.argmax(lengths, axis=1)
    longest, end = lengths[row, best], end[row, best]
    index = end[:, None] + 1 + jnp.arange(gamma, dtype=jnp.int32)[None]
    tokens = text[best[:, None], jnp.minimum(index, capacity - 1)]
    return tokens, longest, jnp.minimum(ends[best] - 1 - end, gamma)


@dataclasses.dataclass(frozen=True)
class SuffixDraft(Drafter):
    """What followed the longest earlier match of the text's end, of any length, and the latest.

    A match of m tokens drafts up to ``factor`` times m of them, and one of fewer than ``min_match``
    nothing: longer matches are right for longer (SuffixDecoding, arXiv 2411.04975, section 4.2).
    The index of matches is part of the state, two integers a position.

    With ``other_rows`` it also drafts what followed the end of the text in another row of the
    batch, as in another answer to the same prompt, ended or not, where that match is longer. A step
    then compares the last ``min_match`` tokens of each row with all positions of all rows.
    """

    traits = DrafterTraits(default_gamma=8, one_hot=True, runs_on_mesh=True)

    min_match: int = 3
    factor: float = 4.0
    other_rows: bool = False

    def __post_init__(self) -> None:
        positive("min_match", self.min_match)
        if type(self.other_rows) is not bool:
            raise ValueError(f"other_rows={shown(self.other_rows)} must be True or False")
        if not math.isfinite(self.factor) or self.factor * self.min_match < 1:
            raise ValueError(
                f"factor={shown(self.factor)} must be finite and, times min_match="
                f"{self.min_match}, at least 1, so that the shortest match drafts a token"
            )

    def init(self, models: Models, batch: int, capacity: int, max_gamma: int) -> SuffixIndex:
        return SuffixIndex.empty(batch, capacity)

    def sync(
        self,
        models: Models,
        drafter_state: SuffixIndex,
        tokens: Array,
        lengths: Array,
        max_tokens: int,
        target_pass: TargetPass | None = None,
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
        following = jnp.full_like(longest, gamma)
        if self.other_rows and len(longest) > 1:
            others = _from_other_rows(whole.text, whole.length, self.min_match, gamma)
            is_longer = others[1] > longest
            draft_tokens = jnp.where(is_longer[:, None], others[0], draft_tokens)
            longest, following = (
                jnp.where(is_longer, other, x)
                for other, x in zip(others[1:], (longest, following), strict=True)
            )
        allowed = self.factor * longest.astype(jnp.float32)
        allowed = jnp.minimum(allowed.astype(jnp.int32), following)
        count = jnp.where(longest >= self.min_match, allowed, 0)
        return Drafted(draft_tokens, count), state

    def learn(self, state: DecodeState, target_pass: TargetPass, verified: Verified) -> DecodeState:
        max_tokens = verified.tokens.shape[1]
        index = state.draft.extended(state.tokens, state.cache.lengths, max_tokens)
        return dataclasses.replace(state, draft=index)
