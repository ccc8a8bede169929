"""Greedy verification with the bookkeeping of a step: what rows know then, and which have ended.

jspec's own loop calls it: what XLA makes a dozen small kernels of is one launch.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.cases import accepted_tokens, ragged_tokens
from jspec.ops.verify import (
    VERIFY_GREEDY,
    Verified,
    check_greedy,
    greedy_sizes,
    greedy_xla,
    verified_like,
)
from jspec.typing import Array


class Rows(NamedTuple):
    """What a step changes of its rows.

    ``tokens`` int32 ``[B, S]``: known tokens, -1 behind them; ``cached`` int32 ``[B]``: how many of
    them are in the cache, which is all but the last; ``done`` bool ``[B]``: rows that have ended.
    """

    tokens: Array
    cached: Array
    done: Array


def verify_and_commit(
    draft_tokens: Array,
    target_tokens: Array,
    draft_lengths: Array,
    stop_tokens: Array,
    limits: Array,
    rows: Rows,
    *,
    implementation: str | None = None,
) -> tuple[Verified, Array, Rows]:
    """`jspec.verify_greedy`, and its outcome appended to each row that is not done.

    Token ids are int32; ``limits`` int32 ``[B]``: most tokens that a row may know. The caller makes
    sure that a block fits into S; what does not is never written. Returns the outcome, the record
    of `commit` and the rows as they then are: donate them, and nothing is copied.
    """
    check_greedy(draft_tokens, target_tokens, draft_lengths, stop_tokens)
    batch = draft_tokens.shape[0]
    given = (rows.cached, rows.done, limits)
    kinds = (rows.tokens.dtype, target_tokens.dtype, *(x.dtype for x in given))
    wanted = (jnp.int32, jnp.int32, jnp.int32, jnp.bool_, jnp.int32)
    if rows.tokens.ndim != 2 or any(x.shape[0] != batch for x in rows) or kinds != wanted:
        raise ValueError(
            f"tokens {rows.tokens.dtype}{rows.tokens.shape}, cached {rows.cached.dtype}"
            f"{rows.cached.shape}, done {rows.done.dtype}{rows.done.shape} and limits "
            f"{limits.dtype}{limits.shape} must be int32 [B, S], int32 [B], bool [B] and int32 "
            f"[B] with B={batch}, and token ids int32"
        )
    arguments = (draft_tokens, target_tokens, draft_lengths, stop_tokens, limits, *rows)
    out = VERIFY_AND_COMMIT(*arguments, implementation=implementation)
    return Verified(*out[:6]), out[6], Rows(*out[7:])


def commit(
    verified: Verified, draft_lengths: Array, limits: Array, rows: Rows
) -> tuple[Array, Rows]:
    """Append the committed block to each row that is not done.

    Returns a record int32 ``[B, gamma + 4]``: draft tokens (those behind a stop token do not
    count), accepted and committed tokens, then the committed block, -1 behind its end; and the rows
    as they then are. A row that is done commits nothing.
    """
    active = ~rows.done
    committed = jnp.where(active, verified.committed, 0)
    block = jnp.where(active[:, None], verified.tokens, -1)
    cached = rows.cached + committed
    cut = verified.committed <= verified.accepted
    longest = verified.tokens.shape[1] - 1
    drafted = jnp.where(cut, verified.accepted, jnp.clip(draft_lengths, 0, longest))
    counts = jnp.stack([drafted, jnp.where(active, verified.accepted, 0), committed], axis=1)
    tokens = _write(rows.tokens, block, rows.cached + 1)
    done = rows.done | verified.stopped | (cached + 1 >= limits)
    return jnp.concatenate([counts, block], axis=1), Rows(tokens, cached, done)


def _write(tokens: Array, block: Array, start: Array) -> Array:
    """Put ``block [B, T]`` into ``tokens [B, S]`` from ``start [B]`` on, -1 writing nothing."""
    index = start[:, None] + jnp.arange(block.shape[1], dtype=jnp.int32)[None]
    index = jnp.where(block >= 0, index, tokens.shape[1])
    return tokens.at[jnp.arange(tokens.shape[0])[:, None], index].set(block, mode="drop")


def committed_like(draft_tokens: Array, tokens: Array) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and dtypes of what backends return: fields of `Verified`, the record and the rows."""
    batch, gamma = draft_tokens.shape
    record = jax.ShapeDtypeStruct((batch, gamma + 4), jnp.int32)
    count = jax.ShapeDtypeStruct((batch,), jnp.int32)
    flag = jax.ShapeDtypeStruct((batch,), jnp.bool_)
    known = jax.ShapeDtypeStruct(tokens.shape, jnp.int32)
    return *verified_like(draft_tokens), record, known, count, flag


def _after(fields: tuple[Array, ...], lengths: Array, limits: Array, *rows: Array) -> Any:
    record, after = commit(Verified(*fields), lengths, limits, Rows(*rows))
    return *fields, record, *after


def _xla(draft, target, lengths, stops, limits, *rows: Array) -> tuple[Array, ...]:
    return _after(greedy_xla(draft, target, lengths, stops), lengths, limits, *rows)


def _two_steps(draft, target, lengths, stops, limits, *rows: Array) -> tuple[Array, ...]:
    """The best backend of verification, and XLA's bookkeeping behind it."""
    return _after(VERIFY_GREEDY(draft, target, lengths, stops), lengths, limits, *rows)


def _rows(tokens: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """Limits and rows beside ``tokens`` of a verification: some are done, and some reach limits."""
    batch, gamma = tokens[0].shape
    rng = np.random.default_rng([batch, gamma])
    cached = rng.integers(0, 7, batch, np.int32)
    known = np.full((batch, gamma + 9), -1, np.int32)
    known = np.where(np.arange(gamma + 9) <= cached[:, None], np.int32(5), known)
    limits = cached + rng.integers(2, gamma + 4, batch, np.int32)
    return limits, known, cached, rng.random(batch) < 0.2


# ``(B, gamma, M)`` by name.
_SHAPES = {
    "no-draft": (6, 0, 2),
    "odd": (5, 5, 2),
    "no-stops": (7, 2, 0),
    "over-a-warp": (9, 33, 3),
    "many-rows": (300, 4, 1),
}


def _cases() -> list[Case]:
    """A case of which all is accepted, and ragged ones."""

    def build(tokens: Any, *shape: int) -> tuple[np.ndarray, ...]:
        given = tokens(*shape)
        return *given, *_rows(given)

    ragged = [
        Case(name, functools.partial(build, ragged_tokens, *shape))
        for name, shape in _SHAPES.items()
    ]
    whole = functools.partial(build, accepted_tokens, 2, 14)
    return [Case("all-accepted", whole, small=True), *ragged]


# Backends return the fields of `Verified`, the record, and the rows.
VERIFY_AND_COMMIT = Operation(
    "verify_and_commit",
    {
        "xla": Backend("xla", _xla, always),
        "two_steps": Backend("two_steps", _two_steps, always),
        "triton": "jspec.triton.commit:VERIFY_AND_COMMIT",
    },
    lambda draft_tokens, *rest: greedy_sizes(draft_tokens),
    _cases,
)
