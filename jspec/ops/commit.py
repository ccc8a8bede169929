"""Greedy verification with the bookkeeping of a step: tokens, cache lengths and rows that end.

jspec's own loop calls it: one launch takes the place of a dozen small kernels of XLA.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.cases import ragged_tokens
from jspec.ops.distribution import LARGEST
from jspec.ops.sample import greedy
from jspec.ops.verify import (
    VERIFY_GREEDY,
    Verified,
    check_draft,
    greedy_sizes,
    greedy_xla,
    verified_like,
)
from jspec.typing import Array


class Rows(NamedTuple):
    """The state of the rows of a batch that a step changes.

    Attributes:
        tokens: int32 ``[B, S]``, known tokens, -1 after the last.
        cached: int32 ``[B]``, how many of them are in the cache: all but the last.
        done: bool ``[B]``, rows that have ended.
    """

    tokens: Array
    cached: Array
    done: Array


def verify_and_commit(
    draft_tokens: Array,
    logits: Array,
    draft_lengths: Array,
    stop_tokens: Array,
    limits: Array,
    rows: Rows,
    *,
    implementation: str | None = None,
) -> tuple[Verified, Array, Rows]:
    """`jspec.ops.verify_greedy` by the target's argmax, and `commit` of its outcome.

    A block should fit into S: tokens past the last slot are dropped. Donate the rows to update them
    without a copy.

    Args:
        draft_tokens: int32 ``[B, gamma]``.
        logits: ``[B, gamma + 1, V]`` of the target; their argmax is that of
            `jspec.ops.sample.greedy`.
        draft_lengths: int32 ``[B]`` in 0..gamma.
        stop_tokens: int32 ``[B, M]``, -1 for none.
        limits: int32 ``[B]``, tokens that a row may have at most, prompt included.
        rows: the rows before the step.
        implementation: the backend by name; None is the best one.

    Returns:
        A `Verified`, and the two results of `commit`.

    Raises:
        ValueError: for shapes or dtypes that do not fit together.
    """
    check_draft(draft_tokens, draft_lengths, stop_tokens, logits.shape[:2])
    batch = draft_tokens.shape[0]
    arguments = (draft_tokens, logits, draft_lengths, stop_tokens, limits, *rows)
    dtypes = tuple(x.dtype for x in (draft_tokens, stop_tokens, limits, *rows))
    required_dtypes = (jnp.int32,) * 5 + (jnp.bool_,)
    shapes = (limits.shape, rows.tokens.shape[:1], rows.cached.shape, rows.done.shape)
    if (
        dtypes != required_dtypes
        or logits.ndim != 3
        or rows.tokens.ndim != 2
        or set(shapes) != {(batch,)}
    ):
        names = "draft_tokens logits draft_lengths stop_tokens limits tokens cached done".split()
        pairs = zip(names, arguments, strict=True)
        raise ValueError(
            ", ".join(f"{name} {x.dtype}{list(x.shape)}" for name, x in pairs)
            + f" must be int32, but for logits [B, gamma + 1, V] and done bool [B], with B={batch}"
        )
    out = VERIFY_AND_COMMIT(*arguments, implementation=implementation)
    return Verified(*out[:6]), out[6], Rows(*out[7:])


def commit(verified: Verified, limits: Array, rows: Rows) -> tuple[Array, Rows]:
    """Append the committed block to each row that is not done; a row that is done commits nothing.

    Returns int32 ``[B, gamma + 3]``: the number of accepted draft tokens, the number of committed
    tokens, then the block, -1 after its end; and the rows after the step.
    """
    active = ~rows.done
    counts = jnp.stack([verified.accepted, verified.committed], axis=1)
    counts = jnp.where(active[:, None], counts, 0)
    block = jnp.where(active[:, None], verified.tokens, -1)
    cached = rows.cached + counts[:, 1]
    tokens = _write(rows.tokens, block, rows.cached + 1)
    done = rows.done | verified.stopped | (cached + 1 >= limits)
    return jnp.concatenate([counts, block], axis=1), Rows(tokens, cached, done)


def _write(tokens: Array, block: Array, start: Array) -> Array:
    """Put ``block [B, T]`` into ``tokens [B, S]`` from ``start [B]`` on, -1 writing nothing."""
    index = start[:, None] + jnp.arange(block.shape[1], dtype=jnp.int32)[None]
    index = jnp.where(block >= 0, index, tokens.shape[1])
    return tokens.at[jnp.arange(tokens.shape[0])[:, None], index].set(block, mode="drop")


def committed_like(draft_tokens: Array, tokens: Array) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and dtypes of what backends return: `Verified`, what was committed, and the rows."""
    batch, gamma = draft_tokens.shape
    committed = jax.ShapeDtypeStruct((batch, gamma + 3), jnp.int32)
    count = jax.ShapeDtypeStruct((batch,), jnp.int32)
    flag = jax.ShapeDtypeStruct((batch,), jnp.bool_)
    known = jax.ShapeDtypeStruct(tokens.shape, jnp.int32)
    return *verified_like(draft_tokens), committed, known, count, flag


def _after(fields: tuple[Array, ...], limits: Array, *rows: Array) -> tuple[Array, ...]:
    committed, after = commit(Verified(*fields), limits, Rows(*rows))
    return *fields, committed, *after


def _xla(draft, logits, lengths, stops, limits, *rows: Array) -> tuple[Array, ...]:
    return _after(greedy_xla(draft, greedy(logits), lengths, stops), limits, *rows)


def _two_steps(draft, logits, lengths, stops, limits, *rows: Array) -> tuple[Array, ...]:
    """The best backend of verification, then XLA's bookkeeping."""
    return _after(VERIFY_GREEDY(draft, greedy(logits), lengths, stops), limits, *rows)


def commit_sizes(draft_tokens: Array, logits: Array, *rest: Array) -> dict[str, int]:
    """The sizes that backends are ordered by; ``logits``: those of a batch row."""
    _, positions, vocabulary = logits.shape
    sizes = {"vocabulary": vocabulary, "logits": positions * vocabulary}
    return greedy_sizes(draft_tokens) | sizes


def _build(batch: int, gamma: int, stops: int, vocabulary: int) -> tuple[np.ndarray, ...]:
    """Ragged drafts; some rows are done before, and some reach their limits or the last slot.

    Logits have ties, NaN and infinities, and some positions nothing else.
    """
    draft, target, lengths, stop_tokens = ragged_tokens(batch, gamma, stops)
    # Few ids, all over the vocabulary.
    draft, target, stop_tokens = (
        np.where(x < 0, -1, np.minimum(x, 5 + 2 * (x == 7)) * (vocabulary // 8))
        for x in (draft, target, stop_tokens)
    )
    rng = np.random.default_rng([batch, gamma, vocabulary])
    logits = rng.integers(-9, 1, (batch, gamma + 1, vocabulary)).astype(np.float32)
    distance = np.arange(vocabulary) - target[..., None]
    for value, where in ((1, distance > 0), (np.nan, distance != 0), (-np.inf, distance != 0)):
        logits[where & (rng.random(logits.shape) < 0.2)] = value
    logits[distance == 0] = 1
    kind = rng.integers(0, 20, (batch, gamma + 1))
    logits[kind == 0] = np.nan
    logits[kind == 1] = -np.inf
    logits[(kind == 2) | (kind == 3), -1] = np.inf
    logits[kind == 3, -2] = LARGEST
    cached = rng.integers(0, 12, batch, np.int32)
    slots = gamma + 6
    known = np.where(np.arange(slots) <= cached[:, None], np.int32(5), np.int32(-1))
    limits = cached + rng.integers(2, gamma + 4, batch, np.int32)
    arrays = (draft, logits, lengths, stop_tokens, limits, known, np.minimum(cached, slots - 1))
    kinds = (np.int32, np.float32, *[np.int32] * 5)
    return *(x.astype(k) for x, k in zip(arrays, kinds, strict=True)), np.arange(batch) % 5 == 3


# ``(B, gamma, M, V)`` by name.
_SHAPES = {
    "small": (2, 3, 1, 19),
    "no-draft": (6, 0, 2, 260),
    "odd": (11, 5, 2, 41),
    "no-stops": (7, 2, 0, 9001),
    "over-a-warp": (9, 33, 3, 1030),
    "many-rows": (300, 4, 1, 16),
}


def _cases() -> list[Case]:
    return [
        Case(name, functools.partial(_build, *shape), small=name == "small")
        for name, shape in _SHAPES.items()
    ]


# Backends return the fields of `Verified`, what was committed, and the rows.
VERIFY_AND_COMMIT = Operation(
    "verify_and_commit",
    {
        "xla": Backend("xla", _xla, always),
        "two_steps": Backend("two_steps", _two_steps, always, composite=True),
        "cuda": "jspec.cuda_ffi.commit:VERIFY_AND_COMMIT",
        "pallas": "jspec.pallas.commit:VERIFY_AND_COMMIT",
        "triton": "jspec.triton.commit:VERIFY_AND_COMMIT",
    },
    commit_sizes,
    _cases,
)
