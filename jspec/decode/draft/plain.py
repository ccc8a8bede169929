"""No draft: every step commits the model's own next token."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import jax.numpy as jnp

from jspec.decode.draft.base import Drafted, Drafter
from jspec.decode.state import DecodeState, Models

if TYPE_CHECKING:
    from jspec.decode.settings import StepConfig


@dataclasses.dataclass(frozen=True)
class NoDraft(Drafter):
    """Plain decoding. With gamma above 0 a pass has gamma positions of padding beside its token,
    so that it is shaped like a pass that verifies."""

    usual_gamma: ClassVar[int] = 0

    def draft(
        self, models: Models, state: DecodeState, config: StepConfig
    ) -> tuple[Drafted, DecodeState]:
        batch = state.tokens.shape[0]
        tokens = jnp.zeros((batch, config.gamma), jnp.int32)
        return Drafted(tokens, jnp.zeros((batch,), jnp.int32)), state
