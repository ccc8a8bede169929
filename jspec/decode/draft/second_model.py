"""A second, smaller model that drafts over a cache of its own."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp

from jspec.cache import Cache
from jspec.cache.layout import check_rings, layouts_of
from jspec.decode.draft.base import CATCH_UP, LACKING, Drafted, Drafter, TargetPass, autoregressive
from jspec.decode.state import DecodeState, Models
from jspec.ops.verify import Verified
from jspec.policies.attend import dense_attend
from jspec.typing import Array, Model

if TYPE_CHECKING:
    from jspec.decode.settings import StepConfig

MAX_PADDING = 1024  # tokens; vocabularies that differ by more are not those of one tokenizer
_MISSING = (
    "ModelDraft() needs a draft model: pass draft_model=, or jspec.Models(target, draft), to "
    "whatever starts decoding with draft=ModelDraft() and to each step"
)


def _required(models: Models) -> Model:
    if models.draft is None:
        raise ValueError(_MISSING)
    return models.draft


@dataclasses.dataclass(frozen=True)
class ModelDraft(Drafter):
    """Drafts with ``Models.draft``, which has the target's vocabulary but for padding.

    Of unequal vocabularies the longer one may only be padded: ids past the target's are never
    drafted, and ids past the draft model's have no mass in its drafts. A draft begins with the last
    two tokens: after a fully accepted draft the draft model's cache lacks the last draft token, and
    pairs add it without a second program.
    """

    runs_model: ClassVar[bool] = True

    def init(self, models: Models, lengths: Array, capacity: int, gamma: int) -> Cache:
        model = _required(models)
        draft_config, target = model.config, models.target.config
        if abs(draft_config.vocab_size - target.vocab_size) > MAX_PADDING:
            raise ValueError(
                f"the draft model's vocabulary of {draft_config.vocab_size} differs from the "
                f"target's {target.vocab_size}; they must be the same but for padding, of "
                f"{MAX_PADDING} tokens at most"
            )
        layouts = layouts_of(draft_config.layers, capacity, gamma)
        cache = Cache.create(draft_config.layers, layouts, len(lengths), model.dtype)
        return cache.with_lengths(lengths)

    def resumed(
        self, models: Models, drafter_state: Any, lengths: Array, capacity: int, gamma: int
    ) -> Cache:
        return drafter_state.with_lengths(lengths)

    def prefill(
        self,
        models: Models,
        drafter_state: Any,
        tokens: Array,
        positions: Array,
        config: StepConfig,
    ) -> Any:
        model, attend = _required(models), dense_attend(positions, backends=config.backends)
        return model(_known(tokens, model), positions, attend, drafter_state)[1]

    @property
    def needs_model(self) -> bool:
        return True

    def undone(self, drafter_state: Any, before: Any) -> Cache:
        return drafter_state.with_lengths(before.lengths)

    def grow(self, drafter_state: Any, capacity: int) -> Cache:
        return drafter_state.grown(capacity)

    def caught_up(self, models: Models, state: DecodeState, config: StepConfig) -> DecodeState:
        begin = jnp.maximum(state.draft.lengths - LACKING, 0)
        drafter_state = self._with_cached_tokens(models, state, begin, CATCH_UP, config)
        lengths = jnp.minimum(begin + CATCH_UP, state.cache.lengths)
        return dataclasses.replace(state, draft=drafter_state.with_lengths(lengths))

    def before_rounds(self, models: Models, state: DecodeState, config: StepConfig) -> DecodeState:
        # A draft begins with a pair of tokens, which adds all missing ones but the first.
        begin = jnp.maximum(state.cache.lengths - LACKING, 0)
        return dataclasses.replace(
            state, draft=self._with_cached_tokens(models, state, begin, 1, config)
        )

    def _with_cached_tokens(
        self, models: Models, state: DecodeState, begin: Array, count: int, config: StepConfig
    ) -> Cache:
        """Its cache with ``count`` of the target's cached tokens from ``begin [B]`` on."""
        positions = begin[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
        positions = jnp.where(positions < state.cache.lengths[:, None], positions, -1)
        tokens = jnp.take_along_axis(state.tokens, jnp.maximum(positions, 0), axis=1)
        return self.prefill(models, state.draft, tokens, positions, config)

    def draft(
        self, models: Models, state: DecodeState, config: StepConfig
    ) -> tuple[Drafted, DecodeState]:
        model = _required(models)
        if not isinstance(state.draft, Cache):
            raise ValueError(_MISSING)
        check_rings(state.draft.specs, state.draft.layouts, config.gamma)
        before = jnp.maximum(state.cache.lengths - 1, 0)
        previous = jnp.take_along_axis(state.tokens, before[:, None], axis=1)[:, 0]

        def advance(step, token, positions, carry):
            previous, cache = carry
            pair = jnp.stack([previous, token], axis=1)
            where = jnp.stack([positions - 1, positions], axis=1)
            where = jnp.where(state.beyond(where), -1, where)
            attend = dense_attend(where, backends=config.backends)
            hidden, cache = model(_known(pair, model), where, attend, cache)
            logits = model.logits(hidden[:, 1:])[:, 0]
            return _of_vocabulary(logits, models.target.config.vocab_size), (token, cache)

        drafted, (_, cache) = autoregressive(state, config, advance, (previous, state.draft))
        return drafted, dataclasses.replace(state, draft=cache)

    def learn(self, state: DecodeState, target_pass: TargetPass, verified: Verified) -> DecodeState:
        return dataclasses.replace(state, draft=state.draft.with_lengths(state.cache.lengths))

    def rest(self, state: DecodeState, target_pass: TargetPass, verified: Verified) -> DecodeState:
        return state


def _known(tokens: Array, model: Model) -> Array:
    """``tokens`` with the model's last one for those that it has no embedding of."""
    return jnp.minimum(tokens, model.config.vocab_size - 1)


def _of_vocabulary(logits: Array, size: int) -> Array:
    """``logits [B, V']`` as ``[B, size]``: cut, or padded with minus infinity."""
    missing = max(size - logits.shape[-1], 0)
    return jnp.pad(logits[:, :size], ((0, 0), (0, missing)), constant_values=-jnp.inf)
