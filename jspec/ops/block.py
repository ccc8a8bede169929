"""Block verification: how much of a draft is accepted is decided for the block as a whole.

Sun et al. 2025 (arXiv 2403.10444), algorithm 2. It accepts at least as many tokens on average as
the token rule, and committed tokens are distributed as the target's. `docs/sampling.md` has the
integer arithmetic and its error bounds.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jspec.ops import uint64
from jspec.ops.distribution import ONE, ONE_BITS, TokenDistribution, total
from jspec.ops.uint64 import in_64_bits
from jspec.ops.vocabulary import Vocabulary
from jspec.typing import Array

DIGITS = (11, 11, 11, 11, 9)  # bits of a quotient that a division gives at a time


@in_64_bits
def chances(p_tokens: Array, q_tokens: Array) -> Array:
    """The probability that at least i tokens of a given draft are accepted, for i in 0..gamma.

    Args:
        p_tokens: uint64 ``[B, gamma]``, target probabilities of the draft tokens in units of
            2**-53.
        q_tokens: the same of the draft's distribution.

    Returns:
        uint64 ``[B, gamma + 1]``, in units of 2**-53.
    """

    def extend(chance: Array, token: tuple[Array, Array]) -> tuple[Array, Array]:
        chance = _chance(chance, *token)
        return chance, chance

    certain = jnp.full_like(p_tokens[:, 0], ONE)
    _, rest = lax.scan(extend, certain, (p_tokens.T, q_tokens.T))
    return jnp.concatenate([certain[:, None], rest.T], axis=1)


@in_64_bits
def accepted(
    numbers: Array,
    chance: Array,
    p: TokenDistribution,
    q: TokenDistribution,
    draft_lengths: Array,
    vocabulary: Vocabulary,
) -> Array:
    """The number of accepted draft tokens, int32 ``[B]``.

    Args:
        numbers: uint64 ``[B, gamma]``, the random number of each draft token.
        chance: uint64 ``[B, gamma + 1]``, the result of `chances`.
        p: the target's distributions at ``gamma + 1`` positions.
        q: the draft's distributions at ``gamma`` positions.
        draft_lengths: int32 ``[B]``.
        vocabulary: the tiles of the vocabulary.
    """
    gamma = numbers.shape[1]
    index = jnp.arange(1, gamma + 1, dtype=jnp.int32)[None]
    lengths = jnp.minimum(draft_lengths, gamma)[:, None]
    token_chance = chance[:, 1:]
    inner_chance = token_chance[:, :-1]
    masses = _masses(inner_chance, _positions(p, 1, gamma), _positions(q, 1, gamma), vocabulary)
    is_last = index == lengths
    # No draft token follows the last one: it gets all of the chance.
    mass = jnp.where(is_last, token_chance, jnp.pad(masses, ((0, 0), (0, 1))))
    whole = mass + (ONE - token_chance)
    ends = (uint64.high64(numbers, whole) < mass) | (token_chance == ONE)
    return jnp.where(ends & (index <= lengths), index, 0).max(axis=1)


@in_64_bits
def residual(
    p_next: TokenDistribution, q_next: TokenDistribution, chance: Array
) -> TokenDistribution:
    """``max(chance * p - q, 0)`` at a position, not normalised: only to draw from.

    ``chance`` uint64 ``[B]``: the result of `chances` at the number of accepted tokens.
    """
    excess = _excess(chance[:, None, None], p_next, q_next)
    return p_next._replace(weights=excess, shift=jnp.zeros_like(p_next.shift))


def _masses(
    chance: Array, p: TokenDistribution, q: TokenDistribution, vocabulary: Vocabulary
) -> Array:
    """Masses of the residuals, uint64 like ``chance [B, T]``."""
    if chance.shape[1] == 0:
        return chance
    excess = _excess(chance[..., None, None], p, q)
    return total(excess, jnp.zeros_like(p.shift), vocabulary)[..., 0]


def _excess(chance: Array, p: TokenDistribution, q: TokenDistribution) -> Array:
    """``max(chance * p - q, 0)`` of each token, uint64 in units of 2**-53."""
    p_tokens, q_tokens = _times(chance, p.probabilities()), q.probabilities()
    return jnp.where(q_tokens < p_tokens, p_tokens - q_tokens, 0)


def _times(a: Array, b: Array) -> Array:
    """The product of two probabilities in units of 2**-53, rounded down."""
    return uint64.high64(a << 10, b << 1)


def _chance(chance: Array, p: Array, q: Array) -> Array:
    """``min(chance * p / q, 1)``, rounded down, in units of 2**-53; 1 where only q is 0."""
    high, low = _times(chance, p), chance * p & (ONE - 1)
    divisor = jnp.maximum(q, 1)
    quotient, rest, left = jnp.zeros_like(high), high % divisor, ONE_BITS
    for bits in DIGITS:
        left -= bits
        rest = rest << bits | (low >> left & (2**bits - 1))
        quotient = quotient << bits | rest // divisor
        rest = rest % divisor
    quotient = jnp.where(high >= q, jnp.uint64(ONE), quotient)
    return jnp.where(high | low == 0, 0, quotient)


def _positions(rows: TokenDistribution, begin: int, end: int) -> TokenDistribution:
    """The distributions at positions ``begin`` to ``end - 1`` of ``[B, T, ...]``."""
    return jax.tree.map(lambda x: x[:, begin:end], rows)
