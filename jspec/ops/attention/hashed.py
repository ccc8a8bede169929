"""Attention of one new token over the slots that its hash code selects, as one operation.

`hash_attention` is the public operation; ``xla`` is the reference, ``one_by_one`` calls the best
backend of each part.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.append import APPEND, APPEND_ENCODE, QKRope, check_encode, rotate_append_encode
from jspec.ops.attention.dense import check_heads
from jspec.ops.attention.gathered import GATHERED, gathered_attention
from jspec.ops.hash import HAMMING_SCORES, HASH_ENCODE, hash_encode
from jspec.ops.hash_selection import HASH_SELECT, hash_select
from jspec.ops.norm import RMS
from jspec.ops.selection import SELECT, check_budget
from jspec.typing import Array

# What it takes the place of: who names a backend for one of these wants it to run.
PARTS = tuple(
    operation.name
    for operation in (
        *(APPEND, APPEND_ENCODE, HASH_ENCODE),
        *(HAMMING_SCORES, SELECT, HASH_SELECT, GATHERED),
    )
)


def hash_attention(
    q: Array,
    k: Array,
    v: Array,
    qk_rope: QKRope,
    keys: Array,
    values: Array,
    codes: Array,
    w: Array,
    positions: Array,
    context_len: Array,
    budget: int,
    *,
    counts: Array | None = None,
    sinks: int = 0,
    recent: int = 0,
    num_uncommitted: int = 1,
    scale: float | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Append one token to a cache with hash codes, select by its code, and attend to the selection.

    All that a layer computes between its projections when it decodes (HATA, Gong et al. 2025, arXiv
    2506.02572, algorithm 3). The cache is linear: a token's slot is its position. Donate the cache
    to update it without a copy. ``positions`` must be below S and ``context_len`` at most S: they
    are not clamped. What slots that are not read hold, NaN included, has no effect.

    Args:
        q: ``[B, 1, N, H]``, as the projection gives it.
        k: ``[B, 1, K, H]``, as the projection gives it.
        v: ``[B, 1, K, H']``.
        qk_rope: norms and rotary embeddings of queries and keys.
        keys: ``[B, S, K, H]``, updated at ``positions``.
        values: ``[B, S, K, H']``, updated at ``positions``.
        codes: uint32 ``[B, S, K, R / 32]`` of `jspec.ops.hash_encode`, updated at ``positions``.
        w: ``[K, H, R]``, the hash matrices.
        positions: int32 ``[B, 1]``, -1 for padding, which appends nothing.
        context_len: int32 ``[B]``: slots below it are selected from.
        budget: slots that are selected for each KV head, at most.
        counts: int32 ``[B]``, the budget of each row; None is ``budget``.
        sinks: the first slots of a row, always selected.
        recent: the last slots of a row below ``context_len``, always selected.
        num_uncommitted: slots from ``context_len`` on that are read as well, up to the query's own.
        scale: of the scores; None is ``H ** -0.5``.
        softcap: as in `jspec.ops.attention`.
        implementation: the backend by name; None is the best one.

    Returns:
        The output ``[B, 1, N, H']`` in the dtype of ``q``; the log-sum-exp, natural log, float32
        ``[B, 1, N]`` (0 and -inf for padding); the selected slots, int32 ``[B, K, budget]``,
        ascending, then -1; and the updated keys, values and codes.

    Raises:
        ValueError: for shapes, dtypes or a budget that do not fit together.
    """
    _check(q, positions, context_len, counts, num_uncommitted)
    check_encode(q, k, v, keys, values, codes, w, positions)
    check_heads(q, keys, values, None)
    check_budget(budget, sinks, recent)
    return HASH_ATTENTION(
        *(q, k, v, qk_rope, keys, values, codes, w, positions, context_len),
        # Backends cap counts at `budget`, so `context_len` stands for no count without an array.
        context_len if counts is None else counts,
        budget=budget,
        sinks=sinks,
        recent=recent,
        num_uncommitted=num_uncommitted,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        softcap=softcap,
        implementation=implementation,
    )


def _check(
    q: Array, positions: Array, context_len: Array, counts: Array | None, num_uncommitted: int
) -> None:
    batch, tokens = q.shape[:2]
    int_arguments = {
        "positions": positions,
        "context_len": context_len,
        "counts": context_len if counts is None else counts,
    }
    shapes = tuple(x.shape for x in int_arguments.values())
    if tokens != 1 or shapes != ((batch, 1), (batch,), (batch,)):
        raise ValueError(
            f"q {q.shape}, "
            + ", ".join(f"{name} {x.shape}" for name, x in int_arguments.items())
            + " must be [B, 1, N, H], [B, 1], [B] and [B]"
        )
    if any(x.dtype != jnp.int32 for x in int_arguments.values()):
        kinds = ", ".join(f"{name} {x.dtype}" for name, x in int_arguments.items())
        raise ValueError(f"{kinds} must be int32")
    if num_uncommitted < 1:
        raise ValueError(
            f"num_uncommitted={num_uncommitted} must be at least 1, the query's own slot"
        )


def _run_parts(
    implementation: str | None,
    q: Array,
    k: Array,
    v: Array,
    qk_rope: QKRope,
    keys: Array,
    values: Array,
    codes: Array,
    w: Array,
    positions: Array,
    context_len: Array,
    counts: Array,
    *,
    budget: int,
    sinks: int,
    recent: int,
    num_uncommitted: int,
    scale: float,
    softcap: float | None,
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """As `hash_attention`, each part by the backend ``implementation``, None for the best one."""
    named: Any = {"implementation": implementation}
    slots = jnp.where(positions >= 0, positions, keys.shape[1])
    # Written before it is read: a cache that is read and then written would be copied whole.
    q, keys, values, codes = rotate_append_encode(
        *(q, k, v, qk_rope, keys, values, codes, w, slots), **named
    )
    with jax.named_scope("selection"):  # that of policies, by which profiles know it
        options = {"counts": counts, "lengths": context_len, "sinks": sinks, "recent": recent}
        chosen = hash_select(hash_encode(q, w, **named), codes, budget, **options, **named)
    tail_slots = context_len[:, None] + jnp.arange(num_uncommitted, dtype=jnp.int32)[None]
    out, lse = gathered_attention(
        *(q, keys, values, positions, chosen, tail_slots, context_len),
        scale=scale,
        softcap=softcap,
        **named,
    )
    return out, lse, chosen, keys, values, codes


_xla = functools.partial(_run_parts, "xla")
_one_by_one = functools.partial(_run_parts, None)


def hash_attention_sizes(
    q: Array, k: Array, v: Array, qk_rope: QKRope, keys: Array, *args: Array, budget: int, **kwargs
) -> dict[str, int]:
    """The sizes that backends are ordered by; ``queries`` of a KV head."""
    batch, slots, heads, _ = keys.shape
    words = args[1].shape[3]
    sizes = {"batch": batch, "slots": slots, "k": budget, "queries": q.shape[2] // heads}
    return sizes | {"heads": heads, "words": words}


def _build(shape, normed, dtype, rows) -> tuple:
    """Without norms: whole numbers, rotated by right angles, so sums are exact in any order."""
    (group, heads, slots, size, value, bits), batch = shape, len(rows)
    # By this seed no sum whose sign is a bit of a code is near 0.
    rng = np.random.default_rng([slots, size, bits, 3])

    def numbers(*shape) -> Any:
        drawn = rng.standard_normal(shape) if normed else rng.integers(-2, 3, shape)
        return drawn.astype(dtype)

    joined = numbers(batch, 1, heads, group * size + size + value)
    q, k, v = np.split(joined, [group * size, group * size + size], axis=-1)
    angles = rng.integers(0, 4, (batch, 1, 1, size // 2)) * (np.pi / 2)
    angles = 1.1 * angles if normed else angles
    turned: Any = (np.cos(angles), np.sin(angles))
    cosine, sine = ((x if normed else np.round(x)).astype(np.float32) for x in turned)
    norms = (RMS(numbers(size)), RMS(numbers(size))) if normed else (None, None)
    columns = numbers(batch, slots, heads, size), numbers(batch, slots, heads, value)
    # Few bits set, so that many scores are equal.
    some = np.array([0, 1, 2**31, 2**32 - 1], np.uint32)
    codes = rng.choice(some, (batch, slots, heads, bits // 32))
    w = numbers(heads, size, bits).astype(np.float32)
    context_len, positions, counts = np.array(rows, np.int32).T
    q, qk_rope = q.reshape(batch, 1, -1, size), QKRope(cosine, sine, *norms, joined)
    return q, k, v, qk_rope, *columns, codes, w, positions[:, None], context_len, counts


def _case(name, shape, dtype, rows, settings, normed=False, small=False) -> Case:
    """``shape``: ``(G, K, S, H, H', R)``; ``rows``: of each ``(context_len, position, count)``;
    ``settings``: ``(budget, sinks, recent, num_uncommitted, softcap)``."""
    static = dict(
        zip(("budget", "sinks", "recent", "num_uncommitted", "softcap"), settings, strict=True)
    )
    static |= {"scale": shape[3] ** -0.5}
    return Case(name, functools.partial(_build, shape, normed, dtype, rows), static, small)


def _cases() -> list[Case]:
    """Rows that are empty, padded, and shorter than what is selected of them."""
    small, drafts = ((2, 2, 20, 16, 16, 32), (2, 2, 24, 16, 16, 64))
    beyond, long_codes = ((1, 3, 20, 24, 8, 32), (1, 8, 130, 32, 32, 256))
    grouped, large_heads = ((8, 2, 700, 64, 64, 128), (4, 2, 300, 128, 128, 128))
    small_heads = (3, 3, 150, 64, 64, 64)
    ragged = [(13, 13, 6), (0, 0, 6), (9, -1, 6), (4, 4, 6)]
    in_tail = [(17, 19, 6), (5, 5, 2), (20, 23, 0)]
    short = [(7, 7, 22), (19, 19, 40), (0, 1, 3)]
    long, others = [(699, 699, 48), (310, -1, 48)], [(129, 129, 9), (64, 64, 4)]
    drafted, padded = [(290, 292, 30), (20, 20, 30)], [(140, 141, 24), (9, -1, 24), (0, 0, 24)]
    return [
        _case("small", small, "float32", ragged, (6, 1, 2, 1, None), normed=True, small=True),
        _case("tail", drafts, "float32", in_tail, (6, 1, 2, 4, None), small=True),
        _case("beyond", beyond, "float32", short, (22, 0, 0, 2, 5.0)),
        _case("grouped", grouped, "float32", long, (48, 4, 16, 1, None), normed=True),
        _case("bfloat16", large_heads, "bfloat16", drafted, (30, 4, 16, 3, None)),
        _case("small-heads", small_heads, "bfloat16", padded, (24, 4, 8, 2, None)),
        _case("long-codes", long_codes, "float16", others, (9, 0, 4, 1, None)),
    ]


# Backends get ``counts [B]`` always, and return what `hash_attention` does.
HASH_ATTENTION = Operation(
    "hash_attention",
    {
        "xla": Backend("xla", _xla, always),
        "one_by_one": Backend("one_by_one", _one_by_one, always, composite=True),
        "cuda": "jspec.cuda_ffi.hashed:HASH_ATTENTION",
    },
    hash_attention_sizes,
    _cases,
    default_order=("one_by_one",),
)
