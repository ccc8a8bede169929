"""Attention of T query tokens over a cache, with its log-sum-exp.

`attention` is the public operation; ``xla`` is the reference, ``xla_blocked`` walks the cache in
blocks with a running softmax and stops at the longest row, which suits CPUs and prefill.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.dispatch import Backend, Case, Operation, always
from jspec.sharding import varying_axes, varying_over
from jspec.typing import Array

# Keys a step of xla_blocked: on a CPU a block of keys and values stays in a core's L2; a GPU, which
# waits for the host in every round, wants fewer and larger ones.
BLOCK, GPU_BLOCK = 512, 2048
LOWEST = float(jnp.finfo(jnp.float32).min)


def attention(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    *,
    key_positions: Array | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Causal grouped-query attention of new tokens over a cache that already holds their keys.

    ``q [B, T, N, H]``; ``k [B, S, K, H]``; ``v [B, S, K, H']``; ``positions`` int32 ``[B, T]``,
    absolute, -1 for padding. ``key_positions`` int32 ``[B, S]`` are the keys' absolute positions,
    -1 for an empty slot; None means that a key's slot is its position. A query sees the keys at or
    before its position, with ``window`` the last ``window`` of them alone. ``scale`` defaults to
    ``H ** -0.5``; with ``softcap`` a score is ``softcap * tanh(score / softcap)``. What empty slots
    hold, NaN included, has no effect. Returns the output ``[B, T, N, H']`` in the dtype of ``q``
    and the log-sum-exp of the scores, natural log, float32 ``[B, T, N]``; padding gives 0 and -inf.
    """
    _check(q, k, v, positions, key_positions)
    return ATTENTION(
        q,
        k,
        v,
        positions,
        key_positions=key_positions,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        window=window,
        softcap=softcap,
        implementation=implementation,
    )


def _check(q: Array, k: Array, v: Array, positions: Array, key_positions: Array | None) -> None:
    batch, tokens, heads, size = q.shape
    fits = k.shape[:3] == v.shape[:3] and k.shape[0] == batch and k.shape[3] == size
    if not fits or heads % k.shape[2]:
        raise ValueError(
            f"q {q.shape}, k {k.shape}, v {v.shape} must be [B, T, N, H], [B, S, K, H] and "
            "[B, S, K, H'] with N a multiple of K"
        )
    if positions.shape != (batch, tokens):
        raise ValueError(f"positions {positions.shape} must be [B, T] = {(batch, tokens)}")
    if key_positions is not None and key_positions.shape != k.shape[:2]:
        raise ValueError(f"key_positions {key_positions.shape} must be [B, S] = {k.shape[:2]}")


def _grouped(q: Array, kv_heads: int) -> Array:
    """``[B, T, N, H]`` to ``[B, K, T * G, H]``: the queries that share a key-value head."""
    batch, tokens, heads, size = q.shape
    q = q.reshape(batch, tokens, kv_heads, heads // kv_heads, size)
    return q.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, -1, size)


def _ungrouped(x: Array, tokens: int) -> Array:
    """``[B, K, T * G, ...]`` back to ``[B, T, N, ...]``."""
    batch, kv_heads, rows, *rest = x.shape
    x = x.reshape(batch, kv_heads, tokens, rows // tokens, *rest)
    return jnp.swapaxes(x, 1, 2).reshape(batch, tokens, kv_heads * (rows // tokens), *rest)


def _accumulate(carry, q: Array, k: Array, v: Array, valid: Array, softcap: float | None):
    """Add a block of keys to a running softmax ``(maximum, sum, weighted values)``.

    ``q [B, K, T * G, H]`` scaled, ``k [B, S, K, H]``, ``v [B, S, K, H']``, ``valid
    [B, T * G, S]``.
    """
    maximum, total, out = carry
    valid = valid[:, None]
    # Empty slots may hold anything, and 0 * NaN is NaN: their values must go too.
    v = jnp.where(valid.any(axis=2)[:, 0, :, None, None], v, 0)
    scores = jnp.einsum("bkmh,bskh->bkms", q, k, preferred_element_type=jnp.float32)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(valid, scores, LOWEST)
    highest = jnp.maximum(maximum, scores.max(axis=-1))
    weights = jnp.where(valid, jnp.exp(scores - highest[..., None]), 0)
    decay = jnp.exp(maximum - highest)
    values = jnp.einsum(
        "bkms,bskh->bkmh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return highest, total * decay + weights.sum(axis=-1), out * decay[..., None] + values


def _start(q: Array, v: Array):
    rows = q.shape[:-1]
    out = jnp.zeros((*rows, v.shape[-1]), jnp.float32)
    return jnp.full(rows, LOWEST, jnp.float32), jnp.zeros(rows, jnp.float32), out


def _finish(carry, tokens: int, dtype) -> tuple[Array, Array]:
    maximum, total, out = carry
    out = out / jnp.where(total > 0, total, 1)[..., None]
    lse = jnp.where(total > 0, maximum + jnp.log(total), -jnp.inf)
    return _ungrouped(out, tokens).astype(dtype), _ungrouped(lse, tokens)


def _sees(positions: Array, key_positions: Array, group: int, window: int | None) -> Array:
    """Which of ``[B, S]`` keys each grouped query row may read, bool ``[B, T * G, S]``."""
    seen = (key_positions >= 0)[:, None] & (key_positions[:, None] <= positions[:, :, None])
    if window is not None:
        seen = seen & (key_positions[:, None] > positions[:, :, None] - window)
    return jnp.repeat(seen, group, axis=1)


def _xla(q, k, v, positions, *, key_positions, scale, window, softcap):
    kv_heads = k.shape[2]
    if key_positions is None:
        key_positions = jnp.arange(k.shape[1], dtype=jnp.int32)[None]
    valid = _sees(positions, key_positions, q.shape[2] // kv_heads, window)
    grouped = _grouped(q * jnp.asarray(scale, q.dtype), kv_heads)
    sums = _accumulate(_start(grouped, v), grouped, k, v, valid, softcap)
    return _finish(sums, q.shape[1], q.dtype)


def _xla_blocked(q, k, v, positions, *, key_positions, scale, window, softcap):
    slots, kv_heads = k.shape[1:3]
    group = q.shape[2] // kv_heads
    block = min(BLOCK if jax.default_backend() == "cpu" else GPU_BLOCK, slots)
    if key_positions is None:
        key_positions = jnp.arange(slots, dtype=jnp.int32)[None]
        blocks = (positions.max() + block) // block
    else:
        blocks = math.ceil(slots / block)
    grouped = _grouped(q * jnp.asarray(scale, q.dtype), kv_heads)

    def body(index, carry):
        # The last block starts early where it would run over the end; what it repeats is masked.
        start = jnp.minimum(index * block, slots - block)
        part_k, part_v = (lax.dynamic_slice_in_dim(x, start, block, axis=1) for x in (k, v))
        part_positions = lax.dynamic_slice_in_dim(key_positions, start, block, axis=1)
        fresh = start + jnp.arange(block) >= index * block
        valid = _sees(positions, part_positions, group, window) & fresh[None, None]
        return _accumulate(carry, grouped, part_k, part_v, valid, softcap)

    start = varying_over(varying_axes((q, k, v, positions, key_positions)), _start(grouped, v))
    sums = lax.fori_loop(0, blocks, body, start)
    return _finish(sums, q.shape[1], q.dtype)


def _sizes(q: Array, k: Array, *args, **kwargs) -> dict[str, int]:
    """What backends are ordered by."""
    return {"batch": q.shape[0], "tokens": q.shape[1], "slots": k.shape[1]}


def _cases() -> list[Case]:
    """Three tokens at the end of a cache, and what numpy makes of them."""

    def build() -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(0)
        q, k, v = (rng.standard_normal((1, n, 2, 16), np.float32) for n in (3, 40, 40))
        return q, k, v, np.array([[37, 38, 39]], np.int32)

    def wanted() -> tuple[np.ndarray, np.ndarray]:
        q, k, v, positions = build()
        scores = np.einsum("btnh,bsnh->bnts", q, k) / 4
        scores = np.where(np.arange(40) <= positions[0][:, None], scores, -np.inf)
        lse = np.log(np.exp(scores).sum(axis=-1))
        out = np.einsum("bnts,bsnh->btnh", np.exp(scores - lse[..., None]), v)
        return out, np.swapaxes(lse, 1, 2)

    static = {"key_positions": None, "scale": 0.25, "window": None, "softcap": None}
    return [Case("three-tokens", build, static, small=True, wanted=wanted)]


# On a GPU a loop with a traced bound waits for the host in every round, which a long prefill chunk
# does not feel and a decoding step does.
ATTENTION = Operation(
    "attention",
    {
        "xla": Backend("xla", _xla, always),
        "xla_blocked": Backend("xla_blocked", _xla_blocked, always),
    },
    _sizes,
    _cases,
    elsewhere=("xla_blocked", "xla"),
)


def causal(q: Array, k: Array, v: Array) -> Array:
    """Causal attention of a whole sequence over itself, without a cache: shapes as `attention`."""
    positions = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
    return attention(q, k, v, positions, implementation="xla")[0]
