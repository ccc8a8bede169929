"""Hamming scores and encoding of hash codes, by themselves, in CUDA and C++."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jspec.cuda_ffi import library
from jspec.dispatch import Backend
from jspec.ops.hash import max_score
from jspec.typing import Array

# As in src/codes/codes.h.
MAX_SCORE = 4095
MAX_CHANNELS = 1024
FLOATS = ("bfloat16", "float32")


def hamming_cuda(q_codes: Array, k_codes: Array, lengths: Array, norms: Array | None) -> Array:
    """The CUDA backend of `jspec.ops.hash.hamming_scores`; ``lengths``: int32 ``[B]``."""
    batch, slots, heads, _ = k_codes.shape
    dtype = jnp.int32 if norms is None else jnp.float32
    return library.call(
        "hamming_scores",
        (jax.ShapeDtypeStruct((batch, heads, slots), dtype),),
        # Any array stands for the norms that there are not.
        *(q_codes, k_codes, lengths, lengths if norms is None else norms),
        vmap_method="broadcast_all",
        scaled=np.bool_(norms is not None),
    )[0]


def encode_cuda(q: Array, k: Array | None, w: Array) -> tuple[Array, Array | None]:
    """The CUDA backend of `jspec.ops.hash.hash_encode_both`; without keys, of `hash_encode`."""
    kv_heads, words = w.shape[0], w.shape[2] // 32
    heads = q.shape[2], 0 if k is None else kv_heads
    q_codes, k_codes = library.call(
        "hash_encode",
        [jax.ShapeDtypeStruct((*q.shape[:2], n, words), jnp.uint32) for n in heads],
        *(q, q if k is None else k, w),
        vmap_method="sequential",
        with_keys=np.bool_(k is not None),
    )
    return q_codes, None if k is None else k_codes


def _supports_scores(q_codes: Array, k_codes: Array, *rest: Array | None) -> str | None:
    if not 0 < (highest := max_score(q_codes, k_codes)) <= MAX_SCORE:
        return f"scores to G T R = {highest} are not in 1..{MAX_SCORE}"
    return library.refusal("codes")


def _supports_encode(q: Array, k: Array | None, w: Array) -> str | None:
    if q.dtype not in FLOATS or w.dtype not in FLOATS:
        return f"q {q.dtype} and w {w.dtype} are not bfloat16 or float32; name another backend"
    if not 0 < (size := q.shape[3]) <= MAX_CHANNELS or size % 4:
        return f"H={size} is not a multiple of 4 up to {MAX_CHANNELS}; name another backend"
    return library.refusal("codes")


HAMMING_SCORES = Backend("cuda", hamming_cuda, _supports_scores)
HASH_ENCODE = Backend("cuda", encode_cuda, _supports_encode)
