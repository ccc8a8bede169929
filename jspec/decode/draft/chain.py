"""Chains: a cheap drafter drafts for the model's sparse view, which drafts for the model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax.numpy as jnp

from jspec.config import shown, whole_number
from jspec.decode.draft.base import (
    Drafted,
    Drafter,
    SparseDrafter,
    TargetPass,
    alternating_scan,
    within_limits,
)
from jspec.decode.state import DecodeState, Models
from jspec.ops.commit import Rows, commit
from jspec.ops.sample import Role, greedy, sample
from jspec.ops.verify import Verified, verify_greedy
from jspec.policies import Dense, Guided, Policy
from jspec.typing import Array

if TYPE_CHECKING:
    from jspec.decode.settings import StepConfig


class Levels(NamedTuple):
    """The states of a chain's two drafters."""

    first: Any
    second: Any


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

    usual_gamma: ClassVar[int] = 12
    runs_model: ClassVar[bool] = True

    first: Drafter
    second: SparseDrafter
    inner: int = 4
    rounds: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.first, Drafter) or isinstance(self.first, Chain):
            raise TypeError(
                f"first={shown(self.first)} must be a drafter and no chain, as SuffixDraft() is"
            )
        if not isinstance(self.second, SparseDrafter):
            raise TypeError(
                f"second={shown(self.second)} must draft with the model itself, as SelfDraft() does"
            )
        cache_policy = self.first.cache_policy
        if self.first.guided is not None:
            raise ValueError(
                f"first={shown(self.first)} is guided by verification, which guides second alone; "
                "pass one that is not, as SuffixDraft() is"
            )
        if cache_policy.reads_queries and not isinstance(cache_policy, Dense):
            raise ValueError(
                f"first={shown(self.first)} keeps columns in the cache, which has room for those "
                "of second alone; pass one without, as SuffixDraft() is"
            )
        if self.first.takes_model and self.second.takes_model:
            raise ValueError(
                f"first={shown(self.first)} and second={shown(self.second)} both draft with "
                "models.draft, which is one model; pass second without quantized"
            )
        for name in ("inner", "rounds"):
            if (whole_number(getattr(self, name)) or 0) < 1:
                raise ValueError(f"{name}={shown(getattr(self, name))} must be at least 1")

    @property
    def cache_policy(self) -> Policy:
        return self.second.cache_policy

    @property
    def needs_model(self) -> bool:
        return self.first.needs_model

    @property
    def takes_model(self) -> bool:
        return self.first.takes_model or self.second.takes_model

    @property
    def learns_from_rejected(self) -> bool:
        return self.first.learns_from_rejected or self.second.learns_from_rejected

    @property
    def guided(self) -> Guided | None:
        return self.second.guided

    def prepare(self, models: Models) -> Models:
        return self.second.prepare(self.first.prepare(models))

    def init(self, models: Models, lengths: Array, capacity: int, gamma: int) -> Levels:
        return Levels(
            # It drafts up to ``inner`` tokens past those of the earlier rounds.
            self.first.init(models, lengths, capacity, gamma + self.inner),
            self.second.init(models, lengths, capacity, gamma),
        )

    def resumed(
        self, models: Models, drafter_state: Any, lengths: Array, capacity: int, gamma: int
    ) -> Levels:
        return Levels(
            self.first.resumed(models, drafter_state.first, lengths, capacity, gamma + self.inner),
            self.second.resumed(models, drafter_state.second, lengths, capacity, gamma),
        )

    def prefill(
        self,
        models: Models,
        drafter_state: Any,
        tokens: Array,
        positions: Array,
        config: StepConfig,
    ) -> Levels:
        pairs = zip((self.first, self.second), drafter_state, strict=True)
        return Levels(*(d.prefill(models, x, tokens, positions, config) for d, x in pairs))

    def grow(self, drafter_state: Any, capacity: int) -> Levels:
        return Levels(
            self.first.grow(drafter_state.first, capacity),
            self.second.grow(drafter_state.second, capacity),
        )

    def learn(self, state: DecodeState, target_pass: TargetPass, verified: Verified) -> DecodeState:
        return self._each(state, lambda drafter, state: drafter.learn(state, target_pass, verified))

    def rest(self, state: DecodeState, target_pass: TargetPass, verified: Verified) -> DecodeState:
        return self._each(state, lambda drafter, state: drafter.rest(state, target_pass, verified))

    def caught_up(self, models: Models, state: DecodeState, config: StepConfig) -> DecodeState:
        return self._each(state, lambda drafter, state: drafter.caught_up(models, state, config))

    def _each(
        self, state: DecodeState, take_up: Callable[[Drafter, DecodeState], DecodeState]
    ) -> DecodeState:
        """The state once ``take_up`` has changed the state of each of the two drafters."""
        pairs = zip((self.first, self.second), state.draft, strict=True)
        states = (
            take_up(x, dataclasses.replace(state, draft=drafter_state)).draft
            for x, drafter_state in pairs
        )
        return dataclasses.replace(state, draft=Levels(*states))

    def draft(
        self, models: Models, state: DecodeState, config: StepConfig
    ) -> tuple[Drafted, DecodeState]:
        gamma, begin, context_len = config.gamma, state.lengths, state.cache.lengths
        # A round may go up to the draft's end, and the outer step needs one token more.
        room = jnp.minimum(jnp.minimum(state.limits - begin - 1, state.draft_limits), gamma)
        room = jnp.maximum(room, 0)
        levels: Levels = state.draft
        inside = dataclasses.replace(
            state, limits=begin + room, done=state.done | (room == 0), draft=levels.first
        )
        inside = self.first.before_rounds(models, inside, config)
        policy, policy_params = self.second.view(models, levels.second, context_len)
        # Each round adds at least one token.
        rounds = min(self.rounds, gamma)
        logits = None
        if state.mode != "greedy":
            logits = jnp.zeros((len(begin), gamma, models.target.config.vocab_size), jnp.float32)

        def body(carried: tuple[DecodeState, Any, Any], _, is_refresh=False):
            inside, policy_params, logits = carried
            before = inside.lengths
            inside, policy_params, of_round = self._round(
                *(models, inside, context_len, (policy, policy_params), config),
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
        levels = levels._replace(first=self.first.undone(inside.draft, levels.first))
        return drafted, dataclasses.replace(state, cache=cache, draft=levels)

    def _round(
        self,
        models: Models,
        state: DecodeState,
        context_len: Array,
        view: tuple[Policy, Any],
        config: StepConfig,
        *,
        is_refresh: bool,
    ) -> tuple[DecodeState, Any, Array]:
        """Draft, check by a sparse pass, and commit within the draft.

        ``view``: that of the second drafter. ``state.draft`` is the first drafter's. Returns the
        state, the second policy's parameters for the next round, and the logits ``[B, g + 1, V]``.
        """
        inner = dataclasses.replace(config, gamma=min(self.inner, config.gamma), draft=self.first)
        drafted, state = self.first.draft(models, state, inner)
        drafted = within_limits(drafted, state, inner.gamma)
        tokens = jnp.concatenate([state.last_token[:, None], drafted.tokens], axis=1)
        index = jnp.arange(inner.gamma + 1, dtype=jnp.int32)[None]
        counts = (index <= drafted.lengths[:, None]) & ~state.done[:, None]
        positions = jnp.where(counts, state.cache.lengths[:, None] + index, -1)
        model = self.second.model_of(models)
        hidden, cache, policy_params = self.second.run(
            *(models, view, tokens, positions, state.cache, context_len, config),
            is_refresh=is_refresh,
        )
        logits = model.logits(hidden)
        if state.mode == "greedy":
            model_tokens = greedy(logits)
        else:
            model_tokens = sample(
                logits,
                state.sampling,
                state.lengths[:, None] + index,
                Role.DRAFT,
                filtered=state.mode == "filtered",
                implementation=config.backends.get("sample"),
            )
        verified = verify_greedy(
            drafted.tokens,
            model_tokens,
            drafted.lengths,
            state.stop_tokens,
            implementation=config.backends.get("verify_greedy"),
        )
        _, rows = commit(
            verified, state.limits, Rows(state.tokens, state.cache.lengths, state.done)
        )
        cache = cache.with_lengths(rows.cached)
        state = dataclasses.replace(state, cache=cache, tokens=rows.tokens, done=rows.done)
        return (
            self.first.learn(state, TargetPass(positions, hidden), verified),
            policy_params,
            logits,
        )


def _put(into: Array, rows: Array, begin: Array, counts: Array) -> Array:
    """``into [B, gamma, V]`` with the first ``counts [B]`` of ``rows [B, n, V]`` from ``begin``."""
    index = jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
    at = jnp.where(index < counts[:, None], begin[:, None] + index, into.shape[1])
    batch = jnp.arange(len(into))[:, None]
    return into.at[batch, at].set(rows.astype(into.dtype), mode="drop")
