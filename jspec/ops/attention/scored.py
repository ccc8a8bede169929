"""Attention over a cache that also scores every key for one pooled query of each KV head.

`scored_attention` is the public operation; ``xla`` is the reference.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.attention.dense import (
    ATTENTION,
    attention_sizes,
    check_attention,
    rows_of_blocks,
)
from jspec.ops.cached import compute_dtype
from jspec.typing import Array


def scored_attention(
    q: Array,
    k: Array,
    v: Array | None,
    positions: Array,
    probe: Array,
    *,
    key_positions: Array | None = None,
    table: Array | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    value_size: int | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array, Array]:
    """`jspec.ops.attention`, and the scores of one more query per KV head, which reads no value.

    Scores are linear in the query: with the mean query of a KV head as ``probe``, a verification
    pass ranks its keys at the cost of one query row.

    Args:
        q: ``[B, T, N, H]``.
        k: ``[B, S, K, H]``, or in blocks as in `jspec.ops.attention`.
        v: ``[B, S, K, H']``, in blocks, or None as in `jspec.ops.attention`.
        positions: int32 ``[B, T]``, absolute, -1 for padding.
        probe: ``[B, K, H]`` of the dtype of ``q``.
        key_positions: as in `jspec.ops.attention`.
        table: as in `jspec.ops.attention`.
        scale: of the scores; None is ``H ** -0.5``.
        window: as in `jspec.ops.attention`.
        softcap: as in `jspec.ops.attention`; not applied to the scores of ``probe``.
        value_size: as in `jspec.ops.attention`.
        implementation: the backend by name; None is the best one.

    Returns:
        Output and log-sum-exp of `jspec.ops.attention`, and the scores, float32 ``[B, K, S]``:
        ``scale`` times the dot product of probe and key. Scores of slots that no query of the row
        reads are not specified.

    Raises:
        ValueError: for shapes or dtypes that do not fit together.
    """
    check_attention(q, k, v, positions, key_positions, value_size, table)
    probe_shape = (q.shape[0], *k.shape[2:])
    if probe.shape != probe_shape or probe.dtype != q.dtype:
        raise ValueError(
            f"probe {probe.dtype}{list(probe.shape)} must be {q.dtype}{list(probe_shape)}, "
            "[B, K, H]"
        )
    return SCORED(
        *(q, k, v, positions, probe),
        key_positions=key_positions,
        table=table,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        window=window,
        softcap=softcap,
        value_size=value_size,
        implementation=implementation,
    )


def _xla(q, k, v, positions, probe, *, scale, table=None, **settings):
    """The reference of `scored_attention`: that of `attention`, and one more matmul."""
    dtype = compute_dtype(q, k)
    keys = k if table is None else rows_of_blocks(k, table)
    scores = jnp.einsum(
        "bkh,bskh->bks",
        probe.astype(dtype),
        keys.astype(dtype),
        preferred_element_type=jnp.float32,
    )
    run = ATTENTION.backend("xla").run
    attended = run(q, k, v, positions, scale=scale, table=table, **settings)
    return *attended, scores * jnp.float32(scale)


def _cases() -> list[Case]:
    """The cases of attention with a probe, and the results of NumPy."""

    def scored(dense: Case) -> Case:
        def build() -> tuple[np.ndarray, ...]:
            q, k, *more = dense.build()
            probe = np.random.default_rng(1).standard_normal((1, 2, k.shape[3]), np.float32)
            return q, k, *more, probe.astype(q.dtype)

        def expected() -> tuple[np.ndarray, ...]:
            assert dense.expected is not None
            _, k, _, _, probe = (np.asarray(x, np.float32) for x in build())
            return *dense.expected(), np.einsum("bkh,bskh->bks", probe, k) / 4

        return Case(dense.name, build, dense.static, small=True, expected=expected)

    return [scored(dense) for dense in ATTENTION.cases()]


SCORED = Operation(
    "scored_attention",
    {
        "xla": Backend("xla", _xla, always),
        "triton": "jspec.triton.attention:SCORED",
        "exact": "jspec.triton.attention:EXACT_SCORED",
        "exact_decode": "jspec.ops.exact:SCORED_BACKEND",
        "pallas": "jspec.pallas.attention:SCORED",
        "cuda": "jspec.cuda_ffi.attention:SCORED",
    },
    attention_sizes,
    _cases,
)
