"""Packing of accepted keys and values: every backend, PyTorch.

Alone, fused with verification, and of the accepted path of a tree within the caches of all layers.

The backend ``two_steps`` of the fused operation runs the best backend of each step: it takes 1.006
of the time of the best pair of backends in the mean of 264 cases on an H200.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import workload
from bench.cases import Case, heads, product
from bench.program import equals, reference
from bench.rivals import verification
from bench.suite import OperationBenchmark, Setup, suite_of
from bench.verify import is_verified
from jspec.ops.fused import VERIFY_AND_PACK
from jspec.ops.packing import PACK
from jspec.ops.path import PACK_PATH


def pack_setup(case: Case) -> Setup:
    """Packing of float16 rows of width D."""
    accepted = workload.make_tokens(case["B"], case["gamma"], case["alpha"]).accepted
    kv = workload.make_kv(case["B"], case["gamma"], case["D"])
    expected = workload.expected_packed(kv, accepted)
    return Setup(
        (jax.device_put(kv), jax.device_put(accepted)),
        is_packed(expected),
        2 * expected[0].nbytes,
        rivals=verification.pack(kv, accepted, expected[0]),
    )


def fused_setup(case: Case) -> Setup:
    """Greedy verification, and packing of what it accepts."""
    tokens = workload.make_tokens(case["B"], case["gamma"], case["alpha"])
    kv = workload.make_kv(case["B"], case["gamma"], case["D"])
    expected = workload.expected_packed(kv, tokens.accepted)
    verified, packed = is_verified(tokens), is_packed(expected)
    return Setup(
        tuple(map(jax.device_put, (*tokens.inputs, kv))),
        lambda outputs: verified(outputs) and packed(outputs),
        2 * expected[0].nbytes,
        rivals=verification.verify_and_pack(tokens, kv, expected[0]),
    )


def path_setup(case: Case) -> Setup:
    """The path of n nodes through a draft of twice as many, in the caches of all layers.

    Columns are not donated: a call copies them first, and a step of a loop does not.
    """
    batch, slots, moves, (_, kv_heads) = case["B"], case["S"], case["n"], heads(case)
    shape = (batch, slots, kv_heads, case["H"])
    keys = jax.random.split(jax.random.key(workload.SEED), 2 * case["layers"])
    columns = tuple(jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
    rng = np.random.default_rng([workload.SEED, batch, moves])
    nodes = np.array([np.sort(rng.permutation(2 * moves)[:moves]) for _ in range(batch)], np.int32)
    first = slots - 2 * moves
    target = np.broadcast_to(np.arange(first, first + moves, dtype=np.int32), nodes.shape)
    counts = np.full(batch, moves, np.int32)
    arguments = columns, *jax.device_put((first + nodes, target, counts))
    moved = int((first + nodes != target).sum()) * sum(x[0, 0].nbytes for x in columns)
    expected = reference(PACK_PATH, arguments)
    return Setup(arguments, equals(expected), 2 * moved, feed=(slice(None), 0))


def path_case(case: Case) -> Case:
    """The case; raises `ValueError` where a draft does not fit into the cache."""
    if 2 * case["n"] > case["S"]:
        raise ValueError(f"n={case['n']}: twice as many nodes must fit into S={case['S']}")
    return case


def is_packed(expected: tuple[np.ndarray, np.ndarray, int]) -> Callable[[Any], bool]:
    """A check that the last three outputs are the fields of `Packed`, up to the total."""
    packed, offsets, total = expected

    def check(outputs: Any) -> bool:
        actual, actual_offsets, actual_total = map(np.asarray, outputs[-3:])
        return (
            int(actual_total) == total
            and np.array_equal(actual_offsets, offsets)
            and np.array_equal(actual[:total], packed)
        )

    return check


DEFAULT = {"B": 32, "gamma": 128, "alpha": 0.9, "D": 2048}
QUICK = product(B=(32,), gamma=(8, 128), D=(128, 2048))
CPU = product(B=(1, 32), gamma=(8, 128), alpha=(0.3, 0.9), D=(128, 1024))
WIDTHS = (128, 512, 1024, 2048)
ALPHAS = product(B=(4, 32), gamma=(8, 128), alpha=(0.3, 0.6), D=WIDTHS)
SUITE = suite_of(
    "pack",
    "packing of accepted keys and values, alone, fused with verification, and within the caches: "
    "every backend, PyTorch",
    OperationBenchmark(
        operation=PACK,
        setup=pack_setup,
        rivals=verification.PACK,
        states=("warm", "cold"),
        default=DEFAULT,
        gpu=[*product(B=(1, 4, 16, 32, 256, 1024), gamma=(8, 128), D=WIDTHS), *ALPHAS],
        quick=QUICK,
        cpu=CPU,
    ),
    OperationBenchmark(
        operation=VERIFY_AND_PACK,
        setup=fused_setup,
        rivals=verification.VERIFY_AND_PACK,
        states=("warm", "cold"),
        default=DEFAULT,
        gpu=[
            *product(B=(1, 4, 32, 256, 1024), gamma=(8, 128), D=WIDTHS),
            *product(gamma=(4, 16, 32, 64), D=(1024,)),
            *ALPHAS,
        ],
        quick=QUICK,
        cpu=CPU,
    ),
    OperationBenchmark(
        operation=PACK_PATH,
        setup=path_setup,
        default={"B": 32, "S": 128, "n": 8, "layers": 36, "heads": "32/8", "H": 128},
        complete=path_case,
        gpu=[
            *product(B=(1, 32), n=(4, 8)),
            *product(B=(96,), n=(4,), layers=(30,), heads=("9/3",), H=(64,)),
        ],
        quick=["", "B=1"],
        cpu=product(B=(4,), n=(4,), layers=(4,), heads=("8/4",), H=(32,)),
    ),
)
