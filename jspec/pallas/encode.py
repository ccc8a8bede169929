"""Hash codes of a step's queries and keys on Mosaic GPU.

A program computes one word of the codes of some tokens of a KV head. Its 32 columns of the matrix
stay in registers: a lane has a column, the four warps have every fourth row each. Products and sums
are float32, without tensor cores, whose factors have fewer bits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec import tuned
from jspec.dispatch import Backend
from jspec.ops.hash import encode_sizes
from jspec.pallas.mosaic import LANES, WARPS, floor_power, refuses_pallas
from jspec.sharding import opaque
from jspec.typing import Array

FLOATS = ("bfloat16", "float16", "float32")
MAX_SIZE = 256  # channels: a thread has a register for each fourth row of the matrix
_UNROLLED = 4  # tokens of an iteration at most
_LOADED = 512  # numbers that are loaded before the first of them is multiplied


@dataclasses.dataclass(frozen=True)
class EncodeBlocks:
    """Block sizes of encoding: ``tokens`` per program, a power of 2."""

    tokens: int


def encode_pallas(
    q: Array, k: Array | None, w: Array, *, blocks: EncodeBlocks | None = None
) -> tuple[Array, Array | None]:
    """The Pallas backend of `jspec.ops.hash.hash_encode_both`; without keys, of `hash_encode`."""
    kv_heads, size, bits = w.shape
    tokens, group, words = q.shape[0] * q.shape[1], q.shape[2] // kv_heads, bits // 32
    blocks = blocks or EncodeBlocks(**tuned.block("hash_encode", "pallas", encode_sizes(q, k, w)))
    per_program = min(blocks.tokens, floor_power(tokens))
    together, at_once = min(per_program, _UNROLLED), max(_LOADED // size, 1)

    # Programs of a head follow each other, so that its matrix is read from memory once.
    def hash_encode(w, *refs):
        vectors, codes = refs[: len(refs) // 2], refs[len(refs) // 2 :]
        program, tiles = lax.axis_index("program"), -(-tokens // per_program)
        word, tile = lax.rem(program, words), lax.div(program, words)
        head, tile = lax.div(tile, tiles), lax.rem(tile, tiles)
        # The last tile ends with the tokens: codes in two tiles are written twice and alike.
        first = jnp.minimum(tile * per_program, tokens - per_program)
        columns = load_columns(w.at[head, :, pl.ds(word * 32, 32)])

        def encode(index, carry):
            places = []
            for token in range(together):
                row = first + index * together + token
                places += [(vectors[0], codes[0], row, head * group + i) for i in range(group)]
                places += [(*refs, row, head) for refs in zip(vectors[1:], codes[1:], strict=True)]
            for start in range(0, len(places), at_once):
                batch = places[start : start + at_once]
                loaded = [load_vector(source.at[row, at]) for source, _, row, at in batch]
                results = [encoded_word([vector], [columns]) for vector in loaded]
                for (_, target, row, at), result in zip(batch, results, strict=True):
                    target[row, at, word] = result
            return carry

        lax.fori_loop(0, per_program // together, encode, 0)

    inputs = [q] if k is None else [q, k]
    call = plgpu.kernel(
        hash_encode,
        out_type=[jax.ShapeDtypeStruct((tokens, x.shape[2], words), jnp.uint32) for x in inputs],
        grid=(kv_heads * -(-tokens // per_program) * words,),
        grid_names=("program",),
        # No memory is both read and written, so nothing has to wait for a write.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    results = opaque(call, w, *(x.reshape(tokens, x.shape[2], size) for x in inputs))
    q_codes, *k_codes = (x.reshape(*q.shape[:2], -1, words) for x in results)
    return q_codes, k_codes[0] if k_codes else None


def columns_layout():
    """Of 32 columns of a matrix ``[H, 32]``: rows to the warps in turn, a column to each lane."""
    tiles = (WARPS, LANES), (1,)
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-3,), (-2,), vector_dim=-1)


def load_columns(ref) -> Array:
    """32 columns ``[H, 32]`` of a matrix, float32."""
    columns = plgpu.load(ref, layout=columns_layout(), optimized=False)  # pyright: ignore[reportCallIssue]
    return columns.astype(jnp.float32)


def load_vector(ref) -> Array:
    """A vector ``[H]``, float32, spread as the rows of `load_columns`."""
    layout = columns_layout().reduce(1)
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)  # pyright: ignore[reportCallIssue]


def encoded_word(vectors: Sequence[Array], columns: Sequence[Array]) -> Array:
    """The signs of a vector times columns as the bits of a word, a uint32 scalar.

    Vector and columns are in one part or in several, ``[H']`` and ``[H', 32]`` each.
    """
    products = [
        lax.broadcast_in_dim(x, y.shape, [0]) * y for x, y in zip(vectors, columns, strict=True)
    ]
    sums = functools.reduce(jnp.add, products).sum(axis=0)
    bit = plgpu.broadcasted_iota(jnp.int32, (32,), 0, layout=columns_layout().reduce(0))
    return jnp.where(sums > 0, jnp.int32(1) << bit, 0).sum().astype(jnp.uint32)


def refuses_encode(q: Array, k: Array | None, w: Array) -> str | None:
    """Why the kernel cannot encode these vectors, or None."""
    if 0 in q.shape or 0 in w.shape:
        return f"q {q.shape} and w {w.shape} leave nothing to launch"
    if q.dtype not in FLOATS or w.dtype not in FLOATS:
        return f"q {q.dtype} and w {w.dtype} are not floats of 16 or 32 bits"
    if (size := q.shape[3]) > MAX_SIZE or size % WARPS:
        return f"H={size} is not a multiple of {WARPS} up to {MAX_SIZE}; name another backend"
    return None


def _supports(q: Array, k: Array | None, w: Array) -> str | None:
    return refuses_encode(q, k, w) or refuses_pallas()


HASH_ENCODE = Backend("pallas", encode_pallas, _supports)
