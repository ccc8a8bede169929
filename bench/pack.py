"""Packing of accepted keys and values, alone and fused with verification: every backend, PyTorch.

The backend ``two_steps`` of the fused operation runs the best backend of each step: it takes 1.006
of the time of the best pair of backends in the mean of 264 cases on an H200.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from bench import workload
from bench.cases import Case, product
from bench.rivals import verification
from bench.suite import OperationBenchmark, Setup, suite_of
from bench.verify import is_verified
from jspec.ops.fused import VERIFY_AND_PACK
from jspec.ops.packing import PACK


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
    "packing of accepted keys and values, alone and fused with verification: every backend, "
    "PyTorch",
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
)
