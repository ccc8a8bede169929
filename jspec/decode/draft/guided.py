"""The model drafts for itself over what its last verification attended to."""

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
    """What a draft reads of the committed positions.

    ``picked``: of each layer that picks, int32 ``[B, n]`` or, per head, ``[B, K, n]``, below the
    length that the last verification began with; ``since`` int32 ``[B, gamma + 1]``: what was
    committed from there on. -1 is none.
    """

    picked: tuple[Array | None, ...]
    since: Array

    def guidance(self, context_len: Array, hashes: Any) -> Guidance:
        """What is read below ``context_len [B]``: the picked positions, and those since."""
        # A slot that was filled by steps of a smaller gamma still has its last row's end here.
        since = jnp.where(self.since < context_len[:, None], self.since, -1)
        read = (None if own is None else with_since(own, since) for own in self.picked)
        return Guidance(tuple(read), since, hashes)


@dataclasses.dataclass(frozen=True)
class GuidedDraft(SparseDrafter):
    """Self-speculation over positions that verification itself picked (Yue et al. 2026).

    Each verification picks for the next draft, at no pass of its own; what was committed since is
    read besides. The first draft has no verification to go by and reads first and last positions.
    The draft's keys and values go into the target's cache. With a policy that refreshes, long
    drafts pick anew by hashes of the keys, which the cache then keeps.
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
    def may_end_early(self) -> bool:
        return not self.refresh  # which passes pick anew is compiled in

    @property
    def learns_from_rejected(self) -> bool:
        return not self.policy.needs_verdict

    def init(self, models: Models, lengths: Array, capacity: int, gamma: int) -> Guide:
        super().init(models, lengths, capacity, gamma)
        specs = models.target.config.layers
        picked = tuple(
            self.policy.opening(specs[layer].kv_heads, capacity, lengths)
            if leader == layer
            else None
            for layer, leader in enumerate(self.policy.leaders(specs))
        )
        return Guide(picked, jnp.full((len(lengths), gamma + 1), -1, jnp.int32))

    def resumed(
        self, models: Models, own: Guide, lengths: Array, capacity: int, gamma: int
    ) -> Guide:
        return self.init(models, lengths, capacity, gamma)

    def grow(self, own: Guide, capacity: int) -> Guide:
        def wider(picked: Array) -> Array:
            none = jnp.zeros(len(picked), jnp.int32)
            most = self.policy.opening(1, capacity, none).shape[-1]
            # On a mesh each device has picks of its own.
            held, size = picked.sharding.shard_shape(picked.shape)[-1], picked.shape[-1]
            parts, axis = size // held, picked.ndim - 1
            return longer(picked, max(most, held) * parts, -1, axis=axis, parts=parts)

        picked = tuple(None if x is None else wider(x) for x in own.picked)
        return own._replace(picked=picked)

    def view(self, models: Models, own: Guide, context_len: Array) -> tuple[Guided, Guidance]:
        return self.policy, own.guidance(context_len, models.policy)

    def draft(
        self, models: Models, state: DecodeState, config: StepConfig
    ) -> tuple[Drafted, DecodeState]:
        context_len = state.cache.lengths
        _, policy_params = self.view(models, state.draft, context_len)
        model = self.model_of(models)

        def advance(step, token, positions, carry, anew=False):
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
                anew=anew,
            )
            return model.logits(hidden)[:, 0], (cache, policy_params)

        drafted, (cache, _) = autoregressive(
            *(state, config, advance, (state.cache, policy_params)),
            axis_name=vocabulary_axes(models.target),
            anew=functools.partial(advance, anew=True),
            every=self.refresh,
        )
        return drafted, dataclasses.replace(state, cache=cache)

    def learn(self, state: DecodeState, target_pass: TargetPass, verified: Verified) -> DecodeState:
        held: Guide = state.draft
        found = picks(
            self.policy, state.cache, target_pass.found, target_pass.positions, verified.accepted
        )
        picked = tuple(
            None if before is None or after is None else padded(after, before.shape[-1])
            for before, after in zip(held.picked, found, strict=True)
        )
        index = jnp.arange(held.since.shape[1], dtype=jnp.int32)
        since = target_pass.positions[:, :1] + index[None]
        known = (target_pass.positions[:, :1] >= 0) & (since < state.cache.lengths[:, None])
        since = jnp.where(known, since, -1)
        return dataclasses.replace(state, draft=Guide(picked, since))
