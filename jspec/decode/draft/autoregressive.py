"""Drafts drawn token by token, and the limits of a row's draft."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jspec.decode.draft.drafter import Drafted
from jspec.decode.state import DecodeState
from jspec.ops.sample import Role, greedy, sample
from jspec.ops.vocabulary import Axes
from jspec.typing import Array

Advance = Callable[[Array, Array, Array, Any], tuple[Array, Any]]


def max_draft_lengths(state: DecodeState, gamma: int) -> Array:
    """Most draft tokens of each row, int32 ``[B]``; none for a row that is done.

    One token of the row's limit is left for the corrected or bonus token.
    """
    lengths = jnp.minimum(state.limits - state.lengths - 1, state.draft_limits)
    return jnp.where(state.done, 0, jnp.clip(lengths, 0, gamma))


def within_limits(drafted: Drafted, state: DecodeState, gamma: int) -> Drafted:
    """Cut a draft at the limits of its rows."""
    if gamma == 0:
        return drafted
    lengths = jnp.minimum(drafted.lengths, max_draft_lengths(state, gamma))
    return dataclasses.replace(drafted, lengths=lengths)


def drawn(
    state: DecodeState, logits: Array, positions: Array, axis_name: Axes | None = None
) -> Array:
    """Draft tokens int32 ``[B, T]`` at ``positions [B, T]``, drawn from ``logits [B, T, V]``."""
    if state.mode == "greedy":
        return greedy(logits, axis_name)
    settings = {"filtered": state.mode == "filtered", "axis_name": axis_name}
    return sample(logits, state.sampling, positions, Role.DRAFT, **settings)


def autoregressive(
    state: DecodeState,
    gamma: int,
    advance: Advance,
    carry: Any,
    *,
    axis_name: Axes | None = None,
    advance_refresh: Advance | None = None,
    every: int = 0,
) -> tuple[Drafted, Any]:
    """Draw gamma tokens per row one by one; returns the draft, and the last carry.

    ``advance(step, token [B], positions [B], carry)`` returns the logits ``[B, V]`` of the token
    after ``token``, which is at ``positions``, and the next carry; ``advance_refresh`` replaces it
    in each ``every``-th step, as in `alternating_scan`. ``axis_name``: as in `sample`.
    """
    index = jnp.arange(gamma, dtype=jnp.int32)

    def body(advance, carried, step):
        token, drafted, processing, carry = carried
        positions = state.lengths + step
        logits, carry = advance(step, token, positions - 1, carry)
        if processing is not None:
            logits = processing.process(logits[:, None], drafted[:, :0], axis_name)[:, 0]
        token = drawn(state, logits[:, None], positions[:, None], axis_name)[:, 0]
        processing = None if processing is None else processing.extended(token[:, None])
        # Of tokens that the loop stacks itself, XLA makes a copy a step on a stream of its own,
        # for which a GPU waits longer than for this kernel.
        drafted = jnp.where(index[None] == step, token[:, None], drafted)
        return (token, drafted, processing, carry), None if state.mode == "greedy" else logits

    token = state.last_token
    drafted = jnp.broadcast_to(token[:, None], (len(token), gamma))
    usual, other = (functools.partial(body, x) for x in (advance, advance_refresh))
    carried = token, drafted, state.processing, carry
    (_, tokens, _, carry), logits = alternating_scan(usual, other, every, carried, gamma)
    lengths = jnp.full(state.lengths.shape, gamma, jnp.int32)
    logits = None if logits is None else jnp.swapaxes(logits, 0, 1)
    return Drafted(tokens, lengths, logits), carry


def alternating_scan(
    usual: Callable[[Any, Array], tuple[Any, Any]],
    other: Callable[[Any, Array], tuple[Any, Any]],
    every: int,
    carry: Any,
    count: int,
) -> tuple[Any, Any]:
    """A `lax.scan` over ``count`` steps of which every ``every``-th one runs another body.

    Step ``i`` runs ``other(carry, i)`` where ``i`` is a positive multiple of ``every``, else
    ``usual(carry, i)``; with ``every=0`` always the latter. Which steps these are is compiled in:
    for a condition in a loop, a GPU waits for the host.
    """
    index = jnp.arange(count, dtype=jnp.int32)
    if not 0 < every < count:
        return lax.scan(usual, carry, index)

    def one_group(carry, steps):
        carry, outs = lax.scan(usual, carry, steps[:-1])
        carry, last = other(carry, steps[-1])
        return carry, jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), outs, last)

    def joined(first, middle, rest):
        return jnp.concatenate([first, middle.reshape(-1, *first.shape[1:]), rest])

    num_groups = (count - 1) // every
    end = num_groups * every + 1
    carry, first = lax.scan(usual, carry, index[:1])
    carry, middle = lax.scan(one_group, carry, index[1:end].reshape(num_groups, every))
    carry, rest = lax.scan(usual, carry, index[end:])
    return carry, jax.tree.map(joined, first, middle, rest)
