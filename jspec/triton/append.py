"""Norm, rotation and the write into the cache, with codes of the keys, as one Triton launch."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jspec.dispatch import Backend
from jspec.ops.append import QKRope
from jspec.ops.norm import CENTERED, RMS
from jspec.triton.call import (
    next_power,
    passes_aliases_twice,
    refuses_triton,
    triton_call,
)
from jspec.triton.hash import encode_triton, refuses_encode
from jspec.typing import Array

# Programs up to which one launch encodes too. Each reads the matrix of its head, which a launch for
# the codes alone shares among the keys of a tile.
ENCODED = 1024


def append_triton(
    q: Array, k: Array, v: Array, qk_rope: QKRope, keys: Array, values: Array, slots: Array
) -> tuple[Array, Array, Array]:
    """The Triton backend of `jspec.ops.append.rotate_and_append`.

    It reads q, k and v in ``qk_rope.joined``.
    """
    from jspec.triton.append_kernel import append_kernel, append_kernel_0_3

    kernel = append_kernel_0_3 if passes_aliases_twice() else append_kernel
    queries, keys, values = _launch(kernel, q, v, qk_rope, (keys, values), slots)
    return queries, keys, values


def append_encode_triton(
    q: Array,
    k: Array,
    v: Array,
    qk_rope: QKRope,
    keys: Array,
    values: Array,
    codes: Array,
    w: Array,
    slots: Array,
) -> tuple[Array, Array, Array, Array]:
    """The Triton backend of `jspec.ops.append.rotate_append_encode`.

    It reads q, k and v in ``qk_rope.joined``. More than `ENCODED` keys take a second launch for
    their codes.
    """
    from jspec.triton.append_encode_kernel import append_encode_kernel, append_encode_kernel_0_3

    if math.prod(k.shape[:3]) > ENCODED:
        return append_then_encode(q, k, v, qk_rope, keys, values, codes, w, slots)
    kernel = append_encode_kernel_0_3 if passes_aliases_twice() else append_encode_kernel
    outputs = _launch(
        kernel, q, v, qk_rope, (keys, values, codes), slots, w, warps=4, BITS=w.shape[2]
    )
    queries, keys, values, codes = outputs
    return queries, keys, values, codes


def append_then_encode(
    q: Array,
    k: Array,
    v: Array,
    qk_rope: QKRope,
    keys: Array,
    values: Array,
    codes: Array,
    w: Array,
    slots: Array,
) -> tuple[Array, Array, Array, Array]:
    """`append_encode_triton` in two launches, whatever the number of keys.

    So keys have the bits of `append_triton`, and codes do not depend on how many tokens there are.
    """
    q, keys, values = append_triton(q, k, v, qk_rope, keys, values, slots)
    rows = jnp.arange(len(slots))[:, None]
    # Of the rotated keys the cache has the only copy; a slot past its end is not written.
    new_codes, _ = encode_triton(keys.at[rows, slots].get(mode="clip"), None, w)
    return q, keys, values, codes.at[rows, slots].set(new_codes, mode="drop")


def _launch(
    kernel: Any,
    q: Array,
    v: Array,
    qk_rope: QKRope,
    columns: tuple[Array, ...],
    slots: Array,
    *more: Array,
    warps: int = 1,
    **constants: int,
) -> tuple[Array, ...]:
    """The queries, and the ``columns``, which are updated in place."""
    assert qk_rope.joined is not None  # `refuses`
    batch, tokens, heads, size = q.shape
    kv_heads, value = v.shape[2:]
    # Any array stands for the scales that there are not.
    q_norm, k_norm = qk_rope.q_norm or RMS(qk_rope.cosine), qk_rope.k_norm or RMS(qk_rope.cosine)
    return triton_call(
        kernel,
        *(
            *columns,
            qk_rope.joined,
            qk_rope.cosine,
            qk_rope.sine,
            slots,
            q_norm.scale,
            k_norm.scale,
            *more,
        ),
        out=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, *columns)),
        aliases={index: index + 1 for index in range(len(columns))},
        programs=batch * tokens * kv_heads,
        warps=warps,
        NORMED=qk_rope.q_norm is not None,
        SLOTS=columns[0].shape[1],
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
        **constants,
    )


def refuses(q: Array, v: Array, qk_rope: QKRope) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    batch, tokens, heads, size = q.shape
    kv_heads, value = v.shape[2:]
    if qk_rope.joined is None:
        return "queries, keys and values are not slices of one array"
    if (qk_rope.q_norm is None) != (qk_rope.k_norm is None):
        return "of queries and keys only one has a norm"
    if qk_rope.q_norm is not None and qk_rope.q_norm.centered:
        return CENTERED
    columns = heads // kv_heads * size + size + value
    if qk_rope.joined.shape != (batch, tokens, kv_heads, columns):
        return f"joined {qk_rope.joined.shape} is not [B, T, K, {columns}]"
    if 0 in q.shape or 0 in v.shape:
        return f"q {q.shape}, v {v.shape} leave nothing to launch"
    return None


def _supports(q, k, v, qk_rope, keys, values, slots) -> str | None:
    return refuses(q, v, qk_rope) or refuses_triton(keys)


def _supports_encode(q, k, v, qk_rope, keys, values, codes, w, slots) -> str | None:
    return refuses(q, v, qk_rope) or refuses_encode(k, None, w) or refuses_triton(keys)


APPEND = Backend("triton", append_triton, _supports)
APPEND_ENCODE = Backend("triton", append_encode_triton, _supports_encode)
EXACT_ENCODE = Backend("exact", append_then_encode, _supports_encode)
