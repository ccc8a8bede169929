"""Self-speculation over a sparse view of the model's own cache, by a policy or by verification."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jspec.cache import Cache, Stripe
from jspec.cache.cache import longer
from jspec.config import shown
from jspec.decode.draft.autoregressive import autoregressive
from jspec.decode.draft.drafter import Drafted, Drafter, DrafterTraits, TargetPass
from jspec.decode.state import DecodeState, Models, vocabulary_axes
from jspec.models.quantized import quantized_copy
from jspec.ops.quantized import KINDS
from jspec.ops.verify import Verified
from jspec.policies import Guided, Policy, Streaming, Vegas
from jspec.policies.attend import run_selected
from jspec.policies.collect import picks
from jspec.policies.compact import Compact, CompactAttend
from jspec.policies.guided import Guidance, padded, positions_before, with_since
from jspec.policies.policy import check_policy
from jspec.policies.read import local_slots
from jspec.typing import Array, Model

VEGAS = Vegas()


@dataclasses.dataclass(frozen=True)
class SparseDrafter(Drafter):
    """A drafter that runs the target over a sparse view of its own cache.

    ``quantized``: ``int8``, ``fp8`` or ``mxfp4`` makes drafts with a copy of the target whose
    linear weights have so few bits (`quantized_copy`). `prepare` makes it, and ``models.draft``
    holds it; verification reads the target's own weights. "" is no copy.
    """

    policy: Policy
    quantized: str = ""

    def __post_init__(self) -> None:
        check_policy("policy", self.policy)
        if self.quantized not in ("", *KINDS):
            raise ValueError(f"quantized={self.quantized!r} must be one of {', '.join(KINDS)}")

    @property
    def traits(self) -> DrafterTraits:  # pyright: ignore[reportIncompatibleVariableOverride]
        is_copy = bool(self.quantized)  # which is whole on one device
        return DrafterTraits(runs_model=True, makes_model=is_copy, runs_on_mesh=not is_copy)

    def prepare(self, models: Models) -> Models:
        if not self.quantized or models.draft is not None:
            return models
        return models._replace(draft=quantized_copy(models.target, self.quantized))

    def init(self, models: Models, batch: int, capacity: int, max_gamma: int) -> Any:
        if self.quantized and models.draft is None:
            raise ValueError(
                f"{type(self).__name__}(quantized={self.quantized!r}) drafts with a copy of the "
                "target; pass draft.prepare(jspec.Models(target))"
            )

    def view(self, models: Models, drafter_state: Any, cache: Cache) -> tuple[Policy, Any]:
        """The policy by which a pass over ``cache`` selects what it reads, and its parameters."""
        raise NotImplementedError

    @property
    def refresh(self) -> int:
        """After how many passes of a draft the next one selects again what it reads; 0 is never."""
        return 0 if self.collect_policy is None else self.collect_policy.refresh

    def run(
        self,
        models: Models,
        view: tuple[Policy, Any],
        tokens: Array,
        positions: Array,
        cache: Cache,
        context_len: Array,
        gamma: int,
        *,
        is_refresh: bool = False,
    ) -> tuple[Array, Cache, Any]:
        """A pass over ``tokens [B, T]`` of a draft, at ``positions [B, T]``, -1 for padding.

        ``view``: what `view` returned; ``context_len [B]``: committed positions, after which the
        draft begins; ``is_refresh``: whether the pass selects again. Returns the hidden states
        ``[B, T, D]``, the cache with the tokens, and the policy's parameters for the next pass.
        """
        policy, policy_params = view
        hidden, cache, selections = run_selected(
            *(self.model_of(models), tokens, positions, cache, context_len, gamma),
            policy=policy,
            policy_params=policy_params.for_refresh() if is_refresh else policy_params,
        )
        if is_refresh:
            policy_params = policy_params.with_selections(selections)
        return hidden, cache, policy_params

    def model_of(self, models: Models) -> Model:
        """The model that drafts: the target, or its quantized copy."""
        if not self.quantized:
            return models.target
        assert models.draft is not None  # `init`
        return models.draft

    def draft(self, models: Models, state: DecodeState, gamma: int) -> tuple[Drafted, DecodeState]:
        context_len, model = state.cache.lengths, self.model_of(models)
        policy, policy_params = self.view(models, state.draft, state.cache)

        def advance(step, token, positions, carry, is_refresh=False):
            cache, policy_params = carry
            where = positions[:, None]
            where = jnp.where(state.beyond(where), -1, where)
            args = (models, (policy, policy_params), token[:, None], where, cache, context_len)
            hidden, *carry = self.run(*args, gamma, is_refresh=is_refresh)
            return model.logits(hidden)[:, 0], tuple(carry)

        drafted, (cache, _) = autoregressive(
            *(state, gamma, advance, (state.cache, policy_params)),
            axis_name=vocabulary_axes(models.target),
            advance_refresh=functools.partial(advance, is_refresh=True),
            every=self.refresh,
        )
        return drafted, dataclasses.replace(state, cache=cache)


@dataclasses.dataclass(frozen=True)
class SelfDraft(SparseDrafter):
    """Self-speculation: the target drafts with attention over what ``policy`` selects.

    Where the selection depends on the query, it is made for each draft token, and the draft's keys
    and values are written to the target's cache. Where it does not, the selected keys and values
    are copied once a step, and the draft reads and writes the copy.
    """

    policy: Policy = Streaming()

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.policy, Guided):
            shown_policy = shown(self.policy)
            raise TypeError(
                f"policy={shown_policy} is guided by verification; pass GuidedDraft({shown_policy})"
            )

    @property
    def cache_policy(self) -> Policy:
        return self.policy

    def view(self, models: Models, drafter_state: Any, cache: Cache) -> tuple[Policy, Any]:
        return self.policy, models.policy

    def draft(self, models: Models, state: DecodeState, gamma: int) -> tuple[Drafted, DecodeState]:
        # There is no compact copy for rows that devices share.
        if self.policy.reads_queries or state.cache.shards is not None:
            return super().draft(models, state, gamma)
        model = self.model_of(models)
        compact = Compact.of(state.cache, self.policy, models.policy, spare=gamma)

        def advance(step, token, positions, compact):
            attend = CompactAttend(positions[:, None], gamma - step)
            hidden, compact = model(token[:, None], positions[:, None], attend, compact)
            return model.logits(hidden)[:, 0], compact

        return autoregressive(state, gamma, advance, compact)[0], state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Guide:
    """What a draft reads of the committed positions; -1 is none.

    Attributes:
        picked: Of each layer that selects, int32 ``[B, n]`` or, per head, ``[B, K, n]``: positions
            below the length that the last verification began with.
        since: int32 ``[B, max_gamma + 1]``: positions committed since then. Before the first one
            those that a prompt ends with; none where no query has selected.
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
    was committed since. For the first draft the query of the last prompt token in the cache
    selects, and the draft also reads the end of the prompt. The draft's keys and values are written
    to the target's cache. With a policy that refreshes, long drafts select again by hashes of the
    keys, which the cache then has.
    """

    policy: Guided = VEGAS

    def __post_init__(self) -> None:
        super().__post_init__()
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
        self,
        models: Models,
        drafter_state: Guide,
        tokens: Array,
        lengths: Array,
        max_tokens: int,
        target_pass: TargetPass | None = None,
    ) -> Guide:
        since = drafter_state.since
        if target_pass is None:
            replaced = since[:, 0] < 0
            selections = self._initial_selections(models, lengths, tokens.shape[1])
        else:
            replaced = (target_pass.positions >= 0).any(axis=1)
            selections = target_pass.collected
            ends = positions_before(lengths, since.shape[1])
            since = jnp.where(replaced[:, None], ends, since)

        def chosen(picked: Array, selection: Array) -> Array:
            replaces = replaced.reshape(-1, *[1] * (picked.ndim - 1))
            return jnp.where(replaces, padded(selection, picked.shape[-1]), picked)

        return Guide(jax.tree.map(chosen, drafter_state.picked, selections), since)

    def _initial_selections(
        self, models: Models, lengths: Array, capacity: int
    ) -> tuple[Array | None, ...]:
        """What each layer reads of contexts of ``lengths [B]`` where no query has selected."""
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

    def view(self, models: Models, drafter_state: Guide, cache: Cache) -> tuple[Guided, Guidance]:
        since = drafter_state.since
        read = tuple(None if x is None else with_since(x, since) for x in drafter_state.picked)
        guidance = Guidance(read, since, models.policy)
        if cache.shards is None or self.refresh:
            return self.policy, guidance

        def slots_of(layer: int, positions: Array | None) -> tuple[Array, Array] | None:
            layout = cache.layouts[layer]
            if positions is None or not isinstance(layout, Stripe):
                return None
            return local_slots(layout, positions)

        slots = tuple(slots_of(layer, x) for layer, x in enumerate(read))
        return self.policy, guidance._replace(slots=slots)

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
