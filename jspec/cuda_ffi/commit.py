"""Greedy verification with the bookkeeping of a step by CUDA kernels: one launch, or two."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jspec import tuned
from jspec.cuda_ffi import library
from jspec.cuda_ffi.verify import refuses as refuses_tokens
from jspec.dispatch import Backend
from jspec.ops.commit import commit_sizes, committed_like
from jspec.typing import Array

MAX_POSITIONS = 2**10  # of a row: its target tokens are in shared memory
RESULTS = 10  # the arrays after them are the kernels' own


def _run(draft_tokens: Array, logits: Array, *rest: Array) -> tuple[Array, ...]:
    _, _, _, tokens, *_ = rest
    block = tuned.block("verify_and_commit", "cuda", commit_sizes(draft_tokens, logits))
    batch, positions, vocabulary = logits.shape
    # Rows of few logits are read by the block that verifies; others in parts, by a launch before.
    part = 0 if positions * vocabulary <= block["whole"] else block["part"]
    shape = (batch, positions, -(-vocabulary // part) if part else 0)
    parts = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)
    outputs = library.call(
        "verify_and_commit",
        (*committed_like(draft_tokens, tokens), *parts),
        *(draft_tokens, logits, *rest),
        vmap_method="broadcast_all",
        aliases={5: 7, 6: 8, 7: 9},
        warps=np.int32(block["warps"]),
        part=np.int32(part),
    )
    return outputs[:RESULTS]


def _supports(draft_tokens, logits, draft_lengths, stop_tokens, *rest) -> str | None:
    positions, vocabulary = logits.shape[1:]
    if logits.dtype not in (jnp.float32, jnp.bfloat16):
        return f"logits are {logits.dtype}; it reads float32 and bfloat16"
    if vocabulary == 0:
        return "V=0 leaves no token to take"
    if positions > MAX_POSITIONS:
        return f"{positions} positions a row are over {MAX_POSITIONS}"
    return refuses_tokens(draft_tokens, stop_tokens) or library.refusal("verify")


VERIFY_AND_COMMIT = Backend("cuda", _run, _supports)
