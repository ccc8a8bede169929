"""New keys and values in the cache, after the norm and the rotary embedding of queries and keys.

`rotate_and_append` and, for caches with hash codes, `rotate_append_encode` are the public
operations; ``xla`` is the reference.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.cached import FLOAT8, as_cached
from jspec.ops.hash import BITS, HASH_ENCODE
from jspec.ops.norm import RMS
from jspec.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QKRope:
    """Norms and rotary embeddings that are still to be applied to queries and keys.

    Attributes:
        cosine: float32 ``[B, T, 1, H / 2]``.
        sine: float32 ``[B, T, 1, H / 2]``.
        q_norm: norm of each head of queries, None for none.
        k_norm: norm of each head of keys, None for none.
        joined: ``[B, T, K, G * H + H + H']``, the projection that queries, keys and values are
            slices of, which kernels read in place; None where they are not.
    """

    cosine: Array
    sine: Array
    q_norm: RMS | None = None
    k_norm: RMS | None = None
    joined: Array | None = None

    def __call__(self, q: Array, k: Array) -> tuple[Array, Array]:
        """Queries ``[B, T, N, H]`` and keys ``[B, T, K, H]``, normed and rotated."""
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        return rotate(q, self.cosine, self.sine), rotate(k, self.cosine, self.sine)


def rotate(x: Array, cosine: Array, sine: Array) -> Array:
    """Apply rotary embeddings to ``x [B, T, N, H]``, half-split as in Llama; keeps its dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def rotate_and_append(
    q: Array,
    k: Array,
    v: Array,
    qk_rope: QKRope,
    keys: Array,
    values: Array,
    slots: Array,
    *,
    implementation: str | None = None,
) -> tuple[Array, Array, Array]:
    """Norm and rotate queries and keys, and write keys and values into their slots of a cache.

    RoFormer (Su et al. 2021); the norms are those of Qwen3.

    Args:
        q: ``[B, T, N, H]``.
        k: ``[B, T, K, H]``.
        v: ``[B, T, K, H']``.
        qk_rope: norms and rotary embeddings.
        keys: ``[B, S, K, H]``, updated.
        values: ``[B, S, K, H']`` of the dtype of ``keys``, updated.
        slots: int32 ``[B, T]``, distinct in a row; S for a token that is not written.
        implementation: the backend by name; None is the best one.

    Returns:
        The rotated queries, and the updated keys and values.

    Raises:
        ValueError: for shapes that do not fit together.
    """
    _check(q, k, v, keys, values, slots)
    return APPEND(q, k, v, qk_rope, keys, values, slots, implementation=implementation)


def rotate_append_encode(
    q: Array,
    k: Array,
    v: Array,
    qk_rope: QKRope,
    keys: Array,
    values: Array,
    codes: Array,
    w: Array,
    slots: Array,
    *,
    implementation: str | None = None,
) -> tuple[Array, Array, Array, Array]:
    """`rotate_and_append`, and `jspec.ops.hash_encode` of the new keys into the column ``codes``.

    The code of a key is that of the key as the cache holds it, rounded to its dtype. Triton, for
    few tokens, and Pallas do all of it in one launch.

    Args:
        q: ``[B, T, N, H]``.
        k: ``[B, T, K, H]``.
        v: ``[B, T, K, H']``.
        qk_rope: norms and rotary embeddings.
        keys: ``[B, S, K, H]``, updated.
        values: ``[B, S, K, H']`` of the dtype of ``keys``, updated.
        codes: uint32 ``[B, S, K, R / 32]``, updated.
        w: ``[K, H, R]``, the hash matrices.
        slots: int32 ``[B, T]``, distinct in a row; S for a token that is not written.
        implementation: the backend by name; None is the best one.

    Returns:
        The rotated queries, and the updated keys, values and codes.

    Raises:
        ValueError: for shapes or dtypes that do not fit together.
    """
    check_encode(q, k, v, keys, values, codes, w, slots)
    arguments = (q, k, v, qk_rope, keys, values, codes, w, slots)
    return APPEND_ENCODE(*arguments, implementation=implementation)


def _check(q: Array, k: Array, v: Array, keys: Array, values: Array, slots: Array) -> None:
    batch, tokens, _, size = q.shape
    fits = k.shape[:2] == v.shape[:2] == slots.shape == (batch, tokens) and k.shape[3] == size
    if not fits or (keys.shape[2:], values.shape[2:]) != (k.shape[2:], v.shape[2:]):
        raise ValueError(
            f"q {q.shape}, k {k.shape}, v {v.shape}, keys {keys.shape}, values {values.shape}, "
            f"slots {slots.shape} must be [B, T, N, H], [B, T, K, H], [B, T, K, H'], [B, S, K, H], "
            "[B, S, K, H'] and [B, T]"
        )


def check_encode(
    q: Array,
    k: Array,
    v: Array,
    keys: Array,
    values: Array,
    codes: Array,
    w: Array,
    slots: Array,
) -> None:
    """Raise `ValueError` where shapes or dtypes are not those of `rotate_append_encode`."""
    _check(q, k, v, keys, values, slots)
    codes_shape = (*keys.shape[:3], w.shape[2] // 32)
    fits = codes.dtype == jnp.uint32 and w.shape[2] in BITS
    if not fits or codes.shape != codes_shape or w.shape[:2] != keys.shape[2:]:
        raise ValueError(
            f"codes {codes.dtype}{list(codes.shape)} and w {list(w.shape)} must be uint32 "
            f"[B, S, K, R / 32] and [K, H, R] for keys {list(keys.shape)}, with R one of {BITS}"
        )


def _xla(q, k, v, qk_rope, keys, values, slots) -> tuple[Array, Array, Array]:
    """The reference of `rotate_and_append`."""
    q, k = qk_rope(q, k)
    rows = jnp.arange(q.shape[0])[:, None]
    keys = keys.at[rows, slots].set(as_cached(k, keys.dtype), mode="drop")
    values = values.at[rows, slots].set(as_cached(v, values.dtype), mode="drop")
    return q, keys, values


def _encode_xla(q, k, v, qk_rope, keys, values, codes, w, slots):
    """The reference of `rotate_append_encode`."""
    q, k = qk_rope(q, k)
    k = as_cached(k, keys.dtype)
    new_codes, _ = HASH_ENCODE(k, None, w, implementation="xla")
    rows = jnp.arange(q.shape[0])[:, None]
    keys = keys.at[rows, slots].set(k, mode="drop")
    values = values.at[rows, slots].set(as_cached(v, values.dtype), mode="drop")
    return q, keys, values, codes.at[rows, slots].set(new_codes, mode="drop")


def append_sizes(q: Array, *args, **kwargs) -> dict[str, int]:
    """The sizes that backends are ordered by."""
    return {"batch": q.shape[0], "tokens": q.shape[1]}


def _cases(bits: int = 0) -> list[Case]:
    """Two rows of three tokens, one of them padding, with and without norms, codes of ``bits``.

    Also into a cache of 8 bits, which holds neither all of the keys nor of the values.
    """

    def build(normed: bool, cached: DTypeLike = np.float32, scale: float = 1.0):
        def made():
            rng = np.random.default_rng(0)

            def normal(*shape) -> Any:
                return rng.standard_normal(shape, np.float32)

            joined = scale * normal(2, 3, 2, 4 * 16)
            q, k, v = np.split(joined, [32, 48], axis=-1)
            angle = normal(2, 3, 1, 8)
            norms = (RMS(normal(16)), RMS(normal(16))) if normed else (None, None)
            qk_rope = QKRope(np.cos(angle), np.sin(angle), *norms, joined)
            cache = [normal(2, 20, 2, 16).astype(cached) for _ in range(2)]
            slots = np.array([[4, 5, 20], [0, 7, 19]], np.int32)
            hashes = ()
            if bits:
                codes = rng.integers(0, 2**32, (2, 20, 2, bits // 32), np.uint32)
                hashes = codes, normal(2, 16, bits)
            return q.reshape(2, 3, 4, 16), k, v, qk_rope, *cache, *hashes, slots

        return made

    return [
        Case("normed", build(True), small=True),
        Case("8-bits", build(False, FLOAT8, 400.0), small=True),
        Case("plain", build(False), small=True),
    ]


APPEND = Operation(
    "rotate_and_append",
    {"xla": Backend("xla", _xla, always), "triton": "jspec.triton.append:APPEND"},
    append_sizes,
    _cases,
)
APPEND_ENCODE = Operation(
    "rotate_append_encode",
    {
        "xla": Backend("xla", _encode_xla, always),
        "triton": "jspec.triton.append:APPEND_ENCODE",
        "pallas": "jspec.pallas.append:APPEND_ENCODE",
        "exact": "jspec.triton.append:EXACT_ENCODE",
    },
    append_sizes,
    lambda: _cases(64),
)
