"""Verification of drafted tokens: what is accepted, and the one token that follows.

Greedy: a draft token stands while it equals the target's argmax. Stochastic: it stands with
probability min(1, p / q), and the first that falls is replaced by a draw from max(p - q, 0)
(Leviathan et al. 2023, algorithm 1; Chen et al. 2023), so that committed tokens follow the target's
law exactly.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jspec.dispatch import Backend, Operation, always
from jspec.ops.sample import Role, Rows, inverse_cdf, probabilities, uniform
from jspec.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verified:
    """The outcome for each row.

    ``accepted`` int32 ``[B]``: draft tokens that stand, a stop token among them ending the count.
    ``committed`` int32 ``[B]``: tokens the caller gets: accepted + 1, or accepted where a stop
    token stood inside the accepted run. ``mismatch`` bool ``[B]``: the last of them corrects a
    rejected draft token. ``next_token`` ``[B]``: that token, or the bonus token behind a draft that
    stood whole; -1 where a stop token came before it. ``stopped`` bool ``[B]``: a committed token
    is a stop token. ``tokens`` ``[B, gamma + 1]``: the committed block, -1 behind its end. Tokens
    have the dtype of the draft's.
    """

    accepted: Array
    committed: Array
    mismatch: Array
    next_token: Array
    stopped: Array
    tokens: Array


def verify_greedy(
    draft_tokens: Array,
    target_tokens: Array,
    draft_lengths: Array,
    stop_tokens: Array,
    *,
    implementation: str | None = None,
) -> Verified:
    """Accept draft tokens while they equal the target's own choice.

    ``draft_tokens`` int32 or int64 ``[B, gamma]``; ``target_tokens`` ``[B, gamma + 1]``, the
    target's argmax after each prefix; ``draft_lengths`` int32 ``[B]`` in 0..gamma, what lies beyond
    is ignored; ``stop_tokens`` ``[B, M]``, -1 for none. Token ids have one dtype.
    """
    check_greedy(draft_tokens, target_tokens, draft_lengths, stop_tokens)
    arguments = (draft_tokens, target_tokens, draft_lengths, stop_tokens)
    return Verified(*VERIFY_GREEDY(*arguments, implementation=implementation))


def check_greedy(
    draft_tokens: Array, target_tokens: Array, draft_lengths: Array, stop_tokens: Array
) -> None:
    """Raise `ValueError` where shapes or dtypes are not those of `verify_greedy`."""
    _check(draft_tokens, draft_lengths, stop_tokens, target_tokens.shape)
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
    accepted = _leading(matches, draft_lengths)
    following = jnp.take_along_axis(target_tokens, accepted[:, None], axis=1)[:, 0]
    return _commit(draft_tokens, draft_lengths, accepted, following, stop_tokens)


# Backends return the fields of `Verified` in order.
VERIFY_GREEDY = Operation(
    "verify_greedy",
    {
        "xla": Backend("xla", greedy_xla, always),
        "cuda": "jspec.cuda_ffi.verify:BALLOT",
        "cuda_naive": "jspec.cuda_ffi.verify:NAIVE",
    },
    lambda platform, *args, **kwargs: ("cuda", "xla") if platform == "gpu" else ("xla",),
)


def verify_stochastic(
    draft_tokens: Array,
    target_logits: Array,
    draft_lengths: Array,
    stop_tokens: Array,
    rows: Rows,
    positions: Array,
    *,
    draft_logits: Array | None = None,
    filtered: bool = True,
) -> Verified:
    """Accept draft tokens by rejection sampling, so that what is committed follows the target.

    As `verify_greedy`, with ``target_logits [B, gamma + 1, V]``; ``rows``: the sampling settings,
    under which both distributions are taken (a row with temperature 0 is verified greedily);
    ``positions`` int32 ``[B]``: absolute position of the first draft token, which keys the random
    numbers; ``draft_logits [B, gamma, V]``: what the draft was drawn from under the same settings,
    None for a draft that was certain of its tokens (one-hot). ``filtered`` as in `probabilities`.
    """
    batch, gamma = draft_tokens.shape
    _check(draft_tokens, draft_lengths, stop_tokens, target_logits.shape[:2])
    if draft_logits is not None and draft_logits.shape != (batch, gamma, target_logits.shape[2]):
        raise ValueError(
            f"draft_logits {draft_logits.shape} must be [B, gamma, V] = "
            f"{(batch, gamma, target_logits.shape[2])}"
        )
    p = probabilities(target_logits, rows, filtered=filtered)
    q = None if draft_logits is None else probabilities(draft_logits, rows, filtered=filtered)
    where = positions[:, None] + jnp.arange(gamma)[None]
    u = uniform(rows.seeds, where, Role.ACCEPT)
    accepted = _leading(_accepts(u, p, q, draft_tokens), draft_lengths)

    rejected = accepted < draft_lengths
    p_here = _row(p, accepted)
    residual = _residual(p_here, q, draft_tokens, accepted)
    # p and q that differ by rounding alone can leave an empty residual: the target then serves.
    empty = ~(residual > 0).any(axis=-1)
    weights = jnp.where((rejected & ~empty)[:, None], residual, p_here)
    at = positions + accepted
    u_next = jnp.where(
        rejected,
        uniform(rows.seeds, at, Role.RESIDUAL),
        uniform(rows.seeds, at, Role.BONUS),
    )
    following = inverse_cdf(weights, u_next)
    return Verified(*_commit(draft_tokens, draft_lengths, accepted, following, stop_tokens))


def _check(draft_tokens: Array, draft_lengths: Array, stop_tokens: Array, target: tuple) -> None:
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


def _accepts(u: Array, p: Array, q: Array | None, tokens: Array) -> Array:
    """Whether each draft token stands: ``u < p / q`` without dividing, so that ``p = 0`` never
    does and ``p >= q > 0`` always does."""
    p_token = _of_token(p[:, : tokens.shape[1]], tokens)
    q_token = jnp.ones_like(p_token) if q is None else _of_token(q, tokens)
    return u * q_token < p_token


def _residual(p_here: Array, q: Array | None, tokens: Array, accepted: Array) -> Array:
    """``max(p - q, 0)`` at the first rejected position, ``[B, V]``, not normalised."""
    gamma = tokens.shape[1]
    if gamma == 0:
        return p_here
    at = jnp.minimum(accepted, gamma - 1)
    if q is not None:
        return jnp.maximum(p_here - _row(q, at), 0)
    token = jnp.take_along_axis(tokens, at[:, None], axis=1)
    return jnp.where(jnp.arange(p_here.shape[-1])[None] == token, 0, p_here)


def _of_token(weights: Array, tokens: Array) -> Array:
    """``[B, T, V]`` at ``tokens [B, T]``; a padding id gives the weight of token 0."""
    index = jnp.clip(tokens, 0, weights.shape[-1] - 1)
    return jnp.take_along_axis(weights, index[..., None], axis=-1)[..., 0]


def _row(weights: Array, index: Array) -> Array:
    """``[B, T, V]`` at position ``index [B]``: ``[B, V]``."""
    return jnp.take_along_axis(weights, index[:, None, None], axis=1)[:, 0]


def _leading(stands: Array, lengths: Array) -> Array:
    """Length of the leading run of True in ``[B, gamma]``, counted within ``lengths [B]``."""
    stands = stands & (jnp.arange(stands.shape[1], dtype=jnp.int32)[None] < lengths[:, None])
    return jnp.cumprod(stands.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)


def _commit(
    draft_tokens: Array,
    draft_lengths: Array,
    accepted: Array,
    following: Array,
    stop_tokens: Array,
) -> tuple[Array, ...]:
    """Put the block together and cut it behind the first stop token: the fields of `Verified`."""
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
