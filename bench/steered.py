"""A model of which draft tokens are accepted at a given rate, for weights that are random."""

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

    In a pass over several tokens that is the next token of the pass, at ``rate``, else another one:
    where these are a draft, each is accepted so often if those before it are. Behind the last token
    it is any one. All of it follows from positions and tokens, so that greedy requests have the
    same text at any batch. It serves drafters that draft by passes over one token.
    """

    def __init__(self, model: jspec.Decoder, rate: float) -> None:
        self.model, self.rate = model, rate
        self.config = model.config

    @property
    def dtype(self) -> Any:
        return self.model.dtype

    def __call__(self, tokens: Array, positions: Array, attend: Any, cache: Any) -> Any:
        """As that of the model, with the digits of the chosen token as channels more."""
        hidden, cache = self.model(tokens, positions, attend, cache)
        size = self.config.vocab_size
        # Another one for each token, so that texts do not run into one another.
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
        """Those of the model, but for that of the chosen token."""
        digits = hidden[..., -DIGITS:].astype(jnp.int32)
        chosen = digits[..., -1]
        for digit in range(DIGITS - 2, -1, -1):
            chosen = chosen * BASE + digits[..., digit]
        logits = self.model.logits(hidden[..., :-DIGITS])
        rows = jnp.meshgrid(*map(jnp.arange, chosen.shape), indexing="ij")
        return logits.at[(*rows, chosen)].set(CERTAIN)


def _mixed(positions: Array, tokens: Array) -> Array:
    """A number of 32 bits for each position and token, as if drawn at random."""
    first, second, third = map(jnp.uint32, (0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35))
    x = positions.astype(jnp.uint32) * first ^ (tokens.astype(jnp.uint32) + 1) * second
    x = (x ^ x >> 16) * second
    x = (x ^ x >> 13) * third
    return x ^ x >> 16
