"""A model with random weights whose verification accepts draft tokens at a given rate."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

import jspec
from jspec.typing import Array

BASE = 256  # digits of a token id, which bfloat16 has exactly
DIGITS = 3
CERTAIN = 1e30


class Steered(nnx.Module):
    """``model`` with its own passes and logits, but for one logit that is the largest by far.

    In a pass over several tokens, the largest logit is that of the pass's next token with
    probability ``rate``, else of another token. So each draft token is accepted at that rate if
    those before it are. After the last token any token may follow. The choice depends only on
    positions and tokens: greedy requests have the same text at any batch. It supports drafters that
    draft by passes over one token.
    """

    def __init__(self, model: jspec.Decoder, rate: float) -> None:
        self.model, self.rate = model, rate
        self.config = model.config

    @property
    def dtype(self) -> Any:
        return self.model.dtype

    def __call__(self, tokens: Array, positions: Array, attend: Any, cache: Any) -> Any:
        """The model's pass, with the digits of the chosen token as extra channels."""
        hidden, cache = self.model(tokens, positions, attend, cache)
        size = self.config.vocab_size
        # Depends on the token, so that texts do not converge.
        free = (
            tokens + (_mixed(positions, jnp.zeros_like(tokens)) % size).astype(jnp.int32)
        ) % size
        drafted = jnp.concatenate([tokens[:, 1:], free[:, -1:]], axis=1)
        is_right = _mixed(positions, tokens) < jnp.uint32(self.rate * (2**32 - 1))
        is_last = (jnp.arange(tokens.shape[1]) == tokens.shape[1] - 1)[None]
        chosen = jnp.where(is_right | is_last, drafted, (drafted + 1) % size)
        chosen = jnp.where(drafted < 0, free, chosen)
        digits = [chosen // BASE**n % BASE for n in range(DIGITS)]
        return jnp.concatenate([hidden, jnp.stack(digits, -1).astype(hidden.dtype)], -1), cache

    def logits(self, hidden: Array) -> Array:
        """The model's logits, except that of the chosen token, which is the largest."""
        digits = hidden[..., -DIGITS:].astype(jnp.int32)
        chosen = digits[..., -1]
        for digit in range(DIGITS - 2, -1, -1):
            chosen = chosen * BASE + digits[..., digit]
        logits = self.model.logits(hidden[..., :-DIGITS])
        rows = jnp.meshgrid(*map(jnp.arange, chosen.shape), indexing="ij")
        return logits.at[(*rows, chosen)].set(CERTAIN)


def _mixed(positions: Array, tokens: Array) -> Array:
    """A pseudo-random uint32 for each position and token."""
    first, second, third = map(jnp.uint32, (0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35))
    x = positions.astype(jnp.uint32) * first ^ (tokens.astype(jnp.uint32) + 1) * second
    x = (x ^ x >> 16) * second
    x = (x ^ x >> 13) * third
    return x ^ x >> 16
