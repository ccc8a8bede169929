"""Verification fused with packing or appending by CUDA kernels."""

from __future__ import annotations

from typing import Any

from jspec.cuda_ffi import library, pack
from jspec.cuda_ffi.pack import Layout
from jspec.dispatch import Backend
from jspec.ops.pack import packed_like
from jspec.ops.verify import verified_like
from jspec.typing import Array


def layout(draft_tokens: Array, rows: Array) -> Layout:
    """The layout of `jspec.verify_and_pack`.

    Counting in each block spares a launch and the wait for it, and costs, on an H100, half of
    that for each pass over the tokens: 8 warps take 512 positions in two passes where a row has
    fewer than 32, and 32 rows in one where it has more.
    """
    batch, gamma = draft_tokens.shape
    if gamma < 32:
        recounts = batch * 2 ** max(gamma - 1, 0).bit_length() <= 512
    else:
        recounts = batch <= 32 and batch * gamma <= 2048
    if not recounts:
        return pack.layout(rows)
    return Layout(threads=256, eager=rows.nbytes <= 2**20, recounts=True)


def _supports(*arguments: Array) -> str | None:
    return pack.supports(arguments[4])


def _supports_single(*arguments: Array) -> str | None:
    if (batch := arguments[0].shape[0]) > 32:
        return f"B={batch} must be at most 32: one block does it all"
    return pack.supports(arguments[4])


def _pack(target: str, *arguments: Array, **attributes: Any) -> tuple[Array, ...]:
    outputs = (*verified_like(arguments[0]), *packed_like(arguments[4]))
    return library.call(target, outputs, *arguments, vmap_method="sequential", **attributes)


def _run(*arguments: Array) -> tuple[Array, ...]:
    return _pack("verify_and_pack", *arguments, **layout(arguments[0], arguments[4]).attributes)


def _run_single(*arguments: Array) -> tuple[Array, ...]:
    return _pack("verify_and_pack_single", *arguments)


def _append(*arguments: Array) -> tuple[Array, ...]:
    draft_tokens, _, _, _, rows, cache, _ = arguments
    outputs = (*verified_like(draft_tokens), cache)
    return library.call(
        "verify_and_append",
        outputs,
        *arguments,
        vmap_method="broadcast_all",
        aliases={5: 6},
        **pack.layout(rows).attributes,
    )


PACK = Backend("cuda", _run, _supports)
PACK_SINGLE = Backend("cuda_single", _run_single, _supports_single)
APPEND = Backend("cuda", _append, _supports)
