"""Verification fused with what follows it: packing accepted rows, or appending them to a cache."""

from __future__ import annotations

import jax.numpy as jnp

from jspec.dispatch import Backend, Operation, always, cuda_first
from jspec.ops.pack import PACK, Packed, pack_xla
from jspec.ops.verify import VERIFY_GREEDY, Verified, check_greedy, greedy_xla
from jspec.typing import Array


def verify_and_pack(
    draft_tokens: Array,
    target_tokens: Array,
    draft_lengths: Array,
    stop_tokens: Array,
    rows: Array,
    *,
    implementation: str | None = None,
) -> tuple[Verified, Packed]:
    """`jspec.verify_greedy`, and `jspec.pack` of the ``rows [B, gamma, D]`` that it accepted."""
    check_greedy(draft_tokens, target_tokens, draft_lengths, stop_tokens)
    _check_rows(rows, draft_tokens)
    arguments = (draft_tokens, target_tokens, draft_lengths, stop_tokens, rows)
    out = VERIFY_AND_PACK(*arguments, implementation=implementation)
    return Verified(*out[:6]), Packed(*out[6:])


def verify_and_append(
    draft_tokens: Array,
    target_tokens: Array,
    draft_lengths: Array,
    stop_tokens: Array,
    rows: Array,
    cache: Array,
    lengths: Array,
    *,
    implementation: str | None = None,
) -> tuple[Verified, Array]:
    """`jspec.verify_greedy`, and the accepted ``rows`` written behind what a cache holds.

    ``rows [B, gamma, D]``; ``cache [B, S, D]`` of the same dtype, whose slots before ``lengths``
    int32 ``[B]`` are kept; row i of batch row b goes to slot ``lengths[b] + i``. Returns the cache
    as it then is: donate it, and nothing is copied. The caller makes sure that ``lengths + gamma``
    does not exceed S; a slot past it is never written.
    """
    check_greedy(draft_tokens, target_tokens, draft_lengths, stop_tokens)
    _check_rows(rows, draft_tokens)
    batch, _, width = rows.shape
    if cache.ndim != 3 or cache.shape[::2] != (batch, width) or cache.dtype != rows.dtype:
        raise ValueError(
            f"cache {cache.dtype}{cache.shape} must be {rows.dtype}[B, S, D] with B={batch}, "
            f"D={width}, as the rows are"
        )
    if lengths.shape != (batch,) or lengths.dtype != jnp.int32:
        raise ValueError(f"lengths {lengths.dtype}{lengths.shape} must be int32 [B] with B={batch}")
    arguments = (draft_tokens, target_tokens, draft_lengths, stop_tokens, rows, cache, lengths)
    out = VERIFY_AND_APPEND(*arguments, implementation=implementation)
    return Verified(*out[:6]), out[6]


def _check_rows(rows: Array, draft_tokens: Array) -> None:
    if rows.ndim != 3 or rows.shape[:2] != draft_tokens.shape:
        raise ValueError(f"rows {rows.shape} must be [B, gamma, D] with {draft_tokens.shape}")


def _pack_xla(*arguments: Array) -> tuple[Array, ...]:
    *tokens, rows = arguments
    verified = greedy_xla(*tokens)
    return *verified, *pack_xla(rows, verified[0])


def _append_xla(*arguments: Array) -> tuple[Array, ...]:
    *tokens, rows, cache, lengths = arguments
    verified = greedy_xla(*tokens)
    index = jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
    # What was rejected is sent past the end, where "drop" leaves it out.
    slots = jnp.where(index < verified[0][:, None], lengths[:, None] + index, cache.shape[1])
    batch = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
    return *verified, cache.at[batch, slots].set(rows, mode="drop")


def _two_steps(*arguments: Array) -> tuple[Array, ...]:
    """The best backend of each step, one launch behind the other."""
    *tokens, rows = arguments
    verified = VERIFY_GREEDY(*tokens)
    return *verified, *PACK(rows, verified[0])


def _preference(platform: str, draft_tokens: Array, *rest: Array) -> tuple[str, ...]:
    """By device time on an H100.

    One launch spares another, but each of its programs counts for itself what goes before its
    rows: more work for more programs the more tokens there are.
    """
    if platform != "gpu":
        return ("xla",)
    batch, gamma = draft_tokens.shape
    if batch * gamma <= 512:
        return ("triton", "cuda", "two_steps")
    if batch * gamma <= (4096 if batch <= 32 else 2048) and batch <= 256:
        return ("triton", "two_steps")
    return ("two_steps",)


# Backends return the fields of `Verified`, then those of `Packed` or the cache.
VERIFY_AND_PACK = Operation(
    "verify_and_pack",
    {
        "xla": Backend("xla", _pack_xla, always),
        "two_steps": Backend("two_steps", _two_steps, always),
        "triton": "jspec.triton.fused:VERIFY_AND_PACK",
        "cuda": "jspec.cuda_ffi.fused:PACK",
        "cuda_single": "jspec.cuda_ffi.fused:PACK_SINGLE",
    },
    _preference,
)
VERIFY_AND_APPEND = Operation(
    "verify_and_append",
    {"xla": Backend("xla", _append_xla, always), "cuda": "jspec.cuda_ffi.fused:APPEND"},
    cuda_first,
)
