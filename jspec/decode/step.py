"""One speculative step: draft, verify, commit, learn; and a chunk of steps in one program."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jspec.cache.layout import check_rings
from jspec.decode.draft import Drafted, Seen
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState, Models, StepRecord
from jspec.ops.sample import greedy
from jspec.ops.stochastic import verify_stochastic
from jspec.ops.verify import Verified, verify_greedy
from jspec.policies.attend import dense_attend
from jspec.sharding import with_auto_axes
from jspec.typing import Array, Model


@jax.jit(static_argnames="config", donate_argnames="state")
def speculative_step(models: Model | Models, state: DecodeState, config: StepConfig) -> DecodeState:
    """Draft up to gamma tokens, verify them in one pass, commit what is accepted. One XLA program.

    ``state`` is donated: use the returned one. Each ``config`` compiles once; draft lengths, row
    limits, sampling settings and ``done`` are traced and compile nothing. Make the first state with
    `jspec.start_decoding`.
    """
    return step(models, state, config)[0]


@jax.jit(static_argnames=("config", "steps"), donate_argnames="state")
def decode_chunk(
    models: Model | Models, state: DecodeState, config: StepConfig, steps: int
) -> tuple[DecodeState, StepRecord]:
    """``steps`` speculative steps in one program; the records are stacked, ``[steps, B, ...]``."""

    def body(state, _):
        return step(models, state, config)

    return lax.scan(body, state, length=steps)


def step(
    models: Model | Models, state: DecodeState, config: StepConfig
) -> tuple[DecodeState, StepRecord]:
    """The body of `speculative_step` and what it did, for a jitted loop of the caller's own."""
    like = state, StepRecord(state.done, state.done, state.done, tokens=state.done[:, None])
    models = Models.of(models)
    with config.of_models():
        return with_auto_axes(functools.partial(_step, config), models, state, like=like)


def _step(config: StepConfig, models: Models, state: DecodeState) -> tuple[DecodeState, StepRecord]:
    check_rings(state.cache.specs, state.cache.layouts, config.gamma)
    drafted, state = config.draft.draft(models, state, config)
    drafted = within_limits(drafted, state, config.gamma)
    verified, state, seen = verify(models, state, drafted, config)
    state, record = commit(state, drafted, verified)
    return config.draft.learn(state, seen, verified), record


def within_limits(drafted: Drafted, state: DecodeState, gamma: int) -> Drafted:
    """Cut a draft at its row's limits, and to nothing for a row that is done.

    One token of the limit is left for the corrected or bonus token.
    """
    room = state.limits - state.lengths - 1
    most = jnp.minimum(jnp.minimum(room, state.draft_limits), gamma)
    most = jnp.where(state.done, 0, jnp.maximum(most, 0))
    return dataclasses.replace(drafted, lengths=jnp.minimum(drafted.lengths, most))


def verify(
    models: Models, state: DecodeState, drafted: Drafted, config: StepConfig
) -> tuple[Verified, DecodeState, Seen]:
    """Run the target over the last token and the draft, and judge the draft by it."""
    tokens = jnp.concatenate([state.last_token[:, None], drafted.tokens], axis=1)
    index = jnp.arange(config.gamma + 1, dtype=jnp.int32)[None]
    counts = (index <= drafted.lengths[:, None]) & ~state.done[:, None]
    positions = jnp.where(counts, state.cache.lengths[:, None] + index, -1)
    attend = dense_attend(
        positions, policy=config.draft.keeps, arrays=models.policy, backends=config.backends
    )
    hidden, cache = models.target(tokens, positions, attend, state.cache)
    logits = models.target.logits(hidden)
    if state.mode == "greedy":
        verified = verify_greedy(
            drafted.tokens,
            greedy(logits),
            drafted.lengths,
            state.stop_tokens,
            # Without a draft there is nothing to verify, and some kernels refuse that.
            implementation=config.backends.get("verify_greedy") if config.gamma else None,
        )
    else:
        verified = verify_stochastic(
            drafted.tokens,
            logits,
            drafted.lengths,
            state.stop_tokens,
            state.sampling,
            state.lengths,
            draft_logits=drafted.logits,
            filtered=state.mode == "filtered",
            implementation=config.backends.get("verify_stochastic"),
        )
    return verified, dataclasses.replace(state, cache=cache), Seen(positions, hidden)


def commit(
    state: DecodeState, drafted: Drafted, verified: Verified
) -> tuple[DecodeState, StepRecord]:
    """Append the committed block to each row that is not done; a length rolls back the rest."""
    active = ~state.done
    committed = jnp.where(active, verified.committed, 0)
    block = jnp.where(active[:, None], verified.tokens, -1)
    lengths = state.lengths + committed
    cut = verified.committed <= verified.accepted
    record = StepRecord(
        drafted=jnp.where(cut, verified.accepted, drafted.lengths),
        accepted=jnp.where(active, verified.accepted, 0),
        committed=committed,
        tokens=block,
    )
    state = dataclasses.replace(
        state,
        cache=state.cache.with_lengths(lengths - 1),
        tokens=_write(state.tokens, block, state.lengths),
        done=state.done | verified.stopped | (lengths >= state.limits),
    )
    return state, record


def _write(tokens: Array, block: Array, start: Array) -> Array:
    """Put ``block [B, T]`` into ``tokens [B, S]`` from ``start [B]`` on, -1 writing nothing."""
    index = start[:, None] + jnp.arange(block.shape[1], dtype=jnp.int32)[None]
    index = jnp.where(block >= 0, index, tokens.shape[1])
    return tokens.at[jnp.arange(tokens.shape[0])[:, None], index].set(block, mode="drop")
