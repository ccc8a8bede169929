"""Verification with packing in Triton: one launch, for batches small enough to verify twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jspec import tuned
from jspec.dispatch import Backend
from jspec.ops.fused import fused_sizes
from jspec.ops.pack import packed_like
from jspec.ops.verify import verified_like
from jspec.triton import pack, verify
from jspec.triton.call import next_power, refuses_triton, triton_call
from jspec.typing import Array

MOST_TOKENS = 8192  # drafted in a batch: a program verifies all of the rows before its own


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the work is cut: ``span`` bytes a program copies at a time, ``most`` programs a batch
    row, ``scan`` earlier rows verified at a time, ``tile`` positions of each at a time, ``warps``
    to run a program; ``span``, ``scan`` and ``tile`` are powers of 2.

    ``eager``: a program's first bytes are read before it is known whether they are kept.
    """

    span: int
    most: int
    scan: int
    tile: int
    warps: int
    eager: bool


def blocks_for(sizes: Mapping[str, int]) -> Blocks:
    """The cut that serves draft tokens and KV rows of these sizes well."""
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
    most = max(1, programs // batch)
    return Blocks(
        span=span,
        most=most,
        scan=min(block["positions"] // tile, next_power(batch)),
        tile=tile,
        warps=block["warps"],
        # What is read in vain is then no more than a GPU has on its way in any case.
        eager=batch * min(sizes["run_bytes"], most * span) <= block["eager_bytes"],
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
    """As the reference of `jspec.ops.fused.verify_and_pack`; what lies past the total is whatever
    was there."""
    from jspec.triton.fused_kernel import verify_and_pack_kernel

    batch, gamma, width = kv.shape
    size = kv.dtype.itemsize
    tokens = (draft_tokens, target_tokens, draft_lengths, stop_tokens)
    blocks = blocks or blocks_for(fused_sizes(*tokens, kv))
    carried = pack.carry(kv)
    span = min(blocks.span // size, next_power(gamma * width))
    chunks = min(-(-gamma * width // span), blocks.most)
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
    if draft_tokens.size > MOST_TOKENS:
        return (
            f"B * gamma = {draft_tokens.size} draft tokens are over {MOST_TOKENS}; verify them, "
            "then pack"
        )
    return verify.refuses(draft_tokens, stop_tokens) or pack.refuses(kv) or refuses_triton()


VERIFY_AND_PACK = Backend("triton", verify_and_pack_triton, _supports)
