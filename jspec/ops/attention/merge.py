"""The merge of attention over parts of the keys."""

from __future__ import annotations

import jax.numpy as jnp

from jspec.typing import Array


def merge_attention(outs: Array, lses: Array) -> tuple[Array, Array]:
    """Attention over all keys, merged from attention over P disjoint parts of them.

    Sums are float32 (FlashDecoding; Helix, section 2.1.2).

    Args:
        outs: ``[P, ..., H]``, the output over each part.
        lses: float32 ``[P, ...]``, the log-sum-exp of each part, natural log; -inf, or +inf as
            FlashAttention-2 has it, for a part of which a query reads no key: its output, NaN
            included, has no effect.

    Returns:
        The output ``[..., H]`` in the dtype of ``outs`` and the log-sum-exp ``[...]``; 0 and -inf
        where no part has a key.

    Raises:
        ValueError: for shapes that do not fit, or without parts.
    """
    if outs.shape[:-1] != lses.shape or not outs.shape[0]:
        raise ValueError(f"outs {outs.shape} and lses {lses.shape} must be [P, ..., H], [P, ...]")
    lses = jnp.where(lses == jnp.inf, -jnp.inf, lses)
    highest = lses.max(axis=0)
    finite = jnp.where(highest == -jnp.inf, 0, highest)
    weights = jnp.exp(lses - finite[None])
    total = weights.sum(axis=0)
    share = weights / jnp.where(total > 0, total, 1)[None]
    parts = jnp.where(weights[..., None] > 0, outs.astype(jnp.float32), 0) * share[..., None]
    return parts.sum(axis=0).astype(outs.dtype), finite + jnp.log(total)
