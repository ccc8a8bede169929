"""Verification fused with packing of the accepted keys and values.

For decode loops that verify greedily and whose drafts write keys and values outside of the cache:
one launch takes the place of two. jspec's step writes the cache in place and does not pack.
"""

from __future__ import annotations

import functools
from typing import Any

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.cases import accepted_tokens, kv_rows, ragged_tokens
from jspec.ops.packing import PACK, Packed, kv_sizes, pack_xla
from jspec.ops.verify import VERIFY_GREEDY, Verified, check_greedy, greedy_sizes, greedy_xla
from jspec.typing import Array


def verify_and_pack(
    draft_tokens: Array,
    target_tokens: Array,
    draft_lengths: Array,
    stop_tokens: Array,
    kv: Array,
    *,
    implementation: str | None = None,
) -> tuple[Verified, Packed]:
    """`jspec.ops.verify_greedy`, then `jspec.ops.pack` of the accepted rows of ``kv``.

    Args:
        draft_tokens: int32 or int64 ``[B, gamma]``.
        target_tokens: ``[B, gamma + 1]``, the target's argmax after each prefix.
        draft_lengths: int32 ``[B]`` in 0..gamma.
        stop_tokens: ``[B, M]``, -1 for none.
        kv: ``[B, gamma, D]``, the KV rows of the draft tokens.
        implementation: the backend by name; None is the best one.

    Returns:
        A `Verified` and a `Packed`.

    Raises:
        ValueError: for shapes or dtypes that do not fit together.
    """
    check_greedy(draft_tokens, target_tokens, draft_lengths, stop_tokens)
    _check_kv(kv, draft_tokens)
    arguments = (draft_tokens, target_tokens, draft_lengths, stop_tokens, kv)
    out = VERIFY_AND_PACK(*arguments, implementation=implementation)
    return Verified(*out[:6]), Packed(*out[6:])


def _check_kv(kv: Array, draft_tokens: Array) -> None:
    if kv.ndim != 3 or kv.shape[:2] != draft_tokens.shape:
        raise ValueError(f"kv {kv.shape} must be [B, gamma, D] with {draft_tokens.shape}")


def _pack_xla(*arguments: Array) -> tuple[Array, ...]:
    *tokens, kv = arguments
    verified = greedy_xla(*tokens)
    return *verified, *pack_xla(kv, verified[0])


def _two_steps(*arguments: Array) -> tuple[Array, ...]:
    """The best backend of each step, one launch after the other."""
    *tokens, kv = arguments
    verified = VERIFY_GREEDY(*tokens)
    return *verified, *PACK(kv, verified[0])


def fused_sizes(draft_tokens: Array, *rest: Array) -> dict[str, int]:
    """The sizes that backends are ordered by.

    Those of verification and of packing, and ``padded``: the batch times the least power of 2 that
    is at least gamma.
    """
    batch, gamma = draft_tokens.shape
    padded = batch * 2 ** max(gamma - 1, 0).bit_length()
    return greedy_sizes(draft_tokens) | kv_sizes(rest[3]) | {"padded": padded}


# ``(B, gamma, M, D, dtype)`` by name.
_SHAPES = {
    "one-row": (1, 3, 2, 8, "float32"),
    "no-draft": (2, 0, 1, 4, "float32"),
    "odd": (5, 7, 1, 33, "float16"),
    "over-a-scan": (37, 4, 2, 16, "bfloat16"),
    "over-a-tile": (3, 40, 1, 16, "int8"),
    "no-stops": (32, 8, 0, 64, "float16"),
    "over-a-warp": (19, 33, 3, 7, "float16"),
    "most-stops": (32, 128, 40, 24, "float32"),
    "long": (6, 200, 1, 9, "int8"),
    "many-rows": (1100, 4, 1, 8, "float32"),
}


def pack_cases() -> list[Case]:
    """A case in which every draft token is accepted, and ragged ones."""

    def ragged(batch: int, gamma: int, stops: int, width: int, dtype: str) -> tuple[Any, ...]:
        return *ragged_tokens(batch, gamma, stops), kv_rows(batch, gamma, width, dtype)

    def whole() -> tuple[Any, ...]:
        return *accepted_tokens(2, 14), kv_rows(2, 14, 8, "float32")

    every = [Case(name, functools.partial(ragged, *shape)) for name, shape in _SHAPES.items()]
    return [Case("all-accepted", whole, small=True), *every]


# Backends return the fields of `Verified`, then those of `Packed`. One launch spares
# another, but each of its programs counts for itself what goes before its rows: the more draft
# tokens there are, the better two steps do.
VERIFY_AND_PACK = Operation(
    "verify_and_pack",
    {
        "xla": Backend("xla", _pack_xla, always),
        "two_steps": Backend("two_steps", _two_steps, always, composite=True),
        "pallas": "jspec.pallas.fused:VERIFY_AND_PACK",
        "triton": "jspec.triton.fused:VERIFY_AND_PACK",
        "cuda": "jspec.cuda_ffi.fused:PACK",
        "cuda_single": "jspec.cuda_ffi.fused:PACK_SINGLE",
    },
    fused_sizes,
    pack_cases,
)
