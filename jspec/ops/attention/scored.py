"""Attention over a cache that also scores every key for one pooled query of each KV head.

`scored_attention` is the public operation; ``xla`` is the reference.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.attention.dense import ATTENTION, attention_sizes, check_attention
from jspec.typing import Array


def scored_attention(
    q: Array,
    k: Array,
    v: Array | None,
    positions: Array,
    shares: Array,
    *,
    key_positions: Array | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    value_size: int | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array, Array]:
    """`jspec.attention`, and the scores of one more query for each KV head, which reads no value.

    ``shares [B, T]``, float32: how much the queries of each token count in that one, which is the
    mean of those of a group of heads, rounded to the dtype of ``q``; where they are 0, queries are
    not read. The other arguments are those of `jspec.attention`. Scores are linear: the mean over
    query heads and tokens of what they score is what the mean of these queries scores, so that a
    pass that verifies can rank its keys at the cost of one row.
    Returns output, log-sum-exp and scores, float32 ``[B, K, S]``: ``scale`` times the product of
    pooled query and key, without soft cap. Scores of slots that no query of the row reads are not
    specified.
    """
    check_attention(q, k, v, positions, key_positions, value_size)
    if shares.shape != q.shape[:2] or shares.dtype != jnp.float32:
        raise ValueError(
            f"shares {shares.dtype}{list(shares.shape)} must be float32{list(q.shape[:2])}, [B, T]"
        )
    return SCORED(
        *(q, k, v, positions, shares),
        key_positions=key_positions,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        window=window,
        softcap=softcap,
        value_size=value_size,
        implementation=implementation,
    )


def mean_query(q: Array, shares: Array, kv_heads: int) -> Array:
    """The queries ``q [B, T, N, H]`` by ``shares [B, T]`` of their tokens, in the mean over the
    heads of a group: float32 ``[B, K, H]``."""
    batch, tokens, heads, size = q.shape
    shares = shares[..., None, None]
    wide = jnp.where(shares == 0, 0, q.astype(jnp.float32) * shares)
    group = heads // kv_heads
    return wide.reshape(batch, tokens, kv_heads, group, size).sum(axis=(1, 3)) / group


def _xla(q, k, v, positions, shares, *, scale, **settings):
    wide = q.dtype if q.dtype == k.dtype else jnp.float32
    probe = mean_query(q, shares, k.shape[2]).astype(q.dtype)
    scores = jnp.einsum(
        "bkh,bskh->bks", probe.astype(wide), k.astype(wide), preferred_element_type=jnp.float32
    )
    run = ATTENTION.backend("xla").run
    return *run(q, k, v, positions, scale=scale, **settings), scores * jnp.float32(scale)


def _cases() -> list[Case]:
    """The cases of attention, with shares, and what numpy makes of them."""

    def scored(dense: Case) -> Case:
        def build() -> tuple[np.ndarray, ...]:
            q, *more = dense.build()
            shares = np.zeros(q.shape[:2], np.float32)
            shares[:, 0] += 0.5
            shares[:, -1] += 0.5
            return q, *more, shares

        def wanted() -> tuple[np.ndarray, ...]:
            assert dense.wanted is not None
            q, k, _, _, shares = (np.asarray(x, np.float32) for x in build())
            probe = np.einsum("btnh,bt->bnh", q, shares)
            probe = probe.reshape(len(q), k.shape[2], -1, q.shape[3]).mean(axis=2)
            probe = probe.astype(build()[0].dtype).astype(np.float32)
            return *dense.wanted(), np.einsum("bkh,bskh->bks", probe, k) / 4

        return Case(dense.name, build, dense.static, small=True, wanted=wanted)

    return [scored(dense) for dense in ATTENTION.cases()]


SCORED = Operation(
    "scored_attention",
    {
        "xla": Backend("xla", _xla, always),
        "triton": "jspec.triton.attention:SCORED",
        "exact": "jspec.triton.attention:EXACT_SCORED",
        "pallas": "jspec.pallas.attention:SCORED",
        "cuda": "jspec.cuda_ffi.attention:SCORED",
    },
    attention_sizes,
    _cases,
)
