"""Verification fused with packing by CUDA kernels."""

from __future__ import annotations

from typing import Any

from jspec.cuda_ffi import library, pack, verify
from jspec.cuda_ffi.pack import packing_cut
from jspec.dispatch import Backend
from jspec.ops.fused import fused_sizes
from jspec.ops.packing import packed_like
from jspec.ops.verify import verified_like
from jspec.typing import Array

MAX_SINGLE_ROWS = 32  # rows of a batch that one block packs


def _supports(*arguments: Array) -> str | None:
    draft_tokens, _, _, stop_tokens, kv = arguments[:5]
    reason = verify.refuses(draft_tokens, stop_tokens) or pack.refuses(kv)
    return reason or library.refusal("pack")


def _supports_single(*arguments: Array) -> str | None:
    if (batch := arguments[0].shape[0]) > MAX_SINGLE_ROWS:
        return f"B={batch} must be at most {MAX_SINGLE_ROWS}: one block does it all"
    return _supports(*arguments)


def _pack(target: str, *arguments: Array, **attributes: Any) -> tuple[Array, ...]:
    outputs = (*verified_like(arguments[0]), *packed_like(arguments[4]))
    return library.call(target, outputs, *arguments, vmap_method="sequential", **attributes)


def _run(*arguments: Array) -> tuple[Array, ...]:
    # Counting in each block spares a launch and the wait for it, and costs half of that for each
    # pass over the tokens: 8 warps take 512 positions in two passes where a row has fewer than 32,
    # and 32 rows in one where it has more.
    cut = packing_cut("verify_and_pack", fused_sizes(*arguments))
    return _pack("verify_and_pack", *arguments, **cut.attributes)


def _run_single(*arguments: Array) -> tuple[Array, ...]:
    return _pack("verify_and_pack_single", *arguments)


PACK = Backend("cuda", _run, _supports)
PACK_SINGLE = Backend("cuda_single", _run_single, _supports_single)
