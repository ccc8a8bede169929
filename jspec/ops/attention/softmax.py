"""What the references of attention share: grouped queries, and a softmax over keys in parts."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from jspec.ops.cached import compute_dtype
from jspec.typing import Array

LOWEST = float(jnp.finfo(jnp.float32).min)


class Sums(NamedTuple):
    """The sums of a softmax over the keys so far, float32; M is ``T * G``.

    Attributes:
        maximum: ``[B, K, M]``, the highest score; weights are relative to it.
        total: ``[B, K, M]``, the sum of the weights.
        out: ``[B, K, M, H']``, the sum of the values times their weights.
    """

    maximum: Array
    total: Array
    out: Array


def grouped(q: Array, kv_heads: int) -> Array:
    """``[B, T, N, H]`` to ``[B, K, T * G, H]``: the queries that share a key-value head."""
    batch, tokens, heads, size = q.shape
    q = q.reshape(batch, tokens, kv_heads, heads // kv_heads, size)
    return q.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, -1, size)


def ungrouped(x: Array, tokens: int) -> Array:
    """``[B, K, T * G, ...]`` back to ``[B, T, N, ...]``."""
    batch, kv_heads, rows, *rest = x.shape
    x = x.reshape(batch, kv_heads, tokens, rows // tokens, *rest)
    return jnp.swapaxes(x, 1, 2).reshape(batch, tokens, kv_heads * (rows // tokens), *rest)


def capped(scores: Array, softcap: float | None) -> Array:
    """Scores in ``-softcap .. softcap``, bent by a tanh; None leaves them as they are."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def empty_sums(q: Array, size: int) -> Sums:
    """The sums over no key, for grouped queries ``[B, K, T * G, H]`` and values of ``size``."""
    rows = q.shape[:-1]
    out = jnp.zeros((*rows, size), jnp.float32)
    return Sums(jnp.full(rows, LOWEST, jnp.float32), jnp.zeros(rows, jnp.float32), out)


def accumulate(
    sums: Sums,
    q: Array,
    k: Array,
    v: Array,
    valid: Array,
    softcap: float | None,
    log_weights: Array | None = None,
) -> Sums:
    """Add keys to the sums.

    ``q [B, K, T * G, H]`` scaled, ``k [B, S, K, H]``, ``v [B, S, K, H']``; ``valid``, bool
    ``[B, K or 1, T * G, S]``, says which keys a query reads; ``log_weights [B, K, T * G, S]`` are
    added to their scores.
    """
    maximum, total, out = sums
    dtype = compute_dtype(q, k)
    # Empty slots may hold anything, and 0 * NaN is NaN: their values must go too.
    read = jnp.swapaxes(valid.any(axis=2), 1, 2)
    v = jnp.where(read[..., None], v, 0).astype(dtype)
    scores = jnp.einsum(
        "bkmh,bskh->bkms",
        q.astype(dtype),
        k.astype(dtype),
        preferred_element_type=jnp.float32,
    )
    scores = capped(scores, softcap)
    if log_weights is not None:
        scores = scores + log_weights
    scores = jnp.where(valid, scores, LOWEST)
    highest = jnp.maximum(maximum, scores.max(axis=-1))
    weights = jnp.where(valid, jnp.exp(scores - highest[..., None]), 0)
    decay = jnp.exp(maximum - highest)
    values = jnp.einsum(
        "bkms,bskh->bkmh", weights.astype(dtype), v, preferred_element_type=jnp.float32
    )
    return Sums(highest, total * decay + weights.sum(axis=-1), out * decay[..., None] + values)


def finish(sums: Sums, tokens: int, dtype) -> tuple[Array, Array]:
    """Output ``[B, T, N, H']`` of ``dtype`` and log-sum-exp ``[B, T, N]`` of the sums."""
    maximum, total, out = sums
    out = out / jnp.where(total > 0, total, 1)[..., None]
    lse = jnp.where(total > 0, maximum + jnp.log(total), -jnp.inf)
    return ungrouped(out, tokens).astype(dtype), ungrouped(lse, tokens)
