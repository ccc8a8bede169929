"""Hash codes in Triton: of queries and keys in one launch, and their scores in another."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jspec import tuned
from jspec.dispatch import Backend
from jspec.ops.hash import encode_sizes, hamming_sizes
from jspec.triton.call import next_power, refuses_triton, triton_call
from jspec.typing import Array

FLOATS = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class EncodeBlocks:
    """Block sizes of encoding: at most ``tile`` vectors per program, ``warps`` of a program."""

    tile: int
    warps: int


@dataclasses.dataclass(frozen=True)
class ScoreBlocks:
    """Block sizes of scoring: ``keys`` per program, a power of 2, and ``warps`` of a program."""

    keys: int
    warps: int


def encode_triton(
    q: Array, k: Array | None, w: Array, *, blocks: EncodeBlocks | None = None
) -> tuple[Array, Array | None]:
    """The Triton backend of `jspec.ops.hash.hash_encode_both`; without keys, of `hash_encode`."""
    from jspec.triton.hash_kernel import encode_kernel

    kv_heads, size, bits = w.shape
    tokens, group = q.shape[0] * q.shape[1], q.shape[2] // kv_heads
    blocks = blocks or EncodeBlocks(**tuned.block("hash_encode", "triton", encode_sizes(q, k, w)))
    vectors = tokens * (group + (k is not None))
    tile = max(16, min(blocks.tile, next_power(vectors)))
    words = (bits // 32,)
    heads = (q.shape[2], kv_heads) if k is not None else (q.shape[2],)
    out = [jax.ShapeDtypeStruct((*q.shape[:2], n, *words), jnp.uint32) for n in heads]
    if k is None:  # a place that nothing is written to
        out.append(jax.ShapeDtypeStruct((1,), jnp.uint32))
    q_codes, k_codes = triton_call(
        encode_kernel,
        *(q, q if k is None else k, w),
        out=out,
        programs=kv_heads * -(-vectors // tile),
        warps=blocks.warps,
        TOKENS=tokens,
        HEADS=kv_heads,
        GROUP=group,
        SIZE=size,
        BITS=bits,
        WITH_KEYS=int(k is not None),
        TILE=tile,
        STEP=min(32, max(16, next_power(size))),
    )
    return q_codes, None if k is None else k_codes


def hamming_triton(
    q_codes: Array,
    k_codes: Array,
    lengths: Array,
    norms: Array | None,
    *,
    blocks: ScoreBlocks | None = None,
) -> Array:
    """The Triton backend of `jspec.ops.hash.hamming_scores`; ``lengths``: int32 ``[B]``."""
    from jspec.triton.hash_kernel import score_kernel

    batch, slots, heads, words = k_codes.shape
    sizes = hamming_sizes(q_codes, k_codes)
    blocks = blocks or ScoreBlocks(**tuned.block("hamming_scores", "triton", sizes))
    # Codes of 128 bytes that lie together are four whole sectors.
    tile = min(32 // words, next_power(heads))
    chunk = blocks.keys // tile
    chunks, parts = -(-slots // chunk), -(-heads // tile)
    dtype = jnp.int32 if norms is None else jnp.float32
    return triton_call(
        score_kernel,
        *(q_codes, k_codes, lengths, k_codes if norms is None else norms),
        out=(jax.ShapeDtypeStruct((batch, heads, slots), dtype),),
        programs=batch * parts * chunks,
        warps=blocks.warps,
        TOKENS=q_codes.shape[1],
        SLOTS=slots,
        HEADS=heads,
        GROUP=q_codes.shape[2] // heads,
        WORDS=words,
        SCALED=norms is not None,
        CHUNKS=chunks,
        CHUNK=chunk,
        TILE=tile,
    )[0]


def refuses_encode(q: Array, k: Array | None, w: Array) -> str | None:
    """Why the kernel cannot encode these vectors, or None."""
    if 0 in q.shape or 0 in w.shape:
        return f"q {q.shape} and w {w.shape} leave nothing to launch"
    if q.dtype not in FLOATS or w.dtype not in FLOATS:
        return f"q {q.dtype} and w {w.dtype} are not floats of 16 or 32 bits"
    return None


def refuses_scores(q_codes: Array, k_codes: Array) -> str | None:
    """Why the kernel cannot score these codes, or None."""
    if 0 in q_codes.shape or 0 in k_codes.shape:
        return f"q_codes {q_codes.shape} and k_codes {k_codes.shape} leave nothing to launch"
    return None


def _supports_encode(q: Array, k: Array | None, w: Array) -> str | None:
    return refuses_encode(q, k, w) or refuses_triton()


def _supports_scores(q_codes: Array, k_codes: Array, *rest: Array | None) -> str | None:
    return refuses_scores(q_codes, k_codes) or refuses_triton()


HASH_ENCODE = Backend("triton", encode_triton, _supports_encode)
HAMMING_SCORES = Backend("triton", hamming_triton, _supports_scores)
