"""Greedy verification by CUDA kernels: a warp a sequence, or a thread a sequence."""

from __future__ import annotations

import functools

import numpy as np

from jspec import tuned
from jspec.cuda_ffi import library
from jspec.dispatch import Backend
from jspec.ops.verify import greedy_sizes, verified_like
from jspec.typing import Array


def supports(*arguments: Array) -> str | None:
    """All arguments that pass the operation's checks will do, where the kernels can be built."""
    return library.refusal("verify")


def _run(backend: str, target: str, *arguments: Array) -> tuple[Array, ...]:
    # Of a block. The ballot kernel gives each warp a sequence, the naive one 32.
    warps = tuned.block("verify_greedy", backend, greedy_sizes(*arguments))["warps"]
    return library.call(
        target,
        verified_like(arguments[0]),
        *arguments,
        vmap_method="broadcast_all",
        warps=np.int32(warps),
    )


def _backend(name: str, target: str) -> Backend:
    return Backend(name, functools.partial(_run, name, target), supports)


BALLOT = _backend("cuda", "verify_greedy")
NAIVE = _backend("cuda_naive", "verify_greedy_naive")
