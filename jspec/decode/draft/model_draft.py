"""A second, smaller model that drafts over a cache of its own."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jspec.cache import Cache
from jspec.cache.layout import check_rings, layouts_of
from jspec.decode.draft.autoregressive import autoregressive
from jspec.decode.draft.drafter import Drafted, Drafter, DrafterTraits, TargetPass
from jspec.decode.state import DecodeState, Models
from jspec.ops.verify import Verified
from jspec.policies.dense import DenseAttend
from jspec.typing import Array, Model

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
    drafted, and ids past the draft model's have no mass in its drafts. Its state is a cache whose
    lengths say which tokens it has. A draft begins with the last two tokens: after a fully accepted
    draft the cache lacks the last draft token, and pairs add it without a second program.
    """

    traits = DrafterTraits(runs_model=True, needs_model=True)

    def init(self, models: Models, batch: int, capacity: int, max_gamma: int) -> Cache:
        model = _required(models)
        draft_config, target = model.config, models.target.config
        if abs(draft_config.vocab_size - target.vocab_size) > MAX_PADDING:
            raise ValueError(
                f"the draft model's vocabulary of {draft_config.vocab_size} differs from the "
                f"target's {target.vocab_size}; they must be the same but for padding, of "
                f"{MAX_PADDING} tokens at most"
            )
        layouts = layouts_of(draft_config.layers, capacity, max_gamma)
        return Cache.create(draft_config.layers, layouts, batch, model.dtype)

    def sync(
        self,
        models: Models,
        drafter_state: Cache,
        tokens: Array,
        lengths: Array,
        max_tokens: int,
        target_pass: TargetPass | None = None,
    ) -> Cache:
        model, begin = _required(models), jnp.minimum(drafter_state.lengths, lengths)
        end = jnp.minimum(begin + max_tokens, lengths)
        positions = begin[:, None] + jnp.arange(max_tokens, dtype=jnp.int32)[None]
        positions = jnp.where(positions < end[:, None], positions, -1)
        tokens = jnp.take_along_axis(tokens, jnp.maximum(positions, 0), axis=1)
        _, cache = model(_known(tokens, model), positions, DenseAttend(positions), drafter_state)
        return cache.with_lengths(end)

    def grow(self, drafter_state: Cache, capacity: int) -> Cache:
        return drafter_state.grown(capacity)

    def draft(self, models: Models, state: DecodeState, gamma: int) -> tuple[Drafted, DecodeState]:
        model = _required(models)
        if not isinstance(state.draft, Cache):
            raise ValueError(_MISSING)
        check_rings(state.draft.specs, state.draft.layouts, gamma)
        before = jnp.maximum(state.cache.lengths - 1, 0)
        previous = jnp.take_along_axis(state.tokens, before[:, None], axis=1)[:, 0]

        def advance(step, token, positions, carry):
            previous, cache = carry
            pair = jnp.stack([previous, token], axis=1)
            where = jnp.stack([positions - 1, positions], axis=1)
            where = jnp.where(state.beyond(where), -1, where)
            hidden, cache = model(_known(pair, model), where, DenseAttend(where), cache)
            logits = model.logits(hidden[:, 1:])[:, 0]
            return _of_vocabulary(logits, models.target.config.vocab_size), (token, cache)

        drafted, (_, cache) = autoregressive(state, gamma, advance, (previous, state.draft))
        # `learn` cuts it at what is committed, in rows that are done and at limits too.
        cache = cache.with_lengths(state.cache.lengths + gamma)
        return drafted, dataclasses.replace(state, draft=cache)

    def learn(self, state: DecodeState, target_pass: TargetPass, verified: Verified) -> DecodeState:
        lengths = jnp.minimum(state.draft.lengths, state.cache.lengths)
        return dataclasses.replace(state, draft=state.draft.with_lengths(lengths))


def _known(tokens: Array, model: Model) -> Array:
    """``tokens`` with the model's last one for those that it has no embedding of."""
    return jnp.minimum(tokens, model.config.vocab_size - 1)


def _of_vocabulary(logits: Array, size: int) -> Array:
    """``logits [B, V']`` as ``[B, size]``: cut, or padded with minus infinity."""
    missing = max(size - logits.shape[-1], 0)
    return jnp.pad(logits[:, :size], ((0, 0), (0, missing)), constant_values=-jnp.inf)
