"""Verification with packing in Triton: one launch, for batches small enough to verify twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jspec import tuned
from jspec.dispatch import Backend
from jspec.ops.fused import fused_sizes
from jspec.ops.packing import packed_like
from jspec.ops.verify import verified_like
from jspec.triton import pack, verify
from jspec.triton.call import next_power, refuses_triton, triton_call
from jspec.typing import Array

MAX_TOKENS = 8192  # drafted in a batch: a program verifies all of the rows before its own


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Block sizes of the kernel; ``span``, ``scan`` and ``tile`` are powers of 2.

    Attributes:
        span: bytes that a program copies at a time.
        row_programs: programs of a batch row, at most.
        scan: earlier rows that are verified at a time.
        tile: positions of each of them at a time.
        warps: of a program.
        eager: whether a program reads its first bytes before it knows whether they are accepted.
    """

    span: int
    row_programs: int
    scan: int
    tile: int
    warps: int
    eager: bool


def blocks_for(sizes: Mapping[str, int]) -> Blocks:
    """Block sizes for draft tokens and KV rows of these sizes."""
    block = tuned.block("verify_and_pack", "triton", sizes)
    batch, span, tile = (
        sizes["batch"],
        block["span"],
        min(block["tile"], next_power(sizes["gamma"])),
    )
    # Each program verifies what comes before its rows: the more that is, the fewer programs, unless
    # there is so much to copy that it takes more of them.
    programs = block["work"] // max(sizes["drafted"], 1)
    programs = min(block["most_programs"], max(block["least_programs"], programs))
    if sizes["bytes"] > block["many_bytes"]:
        programs = max(programs, block["many_programs"])
    row_programs = max(1, programs // batch)
    return Blocks(
        span=span,
        row_programs=row_programs,
        scan=min(block["positions"] // tile, next_power(batch)),
        tile=tile,
        warps=block["warps"],
        # What is read in vain is then no more than a GPU has on its way in any case.
        eager=batch * min(sizes["run_bytes"], row_programs * span) <= block["eager_bytes"],
    )


def verify_and_pack_triton(
    draft_tokens: Array,
    target_tokens: Array,
    draft_lengths: Array,
    stop_tokens: Array,
    kv: Array,
    *,
    blocks: Blocks | None = None,
) -> tuple[Array, ...]:
    """The Triton backend of `verify_and_pack`: the fields of `Verified` and of `Packed`."""
    from jspec.triton.fused_kernel import verify_and_pack_kernel

    batch, gamma, width = kv.shape
    size = kv.dtype.itemsize
    tokens = (draft_tokens, target_tokens, draft_lengths, stop_tokens)
    blocks = blocks or blocks_for(fused_sizes(*tokens, kv))
    carried = pack.carry(kv)
    span = min(blocks.span // size, next_power(gamma * width))
    chunks = min(-(-gamma * width // span), blocks.row_programs)
    *verified, packed, offsets, total = triton_call(
        verify_and_pack_kernel,
        *(*tokens, carried),
        out=(*verified_like(draft_tokens), *packed_like(carried)),
        programs=batch * chunks,
        warps=blocks.warps,
        BATCH=batch,
        GAMMA=gamma,
        STOPS=stop_tokens.shape[1],
        TILE=blocks.tile,
        WIDTH=width,
        CHUNKS=chunks,
        SPAN=span,
        SCAN=blocks.scan,
        EAGER=blocks.eager,
    )
    return *verified, pack.uncarry(packed, kv.dtype), offsets, total


def _supports(
    draft_tokens: Array,
    target_tokens: Array,
    draft_lengths: Array,
    stop_tokens: Array,
    kv: Array,
) -> str | None:
    if draft_tokens.size > MAX_TOKENS:
        return (
            f"B * gamma = {draft_tokens.size} draft tokens are over {MAX_TOKENS}; verify them, "
            "then pack"
        )
    return verify.refuses(draft_tokens, stop_tokens) or pack.refuses(kv) or refuses_triton()


VERIFY_AND_PACK = Backend("triton", verify_and_pack_triton, _supports)
