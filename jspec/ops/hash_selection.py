"""Hamming scores and the selection of the highest of them as one operation.

`hash_select` is the public operation; ``xla``, the reference, scores and then selects.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.hash import (
    HAMMING_SCORES,
    check_codes,
    hamming_sizes,
    hamming_xla,
    lengths_or,
    max_score,
)
from jspec.ops.selection import SELECT, check_budget, ragged, select_xla
from jspec.typing import Array


def hash_select(
    q_codes: Array,
    k_codes: Array,
    k: int,
    *,
    counts: Array | None = None,
    lengths: Array | None = None,
    sinks: int = 0,
    recent: int = 0,
    implementation: str | None = None,
) -> Array:
    """`jspec.ops.select` of the `jspec.ops.hamming_scores` of codes, slots for each KV head.

    CUDA and Triton count scores while they compute them; all kernels read the codes once.

    Args:
        q_codes: uint32 ``[B, T, N, W]``.
        k_codes: uint32 ``[B, S, K, W]``.
        k: slots that are selected of a row, at most.
        counts: int32 ``[B]`` or ``[B, K]``, the budget of each row; None is k.
        lengths: int32 ``[B]`` or ``[B, K]``, slots of each row; None is S.
        sinks: the first slots of a row, always selected.
        recent: the last slots of a row, always selected.
        implementation: the backend by name; None is the best one.

    Returns:
        int32 ``[B, K, k]``: slots in ascending order, then -1.

    Raises:
        ValueError: for shapes, dtypes or a budget that do not fit together.
    """
    check_codes(q_codes, k_codes)
    check_budget(k, sinks, recent)
    batch, slots, heads, _ = k_codes.shape
    lengths = lengths_or(lengths, (batch, heads), slots)
    return HASH_SELECT(
        *(q_codes, k_codes),
        # Backends cut a budget at k: a row's length leaves k, and no kernel makes another array.
        lengths if counts is None else lengths_or(counts, (batch, heads), k),
        lengths,
        k=k,
        sinks=sinks,
        recent=recent,
        implementation=implementation,
    )


def _full(k_codes: Array) -> Array:
    return jnp.full(k_codes.shape[:1], k_codes.shape[1], jnp.int32)


def _xla(q_codes, k_codes, counts, lengths, *, k, sinks, recent) -> Array:
    scores = hamming_xla(q_codes, k_codes, _full(k_codes), None)
    static = {"k": k, "sinks": sinks, "recent": recent, "highest": max_score(q_codes, k_codes)}
    return select_xla(scores, counts, lengths, **static)


def _two_steps(q_codes, k_codes, counts, lengths, *, k, sinks, recent) -> Array:
    """The best backend of scoring, then the best one of selection."""
    scores = HAMMING_SCORES(q_codes, k_codes, _full(k_codes), None)
    static = {"k": k, "sinks": sinks, "recent": recent, "highest": max_score(q_codes, k_codes)}
    return SELECT(scores, counts, lengths, **static)


def hash_select_sizes(
    q_codes: Array, k_codes: Array, *args: Array, k: int, **kwargs: int
) -> dict[str, int]:
    """The sizes that backends are ordered by."""
    return hamming_sizes(q_codes, k_codes) | {"slots": k_codes.shape[1], "k": k}


def _build(batch, tokens, heads, kv_heads, slots, words, k) -> tuple[np.ndarray, ...]:
    """Codes of few bits set, so that many scores are equal."""
    rng = np.random.default_rng([batch, slots, words])
    q, codes = (
        rng.choice(np.array([0, 1, 2**31, 2**32 - 1], np.uint32), shape)
        for shape in ((batch, tokens, heads, words), (batch, slots, kv_heads, words))
    )
    shape = (batch, kv_heads)
    counts, lengths = (ragged(batch * kv_heads, bound).reshape(shape) for bound in (k, slots))
    lengths[0, 0] = slots
    return q, codes, counts, lengths


# ``(B, T, N, K, S, W, k, sinks, recent)`` by name.
_SHAPES = {
    "small": (1, 1, 2, 1, 24, 1, 5, 1, 2),
    "grouped": (2, 1, 8, 2, 700, 4, 48, 4, 16),
    "heads": (2, 1, 12, 12, 333, 4, 20, 0, 0),
    "a-pass": (1, 3, 6, 3, 150, 2, 30, 2, 3),
    "long-codes": (3, 1, 2, 2, 90, 8, 100, 0, 4),
    "long": (1, 1, 8, 8, 9000, 4, 500, 16, 64),
}


def _cases() -> list[Case]:
    return [
        Case(
            name,
            functools.partial(_build, *shape),
            {"k": shape[-1], "sinks": sinks, "recent": recent},
            small=name in ("small", "heads"),  # Pallas refuses the first of them
        )
        for name, (*shape, sinks, recent) in _SHAPES.items()
    ]


HASH_SELECT = Operation(
    "hash_select",
    {
        "xla": Backend("xla", _xla, always),
        "two_steps": Backend("two_steps", _two_steps, always, composite=True),
        "cuda": "jspec.cuda_ffi.hashed:HASH_SELECT",
        "triton": "jspec.triton.hash_select:HASH_SELECT",
        "pallas": "jspec.pallas.hash_select:HASH_SELECT",
    },
    hash_select_sizes,
    _cases,
)
