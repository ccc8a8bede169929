"""Exact selection of the highest scores of a row, also by hash codes: every backend and rivals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import workload
from bench.cases import Case, heads, product
from bench.program import equals, reference
from bench.rivals import select as rivals
from bench.suite import OperationBenchmark, Setup, suite_of
from jspec.ops.hash import BITS, HAMMING_SCORES
from jspec.ops.hash_selection import HASH_SELECT
from jspec.ops.selection import SELECT

HIGHEST = 128  # scores "0..128" count the equal bits of 128 random ones
# n: selected slots of S; R: bits of a code
CODES: Case = {"B": 8, "S": 32768, "n": 512, "heads": "32/32", "T": 1, "R": 128}


def select_setup(case: Case) -> Setup:
    """Selection of k of n scores in each of ``rows``."""
    rows, scores = case["rows"], random_scores(case)
    highest = HIGHEST if case["scores"] == "0..128" else None
    static = {"k": case["k"], "sinks": 0, "recent": 0, "highest": highest}
    counts = (jnp.full((rows,), case[x], jnp.int32) for x in ("k", "n"))
    arguments = jnp.asarray(scores), *counts
    slots = reference(SELECT, arguments, **static)
    size = scores.nbytes + slots.nbytes
    return Setup(arguments, equals(slots), size, static, rivals.select(scores, slots))


def random_scores(case: Mapping[str, Any]) -> np.ndarray:
    """Normal numbers, or the bits that two random codes share, ``[rows, n]``."""
    rng = np.random.default_rng([workload.SEED, case["rows"], case["n"]])
    shape = case["rows"], case["n"]
    if case["scores"] == "0..128":
        return rng.binomial(HIGHEST, 0.5, shape).astype(np.int32)
    return rng.standard_normal(shape, np.float32).astype(jnp.dtype(case["scores"]))


def codes(case: Case) -> tuple[jax.Array, jax.Array]:
    """Random codes of queries ``[B, T, N, R / 32]`` and keys ``[B, S, K, R / 32]``, uint32."""
    (query_heads, kv_heads), batch = heads(case), case["B"]
    words, keys = case["R"] // 32, jax.random.split(jax.random.key(workload.SEED))
    q = jax.random.bits(keys[0], (batch, case["T"], query_heads, words), jnp.uint32)
    return q, jax.random.bits(keys[1], (batch, case["S"], kv_heads, words), jnp.uint32)


def score_setup(case: Case) -> Setup:
    """Hamming scores of every key."""
    q, k = codes(case)
    arguments = q, k, jnp.full((case["B"],), case["S"], jnp.int32), None
    scores = reference(HAMMING_SCORES, arguments)
    return Setup(arguments, equals(scores), k.nbytes + scores.nbytes)


def hash_select_setup(case: Case) -> Setup:
    """Selection of n of S keys by their codes."""
    (q, k), lists = codes(case), (case["B"], heads(case)[1])
    arguments = q, k, *(jnp.full(lists, case[x], jnp.int32) for x in ("n", "S"))
    static = {"k": case["n"], "sinks": 0, "recent": 0}
    slots = reference(HASH_SELECT, arguments, **static)
    return Setup(arguments, equals(slots), k.nbytes + slots.nbytes, static)


def checked_select(case: Case) -> Case:
    """The case; raises `ValueError` where more slots are to be selected than there are."""
    if case["k"] > case["n"]:
        raise ValueError(f"k={case['k']} must be at most n={case['n']}")
    return case


def checked_codes(case: Case) -> Case:
    """The case; raises `ValueError` for a code size without kernels, or too many slots."""
    if case["R"] not in BITS:
        raise ValueError(f"R={case['R']} must be one of {', '.join(map(str, BITS))}")
    if case.get("n", 0) > case.get("S", 0):
        raise ValueError(f"n={case['n']} must be at most S={case['S']}")
    return case


SMALL_MODELS = [  # SmolLM2-135M's heads, then those of Qwen2.5-0.5B, 7 % of the context
    *product(B=(12, 96), S=("7K",), n=(512,), heads=("9/3",), H=(64,)),
    *product(B=(16, 64), S=("30K",), n=("2K",), heads=("14/2",), H=(64,)),
]
CODE_CASES = [
    *("", "heads=32/8", "B=1,S=256K,n=4K", "B=1,S=128K,n=2K,heads=32/8", "R=256"),
    *(case.replace(",H=64", "") for case in SMALL_MODELS),
]
SUITE = suite_of(
    "select",
    "selection of the highest scores of a row, also by hash codes: every backend, JAX, PyTorch, "
    "FlashInfer, CUB",
    OperationBenchmark(
        operation=SELECT,
        setup=select_setup,
        rivals=rivals.NAMES,
        default={"rows": 8, "n": 2**20, "k": 8192, "scores": "float32"},
        choices={"scores": ("0..128", "float32", "bfloat16")},
        complete=checked_select,
        gpu=[
            *("rows=256,n=32K,k=512,scores=0..128", "rows=256,n=32K,k=512"),
            *("rows=256,n=32K,k=512,scores=bfloat16", "", "rows=32,n=128K,k=2K"),
            "rows=4,n=128K,k=8K",
        ],
        quick=["rows=256,n=32K,k=512,scores=0..128", ""],
        cpu=["rows=4,n=8K,k=256,scores=0..128", "rows=4,n=8K,k=256"],
    ),
    *(
        OperationBenchmark(
            operation=operation,
            setup=setup,
            default=CODES,
            complete=checked_codes,
            gpu=CODE_CASES,
            quick=CODE_CASES[:2],
            cpu=["B=1,S=8K,n=128,heads=8/2"],
        )
        for operation, setup in (
            (HAMMING_SCORES, score_setup),
            (HASH_SELECT, hash_select_setup),
        )
    ),
)
