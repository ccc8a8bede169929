"""Attention of T query tokens over a cache, with its log-sum-exp.

`attention` is the public operation; ``xla`` is the reference, ``xla_blocked`` walks the cache in
blocks with a running softmax and stops at the longest row, which suits CPUs and prefill.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.attention.softmax import accumulate, empty_sums, finish, grouped
from jspec.ops.cached import FLOAT8
from jspec.sharding import varying_axes, varying_over
from jspec.typing import Array

# Keys of a block of xla_blocked: on a CPU a block of keys and values stays in a core's L2; a GPU,
# which waits for the host in every round, wants fewer and larger ones.
BLOCK, GPU_BLOCK = 512, 2048


def attention(
    q: Array,
    k: Array,
    v: Array | None,
    positions: Array,
    *,
    key_positions: Array | None = None,
    table: Array | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    value_size: int | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Causal grouped-query attention of new tokens over a cache that already holds their keys.

    A query reads the keys at or before its position. What empty slots hold, NaN included, has no
    effect.

    Args:
        q: ``[B, T, N, H]``.
        k: ``[B, S, K, H]``, with N a multiple of K; with ``table``, ``[blocks, block, K, H]``.
        v: the same with H' channels, of the dtype of ``k``; None: the values are the first
            ``value_size`` channels of the keys.
        positions: int32 ``[B, T]``, absolute positions of the queries, -1 for padding.
        key_positions: int32 ``[B, S]``, absolute positions of the keys, -1 for an empty slot; None:
            a key's slot is its position.
        table: int32 ``[B, W]``, not together with ``key_positions``: which of the blocks of ``k``
            has the positions from ``i * block`` on of a row, -1 for none; S is ``W * block``.
            Rows may share blocks. None: each row has its keys in one piece.
        scale: of the scores; None is ``H ** -0.5``.
        window: a query reads only the last ``window`` keys up to its position; None is all.
        softcap: scores become ``softcap * tanh(score / softcap)``; None leaves them.
        value_size: channels of a value, only for ``v=None``.
        implementation: the backend by name; None is the best one.

    Returns:
        The output ``[B, T, N, H']`` in the dtype of ``q``, and the log-sum-exp of the scores,
        natural log, float32 ``[B, T, N]``. Padding gives 0 and -inf.

    Raises:
        ValueError: for shapes or dtypes that do not fit together.
    """
    check_attention(q, k, v, positions, key_positions, value_size, table)
    return ATTENTION(
        q,
        k,
        v,
        positions,
        key_positions=key_positions,
        table=table,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        window=window,
        softcap=softcap,
        value_size=value_size,
        implementation=implementation,
    )


# Why a backend refuses a table.
IN_BLOCKS = "the keys are in blocks, and the kernel reads those of a row in one piece"


def check_attention(
    q: Array,
    k: Array,
    v: Array | None,
    positions: Array,
    key_positions: Array | None,
    value_size: int | None,
    table: Array | None = None,
) -> None:
    """Raise `ValueError` where the arguments of an attention do not fit together."""
    check_heads(q, k, v, value_size, rows=None if table is None else len(k))
    if table is not None and (
        table.ndim != 2 or len(table) != len(q) or table.dtype != jnp.int32 or 0 in k.shape
    ):
        raise ValueError(
            f"table {table.dtype}{list(table.shape)} must be int32 [B, W] with B={len(q)}, for "
            f"blocks of keys {list(k.shape)}"
        )
    if table is not None and key_positions is not None:
        raise ValueError(
            "key_positions and table are both passed; with a table the position of a key follows "
            "from its block"
        )
    if positions.shape != q.shape[:2]:
        raise ValueError(f"positions {positions.shape} must be [B, T] = {q.shape[:2]}")
    if key_positions is not None and key_positions.shape != k.shape[:2]:
        raise ValueError(f"key_positions {key_positions.shape} must be [B, S] = {k.shape[:2]}")


def check_heads(
    q: Array, k: Array, v: Array | None, value_size: int | None, *, rows: int | None = None
) -> None:
    """Raise `ValueError` where queries, keys and values are not of one attention.

    ``rows``: of the first axis of ``k``; None for those of ``q``.
    """
    rows = q.shape[0] if rows is None else rows
    shapes = f"q {q.shape}, k {k.shape}, v {None if v is None else v.shape}"
    fits = q.ndim == k.ndim == 4 and k.shape[0] == rows and k.shape[3] == q.shape[3]
    if v is not None:
        fits = fits and k.shape[:3] == v.shape[:3]
    if not fits or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{shapes} must be [B, T, N, H], [B, S, K, H] and [B, S, K, H'] with N a multiple of K"
        )
    if v is not None and (v.dtype != k.dtype or value_size is not None):
        raise ValueError(
            f"keys of {k.dtype}, values of {v.dtype}, value_size={value_size}: keys and values "
            "must be of one dtype, and value_size is for v=None"
        )
    if v is None and not 1 <= (value_size or 0) <= k.shape[3]:
        raise ValueError(
            f"value_size={value_size} must be from 1 to {k.shape[3]}, the channels of a key that "
            "are its value, where v is None"
        )


def values_in(k: Array, v: Array | None, value_size: int | None) -> Array:
    """The values, where they may be the first ``value_size`` channels of the keys."""
    return k[..., :value_size] if v is None else v


def slots_of(k: Array, table: Array | None) -> int:
    """The slots of a row."""
    return k.shape[1] if table is None else k.shape[1] * table.shape[1]


def rows_of_blocks(blocks: Array, table: Array) -> Array:
    """A copy ``[B, W * block, ...]`` of each row's ``blocks [blocks, block, ...]``.

    ``table`` as in `attention`; undefined where it is -1.
    """
    rows = jnp.take(blocks, table, axis=0, mode="clip")
    return rows.reshape(len(table), -1, *blocks.shape[2:])


def _positions_of_slots(k: Array, table: Array | None) -> Array:
    """The position of each slot, which is its index, int32 ``[1 or B, S]``; -1 for none."""
    index = jnp.arange(slots_of(k, table), dtype=jnp.int32)[None]
    if table is None:
        return index
    return jnp.where(jnp.repeat(table >= 0, k.shape[1], axis=1), index, -1)


def _sees(positions: Array, key_positions: Array, group: int, window: int | None) -> Array:
    """Which of ``[B, S]`` keys each grouped query row reads, bool ``[B, T * G, S]``."""
    visible = (key_positions >= 0)[:, None] & (key_positions[:, None] <= positions[:, :, None])
    if window is not None:
        visible = visible & (key_positions[:, None] > positions[:, :, None] - window)
    return jnp.repeat(visible, group, axis=1)


def _xla(q, k, v, positions, *, key_positions, scale, window, softcap, value_size, table=None):
    """The reference of `attention`: the scores of all slots at once."""
    kv_heads = k.shape[2]
    if key_positions is None:
        key_positions = _positions_of_slots(k, table)
    if table is not None:
        v = None if v is None else rows_of_blocks(v, table)
        k = rows_of_blocks(k, table)
    v = values_in(k, v, value_size)
    valid = _sees(positions, key_positions, q.shape[2] // kv_heads, window)
    rows = grouped(q * jnp.asarray(scale, q.dtype), kv_heads)
    sums = accumulate(empty_sums(rows, v.shape[3]), rows, k, v, valid[:, None], softcap)
    return finish(sums, q.shape[1], q.dtype)


def _xla_blocked(
    q, k, v, positions, *, key_positions, scale, window, softcap, value_size, table=None
):
    """`attention` block by block, with a running softmax, as far as the longest row reaches.

    With ``key_positions``, over all blocks.
    """
    slots, kv_heads = slots_of(k, table), k.shape[2]
    group = q.shape[2] // kv_heads
    size = 1 if table is None else k.shape[1]  # of a block of the cache, which is read whole
    block = BLOCK if jax.default_backend() == "cpu" else GPU_BLOCK
    block = min(max(block // size, 1) * size, slots)
    if key_positions is None:
        key_positions = _positions_of_slots(k, table)
        blocks = (positions.max() + block) // block
    else:
        blocks = math.ceil(slots / block)
    rows = grouped(q * jnp.asarray(scale, q.dtype), kv_heads)

    def body(index, carry):
        # The last block starts early where it would run over the end; what it repeats is masked.
        begin = jnp.minimum(index * block, slots - block)

        def part(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, begin, block, axis=1)

        def part_of(x: Array) -> Array:
            if table is None:
                return part(x)
            begin_block = begin // size
            numbers = lax.dynamic_slice_in_dim(table, begin_block, block // size, axis=1)
            return rows_of_blocks(x, numbers)

        part_k = part_of(k)
        part_v = values_in(part_k, None if v is None else part_of(v), value_size)
        is_first_read = begin + jnp.arange(block) >= index * block
        valid = _sees(positions, part(key_positions), group, window) & is_first_read[None, None]
        return accumulate(carry, rows, part_k, part_v, valid[:, None], softcap)

    sums = empty_sums(rows, value_size if v is None else v.shape[3])
    sums = varying_over(varying_axes((q, k, v, positions, key_positions)), sums)
    sums = lax.fori_loop(0, blocks, body, sums)
    return finish(sums, q.shape[1], q.dtype)


def attention_sizes(
    q: Array,
    k: Array,
    *args,
    key_positions: Array | None = None,
    table: Array | None = None,
    **kwargs,
) -> dict[str, int]:
    """The sizes that backends are ordered by.

    ``rows`` is T * G, ``keys`` all those of the cache, ``channels`` those of a key and ``bits``
    those of a channel; ``key_positions`` is 1 where they are passed, else 0.
    """
    batch, tokens, heads, _ = q.shape
    (kv_heads, channels), slots = k.shape[2:], slots_of(k, table)
    rows, keys = tokens * heads // kv_heads, batch * slots * kv_heads
    sizes = {"batch": batch, "tokens": tokens, "rows": rows, "slots": slots, "keys": keys}
    sizes |= {"channels": channels, "bits": 8 * k.dtype.itemsize}
    return sizes | {"key_positions": int(key_positions is not None)}


def _cases() -> list[Case]:
    """Three tokens at the end of a cache, and the result of NumPy.

    Also in bfloat16 with 64 channels, for kernels that use matrix units, over a cache of the same
    dtype and of 8 bits.
    """
    settings = {"key_positions": None, "scale": 0.25, "window": None, "softcap": None}
    settings["value_size"] = None

    def build(slots: int, size: int, dtype: str, cached: DTypeLike) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(0)
        shapes = [(1, n, 2, size) for n in (3, slots, slots)]
        q, k, v = (rng.standard_normal(shape, np.float32) for shape in shapes)
        q, k, v = q.astype(dtype), k.astype(cached), v.astype(cached)
        return q, k, v, np.array([[slots - 3, slots - 2, slots - 1]], np.int32)

    def expected(*arguments: Any) -> tuple[np.ndarray, np.ndarray]:
        *arrays, positions = build(*arguments)
        q, k, v = (np.asarray(x, np.float32) for x in arrays)
        scores = np.einsum("btnh,bsnh->bnts", q, k) / 4
        visible = np.arange(k.shape[1]) <= positions[0][:, None]
        scores = np.where(visible, scores, -np.inf)
        lse = np.log(np.exp(scores).sum(axis=-1))
        out = np.einsum("bnts,bsnh->btnh", np.exp(scores - lse[..., None]), v)
        return out.astype(arrays[0].dtype), np.swapaxes(lse, 1, 2)

    def case(name: str, *sizes: Any) -> Case:
        def made():
            return build(*sizes)

        return Case(name, made, settings, small=True, expected=lambda: expected(*sizes))

    return [
        case("three-tokens", 40, 16, "float32", "float32"),
        case("8-bits", 64, 64, "bfloat16", FLOAT8),
        case("channels-64", 64, 64, "bfloat16", "bfloat16"),
    ]


# On a GPU a loop with a traced bound waits for the host in every round, which a long prefill chunk
# does not feel and a decoding step does.
ATTENTION = Operation(
    "attention",
    {
        "xla": Backend("xla", _xla, always),
        "xla_blocked": Backend("xla_blocked", _xla_blocked, always),
        "gathered": "jspec.cuda_ffi.gathered:ALL_SLOTS",
        "pallas": "jspec.pallas.attention:ATTENTION",
        "triton": "jspec.triton.attention:ATTENTION",
        "exact": "jspec.triton.attention:EXACT",
        "exact_decode": "jspec.ops.exact:ATTENTION_BACKEND",
        "cuda": "jspec.cuda_ffi.attention:ATTENTION",
    },
    attention_sizes,
    _cases,
    default_order=("xla_blocked", "xla"),
)


def causal(q: Array, k: Array, v: Array) -> Array:
    """Causal attention of a whole sequence over itself, without a cache: shapes as `attention`."""
    positions = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
    return attention(q, k, v, positions, implementation="xla")[0]
