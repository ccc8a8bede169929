"""The merge of attention over parts of the keys."""

from __future__ import annotations

import jax.numpy as jnp

from jspec.typing import Array


def merge_attention(outs: Array, lses: Array) -> tuple[Array, Array]:
    """Attention over all keys from attention over each of P parts of them.

    ``outs [P, ..., H]`` and their log-sum-exp ``lses [P, ...]``, natural log, float32. A part that
    a query sees no key of has a log-sum-exp of -inf; its output, NaN included, has no effect. Sums
    are in float32. Returns the output ``[..., H]`` in the dtype of ``outs`` and the log-sum-exp
    ``[...]``; without any key they are 0 and -inf (FlashDecoding; Helix, section 2.1.2).
    """
    if outs.shape[:-1] != lses.shape or not outs.shape[0]:
        raise ValueError(f"outs {outs.shape} and lses {lses.shape} must be [P, ..., H], [P, ...]")
    highest = lses.max(axis=0)
    finite = jnp.where(highest == -jnp.inf, 0, highest)
    weights = jnp.exp(lses - finite[None])
    total = weights.sum(axis=0)
    share = weights / jnp.where(total > 0, total, 1)[None]
    parts = jnp.where(weights[..., None] > 0, outs.astype(jnp.float32), 0) * share[..., None]
    return parts.sum(axis=0).astype(outs.dtype), finite + jnp.log(total)
