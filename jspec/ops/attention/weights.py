"""The softmax weight of every key, in the mean over the queries that read it.

`mean_weights` is the public operation; ``xla`` is the reference.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.attention.dense import attention_sizes, check_heads
from jspec.ops.attention.softmax import capped, grouped
from jspec.ops.cached import compute_dtype
from jspec.typing import Array


def mean_weights(
    q: Array,
    k: Array,
    lse: Array,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> Array:
    """The softmax weight of each key of a cache, averaged over tokens and query heads.

    The weight of a key for a query is ``exp(score - lse)``. Nothing is masked: the result for a
    slot that some query does not read is not specified.

    Args:
        q: ``[B, T, N, H]``.
        k: ``[B, S, K, H]``.
        lse: float32 ``[B, T, N]``, the log-sum-exp of `jspec.ops.attention`; queries with -inf,
            such as padding, are left out of the mean.
        scale: of the scores; None is ``H ** -0.5``.
        softcap: as in `jspec.ops.attention`.
        implementation: the backend by name; None is the best one.

    Returns:
        float32 ``[B, K, S]``, the mean over tokens and the query heads of a KV head, 0 where all
        queries are left out.

    Raises:
        ValueError: for shapes or dtypes that do not fit together.
    """
    check_heads(q, k, k, None)
    if lse.shape != q.shape[:3] or lse.dtype != jnp.float32:
        raise ValueError(f"lse {lse.dtype}{list(lse.shape)} must be float32{list(q.shape[:3])}")
    return WEIGHTS(
        *(q, k, lse),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        softcap=softcap,
        implementation=implementation,
    )


def _xla(q: Array, k: Array, lse: Array, *, scale: float, softcap: float | None) -> Array:
    """The reference of `mean_weights`."""
    kv_heads = k.shape[2]
    dtype = compute_dtype(q, k)
    rows = grouped(q * jnp.asarray(scale, q.dtype), kv_heads).astype(dtype)
    scores = jnp.einsum(
        "bkrh,bskh->bkrs", rows, k.astype(dtype), preferred_element_type=jnp.float32
    )
    exponents = grouped(lse[..., None], kv_heads)
    counts = exponents > -jnp.inf
    weights = jnp.exp(capped(scores, softcap) - jnp.where(counts, exponents, 0.0))
    total = jnp.where(counts, weights, 0.0).sum(axis=2)
    return total / jnp.maximum(counts.sum(axis=2), 1).astype(jnp.float32)


def _cases() -> list[Case]:
    """Three tokens, one of them padding, and the result of NumPy."""

    def build() -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(0)
        q, k = (rng.standard_normal((1, n, 2, 16), np.float32) for n in (3, 40))
        lse = rng.standard_normal((1, 3, 2), np.float32)
        lse[0, 2] = -np.inf
        return q, k, lse

    def expected() -> tuple[np.ndarray, ...]:
        q, k, lse = build()
        scores = np.einsum("btnh,bsnh->btns", q[:, :2], k) / 4
        return (np.exp(scores - lse[:, :2, :, None]).mean(axis=1),)

    static = {"scale": 0.25, "softcap": None}
    return [Case("one-of-three-padding", build, static, small=True, expected=expected)]


WEIGHTS = Operation(
    "mean_weights",
    {"xla": Backend("xla", _xla, always), "triton": "jspec.triton.weights:WEIGHTS"},
    attention_sizes,
    _cases,
)
