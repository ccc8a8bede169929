"""Verification by rejection sampling, so that committed tokens follow the target's law.

By the token rule, a draft token is accepted with probability min(1, p / q), and the first that is
rejected is replaced by a draw from max(p - q, 0) (Leviathan et al. 2023, algorithm 1; Chen et al.
2023). The block rule is in `jspec.ops.block`. The law of both is in `docs/sampling.md`.
"""

from __future__ import annotations

from typing import Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import shown
from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops import block, uint64
from jspec.ops.cases import accepted_tokens
from jspec.ops.distribution import ONE, Settings, TokenDistribution, distribution, draw, total
from jspec.ops.sample import Role, Sampling, number, settings_of, unfiltered
from jspec.ops.uint64 import in_64_bits
from jspec.ops.verify import Verified, check_draft, commit, leading
from jspec.ops.vocabulary import Axes, Vocabulary
from jspec.typing import Array

Rule = Literal["token", "block"]
RULES: tuple[Rule, ...] = get_args(Rule)
Rows = TypeVar("Rows", TokenDistribution, Array)


def verify_stochastic(
    draft_tokens: Array,
    target_logits: Array,
    draft_lengths: Array,
    stop_tokens: Array,
    sampling: Sampling,
    positions: Array,
    *,
    draft_logits: Array | None = None,
    rule: Rule = "token",
    filtered: bool = True,
    axis_name: Axes | None = None,
    implementation: str | None = None,
) -> Verified:
    """Accept draft tokens by rejection sampling: committed tokens are distributed as the target's.

    The token rule is algorithm 1 of Leviathan et al. 2023, the block rule algorithm 2 of Sun et al.
    2025 (arXiv 2403.10444); `docs/sampling.md` has the law. A logit that is NaN counts as minus
    infinity, plus infinity as the largest float32; a row without a finite logit is certain of token
    0, in target and draft.

    Args:
        draft_tokens: int32 ``[B, gamma]``.
        target_logits: ``[B, gamma + 1, V]``.
        draft_lengths: int32 ``[B]`` in 0..gamma; draft tokens beyond are ignored.
        stop_tokens: ``[B, M]``, -1 for none.
        sampling: the settings of each row, for target and draft; a row with temperature 0 is
            verified greedily.
        positions: int32 ``[B]``, the absolute position of the first draft token, which keys the
            random numbers.
        draft_logits: ``[B, gamma, V]``, what the draft was drawn from under the same settings; None
            for a draft that is certain of its tokens (one-hot).
        rule: ``token`` decides for each token; ``block`` for the draft as a whole, and accepts at
            least as many on average. For ``block`` the draft must be drawn by
            ``sampling.in_block(positions)``. For a one-hot draft both are the same computation.
        filtered: False promises that no row uses top-k, top-p or min-p.
        axis_name: the axis, or axes, of an enclosing `jax.shard_map` over which V is sharded.
        implementation: the backend by name; None is the best one.

    Returns:
        A `Verified`.

    Raises:
        ValueError: for shapes that do not fit together, and for an unknown rule.
    """
    batch, gamma = draft_tokens.shape
    check_draft(draft_tokens, draft_lengths, stop_tokens, target_logits.shape[:2])
    if draft_logits is not None and draft_logits.shape != (batch, gamma, target_logits.shape[2]):
        raise ValueError(
            f"draft_logits {draft_logits.shape} must be [B, gamma, V] = "
            f"{(batch, gamma, target_logits.shape[2])}"
        )
    check_rule(rule)
    if draft_logits is None or gamma == 0:
        rule = "token"
    if rule == "block":
        sampling = sampling.in_block(positions)
    out = VERIFY_STOCHASTIC(
        draft_tokens,
        target_logits,
        draft_lengths,
        stop_tokens,
        settings_of(sampling),
        positions,
        draft_logits,
        rule=rule,
        filtered=filtered,
        axis_name=axis_name,
        implementation=implementation,
    )
    return Verified(*out)


def check_rule(rule: object) -> None:
    """Raise `ValueError` unless ``rule`` is one of `RULES`."""
    if rule not in RULES:
        raise ValueError(f"rule={shown(rule)} must be one of {', '.join(RULES)}")


def stochastic_xla(
    draft_tokens: Array,
    target_logits: Array,
    draft_lengths: Array,
    stop_tokens: Array,
    settings: Settings,
    positions: Array,
    draft_logits: Array | None,
    *,
    rule: Rule,
    filtered: bool,
    axis_name: Axes | None,
) -> tuple[Array, ...]:
    """The reference of `verify_stochastic`: the fields of `Verified`."""
    accepted, following = _judged(
        draft_tokens,
        target_logits,
        draft_lengths,
        settings,
        positions,
        draft_logits,
        Vocabulary(target_logits.shape[2], axis_name),
        rule=rule,
        filtered=filtered,
    )
    return commit(draft_tokens, draft_lengths, accepted, following, stop_tokens)


@in_64_bits
def _judged(
    draft_tokens: Array,
    target_logits: Array,
    draft_lengths: Array,
    settings: Settings,
    positions: Array,
    draft_logits: Array | None,
    vocabulary: Vocabulary,
    *,
    rule: Rule,
    filtered: bool,
) -> tuple[Array, Array]:
    """How many draft tokens are accepted, int32 ``[B]``, and the token that follows them."""
    gamma = draft_tokens.shape[1]
    p = distribution(target_logits, settings, vocabulary, filtered=filtered)
    q = None
    if draft_logits is not None and gamma > 0:
        q = distribution(draft_logits, settings, vocabulary, filtered=filtered)
    where = positions[:, None] + jnp.arange(gamma, dtype=jnp.int32)[None]
    u = number(settings.seeds, where, Role.ACCEPT)
    tokens = draft_tokens.astype(jnp.int32)
    if q is not None and rule == "block":
        p_tokens = _of_token(jax.tree.map(lambda x: x[:, :gamma], p), tokens, vocabulary)
        chances = block.chances(p_tokens, _of_token(q, tokens, vocabulary))
        accepted = block.accepted(u, chances, p, q, draft_lengths, vocabulary)
        p_next, q_next = _row(p, accepted), _row(q, jnp.minimum(accepted, gamma - 1))
        residual = block.residual(p_next, q_next, _row(chances, accepted))
    else:
        accepted = leading(_accepts(u, p, q, tokens, vocabulary), draft_lengths)
        p_next = _row(p, accepted)
        residual = _residual(p_next, q, tokens, accepted, vocabulary)

    rejected = accepted < jnp.minimum(draft_lengths, gamma)
    # p and q that differ by rounding alone can leave an empty residual: then the target's serves.
    empty = total(residual.weights, residual.shift, vocabulary) == 0
    use_residual = rejected[:, None] & ~empty
    following = draw(
        jnp.where(use_residual[..., None], residual.weights, p_next.weights),
        jnp.where(use_residual, residual.shift, p_next.shift),
        jnp.where(
            rejected,
            number(settings.seeds, positions + accepted, Role.RESIDUAL),
            number(settings.seeds, positions + accepted, Role.BONUS),
        ),
        vocabulary,
    )
    return accepted, following.astype(draft_tokens.dtype)


def _sizes(draft_tokens: Array, target_logits: Array, *rest: object, **static: object):
    """The sizes that backends are ordered by."""
    batch, gamma = draft_tokens.shape
    return {"batch": batch, "gamma": gamma, "vocabulary": target_logits.shape[2]}


def _cases() -> list[Case]:
    """Logits under which every draft token is accepted, whatever the random numbers are."""

    def certain() -> tuple[object, ...]:
        draft, target, lengths, stops = accepted_tokens(2, 14)
        logits = 40 * np.eye(30, dtype=np.float32)[target]
        return draft, logits, lengths, stops, unfiltered(2), np.zeros(2, np.int32), None

    static = {"rule": "token", "filtered": False, "axis_name": None}
    return [Case("certain", certain, static, small=True)]


# Backends return the fields of `Verified` in order.
VERIFY_STOCHASTIC = Operation(
    "verify_stochastic",
    {
        "xla": Backend("xla", stochastic_xla, always),
        "cuda": "jspec.cuda_ffi.stochastic:VERIFY",
        "pallas": "jspec.pallas.stochastic:VERIFY",
        "triton": "jspec.triton.stochastic:VERIFY",
    },
    _sizes,
    _cases,
)


def _accepts(
    u: Array,
    p: TokenDistribution,
    q: TokenDistribution | None,
    tokens: Array,
    vocabulary: Vocabulary,
) -> Array:
    """Whether each draft token is accepted: ``u < p / q`` without dividing, so that ``p = 0`` never
    is and ``p >= q > 0`` always is."""
    gamma = tokens.shape[1]
    p_token = _of_token(jax.tree.map(lambda x: x[:, :gamma], p), tokens, vocabulary)
    q_token = jnp.full_like(p_token, ONE) if q is None else _of_token(q, tokens, vocabulary)
    return uint64.high64(u, q_token) < p_token


def _residual(
    p_next: TokenDistribution,
    q: TokenDistribution | None,
    tokens: Array,
    accepted: Array,
    vocabulary: Vocabulary,
) -> TokenDistribution:
    """``max(p - q, 0)`` at the first rejected position, not normalised: to draw from alone."""
    gamma = tokens.shape[1]
    if gamma == 0:
        return p_next
    at = jnp.minimum(accepted, gamma - 1)
    if q is not None:
        p_tokens, q_tokens = p_next.probabilities(), _row(q, at).probabilities()
        excess = jnp.where(q_tokens < p_tokens, p_tokens - q_tokens, 0)
        return p_next._replace(weights=excess, shift=jnp.zeros_like(p_next.shift))
    token = jnp.take_along_axis(tokens, at[:, None], axis=1)[..., None]
    is_token = vocabulary.ids_like(p_next.weights) == token
    return p_next._replace(weights=jnp.where(is_token, 0, p_next.weights))


def _of_token(rows: TokenDistribution, tokens: Array, vocabulary: Vocabulary) -> Array:
    """Probabilities uint64 of ``tokens [B, T]``; a padding id gives that of token 0."""
    probability, in_shard = vocabulary.at(rows.probabilities(), jnp.clip(tokens, 0, None))
    return vocabulary.sum(jnp.where(in_shard, probability, 0))


def _row(rows: Rows, index: Array) -> Rows:
    """The row at position ``index [B]`` of each of ``[B, T, ...]``."""

    def at(x: Array) -> Array:
        index_like = index.reshape(-1, *[1] * (x.ndim - 1))
        return jnp.take_along_axis(x, index_like, axis=1)[:, 0]

    return jax.tree.map(at, rows)
