"""Greedy verification by CUDA kernels: a warp a sequence, or a thread a sequence."""

from __future__ import annotations

import functools

import numpy as np

from jspec import tuned
from jspec.cuda_ffi import library
from jspec.dispatch import Backend
from jspec.ops.verify import greedy_sizes, verified_like
from jspec.typing import Array

MAX_TOKENS = 2**31 - 1  # of a batch: the handlers count positions in int32


def refuses(draft_tokens: Array, stop_tokens: Array) -> str | None:
    """Why the handlers cannot take these shapes, or None."""
    batch, gamma = draft_tokens.shape
    stops = stop_tokens.shape[1]
    if batch * max(gamma + 1, stops) > MAX_TOKENS:
        return f"B={batch} rows of gamma + 1 = {gamma + 1} and M={stops} tokens are over 2**31 - 1"
    return None


def _supports(
    draft_tokens: Array, target_tokens: Array, draft_lengths: Array, stop_tokens: Array
) -> str | None:
    return refuses(draft_tokens, stop_tokens) or library.refusal("verify")


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
    return Backend(name, functools.partial(_run, name, target), _supports)


BALLOT = _backend("cuda", "verify_greedy")
NAIVE = _backend("cuda_naive", "verify_greedy_naive")
