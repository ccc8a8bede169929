"""The codes of a decoding step: encoding, also as keys are written, and bucket collisions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from bench import workload
from bench.cases import Case, heads
from bench.select import check_codes
from bench.suite import OperationBenchmark, Setup
from jspec.ops.append import APPEND_ENCODE, QKRope
from jspec.ops.collisions import COLLISION_SCORES, LEAST, code_words
from jspec.ops.hash import HASH_ENCODE
from jspec.policies import MagicPIG


def small_integers(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries ``[B, T, N, H]``, keys ``[B, T, K, H]`` and matrices ``[K, H, R]`` of small whole
    numbers, float32: sums are exact in any order."""
    query_heads, kv_heads = heads(case)
    rng = np.random.default_rng([workload.SEED, case["B"], query_heads])
    lead, size = (case["B"], case["T"]), case["H"]
    sizes = (*lead, query_heads, size), (*lead, kv_heads, size), (kv_heads, size, case["R"])
    q, k, w = (rng.integers(-3, 4, shape).astype(np.float32) for shape in sizes)
    return q, k, w


def codes_of(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The codes of ``x [B, T, N, H]``, uint32 ``[B, T, N, R // 32]``."""
    sums = np.einsum("btnh,nhr->btnr", x, np.repeat(w, x.shape[2] // len(w), axis=0))
    return np.packbits(sums > 0, axis=-1, bitorder="little").view("<u4")


def encode_setup(case: Case) -> Setup:
    """Encoding of a step's queries and keys."""
    q, k, w = small_integers(case)
    expected = codes_of(q, w), codes_of(k, w)
    arguments = tuple(jnp.asarray(x, jnp.bfloat16) for x in (q, k, w))
    return Setup(
        arguments, lambda out: all(map(np.array_equal, out, expected)), arguments[2].nbytes
    )


def append_setup(case: Case) -> Setup:
    """Encoding of new keys while they are written into a cache that they fill.

    Its columns are not donated: each run copies them first.
    """
    q, k, w = small_integers(case)
    batch, tokens, kv_heads, size = k.shape
    key_codes = codes_of(k, w)
    codes = jnp.zeros((batch, tokens, kv_heads, case["R"] // 32), jnp.uint32)
    parts = [x.reshape(batch, tokens, kv_heads, -1) for x in (q, k, k)]
    joined = jnp.asarray(np.concatenate(parts, axis=-1), jnp.bfloat16)
    cosine = jnp.ones((batch, tokens, 1, size // 2), jnp.float32)
    qk_rope = QKRope(cosine, jnp.zeros_like(cosine), joined=joined)
    q, k = jnp.asarray(q, jnp.bfloat16), jnp.asarray(k, jnp.bfloat16)
    empty, slots = jnp.zeros_like(k), jnp.broadcast_to(jnp.arange(tokens), (batch, tokens))
    expected = (*map(np.asarray, (q, k, k)), key_codes)
    # Matrices are float32 in a policy.
    return Setup(
        (q, k, k, qk_rope, empty, empty, codes, jnp.asarray(w), slots),
        lambda out: all(map(np.array_equal, out, expected)),
        w.nbytes,
    )


def collision_setup(case: Case) -> Setup:
    """Scores by shared buckets of MagicPIG: a query collides with about one key in 100."""
    policy = MagicPIG()
    (query_heads, kv_heads), batch, tables = heads(case), case["B"], policy.tables
    used = used_bits(policy).reshape(1, 1, 1, -1)
    keys = jax.random.split(jax.random.key(workload.SEED))
    q, k = (
        jax.random.bits(key, (batch, *sizes, used.size), jnp.uint32) & used
        for key, sizes in zip(keys, ((case["T"], query_heads), (case["S"], kv_heads)), strict=True)
    )
    expected = collisions_of(np.asarray(q), np.asarray(k), tables)
    return Setup(
        (q, k, jnp.full((batch,), case["S"], jnp.int32)),
        lambda out: np.array_equal(out, expected),
        k.nbytes + expected.nbytes,
        {"tables": tables},
    )


def used_bits(policy: MagicPIG) -> np.ndarray:
    """Mask of the bits of a code's words that belong to a table, uint32 ``[W]``."""
    places = np.arange(code_words(policy.tables, 1) * 32).reshape(-1, 32) < policy.tables
    words = np.packbits(places, axis=1, bitorder="little").view("<u4")
    return np.repeat(words, policy.bits)


def collisions_of(q: np.ndarray, k: np.ndarray, tables: int) -> np.ndarray:
    """The number of tables in which keys share a bucket with their queries, ``[B, K, S]``."""
    batch, slots, kv_heads, words = k.shape
    groups = code_words(tables, 1)
    q = q.reshape(batch, q.shape[1], kv_heads, -1, groups, words // groups)
    k = k.reshape(batch, slots, kv_heads, groups, words // groups)
    scores = np.zeros((batch, kv_heads, slots), np.int32)
    for row, token, member in np.ndindex(batch, q.shape[1], q.shape[3]):
        differs = np.bitwise_or.reduce(k[row] ^ q[row, token, :, member], axis=-1)
        shared = tables - np.bitwise_count(differs).sum(axis=-1, dtype=np.int32)
        scores[row] += np.where(shared >= LEAST, shared, 0).T
    return np.where(scores > 0, scores, -1)


BENCHMARKS = (
    *(
        OperationBenchmark(
            operation=operation,
            setup=setup,
            default={"B": 8, "heads": "32/32", "H": 128, "T": 1, "R": 128},
            check_case=check_codes,
            gpu=["", "heads=32/8", "B=1", "R=256"],
            quick=["", "heads=32/8"],
            cpu=["B=1,heads=8/2"],
        )
        for operation, setup in ((HASH_ENCODE, encode_setup), (APPEND_ENCODE, append_setup))
    ),
    OperationBenchmark(
        operation=COLLISION_SCORES,
        setup=collision_setup,
        default={"B": 8, "S": 32768, "heads": "32/32", "T": 1},
        gpu=["", "heads=32/8", "B=1,S=256K"],
        quick=["", "heads=32/8"],
        cpu=["B=1,S=8K,heads=8/2"],
    ),
)
