"""No draft: every step commits the model's own next token."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp

from jspec.decode.draft.base import Drafted, Drafter, TargetPass
from jspec.decode.state import DecodeState, Models
from jspec.ops.verify import Verified
from jspec.policies import Guided, Policy
from jspec.typing import Array

if TYPE_CHECKING:
    from jspec.decode.settings import StepConfig


@dataclasses.dataclass(frozen=True)
class NoDraft(Drafter):
    """Plain decoding.

    With gamma above 0 a pass has gamma positions of padding after its token, so that it has the
    shape of a pass that verifies.
    """

    usual_gamma: ClassVar[int] = 0

    def draft(
        self, models: Models, state: DecodeState, config: StepConfig
    ) -> tuple[Drafted, DecodeState]:
        batch = state.tokens.shape[0]
        tokens = jnp.zeros((batch, config.gamma), jnp.int32)
        return Drafted(tokens, jnp.zeros((batch,), jnp.int32)), state


@dataclasses.dataclass(frozen=True)
class Paused(NoDraft):
    """Plain decoding while the drafter ``of`` pauses, which later goes on from the same state.

    The cache gets the columns that it needs, and it learns what is committed. A second model must
    catch up before it drafts again: `jspec.decode.step.catch_up`.
    """

    of: Drafter

    @property
    def cache_policy(self) -> Policy:
        return self.of.cache_policy

    @property
    def guided(self) -> Guided | None:
        return self.of.guided

    def init(self, models: Models, lengths: Array, capacity: int, gamma: int) -> Any:
        return self.of.init(models, lengths, capacity, gamma)

    def resumed(
        self, models: Models, drafter_state: Any, lengths: Array, capacity: int, gamma: int
    ) -> Any:
        return self.of.resumed(models, drafter_state, lengths, capacity, gamma)

    def prefill(
        self,
        models: Models,
        drafter_state: Any,
        tokens: Array,
        positions: Array,
        config: StepConfig,
    ) -> Any:
        return self.of.prefill(models, drafter_state, tokens, positions, config)

    def grow(self, drafter_state: Any, capacity: int) -> Any:
        return self.of.grow(drafter_state, capacity)

    def learn(self, state: DecodeState, target_pass: TargetPass, verified: Verified) -> DecodeState:
        return self.of.rest(state, target_pass, verified)
