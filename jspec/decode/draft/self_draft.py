"""Self-speculation over a sparse view of the model's own cache."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jspec.config import shown
from jspec.decode.draft.base import Drafted, SparseDrafter, autoregressive
from jspec.decode.state import DecodeState, Models, vocabulary_axes
from jspec.policies import Guided, Policy, Streaming
from jspec.policies.attend import Compact, compact_attend, run_selected
from jspec.typing import Array

if TYPE_CHECKING:
    from jspec.decode.settings import StepConfig


@dataclasses.dataclass(frozen=True)
class SelfDraft(SparseDrafter):
    """Self-speculation: the target drafts with attention over what ``policy`` selects.

    Where the selection depends on the query, it is made for each draft token, and the draft's keys
    and values are written to the target's cache. Where it does not, the selected keys and values
    are copied once a step, and the draft reads and writes the copy.
    """

    policy: Policy = Streaming()
    quantized: str = ""

    def __post_init__(self) -> None:
        self.check_quantized()
        if isinstance(self.policy, Guided):
            shown_policy = shown(self.policy)
            raise TypeError(
                f"policy={shown_policy} is guided by verification; pass GuidedDraft({shown_policy})"
            )

    @property
    def cache_policy(self) -> Policy:
        return self.policy

    def view(self, models: Models, drafter_state: Any, context_len: Array) -> tuple[Policy, Any]:
        return self.policy, models.policy

    def draft(
        self, models: Models, state: DecodeState, config: StepConfig
    ) -> tuple[Drafted, DecodeState]:
        models = models._replace(target=self.model_of(models))
        # There is no compact copy for rows that devices share.
        if self.policy.reads_queries or state.cache.shards is not None:
            return self._in_cache(models, state, config)
        return self._in_copy(models, state, config)

    def _in_cache(
        self, models: Models, state: DecodeState, config: StepConfig
    ) -> tuple[Drafted, DecodeState]:
        context_len = state.cache.lengths

        def advance(step, token, positions, cache):
            where = positions[:, None]
            where = jnp.where(state.beyond(where), -1, where)
            hidden, cache, _ = run_selected(
                *(models.target, token[:, None], where, cache, context_len, config.gamma),
                policy=self.policy,
                policy_params=models.policy,
                backends=config.backends,
            )
            return models.target.logits(hidden)[:, 0], cache

        axes = vocabulary_axes(models.target)
        drafted, cache = autoregressive(state, config, advance, state.cache, axis_name=axes)
        return drafted, dataclasses.replace(state, cache=cache)

    def _in_copy(
        self, models: Models, state: DecodeState, config: StepConfig
    ) -> tuple[Drafted, DecodeState]:
        compact = Compact.of(state.cache, self.policy, models.policy, spare=config.gamma)

        def advance(step, token, positions, compact):
            attend = compact_attend(
                positions[:, None], config.gamma - step, backends=config.backends
            )
            hidden, compact = models.target(token[:, None], positions[:, None], attend, compact)
            return models.target.logits(hidden)[:, 0], compact

        drafted, _ = autoregressive(state, config, advance, compact)
        return drafted, state
