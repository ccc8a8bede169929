"""Where draft tokens come from: the model over a window, earlier text, or a second model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from jspec.cache import KVCache, Window, dense, windowed
from jspec.config import ModelDraft, NgramDraft, StepConfig, StreamDraft
from jspec.decode.state import DecodeState
from jspec.ops.sample import Role, sample
from jspec.typing import Array, Model


@dataclasses.dataclass(frozen=True)
class Drafted:
    """``tokens`` int32 ``[B, gamma]``; ``lengths`` int32 ``[B]``: how many of them count;
    ``logits`` float32 ``[B, gamma, V]`` they were drawn from, None where the draft was certain;
    ``cache``: the draft model's cache afterwards, None without one."""

    tokens: Array
    lengths: Array
    logits: Array | None = None
    cache: KVCache | None = None


def propose(
    model: Model, state: DecodeState, config: StepConfig, draft_model: Model | None
) -> Drafted:
    """Draft up to gamma tokens a row, none beyond the row's limits and none for a row that is done.

    One token of the limit is left for the corrected or bonus token.
    """
    room = state.limits - state.lengths - 1
    most = jnp.minimum(jnp.minimum(room, state.draft_limits), config.gamma)
    most = jnp.where(state.done, 0, jnp.maximum(most, 0))
    match config.draft:
        case None:
            return Drafted(jnp.zeros((state.tokens.shape[0], 0), jnp.int32), most)
        case NgramDraft():
            drafted = _ngram(state, config.draft, config.gamma)
        case StreamDraft():
            drafted = _stream(model, state, config, config.draft)
        case ModelDraft():
            if draft_model is None or state.draft_cache is None:
                raise ValueError(
                    "draft=ModelDraft() needs a draft model: pass draft_model to start and to the "
                    "step"
                )
            drafted = _second_model(draft_model, state, config, state.draft_cache)
    return dataclasses.replace(drafted, lengths=jnp.minimum(drafted.lengths, most))


def _autoregressive(
    state: DecodeState,
    config: StepConfig,
    advance: Callable[[Array, Array, Array, Any], tuple[Array, Any]],
    cache: Any,
) -> tuple[Drafted, Any]:
    """Draw gamma tokens one by one from ``advance(step, tokens [B], positions [B], cache)``."""

    def body(carry, step):
        token, cache = carry
        positions = state.lengths + step
        logits, cache = advance(step, token, positions - 1, cache)
        if config.sampling == "greedy":
            token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            return (token, cache), (token, None)
        token = sample(
            logits[:, None],
            state.sampling,
            positions[:, None],
            Role.DRAFT,
            filtered=config.sampling == "filtered",
            implementation=config.implementation,
        )[:, 0]
        return (token, cache), (token, logits)

    (_, cache), (tokens, logits) = lax.scan(
        body, (last_token(state), cache), jnp.arange(config.gamma)
    )
    lengths = jnp.full(state.lengths.shape, config.gamma, jnp.int32)
    logits = None if logits is None else jnp.swapaxes(logits, 0, 1)
    return Drafted(tokens.T, lengths, logits), cache


def last_token(state: DecodeState) -> Array:
    """The last known token of each row, int32 ``[B]``: known, but not in the cache yet."""
    return jnp.take_along_axis(state.tokens, state.cache.lengths[:, None], axis=1)[:, 0]


def _stream(model: Model, state: DecodeState, config: StepConfig, draft: StreamDraft) -> Drafted:
    """Self-speculation over sinks and a recent window at their original positions."""
    window = Window.view(state.cache, draft.sinks, draft.window, spare=config.gamma)
    first = window.positions.shape[1] - config.gamma

    def advance(step, token, positions, window):
        slot = first + step
        marked = lax.dynamic_update_slice_in_dim(window.positions, positions[:, None], slot, axis=1)
        window = dataclasses.replace(window, positions=marked)
        attend = windowed(positions[:, None], slot, config.attention)
        hidden, window = model(token[:, None], positions[:, None], attend, window)
        return model.logits(hidden)[:, 0], window

    drafted, _ = _autoregressive(state, config, advance, window)
    return drafted


def _second_model(model: Model, state: DecodeState, config: StepConfig, cache: KVCache) -> Drafted:
    """A separate model drafts over its own dense cache.

    It is fed the last two tokens each time: after a fully accepted draft its cache lacks the last
    draft token, and feeding pairs catches up without a second program.
    """
    before = jnp.maximum(state.cache.lengths - 1, 0)
    previous = jnp.take_along_axis(state.tokens, before[:, None], axis=1)[:, 0]

    def advance(step, token, positions, carry):
        previous, cache = carry
        pair = jnp.stack([previous, token], axis=1)
        where = jnp.stack([positions - 1, positions], axis=1)
        where = jnp.where(state.done[:, None] | (where >= cache.capacity), -1, where)
        hidden, cache = model(pair, where, dense(where, config.attention), cache)
        return model.logits(hidden[:, 1:])[:, 0], (token, cache)

    drafted, (_, cache) = _autoregressive(state, config, advance, (previous, cache))
    return dataclasses.replace(drafted, cache=cache)


def _ngram(state: DecodeState, draft: NgramDraft, gamma: int) -> Drafted:
    """Prompt lookup: copy what followed the longest, then latest, earlier match of the suffix."""
    tokens, lengths = state.tokens, state.lengths
    batch, capacity = tokens.shape
    ends = jnp.arange(capacity)[None]
    matched = jnp.zeros((batch, capacity), jnp.int32)
    running = ends < lengths[:, None] - 1
    for back in range(draft.max_match):
        at = jnp.maximum(lengths - 1 - back, 0)
        wanted = jnp.where(lengths > back, jnp.take_along_axis(tokens, at[:, None], 1)[:, 0], -2)
        shifted = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-1)[:, :capacity]
        running = running & (shifted == wanted[:, None])
        matched = matched + running.astype(jnp.int32)
    best = matched.max(axis=1)
    end = capacity - 1 - jnp.argmax(jnp.flip(matched, axis=1), axis=1)
    # What follows may reach the end of the text before gamma tokens: it then goes on in a circle,
    # as a text that repeats itself does.
    period = jnp.maximum(lengths - 1 - end, 1)[:, None]
    found = jnp.take_along_axis(tokens, end[:, None] + 1 + jnp.arange(gamma)[None] % period, axis=1)
    return Drafted(found, jnp.where(best >= draft.min_match, gamma, 0).astype(jnp.int32))


__all__ = ["Drafted", "last_token", "propose"]
