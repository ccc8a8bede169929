"""New keys and values into the cache, after the norm and the rotation of queries and keys.

`rotate_and_append` is the public operation; ``xla`` is the reference.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.norm import RMS
from jspec.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Turn:
    """What is still to be done to queries and keys before they meet.

    A norm of each head, ``q_norm`` and ``k_norm``, None for none; then a rotation by ``cosine`` and
    ``sine``, float32 ``[B, T, 1, H / 2]``. ``joined [B, T, K, G * H + H + H']``: the product that
    queries, keys and values are slices of, for kernels to read it in place; None where there is
    none.
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
    """Rotate ``x [B, T, N, H]`` in the half-split layout of Llama checkpoints; keeps its dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def rotate_and_append(
    q: Array,
    k: Array,
    v: Array,
    turn: Turn,
    keys: Array,
    values: Array,
    slots: Array,
    *,
    implementation: str | None = None,
) -> tuple[Array, Array, Array]:
    """Norm and rotate queries and keys, and write keys and values into their slots of a cache.

    ``q [B, T, N, H]``, ``k [B, T, K, H]``, ``v [B, T, K, H']``; ``keys [B, S, K, H]`` and ``values
    [B, S, K, H']``, of one dtype, are updated; ``slots`` int32 ``[B, T]``, S for none, no slot
    twice. Returns the queries, and keys and values with the new ones (RoFormer, Su et al. 2021;
    Qwen3's norm of queries and keys).
    """
    batch, tokens, _, size = q.shape
    fits = k.shape[:2] == v.shape[:2] == slots.shape == (batch, tokens) and k.shape[3] == size
    if not fits or (keys.shape[2:], values.shape[2:]) != (k.shape[2:], v.shape[2:]):
        raise ValueError(
            f"q {q.shape}, k {k.shape}, v {v.shape}, keys {keys.shape}, values {values.shape}, "
            f"slots {slots.shape} must be [B, T, N, H], [B, T, K, H], [B, T, K, H'], [B, S, K, H], "
            "[B, S, K, H'] and [B, T]"
        )
    return APPEND(q, k, v, turn, keys, values, slots, implementation=implementation)


def _xla(q, k, v, turn, keys, values, slots) -> tuple[Array, Array, Array]:
    q, k = turn(q, k)
    rows = jnp.arange(q.shape[0])[:, None]
    keys = keys.at[rows, slots].set(k.astype(keys.dtype), mode="drop")
    values = values.at[rows, slots].set(v.astype(values.dtype), mode="drop")
    return q, keys, values


def append_sizes(q: Array, *args, **kwargs) -> dict[str, int]:
    """What backends are ordered by."""
    return {"batch": q.shape[0], "tokens": q.shape[1]}


def _cases() -> list[Case]:
    """Two rows of three tokens, one of them padding, with and without norms."""

    def build(normed: bool):
        def made():
            rng = np.random.default_rng(0)

            def normal(*shape) -> Any:
                return rng.standard_normal(shape, np.float32)

            joined = normal(2, 3, 2, 4 * 16)
            q, k, v = np.split(joined, [32, 48], axis=-1)
            angle = normal(2, 3, 1, 8)
            norms = (RMS(normal(16)), RMS(normal(16))) if normed else (None, None)
            turn = Turn(np.cos(angle), np.sin(angle), *norms, joined)
            cache = normal(2, 20, 2, 16), normal(2, 20, 2, 16)
            slots = np.array([[4, 5, 20], [0, 7, 19]], np.int32)
            return q.reshape(2, 3, 4, 16), k, v, turn, *cache, slots

        return made

    return [Case("normed", build(True), small=True), Case("plain", build(False), small=True)]


APPEND = Operation(
    "rotate_and_append",
    {"xla": Backend("xla", _xla, always), "triton": "jspec.triton.append:APPEND"},
    append_sizes,
    _cases,
)
