"""A second, smaller model drafts over a cache of its own."""

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

MOST_PADDING = 1024  # tokens; vocabularies that differ by more are not those of one tokenizer
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
    """The draft model of `jspec.Models`, which has the target's vocabulary but for padding.

    Of unequal vocabularies the longer one may only be padded: what lies beyond the target's is
    never drafted, and what lies beyond the draft model's has no mass in its drafts. The draft model
    is fed the last two tokens each time: after a fully accepted draft its cache lacks the last
    draft token, and feeding pairs catches up without a second program.
    """

    runs_model: ClassVar[bool] = True

    def init(self, models: Models, lengths: Array, capacity: int, gamma: int) -> Cache:
        model = _required(models)
        own, target = model.config, models.target.config
        if abs(own.vocab_size - target.vocab_size) > MOST_PADDING:
            raise ValueError(
                f"the draft model's vocabulary of {own.vocab_size} differs from the target's "
                f"{target.vocab_size}; they must be the same but for padding, of {MOST_PADDING} "
                "tokens at most"
            )
        layouts = layouts_of(own.layers, capacity, gamma)
        cache = Cache.create(own.layers, layouts, len(lengths), model.dtype)
        return cache.with_lengths(lengths)

    def resumed(self, models: Models, own: Any, lengths: Array, capacity: int, gamma: int) -> Cache:
        return own.with_lengths(lengths)

    def prefill(
        self, models: Models, own: Any, tokens: Array, positions: Array, config: StepConfig
    ) -> Any:
        model, attend = _required(models), dense_attend(positions, backends=config.backends)
        return model(_known(tokens, model), positions, attend, own)[1]

    @property
    def needs_model(self) -> bool:
        return True

    @property
    def may_end_early(self) -> bool:
        return True

    def undone(self, own: Any, before: Any) -> Cache:
        return own.with_lengths(before.lengths)

    def grow(self, own: Any, capacity: int) -> Cache:
        return own.grown(capacity)

    def caught_up(self, models: Models, state: DecodeState, config: StepConfig) -> DecodeState:
        begin = jnp.maximum(state.draft.lengths - LACKING, 0)
        own = self._taken_up(models, state, begin, CATCH_UP, config)
        lengths = jnp.minimum(begin + CATCH_UP, state.cache.lengths)
        return dataclasses.replace(state, draft=own.with_lengths(lengths))

    def before_rounds(self, models: Models, state: DecodeState, config: StepConfig) -> DecodeState:
        # The pairs of the draft take up all that it may lack but the first.
        begin = jnp.maximum(state.cache.lengths - LACKING, 0)
        return dataclasses.replace(state, draft=self._taken_up(models, state, begin, 1, config))

    def _taken_up(
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
