"""Attention of T query tokens over a selection of a cache, with its log-sum-exp.

`gathered_attention` is the public operation; ``xla``, the reference, copies what was selected.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.attention.dense import check_heads, values_in
from jspec.ops.attention.softmax import accumulate, empty_sums, finish, grouped
from jspec.ops.cached import FLOAT8
from jspec.typing import Array


def gathered_attention(
    q: Array,
    k: Array,
    v: Array | None,
    positions: Array,
    selected: Array,
    tail: Array,
    context_len: Array,
    *,
    counts: Array | None = None,
    log_weights: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    value_size: int | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Grouped-query attention of new tokens over selected slots of a cache, and a tail after them.

    What other slots hold, NaN included, has no effect. Slots must be below S: they are not clamped.

    Args:
        q: ``[B, T, N, H]``.
        k: ``[B, S, K, H]``; or ``[1, S, K, H]``, whose slots all rows read.
        v: the same with H' channels, or None as in `jspec.ops.attention`.
        positions: int32 ``[B, T]``, absolute, -1 for padding.
        selected: int32 ``[B, n]``, or ``[B, K, n]`` for a list of each KV head: slots that every
            query reads, each once, -1 for none.
        tail: int32 ``[B, m]``, the slots of the positions ``context_len``, ``context_len + 1`` and
            so on; a query reads those up to its own position.
        context_len: int32 ``[B]``, the position of the first slot of ``tail``.
        counts: int32 ``[B]``, or ``[B, K]`` as ``selected``: only the first ``counts`` slots of a
            list are read; None is all.
        log_weights: float32 ``[B, T, N, n]``, added to the scores of the selected slots after the
            soft cap; -inf leaves a slot out for that query. For importance sampling: the negative
            logarithm of a slot's probability.
        scale: of the scores; None is ``H ** -0.5``.
        softcap: as in `jspec.ops.attention`.
        value_size: as in `jspec.ops.attention`.
        implementation: the backend by name; None is the best one.

    Returns:
        The output ``[B, T, N, H']`` in the dtype of ``q``, and the log-sum-exp, natural log,
        float32 ``[B, T, N]``. Padding, and a query that reads no slot, give 0 and -inf.

    Raises:
        ValueError: for shapes or dtypes that do not fit together.
    """
    check_heads(q, k, v, value_size, rows=1 if len(k) == 1 else None)
    check_gathered(q, k, positions, selected, tail, context_len, counts, log_weights)
    return GATHERED(
        q,
        k,
        v,
        positions,
        selected,
        tail,
        context_len,
        counts=counts,
        log_weights=log_weights,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        softcap=softcap,
        value_size=value_size,
        implementation=implementation,
    )


def filled(selected: Array) -> Array:
    """The length of each list ``[..., n]`` without the -1 at its end, int32 ``[...]``."""
    index = jnp.arange(1, selected.shape[-1] + 1, dtype=jnp.int32)
    return jnp.where(selected >= 0, index, 0).max(axis=-1)


def check_gathered(
    q: Array,
    k: Array,
    positions: Array,
    selected: Array,
    tail: Array,
    context_len: Array,
    counts: Array | None = None,
    log_weights: Array | None = None,
) -> None:
    """Raise `ValueError` where shapes or dtypes are not those of `gathered_attention`."""
    batch, tokens, kv_heads = *q.shape[:2], k.shape[2]
    if positions.shape != (batch, tokens) or context_len.shape != (batch,):
        raise ValueError(
            f"positions {positions.shape} must be [B, T] = {(batch, tokens)} and context_len "
            f"{context_len.shape} [B] = {(batch,)}"
        )
    lead = (batch, kv_heads)[: selected.ndim - 1]
    if selected.ndim not in (2, 3) or selected.shape[:-1] != lead:
        raise ValueError(
            f"selected {selected.shape} must be [B, n] or [B, K, n] with B={batch}, K={kv_heads}"
        )
    if counts is not None and counts.shape != lead:
        raise ValueError(f"counts {counts.shape} must be {lead}, as selected {selected.shape} is")
    if tail.ndim != 2 or tail.shape[0] != batch:
        raise ValueError(f"tail {tail.shape} must be [B, m] with B={batch}")
    weights_shape = (*q.shape[:3], selected.shape[-1])
    if log_weights is not None and (log_weights.shape, log_weights.dtype) != (
        weights_shape,
        jnp.float32,
    ):
        raise ValueError(
            f"log_weights {log_weights.dtype}{list(log_weights.shape)} must be float32 "
            f"[B, T, N, n] = {list(weights_shape)}"
        )


def _xla(
    q,
    k,
    v,
    positions,
    selected,
    tail,
    context_len,
    *,
    counts,
    log_weights,
    scale,
    softcap,
    value_size,
) -> tuple[Array, Array]:
    """The reference of `gathered_attention`: a copy of what was selected, and of the tail."""
    batch, tokens, heads, _ = q.shape
    kv_heads = k.shape[2]
    # One entry of a head axis where the heads share their selection.
    selected, tail = selected.reshape(batch, -1, selected.shape[-1]), tail[:, None]
    read = selected >= 0
    if counts is not None:
        index = jnp.arange(selected.shape[-1])[None, None]
        read &= index < counts.reshape(batch, -1)[..., None]
    query_positions = positions[:, None, :, None]
    read = read[:, :, None] & (query_positions >= 0)
    tail_positions = context_len[:, None] + jnp.arange(tail.shape[-1])[None]
    tail_read = (tail_positions[:, None, None] <= query_positions) & (tail >= 0)[:, :, None]
    tail_read = jnp.broadcast_to(tail_read, (*read.shape[:3], tail.shape[-1]))
    valid = jnp.repeat(jnp.concatenate([read, tail_read], axis=-1), heads // kv_heads, axis=2)
    tail = jnp.broadcast_to(tail, (*selected.shape[:2], tail.shape[-1]))
    slots = jnp.concatenate([selected, tail], axis=-1)
    index = jnp.swapaxes(slots, 1, 2)[..., None]
    keys = jnp.take_along_axis(k, index, axis=1, mode="clip")
    values = None if v is None else jnp.take_along_axis(v, index, axis=1, mode="clip")
    values = values_in(keys, values, value_size)
    rows = grouped(q * jnp.asarray(scale, q.dtype), kv_heads)
    if log_weights is not None:
        more = ((0, 0), (0, 0), (0, 0), (0, tail.shape[-1]))
        log_weights = jnp.pad(grouped(log_weights, kv_heads), more)
    sums = empty_sums(rows, values.shape[3])
    sums = accumulate(sums, rows, keys, values, valid, softcap, log_weights)
    return finish(sums, tokens, q.dtype)


def gathered_sizes(
    q: Array, k: Array, v, positions, selected: Array | jax.ShapeDtypeStruct, *args, **kwargs
) -> dict[str, int]:
    """The sizes that backends are ordered by.

    ``rows`` is T * G; ``kv_heads``: of all batch rows; ``bits``: of a channel of a key; ``lists``:
    selections of a batch row, 1 where heads share one.
    """
    batch, tokens, heads, _ = q.shape
    kv_heads, channels = k.shape[2:]
    sizes = {"batch": batch, "tokens": tokens, "rows": tokens * heads // kv_heads}
    sizes |= {"kv_heads": batch * kv_heads}
    lists = 1 if selected.ndim == 2 else selected.shape[1]
    sizes |= {"selected": selected.shape[-1], "channels": channels, "bits": 8 * k.dtype.itemsize}
    return sizes | {"lists": lists}


def _cases() -> list[Case]:
    """Two tokens after five selected ones of ten, without and with weights, by NumPy.

    Also in bfloat16 with 64 channels, for kernels that use matrix units, over a cache of the same
    dtype and of 8 bits.
    """
    chosen = np.array([[7, 0, -1, 3, 4, 9]], np.int32)
    weights = np.random.default_rng(1).standard_normal((1, 2, 2, 6)).astype(np.float32)
    weights[0, 0, 1, 3] = -np.inf

    def build(size: int, dtype: str, cached: DTypeLike) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(0)
        shapes = [(1, n, 2, size) for n in (2, 12, 12)]
        q, k, v = (rng.standard_normal(shape, np.float32) for shape in shapes)
        q, k, v = q.astype(dtype), k.astype(cached), v.astype(cached)
        positions, tail = np.array([[10, 11]], np.int32), np.array([[10, 11]], np.int32)
        return q, k, v, positions, chosen, tail, np.array([10], np.int32)

    def expected(weighted: bool, *sizes: Any) -> tuple[np.ndarray, np.ndarray]:
        arrays = build(*sizes)
        q, k, v = (np.asarray(x, np.float32) for x in arrays[:3])
        scores = np.einsum("btnh,bsnh->bnts", q, k) / 4
        if weighted:
            is_slot = chosen[0] >= 0
            scores[..., chosen[0, is_slot]] += np.swapaxes(weights, 1, 2)[..., is_slot]
        read = [np.isin(np.arange(12), [*chosen[0], *range(10, last + 1)]) for last in (10, 11)]
        scores = np.where(np.array(read), scores, -np.inf)
        lse = np.log(np.exp(scores).sum(axis=-1))
        out = np.einsum("bnts,bsnh->btnh", np.exp(scores - lse[..., None]), v)
        return out.astype(arrays[0].dtype), np.swapaxes(lse, 1, 2)

    def case(name: str, log_weights: np.ndarray | None, *sizes: Any) -> Case:
        static = {"counts": None, "scale": 0.25, "softcap": None, "value_size": None}
        static["log_weights"] = log_weights
        builder = functools.partial(build, *sizes)
        expected_case = functools.partial(expected, log_weights is not None, *sizes)
        return Case(name, builder, static, small=True, expected=expected_case)

    return [
        case("two-tokens", None, 16, "float32", "float32"),
        case("weighted", weights, 16, "float32", "float32"),
        case("8-bits", None, 64, "bfloat16", FLOAT8),
        case("channels-64", None, 64, "bfloat16", "bfloat16"),
    ]


GATHERED = Operation(
    "gathered_attention",
    {
        "xla": Backend("xla", _xla, always),
        "triton": "jspec.triton.gathered:GATHERED",
        "cuda": "jspec.cuda_ffi.gathered:GATHERED",
        "pallas": "jspec.pallas.gathered:GATHERED",
    },
    gathered_sizes,
    _cases,
)
