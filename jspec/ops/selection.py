"""Exact, deterministic selection of the best slots of each row of scores.

`select` is the public operation. ``xla``, the reference, is a stable sort; the others count.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.hash import lengths_or
from jspec.typing import Array

DTYPES = ("int32", "float32", "bfloat16", "float16")


def select(
    scores: Array,
    k: int,
    *,
    counts: Array | None = None,
    lengths: Array | None = None,
    sinks: int = 0,
    recent: int = 0,
    highest: int | None = None,
    implementation: str | None = None,
) -> Array:
    """The slots of the ``k`` highest scores of each row, in ascending order.

    Exact and deterministic: of equal scores the one with the lower slot is selected first; -0
    equals 0, and NaN is below minus infinity.

    Args:
        scores: ``[..., n]`` of a dtype in `DTYPES`.
        k: slots that are selected of a row, at most.
        counts: int32, the budget of each row, at most k; of the leading sizes of ``scores`` or the
            first of them; None is k.
        lengths: int32 as ``counts``: only the first ``lengths`` slots of a row are selected from;
            None is n.
        sinks: the first slots of a row, part of the budget and always selected.
        recent: the last slots of a row, as ``sinks``. A budget that is too small for both selects
            the first of them.
        highest: promises that integer scores are in -1..highest; if it is small, they are counted
            in one pass. For higher scores the result is not specified.
        implementation: the backend by name; None is the best one.

    Returns:
        int32 ``[..., k]``: the slots, then -1.

    Raises:
        ValueError: for shapes, dtypes or a budget that do not fit together.
    """
    check_budget(k, sinks, recent)
    if scores.ndim < 1 or scores.dtype not in DTYPES:
        raise ValueError(
            f"scores {scores.dtype}{list(scores.shape)} must be {' or '.join(DTYPES)} [..., n]"
        )
    if highest is not None and (scores.dtype != jnp.int32 or not 0 <= highest < 2**31 - 1):
        raise ValueError(
            f"highest={highest} must be in 0..2**31 - 2, of int32 scores, not of {scores.dtype}"
        )
    lead = scores.shape[:-1]
    lengths = lengths_or(lengths, lead, scores.shape[-1])
    return SELECT(
        lax.stop_gradient(scores),
        # Backends cut a budget at k: a row's length leaves k, and no kernel makes another array.
        lengths if counts is None else lengths_or(counts, lead, k),
        lengths,
        k=k,
        sinks=sinks,
        recent=recent,
        highest=highest,
        implementation=implementation,
    )


def check_budget(k: int, sinks: int, recent: int) -> None:
    """Raise `ValueError` where sinks and recent slots have no room in a budget of ``k``."""
    if k < 1 or sinks < 0 or recent < 0 or sinks + recent > k:
        raise ValueError(
            f"k={k} must be at least 1 and hold sinks={sinks} and recent={recent}, at least 0 each"
        )


def selected_like(scores: Array, k: int) -> jax.ShapeDtypeStruct:
    """Shape and dtype of what backends return."""
    return jax.ShapeDtypeStruct((*scores.shape[:-1], k), jnp.int32)


def select_xla(
    scores: Array,
    counts: Array,
    lengths: Array,
    *,
    k: int,
    sinks: int,
    recent: int,
    highest: int | None,
) -> Array:
    """The reference of `select`: a stable sort of whole rows."""
    n = scores.shape[-1]
    slots = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    lengths = jnp.clip(lengths, 0, n)[..., None]
    counts = jnp.clip(counts[..., None], 0, jnp.minimum(k, lengths))
    forced = (slots < sinks) | (slots >= lengths - recent)
    rank = jnp.where(slots < lengths, jnp.where(forced, 0, 1), 2)
    falling = jnp.where(rank == 1, ~sort_keys(scores), 0)
    *_, order = lax.sort((rank, falling, slots), num_keys=2, is_stable=True)
    order = order[..., :k]
    in_budget = lax.broadcasted_iota(jnp.int32, order.shape, order.ndim - 1) < counts
    # Slots that are left out sort last, and fill the places up to k.
    order = jnp.sort(jnp.where(in_budget, order, n), axis=-1)
    order = jnp.where(order < n, order, -1)
    return jnp.pad(
        order, [(0, 0)] * (scores.ndim - 1) + [(0, k - order.shape[-1])], constant_values=-1
    )


def sort_keys(scores: Array) -> Array:
    """uint32 numbers that rise as the scores do, and are equal where the scores are."""
    if scores.dtype == jnp.int32:
        return lax.bitcast_convert_type(scores, jnp.uint32) ^ np.uint32(2**31)
    # By bits alone: some devices take subnormal numbers for zero when they compare.
    bits = lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.uint32)
    magnitude = bits & np.uint32(2**31 - 1)
    keys = jnp.where(bits == magnitude, bits | np.uint32(2**31), ~bits)
    keys = jnp.where(magnitude == 0, np.uint32(2**31), keys)
    return jnp.where(magnitude > np.uint32(0x7F800000), np.uint32(0), keys)


def select_sizes(scores: Array, *args: Array, k: int, **kwargs: int | None) -> dict[str, int]:
    """The sizes that backends are ordered by."""
    n = scores.shape[-1]
    return {"rows": math.prod(scores.shape[:-1]), "n": n, "k": k}


def rows_of_scores(rows: int, n: int, dtype: DTypeLike, kinds: int) -> np.ndarray:
    """Rows of scores of several kinds, with ``kinds`` distinct values or, for 0, any.

    Floats include infinities, NaN and both zeros; in every fourth row all scores are equal.
    """
    rng = np.random.default_rng([rows, n, kinds])
    if dtype == "int32":
        low, high = (-1, kinds) if kinds else (-(2**31), 2**31)
        scores = rng.integers(low, high, (rows, n)).astype(np.int32)
    else:
        drawn = rng.standard_normal((rows, n), np.float32)
        scores = np.round(drawn * kinds) / kinds if kinds else drawn
        odd = rng.choice(
            np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0, 0.0], np.float32), (rows, n)
        )
        scores = np.where(rng.random((rows, n)) < 0.2, odd, scores).astype(dtype)
    scores[3::4] = scores[3::4, :1]
    return scores


def ragged(rows: int, upper: int) -> np.ndarray:
    """Counts int32 ``[rows]``: 0 and ``upper`` are frequent, and some exceed 0..upper."""
    rng = np.random.default_rng([rows, upper])
    ends = rng.choice([0, upper], rows)
    return np.where(rng.random(rows) < 0.3, ends, rng.integers(-1, upper + 2, rows)).astype(
        np.int32
    )


def _build(rows: int, n: int, k: int, dtype: str, kinds: int) -> tuple[np.ndarray, ...]:
    lengths = ragged(rows, n)
    lengths[0] = n
    return rows_of_scores(rows, n, dtype, kinds), ragged(rows, k), lengths


# ``(rows, n, k, dtype, kinds, sinks, recent)`` by name.
_SHAPES = {
    "small": (3, 20, 6, "float32", 0, 1, 2),
    "all-integers": (9, 300, 40, "int32", 0, 4, 16),
    "few-integers": (8, 1100, 64, "int32", 128, 0, 0),
    "ties": (12, 700, 100, "float32", 2, 3, 30),
    "half": (8, 530, 64, "bfloat16", 0, 0, 5),
    "half-ties": (5, 90, 90, "float16", 1, 0, 0),
    "more-than-there-is": (4, 30, 50, "float32", 0, 2, 2),
    "one-slot": (6, 1, 1, "float32", 0, 0, 1),
    "no-slots": (2, 0, 3, "float32", 0, 1, 1),
    "long": (2, 40000, 700, "float32", 0, 16, 64),
}


def _cases() -> list[Case]:
    return [
        Case(
            name,
            functools.partial(_build, rows, n, k, dtype, kinds),
            {
                "k": k,
                "sinks": sinks,
                "recent": recent,
                "highest": kinds if dtype == "int32" and kinds else None,
            },
            small=name == "small",
        )
        for name, (rows, n, k, dtype, kinds, sinks, recent) in _SHAPES.items()
    ]


SELECT = Operation(
    "select",
    {
        "xla": Backend("xla", select_xla, always),
        "cuda": "jspec.cuda_ffi.select:SELECT",
    },
    select_sizes,
    _cases,
)
