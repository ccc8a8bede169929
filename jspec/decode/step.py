"""One speculative step: draft, verify, commit; and a chunk of steps in one program."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jspec.cache import KVCache, dense
from jspec.config import StepConfig
from jspec.decode.draft import Drafted, last_token, propose
from jspec.decode.state import DecodeState, StepRecord
from jspec.ops.stochastic import verify_stochastic
from jspec.ops.verify import Verified, verify_greedy
from jspec.typing import Array, Model


@jax.jit(static_argnames="config", donate_argnames="state")
def speculative_step(
    model: Model, state: DecodeState, config: StepConfig, draft_model: Model | None = None
) -> DecodeState:
    """Draft up to gamma tokens, verify them in one pass, commit what stands. One XLA program.

    ``state`` is donated: use the returned one. Each ``config`` compiles once; draft lengths, row
    limits, sampling settings and ``done`` are traced and compile nothing. Make the first state with
    `jspec.start`.
    """
    return step(model, state, config, draft_model)[0]


@jax.jit(static_argnames=("config", "steps"), donate_argnames="state")
def decode_chunk(
    model: Model,
    state: DecodeState,
    draft_model: Model | None,
    config: StepConfig,
    steps: int,
) -> tuple[DecodeState, StepRecord]:
    """``steps`` speculative steps in one program; the records are stacked, ``[steps, B, ...]``."""

    def body(state, _):
        return step(model, state, config, draft_model)

    return lax.scan(body, state, length=steps)


def step(
    model: Model, state: DecodeState, config: StepConfig, draft_model: Model | None = None
) -> tuple[DecodeState, StepRecord]:
    """The body of `speculative_step`, for a jitted loop of the caller's own."""
    drafted = propose(model, state, config, draft_model)
    verified, cache = _verify(model, state, drafted, config)
    return _commit(state, drafted, verified, cache)


def _verify(
    model: Model, state: DecodeState, drafted: Drafted, config: StepConfig
) -> tuple[Verified, KVCache]:
    """Run the target over the last token and the draft, and judge the draft by it."""
    tokens = jnp.concatenate([last_token(state)[:, None], drafted.tokens], axis=1)
    index = jnp.arange(config.gamma + 1)[None]
    counts = (index <= drafted.lengths[:, None]) & ~state.done[:, None]
    positions = jnp.where(counts, state.cache.lengths[:, None] + index, -1)
    hidden, cache = model(tokens, positions, dense(positions, config.attention), state.cache)
    logits = model.logits(hidden)
    if config.sampling == "greedy":
        choice = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        judged = verify_greedy(
            drafted.tokens,
            choice,
            drafted.lengths,
            state.stop_tokens,
            # Without a draft there is nothing to verify, and some kernels refuse that.
            implementation=config.implementation if config.gamma else None,
        )
        return judged, cache
    judged = verify_stochastic(
        drafted.tokens,
        logits,
        drafted.lengths,
        state.stop_tokens,
        state.sampling,
        state.lengths,
        draft_logits=drafted.logits,
        filtered=config.sampling == "filtered",
        implementation=config.implementation,
    )
    return judged, cache


def _commit(
    state: DecodeState, drafted: Drafted, verified: Verified, cache: KVCache
) -> tuple[DecodeState, StepRecord]:
    """Append the committed block to each row that is not done; a length rolls back the rest."""
    active = ~state.done
    committed = jnp.where(active, verified.committed, 0)
    block = jnp.where(active[:, None], verified.tokens, -1)
    lengths = state.lengths + committed
    cut = verified.committed <= verified.accepted
    draft_cache = state.draft_cache if drafted.cache is None else drafted.cache
    if draft_cache is not None:
        draft_cache = draft_cache.with_lengths(lengths - 1)
    record = StepRecord(
        drafted=jnp.where(cut, verified.accepted, drafted.lengths),
        accepted=jnp.where(active, verified.accepted, 0),
        committed=committed,
        tokens=block,
    )
    state = dataclasses.replace(
        state,
        cache=cache.with_lengths(lengths - 1),
        tokens=_write(state.tokens, block, state.lengths),
        done=state.done | verified.stopped | (lengths >= state.limits),
        draft_cache=draft_cache,
    )
    return state, record


def _write(tokens: Array, block: Array, start: Array) -> Array:
    """Put ``block [B, T]`` into ``tokens [B, S]`` from ``start [B]`` on, -1 writing nothing."""
    index = start[:, None] + jnp.arange(block.shape[1])[None]
    index = jnp.where(block >= 0, index, tokens.shape[1])
    return tokens.at[jnp.arange(tokens.shape[0])[:, None], index].set(block, mode="drop")
