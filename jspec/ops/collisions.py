"""Buckets of queries and keys in random hash tables, and how often they collide (MagicPIG).

`bucket_codes` and `collision_scores` are public (arXiv 2410.16179, section 4); ``xla`` is the
reference. A table's bucket is the signs of some projections. The code of a vector holds its buckets
in L tables, bit by bit: tables are in groups of 32, and a group has one word for each bit of a
bucket. Table t is bit t % 32 of the words of group t // 32; bits after the last table are 0. Two
buckets are equal if no bit differs, so a few operations on words compare 32 tables.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.hash import check_words, lengths_or
from jspec.typing import Array

MIN_COLLISIONS = 2  # tables in which a query shares a bucket with a key that it retrieves
GROUP = 32  # tables of a word


def bucket_codes(x: Array, projections: Array, tables: int) -> Array:
    """The buckets of vectors in random hash tables, bit by bit.

    A bit is 1 where the projection is above 0, so NaN gives 0; sums are float32. It has no
    derivative.

    Args:
        x: ``[..., H]``.
        projections: floats ``[H, tables * bits]``, the projections of a table next to each other.
        tables: the number of tables.

    Returns:
        uint32 ``[..., W]`` with ``W = ceil(tables / 32) * bits``.

    Raises:
        ValueError: for shapes that do not fit together.
    """
    fits = x.ndim >= 1 and projections.ndim == 2 and x.shape[-1] == projections.shape[0]
    if not fits or tables < 1 or not projections.shape[1] or projections.shape[1] % tables:
        raise ValueError(
            f"x {list(x.shape)} and projections {list(projections.shape)} must be [..., H] and "
            f"[H, tables * bits] with tables={tables} at least 1"
        )
    x, projections = (lax.stop_gradient(y).astype(jnp.float32) for y in (x, projections))
    # In full precision: a key and a query of equal sign must not differ by the program they are in.
    products = jnp.einsum("...h,hp->...p", x, projections, precision=lax.Precision.HIGHEST)
    lead, groups, size = x.shape[:-1], code_words(tables, 1), projections.shape[1] // tables
    bits = (products > 0).reshape(*lead, tables, size).astype(jnp.uint32)
    bits = jnp.pad(bits, [*[(0, 0)] * len(lead), (0, groups * GROUP - tables), (0, 0)])
    places = jnp.arange(GROUP, dtype=jnp.uint32).reshape(*[1] * len(lead), 1, GROUP, 1)
    words = bits.reshape(*lead, groups, GROUP, size) << places
    return words.sum(axis=-2, dtype=jnp.uint32).reshape(*lead, groups * size)


def code_words(tables: int, bits: int) -> int:
    """Words of a code."""
    return -(-tables // GROUP) * bits


def collision_scores(
    q_codes: Array,
    k_codes: Array,
    tables: int,
    *,
    lengths: Array | None = None,
    implementation: str | None = None,
) -> Array:
    """In how many tables each key shares a bucket with the queries that retrieve it.

    A query retrieves a key with which it shares a bucket in at least two tables. The score of a key
    is the number of these tables, summed over those of its G = N / K query heads and T tokens that
    retrieve it: a whole number in 2..G T L, or -1 where none does.

    Args:
        q_codes: uint32 ``[B, T, N, W]`` of `bucket_codes`.
        k_codes: uint32 ``[B, S, K, W]`` of `bucket_codes` with as many tables.
        tables: the number of tables, L.
        lengths: int32 ``[B]``, slots of each row; None is S.
        implementation: the backend by name; None is the best one.

    Returns:
        int32 ``[B, K, S]``, -1 from ``lengths`` on.

    Raises:
        ValueError: for shapes or dtypes that do not fit together.
    """
    _check(q_codes, k_codes, tables)
    lengths = lengths_or(lengths, k_codes.shape[:1], k_codes.shape[1])
    return COLLISION_SCORES(q_codes, k_codes, lengths, tables=tables, implementation=implementation)


def max_collisions(q_codes: Array, k_codes: Array, tables: int) -> int:
    """The highest score that `collision_scores` can give: G T L."""
    _, tokens, heads, _ = q_codes.shape
    return heads // k_codes.shape[2] * tokens * tables


def _check(q_codes: Array, k_codes: Array, tables: int) -> None:
    """Raise `ValueError` where shapes or dtypes are not those of `collision_scores`."""
    check_words(q_codes, k_codes)
    words = k_codes.shape[3]
    if tables < MIN_COLLISIONS or not words or words % code_words(tables, 1):
        raise ValueError(
            f"{words} words a code must be a multiple of tables / {GROUP}, rounded up, of "
            f"tables={tables}, which must be at least {MIN_COLLISIONS}"
        )
    if (highest := max_collisions(q_codes, k_codes, tables)) > np.iinfo(np.int32).max:
        raise ValueError(f"scores to G T L = {highest} do not fit into int32; score fewer tokens")


def collisions(q_codes: Array, k_codes: Array, tables: int) -> Array:
    """In how many tables each query shares a bucket with each key that it reads.

    int32 ``[B, T, S, K, G]`` of codes as `collision_scores` takes them.
    """
    (batch, tokens, heads, words), (_, slots, kv_heads, _) = q_codes.shape, k_codes.shape
    groups = code_words(tables, 1)
    bits = words // groups
    q = q_codes.reshape(batch, tokens, 1, kv_heads, heads // kv_heads, groups, bits)
    k = k_codes.reshape(batch, 1, slots, kv_heads, 1, groups, bits)
    differ = functools.reduce(jnp.bitwise_or, (q[..., bit] ^ k[..., bit] for bit in range(bits)))
    return tables - lax.population_count(differ).astype(jnp.int32).sum(axis=-1)


def collisions_xla(q_codes: Array, k_codes: Array, lengths: Array, *, tables: int) -> Array:
    """The reference of `collision_scores`."""
    shared = collisions(q_codes, k_codes, tables)
    scores = jnp.swapaxes(jnp.where(shared >= MIN_COLLISIONS, shared, 0).sum(axis=(1, 4)), 1, 2)
    slot = jnp.arange(k_codes.shape[1], dtype=jnp.int32).reshape(1, 1, -1)
    return jnp.where((slot < lengths[:, None, None]) & (scores > 0), scores, -1)


def collision_sizes(q_codes: Array, k_codes: Array, *rest: Array, tables: int) -> dict[str, int]:
    """The sizes that backends are ordered by: code words of the queries of a key, and all keys."""
    batch, slots, heads, words = k_codes.shape
    queries = q_codes.shape[1] * (q_codes.shape[2] // heads)
    return {"words": queries * words, "keys": batch * slots * heads}


def _build(
    batch: int, tokens: int, heads: int, kv_heads: int, slots: int, tables: int, bits: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes of which some have few bits that are 1: these share many buckets.

    The first query is 0, the first key too, and the second shares no bucket with it.
    """
    rng = np.random.default_rng([batch, tokens, slots, tables, bits])

    def drawn(*lead: int) -> np.ndarray:
        return _codes(rng.random((*lead, tables, bits)) < rng.random((*lead, 1, 1)) / 2)

    q, k = drawn(batch, tokens, heads), drawn(batch, slots, kv_heads)
    q[0, 0, 0], k[0, :1], k[0, 1:2] = 0, 0, _codes(np.ones((tables, bits), bool))
    lengths = np.resize(np.array([slots, 0, 2 * slots // 3, slots + 1, -1], np.int32), batch)
    # Slots after a row's length would collide in all tables.
    is_past_end = np.arange(slots) >= lengths[:, None]
    query_codes = q[:, :1, :: heads // kv_heads]
    return q, np.where(is_past_end[..., None, None], query_codes, k), lengths


def _codes(bits: np.ndarray) -> np.ndarray:
    """The codes of buckets given as ``bits [..., tables, bits]``."""
    *lead, tables, size = bits.shape
    groups = code_words(tables, 1)
    bits = np.pad(bits, [*[(0, 0)] * len(lead), (0, groups * GROUP - tables), (0, 0)])
    places = np.arange(GROUP, dtype=np.uint32)[:, None]
    words = bits.reshape(*lead, groups, GROUP, size).astype(np.uint32) << places
    return words.sum(axis=-2, dtype=np.uint32).reshape(*lead, groups * size)


# ``(B, T, N, K, S, L, bits)`` by name.
_SHAPES = {
    "small": (2, 1, 4, 2, 9, 3, 2),
    "two-tables": (3, 1, 2, 2, 70, 2, 1),
    "grouped": (3, 1, 8, 2, 70, 150, 10),
    "a-pass": (3, 3, 6, 3, 41, 40, 3),
    "one-head": (1, 2, 12, 1, 70, 151, 5),
    "many-bits": (5, 1, 8, 1, 33, 64, 16),
    "one-key": (1, 1, 4, 2, 1, 151, 7),
    "no-slots": (2, 1, 4, 2, 0, 150, 4),
}


def _cases() -> list[Case]:
    return [
        Case(
            name,
            functools.partial(_build, *shape),
            {"tables": shape[-2]},
            small=name == "small",
        )
        for name, shape in _SHAPES.items()
    ]


COLLISION_SCORES = Operation(
    "collision_scores",
    {
        "xla": Backend("xla", collisions_xla, always),
        "triton": "jspec.triton.collisions:COLLISION_SCORES",
    },
    collision_sizes,
    _cases,
)
