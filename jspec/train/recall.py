"""Recall of key selections: hashes compared with other scores that read as many bytes.

Each method scores the keys for a group of query heads, and the best keys within a budget are
selected. The exact score is the sum of ``q . k`` over the group. Loki (Singhania et al. 2024)
scores by the first principal axes of the keys, Quest (Tang et al. 2024) by a bound from the
smallest and largest key of each page, MagicPIG (Chen et al. 2024) by collisions in hash tables.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import LayerSpec
from jspec.ops.collisions import bucket_codes, collision_scores
from jspec.ops.hash import hamming_scores, hash_encode
from jspec.typing import Array

BUDGETS = (64, 32)  # one in so many of the keys that a query may read: 1.56 % and 3.1 %
KEY_BYTES = 2  # of a key's channel in a cache of bfloat16
BUCKET_BITS = 4  # of a table of MagicPIG


class SelectionQuality(NamedTuple):
    """How well a selection of keys matches attention, each a float32 scalar.

    Attributes:
        recall: share of the keys with the best exact scores that are selected, mean over queries
            and KV heads.
        mass: attention weight of the selected keys, mean over queries and query heads.
    """

    recall: Array
    mass: Array


@dataclasses.dataclass(frozen=True)
class Rivals:
    """Sizes at which other methods read as many bytes of a key as a code of ``bits``.

    Attributes:
        bits: bits of a code.
        key_size: channels of a key.
        nbytes: bytes read for each key.
        channels: bfloat16 channels of Loki.
        page: tokens of a page of Quest, which reads two bfloat16 bounds a channel and page.
        tables: hash tables of MagicPIG, of `BUCKET_BITS` each.
    """

    bits: int
    key_size: int

    @property
    def nbytes(self) -> float:
        return self.bits / 8

    @property
    def channels(self) -> int:
        return self.bits // (8 * KEY_BYTES)

    @property
    def page(self) -> int:
        return max(1, 2 * KEY_BYTES * self.key_size * 8 // self.bits)

    @property
    def tables(self) -> int:
        return self.bits // BUCKET_BITS


def hash_scores(q: Array, k: Array, w: Array) -> Array:
    """Numbers of equal bits of query and key codes, summed over a group.

    Args:
        q: float32 ``[M, K, G, H]``.
        k: float32 ``[S, K, H]``.
        w: hashes float32 ``[K, H, R]``.

    Returns:
        float32 ``[M, K, S]``.
    """
    q_codes = hash_encode(q.reshape(q.shape[0], 1, -1, q.shape[3]), w)
    k_codes = jnp.broadcast_to(
        hash_encode(k[None], w), (q.shape[0], *k.shape[:2], w.shape[2] // 32)
    )
    return hamming_scores(q_codes, k_codes).astype(jnp.float32)


def exact_scores(q: Array, k: Array) -> Array:
    """``q . k`` summed over a group: float32 ``[M, K, S]``."""
    return jnp.einsum("mkh,skh->mks", q.sum(axis=2), k)


def channel_scores(q: Array, k: Array, axes: Array, channels: int) -> Array:
    """Loki: ``q . k`` over the first ``channels`` of ``axes [K, H, H]``, columns by variance."""
    first = axes[:, :, :channels]
    return exact_scores(
        jnp.einsum("mkgh,khc->mkgc", q, first), jnp.einsum("skh,khc->skc", k, first)
    )


def table_scores(q: Array, k: Array, center: Array, tables: int) -> Array:
    """MagicPIG: in how many hash tables a key, less ``center [K, H]``, collides with the queries.

    float32 ``[M, K, S]``; -1 where no query of a group collides twice.
    """
    shape = (q.shape[-1], tables * BUCKET_BITS)
    projections = jax.random.normal(jax.random.key(0), shape, jnp.float32)
    q_codes = bucket_codes(q.reshape(len(q), 1, -1, q.shape[-1]), projections, tables)
    k_codes = bucket_codes((k - center[None])[None], projections, tables)
    k_codes = jnp.broadcast_to(k_codes, (len(q), *k_codes.shape[1:]))
    return collision_scores(q_codes, k_codes, tables).astype(jnp.float32)


def page_scores(q: Array, k: Array, readable: Array, page: int) -> Array:
    """Quest: an upper bound on ``q . k`` over each page, summed over a group.

    Args:
        q: float32 ``[M, K, G, H]``.
        k: float32 ``[S, K, H]``.
        readable: bool ``[M, S]``; a page's bounds are over the keys that the query may read.
        page: tokens of a page.

    Returns:
        float32 ``[M, K, S']``, S rounded up to whole pages; the tokens of a page are equal.
    """
    size = -(-k.shape[0] // page) * page
    k = jnp.pad(k, ((0, size - len(k)), (0, 0), (0, 0)))
    readable = jnp.pad(readable, ((0, 0), (0, size - readable.shape[1])))

    def one(q: Array, readable: Array) -> Array:
        pages = k.reshape(-1, page, *k.shape[1:])
        is_readable = readable.reshape(-1, page, 1, 1)
        low = jnp.where(is_readable, pages, jnp.inf).min(axis=1)
        high = jnp.where(is_readable, pages, -jnp.inf).max(axis=1)
        bound = jnp.maximum(q[None] * low[:, :, None], q[None] * high[:, :, None])
        return bound.sum(axis=(2, 3)).T  # [K, pages]

    bounds = jax.lax.map(lambda pair: one(*pair), (q, readable))
    return jnp.repeat(bounds, page, axis=2)


def ranks(scores: Array, readable: Array) -> Array:
    """The rank of each key by its score, 0 for the best; ties go to the first key.

    Args:
        scores: float32 ``[M, K, S]``.
        readable: bool ``[M, S]``; keys that a query may not read are ranked last.

    Returns:
        int32 ``[M, K, S]``.
    """
    readable_scores = jnp.where(readable[:, None], scores, -jnp.inf)
    best_first = jnp.argsort(-readable_scores, axis=2, stable=True)
    places = jnp.broadcast_to(jnp.arange(scores.shape[2])[None, None], scores.shape)
    return jnp.put_along_axis(places, best_first, places, axis=2, inplace=False)


@functools.partial(jax.jit, static_argnames="spec")
def compare(
    queries: Array,
    positions: Array,
    keys: Array,
    hashes: Mapping[str, Array],
    axes: Array,
    center: Array,
    spec: LayerSpec,
) -> dict[str, list[SelectionQuality]]:
    """Compare the selections of all methods in one layer.

    Args:
        queries: ``[M, N, H]``.
        positions: int32 ``[M]``; a query reads the keys up to its position.
        keys: ``[S, K, H]``.
        hashes: float32 ``[K, H, R]`` by name of the method.
        axes: float32 ``[K, H, H]``, the principal axes for Loki.
        center: float32 ``[K, H]``, the mean of keys for MagicPIG.
        spec: the layer.

    Returns:
        For each method by name, the quality at each of `BUDGETS`.
    """
    k = keys.astype(jnp.float32)
    q = queries.astype(jnp.float32).reshape(len(queries), k.shape[1], -1, k.shape[2])
    readable = jnp.arange(len(k))[None] <= positions[:, None]
    # Slots after the last position may hold anything, NaN included.
    k = jnp.where(readable.any(axis=0)[:, None, None], k, 0)
    sizes = Rivals(next(iter(hashes.values())).shape[2], k.shape[2])
    scores = {name: hash_scores(q, k, w) for name, w in hashes.items()} | {
        "exact": exact_scores(q, k),
        "loki": channel_scores(q, k, axes, sizes.channels),
        "quest": page_scores(q, k, readable, sizes.page)[:, :, : len(k)],
        "magicpig": table_scores(q, k, center, sizes.tables),
    }
    weights = attention_weights(q, k, readable, spec)
    orders = {name: ranks(values, readable) for name, values in scores.items()}
    budget_counts = [jnp.maximum(1, (positions + 1) // one_in) for one_in in BUDGETS]
    return {
        name: [_quality(order, orders["exact"], counts, weights) for counts in budget_counts]
        for name, order in orders.items()
    }


def _quality(order: Array, exact_order: Array, counts: Array, weights: Array) -> SelectionQuality:
    """Recall and mass of the first ``counts [M]`` keys of ``order``, against ``exact_order``."""
    limit = counts[:, None, None]
    mine = order < limit
    hits = (mine & (exact_order < limit)).sum(axis=2, dtype=jnp.float32)
    recall = hits / counts[:, None].astype(jnp.float32)
    return SelectionQuality(
        recall.mean(), jnp.where(mine[:, :, None], weights, 0).sum(axis=3).mean()
    )


def attention_weights(q: Array, k: Array, readable: Array, spec: LayerSpec) -> Array:
    """Attention weights ``[M, K, G, S]`` over the keys that are True in ``readable [M, S]``."""
    logits = spec.score_scale * jnp.einsum("mkgh,skh->mkgs", q, k)
    if spec.softcap is not None:
        logits = spec.softcap * jnp.tanh(logits / spec.softcap)
    return jax.nn.softmax(jnp.where(readable[:, None, None], logits, -jnp.inf), axis=-1)


def principal_axes(keys: np.ndarray) -> np.ndarray:
    """Principal axes of ``keys [n, K, H]`` of each KV head, ``[K, H, H]``, columns by variance."""
    axes = []
    for head_keys in np.moveaxis(keys.astype(np.float32), 1, 0):
        values, vectors = np.linalg.eigh(np.cov(head_keys, rowvar=False))
        axes.append(vectors[:, np.argsort(-values)])
    return np.stack(axes).astype(np.float32)
