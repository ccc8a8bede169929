"""Scores of all cached keys, or of pages of them, for the queries that share a KV head.

`dot_scores` and `page_scores` are the public operations; ``xla`` is the reference. Queries of
several tokens and of the heads of a group are scored together: a score is the sum over them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout as Order
from jax.experimental.layout import with_layout_constraint

from jspec.dispatch import Backend, Case, Operation, always
from jspec.typing import Array


def dot_scores(
    q: Array, keys: Array, *, projection: Array | None = None, implementation: str | None = None
) -> Array:
    """The sum of q.k over the queries that read a KV head, for every slot.

    With ``projection`` W, q W takes the place of q: the scores of Loki (arXiv 2406.02542,
    algorithm 1), whose columns are keys in their leading principal components. It has no
    derivative.

    Args:
        q: ``[B, T, N, H]``.
        keys: ``[B, S, K, C]``; C = H without a projection.
        projection: float32 ``[K, H, C]``.
        implementation: the backend by name; None is the best one.

    Returns:
        float32 ``[B, K, S]``; sums are float32.

    Raises:
        ValueError: for shapes that do not fit together.
    """
    channels = q.shape[-1] if projection is None else projection.shape[-1]
    _check(q, keys, channels)
    if projection is not None and projection.shape != (keys.shape[2], q.shape[3], channels):
        raise ValueError(
            f"projection {list(projection.shape)} must be [K, H, C] = "
            f"{[keys.shape[2], q.shape[3], channels]}"
        )
    arguments = q, keys, projection
    return DOT_SCORES(*map(_constant, arguments), implementation=implementation)


def page_scores(q: Array, low: Array, high: Array, *, implementation: str | None = None) -> Array:
    """An upper bound of q.k of all keys of a page, summed over the queries that read a KV head.

    With the smallest and the largest key of a page in each channel i, it is the sum of
    ``max(q_i low_i, q_i high_i)`` (Quest, arXiv 2406.10774, algorithm 1). It has no derivative.

    Args:
        q: ``[B, T, N, H]``.
        low: the smallest keys, ``[B, P, K, H]``.
        high: the largest keys, of the same shape and dtype.
        implementation: the backend by name; None is the best one.

    Returns:
        float32 ``[B, K, P]``; sums are float32.

    Raises:
        ValueError: for shapes or dtypes that do not fit together.
    """
    _check(q, low, q.shape[-1])
    if (low.shape, low.dtype) != (high.shape, high.dtype):
        raise ValueError(
            f"low {low.dtype}{list(low.shape)} and high {high.dtype}{list(high.shape)} must be of "
            "one shape and dtype"
        )
    return PAGE_SCORES(*map(_constant, (q, low, high)), implementation=implementation)


def _constant(x: Array | None) -> Array | None:
    return None if x is None else lax.stop_gradient(x)


def _check(q: Array, keys: Array, channels: int) -> None:
    fits = q.ndim == keys.ndim == 4 and q.shape[0] == keys.shape[0] and keys.shape[3] == channels
    if not fits or not keys.shape[2] or q.shape[2] % keys.shape[2]:
        raise ValueError(
            f"q {list(q.shape)} and keys {list(keys.shape)} must be [B, T, N, H] and [B, S, K, C] "
            f"with N a multiple of K and C = {channels}"
        )


def _by_group(q: Array, kv_heads: int) -> Array:
    """``q [B, T, N, H]`` in float32 by the KV head that each query reads, ``[B, T, K, N/K, H]``."""
    batch, tokens, heads, size = q.shape
    return q.reshape(batch, tokens, kv_heads, heads // kv_heads, size).astype(jnp.float32)


def _dots(*pairs: tuple[Array, Array]) -> Array:
    """``q [B, K, C]`` times each of ``k [B, S, K, C]``, summed in float32: ``[B, K, S]``.

    Of several pairs the sum, in one kernel. It is no matmul, for which XLA would transpose all
    keys. Nor may XLA choose a layout for a column that no kernel of jspec fixes: a chunk of steps
    would begin and end with a copy of the whole column.
    """
    products = (
        with_layout_constraint(jnp.asarray(k), Order((0, 1, 2, 3))).astype(jnp.float32) * q[:, None]
        for q, k in pairs
    )
    return jnp.swapaxes(functools.reduce(jnp.add, products).sum(axis=-1), 1, 2)


def dot_scores_xla(q: Array, keys: Array, projection: Array | None) -> Array:
    """The reference of `dot_scores`: as q.k is linear, queries are summed first."""
    pooled = _by_group(q, keys.shape[2]).sum(axis=(1, 3))
    if projection is not None:
        pooled = jnp.einsum("bkh,khc->bkc", pooled, projection)
    return _dots((pooled, keys))


def page_scores_xla(q: Array, low: Array, high: Array) -> Array:
    """The reference of `page_scores`: positive channels meet the largest key, others the least."""
    by_group = _by_group(q, low.shape[2])
    above, below = (part(by_group, 0).sum(axis=(1, 3)) for part in (jnp.maximum, jnp.minimum))
    return _dots((above, high), (below, low))


def key_sizes(q: Array, keys: Array, *rest: Array | None) -> dict[str, int]:
    """The sizes that backends are ordered by: keys or pages of all heads, and channels of each."""
    batch, slots, heads, channels = keys.shape
    return {"keys": batch * slots * heads, "channels": channels}


def _case(
    batch: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    slots: int,
    size: int,
    channels: int,
    dtype: str,
) -> tuple[Any, ...]:
    """Small whole numbers, so that sums are exact in any order."""
    rng = np.random.default_rng([batch, tokens, slots, size])

    def drawn(*shape: int, dtype: str = dtype) -> np.ndarray:
        return rng.integers(-3, 4, shape).astype(jnp.dtype(dtype))

    q, keys = drawn(batch, tokens, heads, size), drawn(batch, slots, kv_heads, channels)
    projected = channels != size
    return q, keys, drawn(kv_heads, size, channels, dtype="float32") if projected else None


def _full_pages(*sizes: int | str) -> tuple[np.ndarray, ...]:
    q, low, _ = _case(*sizes)  # pyright: ignore[reportArgumentType]
    return q, low, low + np.abs(low[:, ::-1])


def _page_case(*sizes: int | str) -> tuple[np.ndarray, ...]:
    """The last page as one without a position: its score is any number that is not finite."""
    q, low, high = _full_pages(*sizes)
    low[:, -1:], high[:, -1:] = np.inf, -np.inf
    return q, low, high


# ``(B, T, N, K, S, H, C, dtype)`` by name.
_SHAPES = {
    "small": (2, 1, 4, 2, 9, 8, 8, "float32"),
    "grouped": (2, 3, 8, 2, 300, 64, 64, "bfloat16"),
    "odd-size": (1, 2, 6, 3, 130, 24, 24, "float16"),
    "no-slots": (2, 1, 4, 2, 0, 16, 16, "bfloat16"),
}
_PROJECTED = {
    "components": (2, 1, 8, 2, 300, 64, 32, "bfloat16"),
    "few-components": (1, 2, 6, 3, 70, 24, 5, "float32"),
}


def _dot_cases() -> list[Case]:
    return [
        Case(name, functools.partial(_case, *shape), small=name == "small")
        for name, shape in (_SHAPES | _PROJECTED).items()
    ]


def _page_cases() -> list[Case]:
    ragged = [Case(name, functools.partial(_page_case, *shape)) for name, shape in _SHAPES.items()]
    return [*ragged, Case("full", functools.partial(_full_pages, *_SHAPES["small"]), small=True)]


DOT_SCORES = Operation(
    "dot_scores",
    {
        "xla": Backend("xla", dot_scores_xla, always),
        "triton": "jspec.triton.key_scores:DOT_SCORES",
    },
    key_sizes,
    _dot_cases,
)
PAGE_SCORES = Operation(
    "page_scores",
    {
        "xla": Backend("xla", page_scores_xla, always),
        "triton": "jspec.triton.key_scores:PAGE_SCORES",
    },
    key_sizes,
    _page_cases,
)
