"""Self-speculation over what the last verification attended to."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from jspec.cache.cache import longer
from jspec.config import shown
from jspec.decode.draft.base import Drafted, SparseDrafter, TargetPass, autoregressive
from jspec.decode.state import DecodeState, Models, vocabulary_axes
from jspec.ops.verify import Verified
from jspec.policies import Guided, Policy, Vegas
from jspec.policies.collect import picks
from jspec.policies.guided import Guidance, padded, with_since
from jspec.typing import Array

if TYPE_CHECKING:
    from jspec.decode.settings import StepConfig


VEGAS = Vegas()


class Guide(NamedTuple):
    """What a draft reads of the committed positions; -1 is none.

    Attributes:
        picked: Of each layer that selects, int32 ``[B, n]`` or, per head, ``[B, K, n]``: positions
            below the length that the last verification began with.
        since: int32 ``[B, gamma + 1]``: positions committed since then.
    """

    picked: tuple[Array | None, ...]
    since: Array

    def guidance(self, context_len: Array, hashes: Any) -> Guidance:
        """What passes of a draft read below ``context_len [B]``: ``picked``, and ``since``."""
        # Steps of a smaller gamma leave entries of the slot's last request in ``since``.
        since = jnp.where(self.since < context_len[:, None], self.since, -1)
        read = (
            None if positions is None else with_since(positions, since) for positions in self.picked
        )
        return Guidance(tuple(read), since, hashes)


@dataclasses.dataclass(frozen=True)
class GuidedDraft(SparseDrafter):
    """Self-speculation over positions that verification itself selected (Yue et al. 2026).

    Each verification selects for the next draft, without a pass of its own; a draft also reads what
    was committed since. The first draft has no verification before it, and reads the first and the
    last positions. The draft's keys and values are written to the target's cache. With a policy
    that refreshes, long drafts select again by hashes of the keys, which the cache then has.
    """

    policy: Guided = VEGAS
    quantized: str = ""

    def __post_init__(self) -> None:
        self.check_quantized()
        if not isinstance(self.policy, Guided):
            raise TypeError(
                f"policy={shown(self.policy)} is not guided by verification; pass SelfDraft(...)"
            )

    @property
    def cache_policy(self) -> Policy:
        return self.policy.cache_policy

    @property
    def guided(self) -> Guided:
        return self.policy

    @property
    def learns_from_rejected(self) -> bool:
        return not self.policy.needs_verdict

    def init(self, models: Models, lengths: Array, capacity: int, gamma: int) -> Guide:
        super().init(models, lengths, capacity, gamma)
        specs = models.target.config.layers
        picked = tuple(
            self.policy.initial_selection(specs[layer].kv_heads, capacity, lengths)
            if leader == layer
            else None
            for layer, leader in enumerate(self.policy.leaders(specs))
        )
        return Guide(picked, jnp.full((len(lengths), gamma + 1), -1, jnp.int32))

    def resumed(
        self, models: Models, drafter_state: Guide, lengths: Array, capacity: int, gamma: int
    ) -> Guide:
        return self.init(models, lengths, capacity, gamma)

    def grow(self, drafter_state: Guide, capacity: int) -> Guide:
        def wider(picked: Array) -> Array:
            none = jnp.zeros(len(picked), jnp.int32)
            new_size = self.policy.initial_selection(1, capacity, none).shape[-1]
            # On a mesh each device has picks of its own.
            local_size, size = picked.sharding.shard_shape(picked.shape)[-1], picked.shape[-1]
            parts, axis = size // local_size, picked.ndim - 1
            return longer(picked, max(new_size, local_size) * parts, -1, axis=axis, parts=parts)

        picked = tuple(None if x is None else wider(x) for x in drafter_state.picked)
        return drafter_state._replace(picked=picked)

    def view(
        self, models: Models, drafter_state: Guide, context_len: Array
    ) -> tuple[Guided, Guidance]:
        return self.policy, drafter_state.guidance(context_len, models.policy)

    def draft(
        self, models: Models, state: DecodeState, config: StepConfig
    ) -> tuple[Drafted, DecodeState]:
        context_len = state.cache.lengths
        _, policy_params = self.view(models, state.draft, context_len)
        model = self.model_of(models)

        def advance(step, token, positions, carry, is_refresh=False):
            cache, policy_params = carry
            where = positions[:, None]
            where = jnp.where(state.beyond(where), -1, where)
            hidden, cache, policy_params = self.run(
                *(
                    models,
                    (self.policy, policy_params),
                    token[:, None],
                    where,
                    cache,
                    context_len,
                    config,
                ),
                is_refresh=is_refresh,
            )
            return model.logits(hidden)[:, 0], (cache, policy_params)

        drafted, (cache, _) = autoregressive(
            *(state, config, advance, (state.cache, policy_params)),
            axis_name=vocabulary_axes(models.target),
            advance_refresh=functools.partial(advance, is_refresh=True),
            every=self.refresh,
        )
        return drafted, dataclasses.replace(state, cache=cache)

    def learn(self, state: DecodeState, target_pass: TargetPass, verified: Verified) -> DecodeState:
        guide: Guide = state.draft
        selections = picks(
            self.policy,
            state.cache,
            target_pass.collected,
            target_pass.positions,
            verified.accepted,
        )
        picked = tuple(
            None if before is None or after is None else padded(after, before.shape[-1])
            for before, after in zip(guide.picked, selections, strict=True)
        )
        index = jnp.arange(guide.since.shape[1], dtype=jnp.int32)
        since = target_pass.positions[:, :1] + index[None]
        known = (target_pass.positions[:, :1] >= 0) & (since < state.cache.lengths[:, None])
        since = jnp.where(known, since, -1)
        return dataclasses.replace(state, draft=Guide(picked, since))
