"""Greedy verification in Triton: one launch, flat in the acceptance rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jspec import tuned
from jspec.dispatch import Backend
from jspec.ops.verify import greedy_sizes, verified_like
from jspec.triton.call import next_power, refuses_triton, triton_call
from jspec.typing import Array

MAX_STOPS = 32  # the kernel unrolls over them
MAX_GAMMA = 1024  # a row stays in registers
MAX_TOKENS = 2**31 - 1  # the kernel counts them in int32


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Block sizes of the kernel.

    Attributes:
        rows: of the batch, per program, a power of 2.
        tile: positions at a time, a power of 2.
        warps: of a program.
    """

    rows: int
    tile: int
    warps: int = 1


def blocks_for(sizes: Mapping[str, int]) -> Blocks:
    """Block sizes for draft tokens of these sizes."""
    # A row to a warp while there are about as many as the GPU has places for; then several rows, as
    # long as a lane keeps to some eight positions.
    block, gamma = tuned.block("verify_greedy", "triton", sizes), sizes["gamma"]
    rows = max(1, min(block["rows"], block["positions"] // max(gamma, 1)))
    # One instruction finds the maximum of 32 lanes.
    tile = block["tile"] if rows == 1 else min(block["tile"], next_power(gamma))
    return Blocks(next_power(rows), tile, block["warps"])


def verify_triton(
    draft_tokens: Array,
    target_tokens: Array,
    draft_lengths: Array,
    stop_tokens: Array,
    *,
    blocks: Blocks | None = None,
) -> tuple[Array, ...]:
    """The Triton backend of `jspec.ops.verify.verify_greedy`: the fields of `Verified`."""
    from jspec.triton.verify_kernel import verify_kernel

    batch, gamma = draft_tokens.shape
    blocks = blocks or blocks_for(greedy_sizes(draft_tokens))
    return triton_call(
        verify_kernel,
        *(draft_tokens, target_tokens, draft_lengths, stop_tokens),
        out=verified_like(draft_tokens),
        programs=-(-batch // blocks.rows),
        warps=blocks.warps,
        BATCH=batch,
        GAMMA=gamma,
        STOPS=stop_tokens.shape[1],
        ROWS=blocks.rows,
        TILE=blocks.tile,
    )


def refuses(draft_tokens: Array, stop_tokens: Array) -> str | None:
    """Why the kernel cannot take these shapes, or None."""
    batch, gamma = draft_tokens.shape
    stops = stop_tokens.shape[1]
    if batch == 0:
        return "B=0 leaves nothing to launch"
    if gamma > MAX_GAMMA:
        return f"gamma={gamma} is over {MAX_GAMMA}"
    if stops > MAX_STOPS:
        return f"{stops} stop tokens a row are over {MAX_STOPS}"
    if batch * max(gamma + 1, stops) > MAX_TOKENS:
        return f"B={batch} rows of {max(gamma + 1, stops)} tokens are over {MAX_TOKENS}"
    return None


def _supports(
    draft_tokens: Array, target_tokens: Array, draft_lengths: Array, stop_tokens: Array
) -> str | None:
    return refuses(draft_tokens, stop_tokens) or refuses_triton()


VERIFY_GREEDY = Backend("triton", verify_triton, _supports)
