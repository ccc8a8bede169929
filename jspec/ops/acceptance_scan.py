"""The acceptance scan of the verification paper, whose outputs are three numbers a row.

For comparing two ways to scan, a warp a row with ballots and the serial scan of a thread a row that
the paper starts from. `jspec.ops.verify_greedy`, which decoding calls, also takes ragged drafts and
stop tokens, and writes the committed block.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.cases import paper_tokens
from jspec.ops.verify import greedy_sizes, leading
from jspec.typing import Array


def acceptance_scan(
    draft_tokens: Array, target_tokens: Array, *, implementation: str | None = None
) -> tuple[Array, Array, Array]:
    """Find the first mismatch of each row.

    "Batched Speculative Decoding Verification Kernels" (Kolawole), sections 2.1 and 5.1.

    Args:
        draft_tokens: int32 ``[B, gamma]``.
        target_tokens: int32 ``[B, gamma + 1]``, the target's argmax after each prefix.
        implementation: the backend by name; None is the best one.

    Returns:
        int32 ``[B]``, the accepted draft tokens; bool ``[B]``, whether one was rejected; and int32
        ``[B]``, the target's token after the accepted ones.

    Raises:
        ValueError: for shapes or dtypes that do not fit together.
    """
    pair = draft_tokens, target_tokens
    is_int32 = all(x.dtype == jnp.int32 for x in pair)
    batch, *gamma = draft_tokens.shape
    if len(gamma) != 1 or target_tokens.shape != (batch, gamma[0] + 1) or not is_int32:
        names = "draft_tokens", "target_tokens"
        got = [f"{name} {x.dtype}{list(x.shape)}" for name, x in zip(names, pair, strict=True)]
        raise ValueError(f"{' and '.join(got)} must be int32 [B, gamma] and [B, gamma + 1]")
    return ACCEPTANCE_SCAN(draft_tokens, target_tokens, implementation=implementation)


def _xla(draft_tokens: Array, target_tokens: Array) -> tuple[Array, Array, Array]:
    """The reference of `acceptance_scan`."""
    batch, gamma = draft_tokens.shape
    matches = draft_tokens == target_tokens[:, :gamma]
    accepted = leading(matches, jnp.full(batch, gamma, jnp.int32))
    following = jnp.take_along_axis(target_tokens, accepted[:, None], axis=1)[:, 0]
    return accepted, accepted < gamma, following


def scan_like(draft_tokens: Array) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and dtypes of the results for ``draft_tokens [B, gamma]``."""
    count = jax.ShapeDtypeStruct(draft_tokens.shape[:1], jnp.int32)
    return count, jax.ShapeDtypeStruct(draft_tokens.shape[:1], jnp.bool_), count


# ``(B, gamma, alpha)`` by name.
_SHAPES = {
    "no-draft": (3, 0, 0.5),
    "one-token": (5, 1, 0.5),
    "short": (37, 8, 0.9),
    "over-a-warp": (6, 33, 0.95),
    "two-rounds": (5, 200, 0.99),
    "first-of-two-rounds": (5, 200, 0.4),
}


def _cases() -> list[Case]:
    def build(batch: int, gamma: int, alpha: float) -> tuple[np.ndarray, ...]:
        return paper_tokens(batch, gamma, alpha)[:2]

    def expected(batch: int, gamma: int, alpha: float) -> tuple[np.ndarray, ...]:
        _, target, accepted = paper_tokens(batch, gamma, alpha)
        return accepted, accepted < gamma, target[np.arange(batch), accepted]

    return [
        Case(
            name,
            functools.partial(build, *shape),
            small=name == "short",
            expected=functools.partial(expected, *shape),
        )
        for name, shape in _SHAPES.items()
    ]


ACCEPTANCE_SCAN = Operation(
    "acceptance_scan",
    {
        "xla": Backend("xla", _xla, always),
        "cuda": "jspec.cuda_ffi.verify:SCAN",
        "cuda_naive": "jspec.cuda_ffi.verify:NAIVE_SCAN",
    },
    greedy_sizes,
    _cases,
)
