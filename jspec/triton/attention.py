"""Attention over a cache in Triton: split over the sequence, merged by a small second launch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec import tuned
from jspec.dispatch import Backend
from jspec.gpu import gpu_in_use
from jspec.ops.attention.dense import attention_sizes, slots_of
from jspec.ops.cached import FLOAT8
from jspec.triton.call import next_power, refuses_triton, triton_call
from jspec.typing import Array

DTYPES = ("bfloat16", "float16", "float32")  # of queries; keys may also have 8 bits
MAX_CHANNELS = 256  # of a key or value: a tile of queries and its sums stay in registers
# Values in wider keys, and the rest of such a key.
LARGE_VALUE_SIZES, MAX_REST = (256, 512), 128
LEAST = 16  # the matrix units take no fewer rows, keys or channels
MAX_KEYS = 128  # of a tile
MAX_SPLITS = 128  # of a head's keys; one tile merges them
MERGED = 4096  # elements of that tile
# Of an exact pass: bytes of the parts that its tokens leave, and tokens that go together at least.
PIECE_BYTES = 2**23
PIECE = 32


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Block sizes of the kernel.

    They may follow from the heads, from whether there are key positions and, unless attention is
    exact, from T; never from B, lengths or the capacity: a row's arithmetic depends only on its own
    positions.

    Attributes:
        splits: programs that share a head's keys, at least, a power of 2.
        programs: of a batch row, at least, a power of 2: there are more splits where there would be
            fewer.
        bytes: of keys and values of a tile.
        rows: of queries of a tile, at most, a power of 2.
        stages: of the compiler's pipelining.
        warps: of a program.
        least: rows of queries of a tile, at least, a power of 2.
    """

    splits: int
    programs: int
    bytes: int
    rows: int
    stages: int
    warps: int
    least: int = LEAST


def attention_triton(
    q: Array,
    k: Array,
    v: Array | None,
    positions: Array,
    *,
    key_positions: Array | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    value_size: int | None,
    table: Array | None = None,
    blocks: Blocks | None = None,
    exact: bool = False,
) -> tuple[Array, Array]:
    """The Triton backend of `jspec.ops.attention`.

    ``blocks``: other block sizes than the tuned ones. ``exact``: the cut does not follow from T
    either, so that a row's bits follow from it alone.
    """
    settings = {"key_positions": key_positions, "scale": scale, "window": window}
    settings |= {"softcap": softcap, "value_size": value_size, "table": table, "blocks": blocks}

    def attended(q: Array, positions: Array) -> tuple[Array, Array]:
        return _attended(q, k, v, positions, None, **settings, exact=exact)[:2]

    if not exact:
        return attended(q, positions)
    value = tile_shape(k, v, value_size)["VALUE"]
    blocks = blocks or _blocks("attention", "exact", q, k, key_positions)
    return _in_pieces(attended, q, positions, value, splits_of(k.shape[2], 1, blocks))


def scored_attention_triton(
    q: Array, k: Array, v: Array | None, positions: Array, probe: Array, **settings: Any
) -> tuple[Array, Array, Array]:
    """The Triton backend of `jspec.ops.scored_attention`.

    ``settings``: those of the operation, and ``blocks`` and ``exact`` of `attention_triton`.
    """
    return _attended(q, k, v, positions, probe, **settings)


def _attended(
    q: Array,
    k: Array,
    v: Array | None,
    positions: Array,
    probe: Array | None,
    *,
    key_positions: Array | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    value_size: int | None,
    table: Array | None = None,
    blocks: Blocks | None = None,
    exact: bool = False,
) -> tuple[Array, Array, Array]:
    """Output, log-sum-exp, and the scores of ``probe``, which are one number where it is None."""
    from jspec.triton.attention_kernel import attention_kernel, exact_attention_kernel

    operation = "attention" if exact or probe is None else "scored_attention"
    blocks = blocks or _blocks(operation, "exact" if exact else "triton", q, k, key_positions)
    batch, tokens, heads, _ = q.shape
    slots, kv_heads = slots_of(k, table), k.shape[2]
    shape = tile_shape(k, v, value_size)
    keys = keys_of_tile(shape, k, v, blocks.bytes)
    every = tokens * heads // kv_heads
    rows = rows_of_tile(blocks.rows if exact else max(every, blocks.least), q, k, blocks.rows)
    tiles = -(-every // rows)
    splits = splits_of(kv_heads, 1 if exact else tiles, blocks)
    parts = min(splits, -(-slots // keys))
    cut: Any = {"TOKENS": tokens, "SLOTS": slots, "TILES": tiles, "PARTS": parts}
    # Read when it runs, so that all of them share one machine program.
    sizes = jnp.asarray(np.array(list(cut.values()), np.int32)) if exact else None
    scored = (1,) if probe is None else (batch, kv_heads, slots)
    types = part_types(q, kv_heads, parts, shape["VALUE"], whole=parts == 1 and not exact)
    *partials, scores = triton_call(
        exact_attention_kernel if exact else attention_kernel,
        *(q, k, k if v is None else v, positions),
        positions if key_positions is None else key_positions,
        positions if table is None else table,
        *(q if probe is None else probe, *(() if sizes is None else (sizes,))),
        out=(*types, jax.ShapeDtypeStruct(scored, jnp.float32)),
        programs=batch * parts * tiles * kv_heads,
        warps=blocks.warps,
        stages=blocks.stages,
        **({} if exact else cut),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        SCALE=float(scale),
        SOFTCAP=softcap,
        WINDOW=window,
        HAS_KEY_POSITIONS=key_positions is not None,
        BLOCK=0 if table is None else k.shape[1],
        PROBED=probe is not None,
        ROWS=rows,
        SPLITS=splits,
        KEYS=keys,
        **shape,
    )
    return *merged(q, kv_heads, parts, splits, *partials, sizes=sizes), scores


def _blocks(
    operation: str, backend: str, q: Array, k: Array, key_positions: Array | None
) -> Blocks:
    sizes = attention_sizes(q, k, key_positions=key_positions)
    return Blocks(**tuned.block(operation, backend, sizes))


def _in_pieces(
    attended: Callable[[Array, Array], tuple[Array, Array]],
    q: Array,
    positions: Array,
    value: int,
    splits: int,
) -> tuple[Array, Array]:
    """``attended``, a few tokens at a time, which changes no bit of an exact attention.

    For each token every split leaves a part of ``value`` channels a head: for a long prompt, all
    parts at once would take more memory than the cache.
    """
    batch, tokens, heads, _ = q.shape
    piece = max(PIECE_BYTES // (4 * heads * (value + 1) * splits), PIECE)
    if tokens <= piece:
        return attended(q, positions)

    def put(results: tuple[Array, Array], begin: Array | int, count: int) -> tuple[Array, Array]:
        piece_inputs = (lax.dynamic_slice_in_dim(x, begin, count, 1) for x in (q, positions))
        out, lse = (
            lax.dynamic_update_slice_in_dim(whole, part, begin, 1)
            for whole, part in zip(results, attended(*piece_inputs), strict=True)
        )
        return out, lse

    results = jnp.zeros((batch, tokens, heads, value), q.dtype), jnp.zeros((batch, tokens, heads))
    results = lax.fori_loop(
        0, tokens // piece, lambda index, carry: put(carry, index * piece, piece), results
    )
    rest = tokens % piece
    return put(results, tokens - rest, rest) if rest else results


def splits_of(kv_heads: int, tiles: int, blocks: Blocks) -> int:
    """How many programs share a head's keys, a power of 2; ``tiles`` of queries read them each."""
    splits = min(max(blocks.programs // next_power(kv_heads), blocks.splits), MAX_SPLITS)
    return max(splits // next_power(tiles), 1)


def tile_shape(k: Array, v: Array | None, value_size: int | None) -> dict[str, Any]:
    """Sizes of keys and values, and of their tiles: powers of 2, of REST also 0.

    Of keys that `refuses` lets be wider than others, the values are a tile and the rest is another.
    """
    size = k.shape[3]
    value = v.shape[3] if v is not None else (value_size or 0)
    rest = size - value if size > MAX_CHANNELS else 0
    width = max(LEAST, next_power(size - rest))
    value_width = width if v is None else max(LEAST, next_power(value))
    return {
        "SIZE": size,
        "VALUE": value,
        "WIDTH": width,
        "REST": max(LEAST, next_power(rest)) if rest else 0,
        "VALUE_WIDTH": value_width,
        "VALUES_IN_KEYS": v is None,
    }


def keys_of_tile(shape: dict[str, int | bool], k: Array, v: Array | None, max_bytes: int) -> int:
    """How many keys a tile holds, of ``max_bytes`` bytes with their values."""
    channels = shape["WIDTH"] + shape["REST"] + (0 if v is None else shape["VALUE_WIDTH"])
    keys = max_bytes // (channels * k.dtype.itemsize)
    return min(MAX_KEYS, max(LEAST, next_power(keys + 1) // 2))


def rows_of_tile(rows: int, q: Array, k: Array, max_rows: int) -> int:
    """How many of a program's query rows a tile holds."""
    # Matmuls in float32 use no matrix units, and more rows than these no longer fit in registers.
    is_float32 = jnp.float32 in (q.dtype, k.dtype)
    return min(LEAST if is_float32 else max_rows, max(LEAST, next_power(rows)))


def part_types(
    q: Array, kv_heads: int, parts: int, value: int, *, whole: bool
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the parts to merge; of a ``whole`` part, those of the result."""
    batch, tokens, heads, _ = q.shape
    lead, dtype = (batch, tokens, heads), q.dtype
    if not whole:
        lead, dtype = (batch, kv_heads, parts, tokens * heads // kv_heads), jnp.float32
    return jax.ShapeDtypeStruct((*lead, value), dtype), jax.ShapeDtypeStruct(lead, jnp.float32)


def merged(
    q: Array,
    kv_heads: int,
    parts: int,
    splits: int,
    out: Array,
    lse: Array,
    *,
    sizes: Array | None,
) -> tuple[Array, Array]:
    """Output ``[B, T, N, H']`` in the dtype of ``q`` and log-sum-exp of the parts of ``splits``.

    ``sizes``: those of an exact attention, which leaves one part too.
    """
    from jspec.triton.attention_merge_kernel import exact_merge_kernel, merge_kernel

    if parts == 1 and sizes is None:
        return out, lse
    batch, tokens, heads, _ = q.shape
    value = out.shape[-1]
    # A warp holds the tile, so that no sum waits for another warp.
    channels = min(64, MERGED // splits, next_power(value))
    programs_per_row = -(-value // channels)
    lead = (batch, tokens, heads)
    cut: Any = {"TOKENS": tokens, "PARTS": parts} if sizes is None else {}
    out, lse = triton_call(
        merge_kernel if sizes is None else exact_merge_kernel,
        *(out, lse, *(() if sizes is None else (sizes,))),
        out=(
            jax.ShapeDtypeStruct((*lead, value), q.dtype),
            jax.ShapeDtypeStruct(lead, jnp.float32),
        ),
        programs=batch * tokens * heads * programs_per_row,
        warps=1,
        **cut,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        VALUE=value,
        PARTS_AT_ONCE=splits,  # whatever the capacity, so that sums are of one order
        CHANNELS_AT_ONCE=channels,
        PROGRAMS_PER_ROW=programs_per_row,
    )
    return out, lse


def refuses(q: Array, k: Array, v: Array | None, value_size: int | None = None) -> str | None:
    """Why the kernels cannot take queries, keys and values of these shapes and types, or None.

    ``value_size``: left out for a kernel that takes no wide keys.
    """
    if 0 in q.shape or 0 in k.shape or (v is not None and 0 in v.shape):
        return f"q {q.shape}, k {k.shape} leave nothing to launch"
    for name, x, dtypes in (("q", q, DTYPES), ("k", k, (*DTYPES, str(FLOAT8)))):
        if str(x.dtype) not in dtypes:
            return f"{name} of {x.dtype} is none of {', '.join(dtypes)}"
    size = k.shape[3]
    value = v.shape[3] if v is not None else (value_size or size)
    if max(size, value) <= MAX_CHANNELS:
        return None
    if v is None and value_size in LARGE_VALUE_SIZES and size - value <= MAX_REST:
        return None
    reason = f"keys of size {size} and values of {value} are over {MAX_CHANNELS}"
    if value_size is None:
        return reason
    value_sizes = " or ".join(map(str, LARGE_VALUE_SIZES))
    return (
        f"{reason}; wider keys must hold values of {value_sizes} and up to {MAX_REST} channels more"
    )


def refuses_key_size(k: Array) -> str | None:
    """Why the default device cannot run the kernels with keys of this size, or None."""
    if (reason := refuses_triton(k)) or k.shape[3] <= MAX_CHANNELS:
        return reason
    gpu = gpu_in_use()
    if gpu is None or gpu[1][0] != 9:
        # Elsewhere Triton's tiles of this size take more shared memory than there is.
        return f"keys of size {k.shape[3]} are over {MAX_CHANNELS}, and this is no Hopper GPU"
    return None


def refuses_blocks(k: Array, table: Array | None) -> str | None:
    """Why the kernels cannot read blocks of this size, or None: none may end within a tile."""
    if table is None or k.shape[1] % MAX_KEYS == 0:
        return None
    return f"blocks of {k.shape[1]} keys are no multiple of {MAX_KEYS}, the most of a tile"


def _supports(q, k, v, *args, value_size=None, table=None, **kwargs) -> str | None:
    reason = refuses(q, k, v, value_size) or refuses_blocks(k, table)
    return reason or refuses_key_size(k)


def _supports_narrow(q, k, v, *args, table=None, **kwargs) -> str | None:
    return refuses(q, k, v) or refuses_blocks(k, table) or refuses_triton(k)


ATTENTION = Backend("triton", attention_triton, _supports)
SCORED = Backend("triton", scored_attention_triton, _supports_narrow)
EXACT = Backend("exact", functools.partial(attention_triton, exact=True), _supports_narrow)
EXACT_SCORED = Backend(
    "exact", functools.partial(scored_attention_triton, exact=True), _supports_narrow
)
