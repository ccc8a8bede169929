"""Queries and keys of a prefill, and the labelled pairs that hashes are learned from.

The sampling is that of HATA's appendix B.1: one query from the second half of a text with all keys
up to its own, the tenth of the pairs with the highest scores labelled 20 down to 1, the rest -1.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.cache import Cache, LinearLayout
from jspec.config import LayerSpec
from jspec.policies.dense import DenseAttend
from jspec.typing import Array, Attend, Model

POSITIVE = 10  # one pair in so many of a query
HIGHEST, LOWEST, NEGATIVE = 20.0, 1.0, -1.0  # labels: of the positive pairs, and of the others
BLOCK = 256  # pairs of one query that are drawn together
MIN_TOKENS = 16  # of a text; the positive pairs of a shorter one would be none
QUERY_MULTIPLE = 16  # the queries of a pass are padded to a multiple of it
OnPiece = Callable[[int, int], None]


def query_position(length: int, rng: np.random.Generator) -> int:
    """A position in the second half of a text of ``length`` tokens."""
    return int(rng.integers(length // 2, length))


@dataclasses.dataclass(frozen=True)
class PrefilledText:
    """A prefilled text: the queries and keys of each layer.

    ``queries``: of each layer ``[M, N, H]``, at the ``positions [M]`` that were asked for.
    ``cache``: of one row, which holds the keys up to the last of them.
    """

    queries: tuple[np.ndarray, ...]
    positions: np.ndarray
    cache: Cache

    def keys(self, layer: int) -> Array:
        """Keys of a layer, ``[S, K, H]``; slots after the last position hold anything."""
        return self.cache.keys(layer)[0]


def prefill(
    model: Model,
    tokens: Sequence[int],
    positions: Sequence[int],
    *,
    room: int = 0,
    chunk: int | None = None,
    on_piece: OnPiece | None = None,
) -> PrefilledText:
    """Run ``model`` over a text and collect its queries and keys, after norm and rotation.

    Args:
        model: the model.
        tokens: token ids of the text.
        positions: positions of the queries to collect; the text is read up to the last of them.
        room: slots of the cache, at least; texts with the same room share compiled programs.
        chunk: tokens of a pass; None chooses by device.
        on_piece: called as ``on_piece(done, total)`` with numbers of tokens after each pass.

    Returns:
        The queries, and the cache with the keys.

    Raises:
        ValueError: a position is outside the text.
    """
    query_positions = np.asarray(positions, np.int32)
    total = int(query_positions.max()) + 1
    if not 0 < total <= len(tokens) or query_positions.min() < 0:
        raise ValueError(f"positions {list(positions)} must be below the {len(tokens)} tokens")
    if chunk is None:
        chunk = 256 if jax.default_backend() == "cpu" else 2048
    capacity = -(-max(room, total) // chunk) * chunk
    specs = model.config.layers
    cache = Cache.create(specs, [LinearLayout(capacity)] * len(specs), 1, model.dtype)
    # As many in each pass, so that passes share a program.
    padded_count = -(-len(query_positions) // QUERY_MULTIPLE) * QUERY_MULTIPLE
    padded_positions = np.full(padded_count, -1, np.int32)
    padded_positions[: len(query_positions)] = query_positions
    queries: tuple[np.ndarray, ...] = ()
    for begin in range(0, total, chunk):
        end = min(begin + chunk, total)
        piece = np.full((1, chunk), -1, np.int32)
        piece[0, : end - begin] = tokens[begin:end]
        where = begin + np.arange(chunk, dtype=np.int32)
        where = np.where(where < total, where, -1)[None]
        piece_queries, cache = _piece(model, cache, piece, where, padded_positions - begin)
        inside = (begin <= query_positions) & (query_positions < end)
        if inside.any():
            new_queries = [np.asarray(x)[: len(query_positions)] for x in piece_queries]
            queries = queries or tuple(map(np.zeros_like, new_queries))
            for x, new in zip(queries, new_queries, strict=True):
                x[inside] = new[inside]
        if on_piece is not None:
            jax.block_until_ready(cache)
            on_piece(end, total)
    return PrefilledText(queries, query_positions, cache)


@functools.partial(jax.jit, donate_argnames="cache")
def _piece(
    model: Model, cache: Cache, tokens: Array, positions: Array, indices: Array
) -> tuple[tuple[Array, ...], Cache]:
    """Append ``tokens [1, T]`` to the cache and return each layer's queries at ``indices``.

    An index outside the pass gives the query of another token.
    """
    inner = DenseAttend(positions)
    layer_queries: list[Array] = []

    # It does not accept `qk_rope`: the model passes queries that are normed and rotated.
    class RecordingAttend(Attend):
        def __call__(self, layer, q, k, v, cache, /, *, sinks=None, up=None, **_):
            layer_queries.append(jnp.take(q[0], indices, axis=0, mode="clip"))
            return inner(layer, q, k, v, cache, sinks=sinks, up=up)

    _, cache = model(tokens, positions, RecordingAttend(), cache)
    return tuple(layer_queries), cache


@functools.partial(jax.jit, static_argnames="kv_heads")
def labels(query: Array, keys: Array, count: Array, kv_heads: int) -> Array:
    """Label the pairs of one query with the keys of a text (HATA, appendix B.1).

    Each query head ranks the keys by its own scores. The first tenth, at least one key, is labelled
    20 down to 1, evenly spaced, the others -1. Ties go to the earlier key.

    Args:
        query: ``[N, H]``.
        keys: ``[n, K, H]``.
        count: int32 scalar, number of keys that are used; the others are labelled 0.
        kv_heads: K.

    Returns:
        float32 ``[n, K, G]``.
    """
    grouped = query.reshape(kv_heads, -1, query.shape[-1]).astype(jnp.float32)
    scores = jnp.einsum("kgh,nkh->nkg", grouped, keys.astype(jnp.float32))
    is_pair = (jnp.arange(keys.shape[0]) < count)[:, None, None]
    best_first = jnp.argsort(jnp.where(is_pair, -scores, jnp.inf), axis=0, stable=True)
    rank = jnp.argsort(best_first, axis=0)
    positive = jnp.maximum(1, count // POSITIVE)
    step = (HIGHEST - LOWEST) / jnp.maximum(positive - 1, 1).astype(jnp.float32)
    falling = HIGHEST - step * rank.astype(jnp.float32)
    return jnp.where(is_pair, jnp.where(rank < positive, falling, NEGATIVE), 0.0)


class Pairs(NamedTuple):
    """Labelled pairs of a layer in blocks, each of one query, on the device.

    Attributes:
        queries: ``[blocks, K, G, H]``.
        keys: ``[blocks, P, K, H]``.
        labels: float32 ``[blocks, P, K, G]``.
        counts: int32 ``[blocks]``, pairs of a block; rows after them are zero.
    """

    queries: Array
    keys: Array
    labels: Array
    counts: Array


def pairs_of(
    samples: Iterable[tuple[np.ndarray, np.ndarray]],
    spec: LayerSpec,
    rng: np.random.Generator,
    block: int = BLOCK,
) -> Pairs:
    """Create the labelled pairs of a layer.

    The pairs of a query are shuffled before they are cut into blocks, so that any choice of blocks
    is a uniform sample.

    Args:
        samples: a query ``[N, H]`` and keys ``[n, K, H]`` for each text.
        spec: the layer.
        rng: shuffles the pairs.
        block: pairs of a block.

    Returns:
        The pairs.
    """
    parts, used = [], []
    for query, keys in samples:
        count = len(keys)
        # A power of two of blocks, so that texts of close lengths share a program.
        room = block << max(-(-count // block) - 1, 0).bit_length()
        padding = ((0, room - count), (0, 0), (0, 0))
        order = np.concatenate([rng.permutation(count), np.arange(count, room)]).astype(np.int32)
        keys = np.pad(keys, padding)
        parts.append(_cut(query, keys, np.int32(count), order, spec.kv_heads, block))
        used.append(np.arange(room // block) * block < count)
    # Once for all texts: slicing each to its own length would compile a program for each length.
    chosen = np.flatnonzero(np.concatenate(used))
    return Pairs(*(jnp.concatenate(part)[chosen] for part in zip(*parts, strict=True)))


@functools.partial(jax.jit, static_argnames=("kv_heads", "block"))
def _cut(query: Array, keys: Array, count: Array, order: Array, kv_heads: int, block: int) -> Pairs:
    """Permute the first ``count`` of ``keys [n, K, H]`` by ``order [n]`` and cut into blocks."""
    blocks = len(keys) // block
    pair_labels = labels(query, keys, count, kv_heads)
    grouped = query.reshape(1, kv_heads, -1, query.shape[-1])
    return Pairs(
        jnp.broadcast_to(grouped, (blocks, *grouped.shape[1:])),
        keys[order].reshape(blocks, block, *keys.shape[1:]),
        pair_labels[order].reshape(blocks, block, *pair_labels.shape[1:]),
        jnp.clip(count - block * jnp.arange(blocks), 0, block),
    )
