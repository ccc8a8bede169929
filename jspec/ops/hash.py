"""Hash codes of queries and keys, and their Hamming scores (HATA, arXiv 2506.02572).

`hash_encode`, `hash_encode_both` and `hamming_scores` are the public operations; ``xla`` is the
reference. A code has R bits, R in `BITS`. Bit j is bit j % 32, from the lowest, of word j // 32.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.dispatch import Backend, Case, Operation, always
from jspec.typing import Array

BITS = (32, 64, 128, 256)
_MAX_EXACT_SCORE = 2**24  # of a score: float32 then holds each one exactly


def hash_encode(x: Array, w: Array, *, implementation: str | None = None) -> Array:
    """Hash codes: the signs of ``x`` times ``w`` as bits of uint32 words (section 3.1 of HATA).

    Sums are float32; a bit is 1 where its sum is above 0, so NaN gives 0. It has no derivative.

    Args:
        x: ``[B, T, N, H]``, queries or, with N = K, keys.
        w: floats ``[K, H, R]``, a matrix for each KV head, which its N / K query heads share.
        implementation: the backend by name; None is the best one.

    Returns:
        uint32 ``[B, T, N, R // 32]``.

    Raises:
        ValueError: for shapes that do not fit together, or another R than those of `BITS`.
    """
    _check_encode(x, None, w)
    return HASH_ENCODE(*map(lax.stop_gradient, (x, None, w)), implementation=implementation)[0]


def hash_encode_both(
    q: Array, k: Array, w: Array, *, implementation: str | None = None
) -> tuple[Array, Array]:
    """`hash_encode` of queries and keys of the same tokens, by kernels in one launch.

    Args:
        q: ``[B, T, N, H]``.
        k: ``[B, T, K, H]`` of the dtype of ``q``.
        w: floats ``[K, H, R]``.
        implementation: the backend by name; None is the best one.

    Returns:
        The codes of queries, uint32 ``[B, T, N, R // 32]``, and of keys, ``[B, T, K, R // 32]``.

    Raises:
        ValueError: for shapes or dtypes that do not fit together.
    """
    _check_encode(q, k, w)
    return HASH_ENCODE(*map(lax.stop_gradient, (q, k, w)), implementation=implementation)


def hamming_scores(
    q_codes: Array,
    k_codes: Array,
    *,
    lengths: Array | None = None,
    norms: Array | None = None,
    implementation: str | None = None,
) -> Array:
    """How many bits each key's code shares with those of the queries that read it.

    With h the Hamming distance to the G = N / K query heads and T tokens, summed, the score of a
    key is ``G T R - h``: a whole number in 0..G T R, higher is better. With ``norms`` it is
    ``norm * (G T - 2 h / R)``, the estimate of the sum of dot products in the code of HATA.

    Args:
        q_codes: uint32 ``[B, T, N, W]`` of `hash_encode`, R = 32 W.
        k_codes: uint32 ``[B, S, K, W]``.
        lengths: int32 ``[B]``, slots of each row; None is S.
        norms: float32 ``[B, S, K]``, the norms of the keys.
        implementation: the backend by name; None is the best one.

    Returns:
        int32 ``[B, K, S]``, -1 from ``lengths`` on; with ``norms`` float32, -inf from ``lengths``
        on.

    Raises:
        ValueError: for shapes or dtypes that do not fit together, and for scores over 2**24.
    """
    check_codes(q_codes, k_codes)
    batch, slots, heads, _ = k_codes.shape
    if norms is not None and (norms.shape != (batch, slots, heads) or norms.dtype != jnp.float32):
        raise ValueError(
            f"norms {norms.dtype}{list(norms.shape)} must be float32 [B, S, K] = "
            f"{[batch, slots, heads]}"
        )
    lengths = lengths_or(lengths, (batch,), slots)
    return HAMMING_SCORES(
        *(q_codes, k_codes, lengths, None if norms is None else lax.stop_gradient(norms)),
        implementation=implementation,
    )


def max_score(q_codes: Array, k_codes: Array) -> int:
    """The highest score that `hamming_scores` can give: G T R."""
    _, tokens, heads, words = q_codes.shape
    return heads // k_codes.shape[2] * tokens * 32 * words


def lengths_or(lengths: Array | None, lead: tuple[int, ...], full: int) -> Array:
    """``lengths``, int32 of the leading sizes ``lead`` or the first of them, for each of ``lead``.

    None is ``full``.
    """
    if lengths is None:
        return jnp.full(lead, full, jnp.int32)
    if lengths.dtype != jnp.int32 or lengths.shape != lead[: lengths.ndim]:
        raise ValueError(
            f"lengths and counts {lengths.dtype}{list(lengths.shape)} must be int32 of the sizes "
            f"{list(lead)} or the first of them"
        )
    return jnp.broadcast_to(
        lengths.reshape(*lengths.shape, *[1] * (len(lead) - lengths.ndim)), lead
    )


def _check_encode(q: Array, k: Array | None, w: Array) -> None:
    fits = q.ndim == 4 and w.ndim == 3 and q.shape[3] == w.shape[1]
    fits = fits and w.shape[0] > 0 and q.shape[2] % w.shape[0] == 0
    if k is not None:
        fits = fits and k.shape == (*q.shape[:2], w.shape[0], q.shape[3])
        fits = fits and k.dtype == q.dtype
    if not fits:
        keys = "" if k is None else f", k {k.dtype}{list(k.shape)}"
        raise ValueError(
            f"q {q.dtype}{list(q.shape)}{keys} and w {list(w.shape)} must be [B, T, N, H], "
            "[B, T, K, H] of the same dtype, and [K, H, R] with N a multiple of K"
        )
    if w.shape[2] not in BITS:
        raise ValueError(f"R={w.shape[2]} bits of w must be one of {', '.join(map(str, BITS))}")


def check_words(q_codes: Array, k_codes: Array) -> None:
    """Raise `ValueError` unless these are codes of queries and of keys that they may read."""
    fits = q_codes.ndim == k_codes.ndim == 4 and q_codes.dtype == k_codes.dtype == jnp.uint32
    fits = fits and q_codes.shape[0] == k_codes.shape[0] and q_codes.shape[3] == k_codes.shape[3]
    if not fits or not k_codes.shape[2] or q_codes.shape[2] % k_codes.shape[2]:
        raise ValueError(
            f"q_codes {q_codes.dtype}{list(q_codes.shape)} and k_codes "
            f"{k_codes.dtype}{list(k_codes.shape)} must be uint32 [B, T, N, W] and [B, S, K, W] "
            "with N a multiple of K"
        )


def check_codes(q_codes: Array, k_codes: Array) -> None:
    """Raise `ValueError` where shapes or dtypes are not those of `hamming_scores`."""
    check_words(q_codes, k_codes)
    if 32 * q_codes.shape[3] not in BITS:
        raise ValueError(f"{q_codes.shape[3]} words a code must be 1, 2, 4 or 8")
    if (highest := max_score(q_codes, k_codes)) > _MAX_EXACT_SCORE:
        raise ValueError(
            f"scores to G T R = {highest} are over {_MAX_EXACT_SCORE}; score fewer tokens at once"
        )


def _encode_xla(q: Array, k: Array | None, w: Array) -> tuple[Array, Array | None]:
    return _codes(q, w), None if k is None else _codes(k, w)


def _codes(x: Array, w: Array) -> Array:
    batch, tokens, heads, size = x.shape
    x = x.reshape(batch, tokens, w.shape[0], -1, size).astype(jnp.float32)
    sums = jnp.einsum("btkgh,khr->btkgr", x, w.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    bits = (sums > 0).reshape(batch, tokens, heads, w.shape[2] // 32, 32).astype(jnp.uint32)
    places = jnp.arange(32, dtype=jnp.uint32).reshape(1, 1, 1, 1, 32)
    return (bits << places).sum(axis=-1, dtype=jnp.uint32)


def hamming_xla(q_codes: Array, k_codes: Array, lengths: Array, norms: Array | None) -> Array:
    """The reference of `hamming_scores`."""
    batch, slots, heads, words = k_codes.shape
    q = q_codes.reshape(batch, -1, heads, q_codes.shape[2] // heads, words)
    q = jnp.moveaxis(q, 2, 1).reshape(batch, 1, heads, -1, words)
    highest = max_score(q_codes, k_codes)
    distances = lax.population_count(q ^ k_codes[:, :, :, None]).astype(jnp.int32).sum((3, 4))
    shared = highest - jnp.swapaxes(distances, 1, 2)
    slot = jnp.arange(slots, dtype=jnp.int32).reshape(1, 1, slots)
    read = slot < lengths[:, None, None]
    if norms is None:
        return jnp.where(read, shared, -1)
    # Exact: a whole number over a power of two. The product with the norm rounds once.
    scaled = (2 * shared - highest).astype(jnp.float32) / np.float32(32 * words)
    return jnp.where(read, jnp.swapaxes(norms, 1, 2) * scaled, -jnp.inf)


def encode_sizes(q: Array, k: Array | None, w: Array) -> dict[str, int]:
    """The sizes that backends are ordered by."""
    return {"tokens": q.shape[0] * q.shape[1], "kv_heads": w.shape[0], "bits": w.shape[2]}


def hamming_sizes(q_codes: Array, k_codes: Array, *rest: Array | None) -> dict[str, int]:
    """The sizes that backends are ordered by: code words of the queries of a key, and all keys."""
    batch, slots, heads, _ = k_codes.shape
    return {"words": max_score(q_codes, k_codes) // 32, "keys": batch * slots * heads}


def _encode_case(batch, tokens, heads, kv_heads, size, bits, dtype, both):
    rng = np.random.default_rng([batch, tokens, heads, bits])
    # Whole numbers: sums are exact in any order, and some are 0.
    q, k, w = (
        rng.integers(-3, 4, shape).astype(dtype)
        for shape in (
            (batch, tokens, heads, size),
            (batch, tokens, kv_heads, size),
            (kv_heads, size, bits),
        )
    )
    q[0, 0, 0, 0] = np.nan
    return q, k if both else None, w


def _hamming_case(batch, tokens, heads, kv_heads, slots, words, scaled):
    rng = np.random.default_rng([batch, tokens, slots, words])
    q, k = (
        rng.integers(0, 2**32, shape, np.uint32)
        for shape in ((batch, tokens, heads, words), (batch, slots, kv_heads, words))
    )
    q[0, 0] = 0
    k[0, :1], k[0, 1:2] = 0, 2**32 - 1
    lengths = rng.integers(-1, slots + 2, batch).astype(np.int32)
    lengths[0] = slots
    norms = rng.random((batch, slots, kv_heads), np.float32) if scaled else None
    return q, k, lengths, norms


# ``(B, T, N, K, H, R, dtype, with keys)`` by name.
_ENCODED = {
    "one-token": (1, 1, 4, 2, 16, 32, "float32", True),
    "a-step": (3, 1, 8, 2, 64, 128, "bfloat16", True),
    "a-pass": (2, 21, 6, 6, 24, 64, "float32", False),
    "long-codes": (1, 3, 6, 2, 128, 256, "float16", True),
}
# ``(B, T, N, K, S, W, with norms)`` by name.
_SCORED = {
    "small": (2, 1, 4, 2, 9, 1, False),
    "grouped": (2, 1, 8, 2, 300, 4, False),
    "a-pass": (1, 5, 12, 4, 130, 2, False),
    "short-codes": (2, 2, 8, 4, 150, 1, False),
    "long-codes": (3, 2, 3, 3, 70, 8, False),
    "with-norms": (2, 1, 6, 2, 260, 4, True),
    "no-slots": (2, 1, 4, 2, 0, 4, False),
}


def _cases(build, shapes, *small: str):
    return lambda: [
        Case(name, functools.partial(build, *shape), small=name in small)
        for name, shape in shapes.items()
    ]


HASH_ENCODE = Operation(
    "hash_encode",
    {
        "xla": Backend("xla", _encode_xla, always),
        "triton": "jspec.triton.hash:HASH_ENCODE",
        "cuda": "jspec.cuda_ffi.codes:HASH_ENCODE",
        "pallas": "jspec.pallas.encode:HASH_ENCODE",
    },
    encode_sizes,
    _cases(_encode_case, _ENCODED, "one-token"),
)

HAMMING_SCORES = Operation(
    "hamming_scores",
    {
        "xla": Backend("xla", hamming_xla, always),
        "triton": "jspec.triton.hash:HAMMING_SCORES",
        "cuda": "jspec.cuda_ffi.codes:HAMMING_SCORES",
        "pallas": "jspec.pallas.hash:HAMMING_SCORES",
    },
    hamming_sizes,
    # Pallas refuses the first of them.
    _cases(_hamming_case, _SCORED, "small", "grouped"),
)
