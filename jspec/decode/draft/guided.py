"""Self-speculation over what the last verification attended to."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jspec.cache.cache import longer
from jspec.config import shown
from jspec.decode.draft.drafter import DrafterTraits, TargetPass
from jspec.decode.draft.self_draft import SparseDrafter
from jspec.decode.state import DecodeState, Models
from jspec.ops.verify import Verified
from jspec.policies import Guided, Policy, Vegas
from jspec.policies.collect import picks
from jspec.policies.guided import Guidance, padded, with_since
from jspec.policies.policy import check_policy
from jspec.typing import Array

VEGAS = Vegas()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Guide:
    """What a draft reads of the committed positions; -1 is none.

    Attributes:
        picked: Of each layer that selects, int32 ``[B, n]`` or, per head, ``[B, K, n]``: positions
            below the length that the last verification began with.
        since: int32 ``[B, max_gamma + 1]``: positions committed since then; none before the first
            verification.
    """

    picked: tuple[Array | None, ...]
    since: Array

    def partition_specs(self, tpa_axes: Any, kvp_axes: Any) -> Any:
        """The `PartitionSpec` of each array: a device picks of its own positions, and heads."""

        def of(picked: Array) -> PartitionSpec:
            heads = () if picked.ndim == 2 else (tpa_axes,)
            return PartitionSpec(None, *heads, kvp_axes)

        return dataclasses.replace(
            self, picked=jax.tree.map(of, self.picked), since=PartitionSpec()
        )


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
        check_policy("policy", self.policy)
        if not isinstance(self.policy, Guided):
            raise TypeError(
                f"policy={shown(self.policy)} is not guided by verification; pass SelfDraft(...)"
            )

    @property
    def cache_policy(self) -> Policy:
        return self.policy.cache_policy

    @property
    def collect_policy(self) -> Guided:
        return self.policy

    @property
    def traits(self) -> DrafterTraits:  # pyright: ignore[reportIncompatibleVariableOverride]
        learns_from_rejected = not self.policy.needs_verdict
        return dataclasses.replace(super().traits, learns_from_rejected=learns_from_rejected)

    def init(self, models: Models, batch: int, capacity: int, max_gamma: int) -> Guide:
        super().init(models, batch, capacity, max_gamma)
        picked = self._initial_selections(models, jnp.zeros(batch, jnp.int32), capacity)
        return Guide(picked, jnp.full((batch, max_gamma + 1), -1, jnp.int32))

    def sync(
        self, models: Models, drafter_state: Guide, tokens: Array, lengths: Array, max_tokens: int
    ) -> Guide:
        guide, has_verified = drafter_state, drafter_state.since[:, 0] >= 0

        def chosen(picked: Array, initial: Array) -> Array:
            keeps = has_verified.reshape(-1, *[1] * (picked.ndim - 1))
            return jnp.where(keeps, picked, padded(initial, picked.shape[-1]))

        initial = self._initial_selections(models, lengths, tokens.shape[1])
        return dataclasses.replace(guide, picked=jax.tree.map(chosen, guide.picked, initial))

    def _initial_selections(
        self, models: Models, lengths: Array, capacity: int
    ) -> tuple[Array | None, ...]:
        """What each layer reads of contexts of ``lengths [B]`` before any verification."""
        specs = models.target.config.layers
        return tuple(
            self.policy.initial_selection(specs[layer].kv_heads, capacity, lengths)
            if leader == layer
            else None
            for layer, leader in enumerate(self.policy.leaders(specs))
        )

    def grow(self, drafter_state: Guide, capacity: int) -> Guide:
        def wider(picked: Array) -> Array:
            none = jnp.zeros(len(picked), jnp.int32)
            new_size = self.policy.initial_selection(1, capacity, none).shape[-1]
            # On a mesh each device has picks of its own.
            local_size, size = picked.sharding.shard_shape(picked.shape)[-1], picked.shape[-1]
            parts, axis = size // local_size, picked.ndim - 1
            return longer(picked, max(new_size, local_size) * parts, -1, axis=axis, parts=parts)

        picked = tuple(None if x is None else wider(x) for x in drafter_state.picked)
        return dataclasses.replace(drafter_state, picked=picked)

    def view(
        self, models: Models, drafter_state: Guide, context_len: Array
    ) -> tuple[Guided, Guidance]:
        since = drafter_state.since
        read = tuple(None if x is None else with_since(x, since) for x in drafter_state.picked)
        return self.policy, Guidance(read, since, models.policy)

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
