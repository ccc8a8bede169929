"""Greedy verification, also of trees, and the acceptance scan by CUDA kernels."""

from __future__ import annotations

import numpy as np

from jspec import tuned
from jspec.cuda_ffi import library
from jspec.dispatch import Backend
from jspec.ops.acceptance_scan import scan_like
from jspec.ops.tree import tree_like
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


def _run(*arguments: Array) -> tuple[Array, ...]:
    return _call("verify_greedy", "cuda", "verify_greedy", verified_like(arguments[0]), *arguments)


def _supports_tree(draft_tokens: Array, target_tokens: Array, *rest: Array) -> str | None:
    return refuses(draft_tokens, rest[-1]) or library.refusal("verify")


def _run_tree(
    draft_tokens: Array,
    target_tokens: Array,
    parents: Array,
    draft_lengths: Array,
    stop_tokens: Array,
) -> tuple[Array, ...]:
    return library.call(
        "verify_tree",
        tree_like(draft_tokens),
        *(draft_tokens, target_tokens, draft_lengths, stop_tokens, parents),
        vmap_method="broadcast_all",
    )


def _call(operation: str, backend: str, target: str, outputs, *arguments: Array):
    # Warps of a block. A warp has a sequence, or 32 of them in the naive scan.
    warps = tuned.block(operation, backend, greedy_sizes(*arguments))["warps"]
    return library.call(
        target, outputs, *arguments, vmap_method="broadcast_all", warps=np.int32(warps)
    )


def _supports_scan(draft_tokens: Array, target_tokens: Array) -> str | None:
    return refuses(draft_tokens, target_tokens) or library.refusal("verify")


def _scan(name: str, target: str) -> Backend:
    def run(*arguments: Array) -> tuple[Array, ...]:
        return _call("acceptance_scan", name, target, scan_like(arguments[0]), *arguments)

    return Backend(name, run, _supports_scan)


BALLOT = Backend("cuda", _run, _supports)
TREE = Backend("cuda", _run_tree, _supports_tree)
SCAN = _scan("cuda", "acceptance_scan")
NAIVE_SCAN = _scan("cuda_naive", "acceptance_scan_naive")
