"""A step without a draft, whose padding is noise."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jspec.decode.draft import Drafted, NoDraft
from jspec.decode.state import DecodeState, Models

SPREAD = 7919  # a prime, so that neighbours in a pass are far apart in the vocabulary


@dataclasses.dataclass(frozen=True)
class NoisyPadding(NoDraft):
    """`NoDraft` with different padding tokens at all positions of rows of equal length.

    Equal tokens would all choose the same experts, and a pass would read too few of them.
    """

    def draft(self, models: Models, state: DecodeState, gamma: int) -> tuple[Drafted, DecodeState]:
        drafted, state = super().draft(models, state, gamma)
        batch = len(drafted.tokens)
        number = state.lengths[:, None] + jnp.arange(batch * gamma).reshape(batch, gamma)
        tokens = number * SPREAD % models.target.config.vocab_size
        return dataclasses.replace(drafted, tokens=tokens), state
