"""What policies compute in a decoding step: hash codes, and the scores of keys and of pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from bench import workload
from bench.caches import Check, bytes_of, random_cache
from bench.cases import Case, heads
from bench.program import equals, reference
from bench.select import SMALL_MODELS, checked_codes
from bench.select import codes as random_codes
from bench.suite import OperationBenchmark, Setup
from jspec.ops.append import APPEND_ENCODE, QKRope
from jspec.ops.attention.hashed import HASH_ATTENTION
from jspec.ops.collisions import COLLISION_SCORES, code_words
from jspec.ops.hash import HASH_ENCODE
from jspec.ops.key_scores import DOT_SCORES, PAGE_SCORES
from jspec.policies import MagicPIG


def small_integers(case: Case) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries ``[B, T, N, H]``, keys ``[B, T, K, H]`` and matrices ``[K, H, R]`` of small whole
    numbers, bfloat16: sums are exact in any order."""
    query_heads, kv_heads = heads(case)
    rng = np.random.default_rng([workload.SEED, case["B"], query_heads])
    lead, size = (case["B"], case["T"]), case["H"]
    sizes = (*lead, query_heads, size), (*lead, kv_heads, size), (kv_heads, size, case["R"])
    q, k, w = (jnp.asarray(rng.integers(-3, 4, shape), jnp.bfloat16) for shape in sizes)
    return q, k, w


def encode_setup(case: Case) -> Setup:
    """Encoding of a step's queries and keys."""
    arguments = small_integers(case)
    return Setup(arguments, equals(reference(HASH_ENCODE, arguments)), arguments[2].nbytes)


def append_setup(case: Case) -> Setup:
    """Encoding of new keys while they are written into a cache that they fill.

    Its columns are not donated: each run copies them first.
    """
    q, k, w = small_integers(case)
    batch, tokens, kv_heads, _ = k.shape
    codes = jnp.zeros((batch, tokens, kv_heads, case["R"] // 32), jnp.uint32)
    empty, slots = jnp.zeros_like(k), jnp.broadcast_to(jnp.arange(tokens), (batch, tokens))
    w = w.astype(jnp.float32)  # as in a policy
    arguments = q, k, k, not_rotated(q, k), empty, empty, codes, w, slots
    return Setup(arguments, equals(reference(APPEND_ENCODE, arguments)), w.nbytes)


def not_rotated(q: jax.Array, k: jax.Array) -> QKRope:
    """A rotation by 0 degrees of queries and keys that are slices of one array; values are keys."""
    batch, tokens, kv_heads, size = k.shape
    joined = [x.reshape(batch, tokens, kv_heads, -1) for x in (q, k, k)]
    cosine = jnp.ones((batch, tokens, 1, size // 2), jnp.float32)
    return QKRope(cosine, jnp.zeros_like(cosine), joined=jnp.concatenate(joined, axis=-1))


def attention_setup(case: Case) -> Setup:
    """A layer of HATA between its projections: n of S slots are selected for each KV head.

    The columns are not donated: each run copies them first. The device clock leaves a copy out, but
    counts it where XLA makes it by a kernel.
    """
    case = {**case, "T": 1}
    q, k, w = small_integers(case)
    batch, slots = case["B"], case["S"]
    read, (_, codes) = np.full(batch, case["n"]), random_codes(case)
    _, keys, values = random_cache(case, np.zeros((1, slots, 1), bool), read)
    lengths = jnp.full((batch,), slots - 1, jnp.int32)
    arguments = (
        *(q, k, k, not_rotated(q, k), keys, values, codes, w.astype(jnp.float32)),
        *(lengths[:, None], lengths, jnp.full((batch,), case["n"], jnp.int32)),
    )
    static = {"budget": case["n"], "sinks": 4, "recent": 16, "num_uncommitted": 1}
    static |= {"scale": case["H"] ** -0.5, "softcap": None}
    # In bfloat16 the reference would round queries times a scale that is no power of 2.
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == k.dtype else x, arguments)
    out, lse, chosen, *columns, codes = reference(HASH_ATTENTION, wide, **static)
    exact = (chosen, *(x.astype(k.dtype) for x in columns), codes)
    attended, selected = Check(out, lse), equals(exact)
    return Setup(
        arguments,
        lambda outputs: attended.both(outputs) and selected(list(outputs[2:])),
        bytes_of(batch * (case["n"] + 1), case) + codes.nbytes,
        static,
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
    arguments = q, k, jnp.full((batch,), case["S"], jnp.int32)
    scores = reference(COLLISION_SCORES, arguments, tables=tables)
    return Setup(arguments, equals(scores), k.nbytes + scores.nbytes, {"tables": tables})


def dot_setup(case: Case) -> Setup:
    """Scores q.k of every key, or of its ``C`` < H leading components, as Loki scores."""
    q, keys, projection = vectors(case, case["S"], case["C"])
    arguments = q, keys, projection if case["C"] < case["H"] else None
    scores = reference(DOT_SCORES, arguments)
    return Setup(arguments, equals(scores), keys.nbytes + scores.nbytes)


def page_setup(case: Case) -> Setup:
    """Upper bounds of the scores of pages of ``page`` keys, as Quest scores."""
    q, low, _ = vectors(case, case["S"] // case["page"], case["H"])
    arguments = q, low, low + 1
    scores = reference(PAGE_SCORES, arguments)
    return Setup(arguments, equals(scores), 2 * low.nbytes + scores.nbytes)


def vectors(case: Case, slots: int, channels: int) -> tuple[jax.Array, ...]:
    """Queries, ``slots`` columns of ``channels`` and a projection of small whole numbers: sums are
    exact in any order."""
    (query_heads, kv_heads), batch, size = heads(case), case["B"], case["H"]
    keys = jax.random.split(jax.random.key(workload.SEED), 3)
    q, columns, projection = (
        jax.random.randint(key, shape, -3, 4, jnp.int8).astype(dtype)
        for key, shape, dtype in (
            (keys[0], (batch, case["T"], query_heads, size), jnp.bfloat16),
            (keys[1], (batch, slots, kv_heads, channels), jnp.bfloat16),
            (keys[2], (kv_heads, size, channels), jnp.float32),
        )
    )
    return q, columns, projection


def used_bits(policy: MagicPIG) -> np.ndarray:
    """Mask of the bits of a code's words that belong to a table, uint32 ``[W]``."""
    places = np.arange(code_words(policy.tables, 1) * 32).reshape(-1, 32) < policy.tables
    words = np.packbits(places, axis=1, bitorder="little").view("<u4")
    return np.repeat(words, policy.bits)


BENCHMARKS = (
    *(
        OperationBenchmark(
            operation=operation,
            setup=setup,
            default={"B": 8, "heads": "32/32", "H": 128, "T": 1, "R": 128},
            complete=checked_codes,
            gpu=["", "heads=32/8", "B=1", "R=256"],
            quick=["", "heads=32/8"],
            cpu=["B=1,heads=8/2"],
        )
        for operation, setup in ((HASH_ENCODE, encode_setup), (APPEND_ENCODE, append_setup))
    ),
    OperationBenchmark(
        operation=HASH_ATTENTION,
        setup=attention_setup,
        default={"B": 8, "S": 32768, "n": 512, "heads": "32/32", "H": 128, "R": 128},
        complete=checked_codes,
        gpu=["", "heads=32/8", "B=1,S=128K,n=2K,heads=32/8", *SMALL_MODELS],
        quick=["", "heads=32/8"],
        cpu=["B=1,S=8K,n=128,heads=8/2"],
    ),
    OperationBenchmark(
        operation=COLLISION_SCORES,
        setup=collision_setup,
        default={"B": 8, "S": 32768, "heads": "32/32", "T": 1},
        gpu=["", "heads=32/8", "B=1,S=256K"],
        quick=["", "heads=32/8"],
        cpu=["B=1,S=8K,heads=8/2"],
    ),
    OperationBenchmark(
        operation=DOT_SCORES,
        setup=dot_setup,
        # C: channels of what is scored, H for whole keys
        default={"B": 8, "S": 32768, "heads": "32/32", "H": 128, "T": 1, "C": 32},
        gpu=["", "heads=32/8", "B=1,S=256K", "B=4,S=128K,heads=32/8", "heads=32/8,C=128"],
        quick=["", "heads=32/8"],
        cpu=["B=1,S=8K,heads=8/2"],
    ),
    OperationBenchmark(
        operation=PAGE_SCORES,
        setup=page_setup,
        default={"B": 8, "S": 32768, "heads": "32/32", "H": 128, "T": 1, "page": 32},
        gpu=["", "heads=32/8", "B=1,S=256K", "B=4,S=128K,heads=32/8"],
        quick=["", "heads=32/8"],
        cpu=["B=1,S=8K,heads=8/2"],
    ),
)
