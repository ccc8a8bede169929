"""A new token that is appended to the cache and attends to a selection of it, as one operation.

`rotate_append_attend` is the public operation; ``xla`` is the reference, ``one_by_one`` calls the
best backend of each part.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.append import APPEND, QKRope, rotate_and_append
from jspec.ops.attention.dense import check_heads
from jspec.ops.attention.gathered import (
    GATHERED,
    check_gathered,
    gathered_attention,
    gathered_sizes,
)
from jspec.ops.norm import RMS
from jspec.typing import Array

PARTS = (APPEND.name, GATHERED.name)  # what it takes the place of


def rotate_append_attend(
    q: Array,
    k: Array,
    v: Array,
    qk_rope: QKRope,
    keys: Array,
    values: Array,
    positions: Array,
    selected: Array,
    tail: Array,
    context_len: Array,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array, Array, Array]:
    """`rotate_and_append` of one token, and its `gathered_attention`.

    All that a layer of a guided draft computes between its projections (Vegas, Yue et al. 2026).
    The token's slot is that of ``tail`` at its position. Donate the cache to update it without a
    copy. CUDA does all of it in one launch.

    Args:
        q: ``[B, 1, N, H]``, as the projection gives it.
        k: ``[B, 1, K, H]``, as the projection gives it.
        v: ``[B, 1, K, H']``.
        qk_rope: norms and rotary embeddings of queries and keys.
        keys: ``[B, S, K, H]``, updated.
        values: ``[B, S, K, H']``, updated.
        positions: int32 ``[B, 1]``; -1 for padding. It and a token whose position has no slot in
            ``tail`` append nothing.
        selected: as in `gathered_attention`.
        tail: as in `gathered_attention`.
        context_len: as in `gathered_attention`.
        scale: of the scores; None is ``H ** -0.5``.
        softcap: as in `jspec.ops.attention`.
        implementation: the backend by name; None is the best one.

    Returns:
        The output ``[B, 1, N, H']`` in the dtype of ``q``; the log-sum-exp, natural log, float32
        ``[B, 1, N]`` (0 and -inf for padding); and the updated keys and values.

    Raises:
        ValueError: for shapes or dtypes that do not fit together, and for more than one token.
    """
    if q.shape[1] != 1:
        raise ValueError(f"q {q.shape} must have one token a row: [B, 1, N, H]")
    check_heads(q, keys, values, None)
    check_gathered(q, keys, positions, selected, tail, context_len)
    if (k.shape, v.shape) != tuple((x.shape[0], 1, *x.shape[2:]) for x in (keys, values)):
        raise ValueError(
            f"k {k.shape} and v {v.shape} must be [B, 1, K, H] and [B, 1, K, H'] for keys "
            f"{keys.shape} and values {values.shape}"
        )
    return APPEND_ATTEND(
        *(q, k, v, qk_rope, keys, values, positions, selected, tail, context_len),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        softcap=softcap,
        implementation=implementation,
    )


def _run_parts(
    implementation: str | None,
    q: Array,
    k: Array,
    v: Array,
    qk_rope: QKRope,
    keys: Array,
    values: Array,
    positions: Array,
    selected: Array,
    tail: Array,
    context_len: Array,
    *,
    scale: float,
    softcap: float | None,
) -> tuple[Array, Array, Array, Array]:
    """As `rotate_append_attend`, each part by the backend ``implementation``, None for the best."""
    named: Any = {"implementation": implementation}
    index = positions - context_len[:, None]
    slots = jnp.take_along_axis(tail, jnp.maximum(index, 0), axis=1, mode="clip")
    is_there = (positions >= 0) & (index >= 0) & (index < tail.shape[1]) & (slots >= 0)
    slots = jnp.where(is_there, slots, keys.shape[1])
    q, keys, values = rotate_and_append(q, k, v, qk_rope, keys, values, slots, **named)
    out, lse = gathered_attention(
        *(q, keys, values, positions, selected, tail, context_len),
        scale=scale,
        softcap=softcap,
        **named,
    )
    return out, lse, keys, values


def append_attend_sizes(q: Array, k, v, qk_rope, keys: Array, values, *args, **kwargs):
    """The sizes that backends are ordered by: those of `gathered_attention`."""
    return gathered_sizes(q, keys, values, *args[:2])


def _cases() -> list[Case]:
    """Rows in the middle of a draft, at its beginning, padded, and two without a slot.

    The last row's position is in ``tail``, with a slot of -1. The norms have different ``eps``.
    """

    def build(
        size: int, group: int, normed: bool, per_head: bool, dtype: str, new: int = 6
    ) -> tuple[Any, ...]:
        rng, batch, kv_heads, slots = np.random.default_rng(0), 5, 2, 70

        def normal(*shape: int) -> Any:
            return rng.standard_normal(shape, np.float32).astype(dtype)

        joined = normal(batch, 1, kv_heads, (group + 2) * size)
        q, k, v = np.split(joined, [group * size, (group + 1) * size], axis=-1)
        angles: Any = rng.standard_normal((batch, 1, 1, size // 2), np.float32)
        norms = (RMS(normal(size)), RMS(normal(size), 0.5)) if normed else (None, None)
        cosine: Any = np.cos(angles)
        sine: Any = np.sin(angles)
        qk_rope = QKRope(cosine, sine, *norms, joined)
        keys, values = normal(2, batch, slots, kv_heads, size)
        context_len = np.array([24, 3, 9, 20, 20], np.int32)
        positions = np.array([[22 + new], [3], [-1], [20 + new], [22]], np.int32)
        tail = context_len[:, None] + np.arange(new, dtype=np.int32)
        tail[4, 2] = -1
        lists = [rng.permutation(x)[:20] for x in context_len for _ in range(kv_heads)]
        selected = np.array([np.pad(x, (0, 20 - len(x)), constant_values=-1) for x in lists])
        selected = selected.astype(np.int32).reshape(batch, kv_heads, 20)
        selected = selected if per_head else selected[:, 0]
        q = q.reshape(batch, 1, -1, size)
        return q, k, v, qk_rope, keys, values, positions, selected, tail, context_len

    def case(name: str, *sizes: Any, small: bool = False) -> Case:
        static = {"scale": sizes[0] ** -0.5, "softcap": None}
        return Case(name, functools.partial(build, *sizes), static, small)

    return [
        case("float32", 16, 3, True, False, "float32", small=True),
        case("normed", 64, 7, True, False, "bfloat16"),
        case("plain", 64, 1, False, True, "bfloat16"),
        case("channels-128", 128, 4, True, True, "bfloat16", 40),
    ]


# Backends return what `rotate_append_attend` does.
APPEND_ATTEND = Operation(
    "rotate_append_attend",
    {
        "xla": Backend("xla", functools.partial(_run_parts, "xla"), always),
        "one_by_one": Backend(
            "one_by_one", functools.partial(_run_parts, None), always, composite=True
        ),
        "cuda": "jspec.cuda_ffi.gathered:APPEND_ATTEND",
    },
    append_attend_sizes,
    _cases,
    default_order=("one_by_one",),
)
