"""Attention of many query rows over heads of 64 or 128 channels, on Hopper's matrix units."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec import tuned
from jspec.cuda_ffi import library
from jspec.dispatch import Backend
from jspec.gpu import gpu_in_use
from jspec.ops.attention.dense import IN_BLOCKS, attention_sizes
from jspec.ops.cached import FLOAT8
from jspec.typing import Array

# As in src/attention/attention.h.
SLOTS = 8  # of which the slots of a row are a multiple
CHANNELS = (64, 128)  # of a key and of a value
MAX_ROWS = 128  # T * G: query rows of a KV head
MAX_TOKENS = 32  # T
MAX_PARTS = 128  # into which the slots of a KV head are split
BLOCK = 128  # keys that a part has at least
# Query rows of a KV head, by channels, up to which a row's sums have one order: with more of 128
# channels, a warpgroup has both halves of a block of keys.
EXACT_ROWS = {64: MAX_ROWS, 128: 64}

# How long after the mean program the last one ends, in parts, as lengths of rows differ.
SPREAD = 0.2


def attention_cuda(
    q: Array, k: Array, v: Array | None, positions: Array, *, scale: float, **_settings: Any
) -> tuple[Array, Array]:
    """The CUDA backend of `jspec.ops.attention`.

    ``_settings``: the others of that operation, at the values that alone `refuses` lets pass.
    """
    assert v is not None  # `refuses`
    out, lse, *_ = _launch("attention", q, k, v, positions, scale=scale)
    return out, lse


def scored_attention_cuda(
    q: Array,
    k: Array,
    v: Array | None,
    positions: Array,
    probe: Array,
    *,
    scale: float,
    **_settings: Any,
) -> tuple[Array, Array, Array]:
    """The CUDA backend of `jspec.ops.scored_attention`.

    ``_settings``: the others of that operation, at the values that alone `refuses` lets pass.
    """
    assert v is not None  # `refuses`
    out, lse, _, _, scores = _launch("scored_attention", q, k, v, positions, probe, scale=scale)
    return out, lse, scores


def exact_attention_cuda(
    q: Array, k: Array, v: Array, positions: Array, *, scale: float, **_settings: Any
) -> tuple[Array, Array]:
    """As `attention_cuda`, with bits of a row that follow from that row alone.

    The keys of a head are split by the number of heads, and the tokens of a pass do not change the
    order of a row's sums: as many as share a tile go together.
    """
    arrays = q, k, v, positions
    pieces = [
        _launch("attention", *piece, scale=scale, **_exact_split(q, k))[:2]
        for piece in _pieces(*arrays)
    ]
    out, lse = (jnp.concatenate(parts, axis=1) for parts in zip(*pieces, strict=True))
    return out, lse


def exact_scored_attention_cuda(
    q: Array, k: Array, v: Array, positions: Array, probe: Array, *, scale: float, **settings: Any
) -> tuple[Array, Array, Array]:
    """As `scored_attention_cuda`, with bits of a row that follow from that row alone.

    A launch scores the keys up to the last that one of its tokens reads, so each piece scores.
    """
    pieces = _pieces(q, k, v, positions)
    static = {"scale": scale, **_exact_split(q, k)}
    results = [_launch("scored_attention", *piece, probe, **static) for piece in pieces]
    out, lse = (jnp.concatenate([x[i] for x in results], axis=1) for i in range(2))
    scores = results[0][4]
    for piece, result in zip(pieces[1:], results[1:], strict=True):
        read = jnp.arange(k.shape[1])[None] <= piece[3].max(axis=1, keepdims=True)
        scores = jnp.where(read[:, None], result[4], scores)
    return out, lse, scores


def _exact_split(q: Array, k: Array) -> dict[str, int]:
    """Into how many parts an exact attention splits the keys of a head, and by how many blocks.

    The part of a key follows from its position and the heads. In a cache that has keys for fewer
    parts, the merge would add nothing for the others.
    """
    slots, kv_heads, size = k.shape[1:]
    if slots % SLOTS:
        raise ValueError(
            f"capacity={slots} is not a multiple of {SLOTS}, as exact attention needs it on this "
            "GPU; round it up"
        )
    sizes = {"kv_heads": kv_heads, "channels": size}
    programs = tuned.block("exact_attention", "cuda", sizes)["programs"]
    together = _together(q.shape[2] // kv_heads)
    most = -(-slots // (together * BLOCK))
    return {"parts": min(max(programs // kv_heads, 1), MAX_PARTS, most), "together": together}


def _together(group: int) -> int:
    """How many neighbouring blocks belong to a part: the power of 2 nearest to 2 * ``group``.

    A pass over few tokens then writes little, a float a channel for every query row of a part,
    compared with the keys and values that it reads.
    """
    below = 1 << group.bit_length()  # the highest power of 2 that is at most 2 * group
    return below if 2 * group <= 1.5 * below else 2 * below


def _pieces(q: Array, k: Array, v: Array, positions: Array) -> list[tuple[Array, ...]]:
    """The arguments, with as many tokens at a time as share a tile with a probe."""
    tokens, group = q.shape[1], q.shape[2] // k.shape[2]
    size = min((EXACT_ROWS[q.shape[3]] - 1) // group, MAX_TOKENS)
    cuts = (slice(begin, begin + size) for begin in range(0, tokens, size))
    return [(q[:, cut], k, v, positions[:, cut]) for cut in cuts]


def _launch(
    target: str, *arrays: Array, scale: float, parts: int | None = None, together: int = 1
) -> tuple[Array, ...]:
    """Block i is in part i // ``together`` % ``parts``; None for as many as take the least time."""
    q, k = arrays[:2]
    (batch, tokens, heads, size), (slots, kv_heads) = q.shape, k.shape[1:3]
    if parts is None:
        sizes = tuned.block(target, "cuda", attention_sizes(q, k))
        parts = number_of_parts(batch * kv_heads, slots, **sizes)
    lead = (batch, kv_heads, parts, tokens * heads // kv_heads)
    shapes = [q.shape[:3], (*lead, size), (*lead, 2)]
    if target == "scored_attention":
        shapes.append((batch, kv_heads, slots))
    floats = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return library.call(
        target,
        (jax.ShapeDtypeStruct(q.shape, q.dtype), *floats),
        *arrays,
        vmap_method="sequential",
        scale=np.float32(scale),
        parts=np.int32(parts),
        together=np.int32(together),
    )


def number_of_parts(heads: int, slots: int, *, programs: int, overhead: int) -> int:
    """Into how many parts the kernel splits the keys of a head: with the least estimated time.

    Programs take the parts in turn, so a time is that of the program with most of them. It depends
    on sizes alone: what rows hold, their lengths included, never changes the order of sums, but the
    batch and the capacity do.

    Args:
        heads: KV heads of all batch rows.
        slots: S of the cache.
        programs: How many run at a time.
        overhead: The time that a part costs, in keys that are read meanwhile.

    Returns:
        A number from 1 to `MAX_PARTS`, at most one part for each `BLOCK` of slots.
    """

    def estimate(parts: int) -> float:
        rounds = -(-heads * parts // programs)
        return slots / parts * (rounds + SPREAD * rounds**0.5) + overhead * rounds

    return min(range(1, min(MAX_PARTS, -(-slots // BLOCK)) + 1), key=estimate)


def refuses(
    q: Array,
    k: Array,
    v: Array | None,
    *probe: Array,
    key_positions: Array | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    batch, tokens, heads, size = q.shape
    slots, kv_heads = k.shape[1:3]
    rows = tokens * heads // max(kv_heads, 1)
    # The probe is one row more.
    max_rows = MAX_ROWS - len(probe)
    if key_positions is not None:
        return "key_positions are passed, and the kernel takes slots for positions"
    if v is None:
        return "the values are in the keys"
    if q.dtype != jnp.bfloat16 or k.dtype not in (jnp.bfloat16, FLOAT8):
        return f"q of {q.dtype}, k and v of {k.dtype} are not all bfloat16, nor a cache of {FLOAT8}"
    if size not in CHANNELS or v.shape[3] != size:
        return f"H={size} and H'={v.shape[3]} are not both {' or both '.join(map(str, CHANNELS))}"
    if window is not None or softcap is not None:
        return f"window={window}, softcap={softcap}: the kernel supports neither"
    if tokens > MAX_TOKENS or rows > max_rows:
        return f"T={tokens} with {rows} rows a head is over {MAX_TOKENS} tokens or {max_rows} rows"
    if not scale > 0:
        return f"scale={scale} is not positive"
    if slots % SLOTS:
        return f"S={slots} is not a multiple of {SLOTS}; round the capacity up"
    if batch * rows * kv_heads * slots == 0:
        return f"q {q.shape} or k {k.shape} is empty"
    if batch * kv_heads * max(slots, MAX_PARTS * rows) > 2**31 - 1:
        return f"q {q.shape} and k {k.shape} have more elements than int32 counts"
    return None


def _supports(
    q, k, v, positions, *probe, key_positions, scale, window, softcap, value_size, table=None
) -> str | None:
    del positions, value_size
    if table is not None:
        return IN_BLOCKS
    settings = {"key_positions": key_positions, "scale": scale}
    gpu = gpu_in_use()
    if reason := refuses(q, k, v, *probe, **settings, window=window, softcap=softcap):
        return reason
    if gpu is not None and gpu[1] != (9, 0):
        return f"it needs compute capability 9.0, and {gpu[0]} has {gpu[1][0]}.{gpu[1][1]}"
    return library.refusal("attention")


def _supports_exact(q, k, v, positions, *probe, **settings) -> str | None:
    """As `_supports`, but of one token of a row in a small cache, with or without a probe.

    So that passes of every length and batch, with a probe and without, take the same kernel.
    """

    def small(x, *lead: int):
        return None if x is None else jax.ShapeDtypeStruct((*lead, *x.shape[2:]), x.dtype)

    if reason := _supports(small(q, 1, 1), small(k, 1, 8), small(v, 1, 8), positions, **settings):
        return reason
    group, limit = q.shape[2] // k.shape[2], EXACT_ROWS[q.shape[3]]
    if group >= limit:
        return f"{group} query rows a head and a probe are over {limit}"
    return None


ATTENTION = Backend("cuda", attention_cuda, _supports)
SCORED = Backend("cuda", scored_attention_cuda, _supports)
EXACT = Backend("cuda", exact_attention_cuda, _supports_exact)
EXACT_SCORED = Backend("cuda", exact_scored_attention_cuda, _supports_exact)
