"""Norm, rotation and the write into the cache as one Triton launch."""

from __future__ import annotations

import jax

from jspec.dispatch import Backend
from jspec.ops.append import Turn
from jspec.ops.norm import RMS
from jspec.triton.call import (
    aliases_are_given_twice,
    next_power,
    refuses_triton,
    triton_call,
)
from jspec.typing import Array


def append_triton(
    q: Array, k: Array, v: Array, turn: Turn, keys: Array, values: Array, slots: Array
) -> tuple[Array, Array, Array]:
    """As `jspec.ops.append.rotate_and_append`."""
    from jspec.triton.append_kernel import append_kernel, append_kernel_0_3

    assert turn.joined is not None  # `refuses`
    batch, tokens, heads, size = q.shape
    kv_heads, value = v.shape[2:]
    like = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, keys, values))
    # Any array stands for the scales that there are not.
    q_norm, k_norm = turn.q_norm or RMS(turn.cosine), turn.k_norm or RMS(turn.cosine)
    found = triton_call(
        append_kernel_0_3 if aliases_are_given_twice() else append_kernel,
        *(
            keys,
            values,
            turn.joined,
            turn.cosine,
            turn.sine,
            slots,
            q_norm.scale,
            k_norm.scale,
        ),
        out=tuple(like),
        aliases={0: 1, 1: 2},
        programs=batch * tokens * kv_heads,
        warps=1,
        NORMED=turn.q_norm is not None,
        SLOTS=keys.shape[1],
        TOKENS=tokens,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        SIZE=size,
        VALUE=value,
        Q_EPS=q_norm.eps,
        K_EPS=k_norm.eps,
        GROUP_WIDTH=next_power(heads // kv_heads),
        HALF=next_power(size // 2),
        VALUE_WIDTH=next_power(value),
    )
    queries, keys, values = found
    return queries, keys, values


def refuses(q: Array, v: Array, turn: Turn) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    batch, tokens, heads, size = q.shape
    kv_heads, value = v.shape[2:]
    if turn.joined is None:
        return "queries, keys and values are not slices of one product"
    if (turn.q_norm is None) != (turn.k_norm is None):
        return "of queries and keys only one has a norm"
    columns = heads // kv_heads * size + size + value
    if turn.joined.shape != (batch, tokens, kv_heads, columns):
        return f"joined {turn.joined.shape} is not [B, T, K, {columns}]"
    if 0 in q.shape or 0 in v.shape:
        return f"q {q.shape}, v {v.shape} leave nothing to launch"
    return None


def _supports(q, k, v, turn, keys, values, slots) -> str | None:
    return refuses(q, v, turn) or refuses_triton()


APPEND = Backend("triton", append_triton, _supports)
