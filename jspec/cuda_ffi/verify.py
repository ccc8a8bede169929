"""Greedy verification by CUDA kernels: a warp a sequence, or a thread a sequence."""

from __future__ import annotations

import functools

import numpy as np

from jspec.cuda_ffi import library
from jspec.dispatch import Backend
from jspec.ops.verify import verified_like
from jspec.typing import Array

BALLOT_TARGET, NAIVE_TARGET = "verify_greedy", "verify_greedy_naive"


def warps(target: str, batch: int) -> int:
    """Warps of a block. The ballot kernel gives each a sequence, the naive one 32."""
    return 4 if target == BALLOT_TARGET and batch <= 512 else 8


def supports(*arguments: Array) -> str | None:
    """All arguments that pass the operation's checks will do, where the kernels can be built."""
    return library.refusal("verify")


def _run(target: str, *arguments: Array) -> tuple[Array, ...]:
    return library.call(
        target,
        verified_like(arguments[0]),
        *arguments,
        vmap_method="broadcast_all",
        warps=np.int32(warps(target, arguments[0].shape[0])),
    )


BALLOT = Backend("cuda", functools.partial(_run, BALLOT_TARGET), supports)
NAIVE = Backend("cuda_naive", functools.partial(_run, NAIVE_TARGET), supports)
