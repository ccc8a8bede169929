"""Verification of drafted tokens: what is accepted, and the one token that follows.

Greedy: draft tokens are accepted while they equal the target's argmax. For rejection sampling see
`jspec.ops.stochastic`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.cases import accepted_tokens, ragged_tokens
from jspec.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verified:
    """The outcome of a verification for each row; token arrays have the dtype of the draft tokens.

    Attributes:
        accepted: int32 ``[B]``, accepted draft tokens; a stop token among them ends the count.
        committed: int32 ``[B]``, tokens of the committed block: accepted + 1, or accepted where the
            block ends with an accepted stop token.
        mismatch: bool ``[B]``, whether the last committed token corrects a rejected draft token.
        next_token: ``[B]``, the corrected token, or the bonus token after a draft that is accepted
            as a whole; -1 where a stop token came before it.
        stopped: bool ``[B]``, whether a committed token is a stop token.
        tokens: ``[B, gamma + 1]``, the committed block, -1 after its end.
    """

    accepted: Array
    committed: Array
    mismatch: Array
    next_token: Array
    stopped: Array
    tokens: Array


def verified_like(draft_tokens: Array) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and dtypes of the fields of `Verified` for ``draft_tokens [B, gamma]``."""
    batch, gamma = draft_tokens.shape
    count = jax.ShapeDtypeStruct((batch,), jnp.int32)
    flag = jax.ShapeDtypeStruct((batch,), jnp.bool_)
    token = jax.ShapeDtypeStruct((batch,), draft_tokens.dtype)
    block = jax.ShapeDtypeStruct((batch, gamma + 1), draft_tokens.dtype)
    return count, count, flag, token, flag, block


def verify_greedy(
    draft_tokens: Array,
    target_tokens: Array,
    draft_lengths: Array,
    stop_tokens: Array,
    *,
    implementation: str | None = None,
) -> Verified:
    """Accept draft tokens as long as they equal the target's argmax.

    Args:
        draft_tokens: int32 or int64 ``[B, gamma]``.
        target_tokens: ``[B, gamma + 1]``, the target's argmax after each prefix.
        draft_lengths: int32 ``[B]`` in 0..gamma; draft tokens beyond are ignored.
        stop_tokens: ``[B, M]``, -1 for none. All token ids have one dtype.
        implementation: the backend by name; None is the best one.

    Returns:
        A `Verified`.

    Raises:
        ValueError: for shapes or dtypes that do not fit together.
    """
    check_greedy(draft_tokens, target_tokens, draft_lengths, stop_tokens)
    arguments = (draft_tokens, target_tokens, draft_lengths, stop_tokens)
    return Verified(*VERIFY_GREEDY(*arguments, implementation=implementation))


def check_greedy(
    draft_tokens: Array, target_tokens: Array, draft_lengths: Array, stop_tokens: Array
) -> None:
    """Raise `ValueError` where shapes or dtypes are not those of `verify_greedy`."""
    check_draft(draft_tokens, draft_lengths, stop_tokens, target_tokens.shape)
    dtypes = {x.dtype for x in (draft_tokens, target_tokens, stop_tokens)}
    if len(dtypes) != 1 or dtypes.pop() not in (jnp.int32, jnp.int64):
        raise ValueError(
            f"draft_tokens {draft_tokens.dtype}, target_tokens {target_tokens.dtype} and "
            f"stop_tokens {stop_tokens.dtype} must all be int32 or all int64"
        )


def greedy_xla(
    draft_tokens: Array, target_tokens: Array, draft_lengths: Array, stop_tokens: Array
) -> tuple[Array, ...]:
    """The reference of `verify_greedy`: the fields of `Verified`."""
    matches = draft_tokens == target_tokens[:, : draft_tokens.shape[1]]
    accepted = leading(matches, draft_lengths)
    following = jnp.take_along_axis(target_tokens, accepted[:, None], axis=1)[:, 0]
    return commit(draft_tokens, draft_lengths, accepted, following, stop_tokens)


def greedy_sizes(draft_tokens: Array, *rest: Array) -> dict[str, int]:
    """The sizes that backends are ordered by: the batch, gamma, and all draft tokens."""
    batch, gamma = draft_tokens.shape
    return {"batch": batch, "gamma": gamma, "drafted": batch * gamma}


# ``(B, gamma, M)`` by name.
_SHAPES = {
    "gamma-1": (5, 1, 1),
    "no-stops": (7, 2, 0),
    "odd": (5, 5, 2),
    "one-row": (1, 8, 1),
    "warp": (9, 32, 3),
    "over-a-warp": (6, 33, 1),
    "two-pieces": (6, 100, 2),
    "largest": (6, 128, 1),
    "three-pieces": (3, 200, 1),
}


def greedy_cases() -> list[Case]:
    """A case in which every draft token is accepted, and ragged ones of every kind of length."""
    ragged = [
        Case(name, functools.partial(ragged_tokens, *shape)) for name, shape in _SHAPES.items()
    ]
    return [Case("all-accepted", lambda: accepted_tokens(2, 14), small=True), *ragged]


# Backends return the fields of `Verified` in order.
VERIFY_GREEDY = Operation(
    "verify_greedy",
    {
        "xla": Backend("xla", greedy_xla, always),
        "cuda": "jspec.cuda_ffi.verify:BALLOT",
        "pallas": "jspec.pallas.verify:VERIFY_GREEDY",
        "triton": "jspec.triton.verify:VERIFY_GREEDY",
    },
    greedy_sizes,
    greedy_cases,
)


def check_draft(
    draft_tokens: Array, draft_lengths: Array, stop_tokens: Array, target: tuple[int, ...]
) -> None:
    """Raise `ValueError` where a draft does not fit ``target``, the leading axes of the logits."""
    batch, gamma = draft_tokens.shape
    if target != (batch, gamma + 1):
        raise ValueError(
            f"draft_tokens {draft_tokens.shape} needs a target for [B, gamma + 1] = "
            f"{(batch, gamma + 1)} positions, got {target}"
        )
    if draft_lengths.shape != (batch,) or stop_tokens.ndim != 2 or stop_tokens.shape[0] != batch:
        raise ValueError(
            f"draft_lengths {draft_lengths.shape} and stop_tokens {stop_tokens.shape} must be "
            f"[B] and [B, M] with B={batch}"
        )
    if draft_lengths.dtype != jnp.int32:
        raise ValueError(f"draft_lengths {draft_lengths.dtype} must be int32")


def leading(accepts: Array, lengths: Array) -> Array:
    """Length of the leading run of True in ``[B, gamma]``, counted within ``lengths [B]``."""
    accepts = accepts & (jnp.arange(accepts.shape[1], dtype=jnp.int32)[None] < lengths[:, None])
    return jnp.cumprod(accepts.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)


def commit(
    draft_tokens: Array,
    draft_lengths: Array,
    accepted: Array,
    following: Array,
    stop_tokens: Array,
) -> tuple[Array, ...]:
    """Build the block and cut it after the first stop token: the fields of `Verified`."""
    index = jnp.arange(draft_tokens.shape[1] + 1, dtype=jnp.int32)[None]
    padded = jnp.pad(draft_tokens, ((0, 0), (0, 1)), constant_values=-1)
    block = jnp.where(index == accepted[:, None], following[:, None], padded)
    block = jnp.where(index <= accepted[:, None], block, -1)
    is_stop = (block[:, :, None] == stop_tokens[:, None]).any(axis=-1) & (block >= 0)
    stopped = is_stop.any(axis=1)
    first = jnp.argmax(is_stop, axis=1).astype(jnp.int32)
    committed = jnp.where(stopped, first, accepted) + 1
    cut = committed <= accepted
    return (
        jnp.minimum(accepted, committed),
        committed,
        ~cut & (accepted < jnp.minimum(draft_lengths, draft_tokens.shape[1])),
        jnp.where(cut, -1, following),
        stopped,
        jnp.where(index < committed[:, None], block, -1),
    )
