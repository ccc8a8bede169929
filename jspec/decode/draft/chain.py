"""Chains: a cheap drafter drafts for the model's sparse view, which drafts for the model."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jspec.cache import Cache
from jspec.config import positive, refuse_class, shown
from jspec.decode.draft.autoregressive import (
    alternating_scan,
    drawn,
    max_draft_lengths,
    within_limits,
)
from jspec.decode.draft.drafter import Drafted, Drafter, DrafterTraits, TargetPass, learn_with
from jspec.decode.draft.self_draft import SparseDrafter
from jspec.decode.state import DecodeState, Models, vocabulary_axes
from jspec.ops.commit import Rows, commit
from jspec.ops.verify import Verified, verify_greedy
from jspec.policies import Dense, Guided, Policy
from jspec.sharding import varying_over
from jspec.typing import Array, Model

Levels = tuple[Any, Any]  # the states of a chain's two drafters


@dataclasses.dataclass(frozen=True)
class Chain(Drafter):
    """A draft in ``rounds``: ``first`` drafts ``inner`` tokens, and one pass of ``second`` checks
    them.

    A round adds what ``second`` would have drafted by itself: the tokens of ``first`` that it
    accepts, and one more. So the tokens and their law are those of ``second``, with fewer passes:
    each token is drawn from its logits with its own random number, and a token of ``first`` is
    accepted where it is the same (docs/sampling.md, *Chains*). The first query of a round makes its
    selection. gamma bounds the tokens of all rounds; more than ``rounds * (inner + 1)`` are never
    drafted.
    """

    first: Drafter
    second: SparseDrafter
    inner: int = 4
    rounds: int = 4

    def __post_init__(self) -> None:
        refuse_class("first", self.first)
        refuse_class("second", self.second)
        if not isinstance(self.first, Drafter) or isinstance(self.first, Chain):
            raise TypeError(
                f"first={shown(self.first)} must be a drafter and no chain, as SuffixDraft() is"
            )
        if not isinstance(self.second, SparseDrafter):
            raise TypeError(
                f"second={shown(self.second)} must draft with the model itself, as SelfDraft() does"
            )
        cache_policy = self.first.cache_policy
        if self.first.collect_policy is not None:
            raise ValueError(
                f"first={shown(self.first)} is guided by verification, which guides second alone; "
                "pass one that is not, as SuffixDraft() is"
            )
        if cache_policy.reads_queries and not isinstance(cache_policy, Dense):
            raise ValueError(
                f"first={shown(self.first)} keeps columns in the cache, which has room for those "
                "of second alone; pass one without, as SuffixDraft() is"
            )
        first, second = self.first.traits, self.second.traits
        if (first.needs_model or first.makes_model) and second.makes_model:
            raise ValueError(
                f"first={shown(self.first)} and second={shown(self.second)} both draft with "
                "models.draft, which is one model; pass second without quantized"
            )
        for name in ("inner", "rounds"):
            positive(name, getattr(self, name))

    @property
    def traits(self) -> DrafterTraits:  # pyright: ignore[reportIncompatibleVariableOverride]
        first, second = self.first.traits, self.second.traits
        return DrafterTraits(
            default_gamma=12,
            runs_model=True,
            needs_model=first.needs_model,
            makes_model=first.makes_model or second.makes_model,
            runs_on_mesh=first.runs_on_mesh
            and second.runs_on_mesh
            and self.first.cache_policy.runs_on_mesh,
            learns_from_rejected=first.learns_from_rejected or second.learns_from_rejected,
        )

    @property
    def cache_policy(self) -> Policy:
        return self.second.cache_policy

    @property
    def collect_policy(self) -> Guided | None:
        return self.second.collect_policy

    def prepare(self, models: Models) -> Models:
        return self.second.prepare(self.first.prepare(models))

    def init(self, models: Models, batch: int, capacity: int, max_gamma: int) -> Levels:
        # It drafts up to ``inner`` tokens past those of the earlier rounds.
        first = self.first.init(models, batch, capacity, max_gamma + self.inner)
        return first, self.second.init(models, batch, capacity, max_gamma)

    def sync(
        self,
        models: Models,
        drafter_state: Levels,
        tokens: Array,
        lengths: Array,
        max_tokens: int,
        target_pass: TargetPass | None = None,
    ) -> Levels:
        first, second = drafter_state
        first = self.first.sync(models, first, tokens, lengths, max_tokens)
        return first, self.second.sync(models, second, tokens, lengths, max_tokens, target_pass)

    def grow(self, drafter_state: Levels, capacity: int) -> Levels:
        first, second = drafter_state
        return self.first.grow(first, capacity), self.second.grow(second, capacity)

    def learn(self, state: DecodeState, target_pass: TargetPass, verified: Verified) -> DecodeState:
        pairs = zip((self.first, self.second), state.draft, strict=True)
        states = (
            learn_with(drafter, dataclasses.replace(state, draft=x), target_pass, verified).draft
            for drafter, x in pairs
        )
        return dataclasses.replace(state, draft=tuple(states))

    def draft(self, models: Models, state: DecodeState, gamma: int) -> tuple[Drafted, DecodeState]:
        begin, context_len = state.lengths, state.cache.lengths
        first, second = state.draft
        if self.first.traits.needs_model:
            # A draft takes up one missing token by itself. After a draft of a chain that was
            # accepted whole there are two: the last of the first drafter, and that of the second.
            first = self.first.sync(models, first, state.tokens, context_len, 1)
        # A round may go up to the draft's end, and the outer step needs one token more.
        max_lengths = max_draft_lengths(state, gamma)
        inside = dataclasses.replace(
            state, limits=begin + max_lengths, done=state.done | (max_lengths == 0), draft=first
        )
        policy, policy_params = self.second.view(models, second, state.cache)
        # Each round adds at least one token.
        rounds = min(self.rounds, gamma)
        logits = None
        if state.mode != "greedy":
            logits = _no_logits(models.target, len(begin), gamma)

        def body(carried: tuple[DecodeState, Any, Any], _, is_refresh=False):
            inside, policy_params, logits = carried
            before = inside.lengths
            inside, policy_params, of_round = self._round(
                *(models, inside, context_len, (policy, policy_params), gamma),
                is_refresh=is_refresh,
            )
            if logits is not None:
                logits = _put(logits, of_round, before - begin, inside.lengths - before)
            return (inside, policy_params, logits), None

        again, every = functools.partial(body, is_refresh=True), self.second.refresh
        (inside, _, logits), _ = alternating_scan(
            body, again, every, (inside, policy_params, logits), rounds
        )
        index = begin[:, None] + jnp.arange(gamma, dtype=jnp.int32)[None]
        index = jnp.minimum(index, state.tokens.shape[1] - 1)
        tokens = jnp.take_along_axis(inside.tokens, index, axis=1)
        drafted = Drafted(tokens, inside.lengths - begin, logits)
        cache = inside.cache.with_lengths(context_len)
        levels = _restored(inside.draft, first), second
        return drafted, dataclasses.replace(state, cache=cache, draft=levels)

    def _round(
        self,
        models: Models,
        state: DecodeState,
        context_len: Array,
        view: tuple[Policy, Any],
        gamma: int,
        *,
        is_refresh: bool,
    ) -> tuple[DecodeState, Any, Array]:
        """Draft, check by a sparse pass, and commit within the draft.

        ``view``: that of the second drafter. ``state.draft`` is the first drafter's. Returns the
        state, the second policy's parameters for the next round, and the logits ``[B, g + 1, V]``.
        """
        inner = min(self.inner, gamma)
        drafted, state = self.first.draft(models, state, inner)
        drafted = within_limits(drafted.first_path, state, inner)
        tokens = jnp.concatenate([state.last_token[:, None], drafted.tokens], axis=1)
        index = jnp.arange(inner + 1, dtype=jnp.int32)[None]
        counts = (index <= drafted.lengths[:, None]) & ~state.done[:, None]
        positions = jnp.where(counts, state.cache.lengths[:, None] + index, -1)
        model = self.second.model_of(models)
        hidden, cache, policy_params = self.second.run(
            *(models, view, tokens, positions, state.cache, context_len, gamma),
            is_refresh=is_refresh,
        )
        logits = model.logits(hidden)
        token_positions, axes = state.lengths[:, None] + index, vocabulary_axes(models.target)
        if state.processing is not None:
            logits = state.processing.process(logits, drafted.tokens, axes)
        model_tokens = drawn(state, logits, token_positions, axes)
        verified = verify_greedy(drafted.tokens, model_tokens, drafted.lengths, state.stop_tokens)
        committed, rows = commit(
            verified, state.limits, Rows(state.tokens, state.cache.lengths, state.done)
        )
        if state.processing is not None:
            processing = state.processing.extended(committed[:, 2:])
            state = dataclasses.replace(state, processing=processing)
        cache = cache.with_lengths(rows.cached)
        state = dataclasses.replace(state, cache=cache, tokens=rows.tokens, done=rows.done)
        return (
            learn_with(self.first, state, TargetPass(positions, hidden), verified),
            policy_params,
            logits,
        )


def _restored(after: Any, before: Any) -> Any:
    """The first drafter's state once the rounds are over, in which it learned from drafts.

    It is that of before, except for a `Cache`, of which ``before`` would be a second copy: the
    tokens of the rounds stay in it until `Drafter.learn` cuts it.
    """
    return jax.tree.map(
        lambda after, before: after if isinstance(after, Cache) else before,
        *(after, before),
        is_leaf=lambda node: isinstance(node, Cache),
    )


def _no_logits(model: Model, batch: int, gamma: int) -> Array:
    """Zeros float32 ``[B, gamma, V]``; on a mesh of this device's share of the vocabulary."""
    size, axes = model.config.vocab_size, vocabulary_axes(model)
    if axes is None:
        return jnp.zeros((batch, gamma, size), jnp.float32)
    logits = jnp.zeros((batch, gamma, size // lax.axis_size(axes)), jnp.float32)
    return varying_over(frozenset(axes), logits)


def _put(into: Array, rows: Array, begin: Array, counts: Array) -> Array:
    """``into [B, gamma, V]`` with the first ``counts [B]`` of ``rows [B, n, V]`` from ``begin``."""
    index = jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
    at = jnp.where(index < counts[:, None], begin[:, None] + index, into.shape[1])
    batch = jnp.arange(len(into))[:, None]
    return into.at[batch, at].set(rows.astype(into.dtype), mode="drop")
