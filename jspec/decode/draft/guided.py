"""The model drafts for itself over what its last verification attended to."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from jspec.cache.cache import longer
from jspec.config import shown
from jspec.decode.draft.base import Drafted, Seen, SparseDrafter, autoregressive
from jspec.decode.state import DecodeState, Models, vocabulary_axes
from jspec.ops.verify import Verified
from jspec.policies import Guided, Vegas
from jspec.policies.attend import run_selected
from jspec.policies.collect import picks
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

    def selections(self, until: Array) -> tuple[Array | None, ...]:
        """All that is read of each layer below ``until [B]``: the picked positions, those since."""

        def joined(own: Array) -> Array:
            # A slot that was filled by steps of a smaller gamma still has its last row's end here.
            since = jnp.where(self.since < until[:, None], self.since, -1)
            since = since if own.ndim == 2 else since[:, None]
            since = jnp.broadcast_to(since, (*own.shape[:-1], since.shape[-1]))
            return jnp.concatenate([own, since], axis=-1)

        return tuple(None if own is None else joined(own) for own in self.picked)


@dataclasses.dataclass(frozen=True)
class GuidedDraft(SparseDrafter):
    """Self-speculation over positions that verification itself picked (Yue et al. 2026).

    Each verification picks for the next draft, at no pass of its own; what was committed since is
    read besides. The first draft has no verification to go by and reads first and last positions.
    The draft's keys and values go into the target's cache.
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
    def guided(self) -> Guided:
        return self.policy

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

    def view(
        self, models: Models, own: Guide, until: Array
    ) -> tuple[Guided, tuple[Array | None, ...]]:
        return self.policy, own.selections(until)

    def draft(
        self, models: Models, state: DecodeState, config: StepConfig
    ) -> tuple[Drafted, DecodeState]:
        until, selections = state.cache.lengths, state.draft.selections(state.cache.lengths)
        model = self.model_of(models)

        def advance(step, token, positions, cache):
            where = positions[:, None]
            where = jnp.where(state.beyond(where), -1, where)
            hidden, cache = run_selected(
                *(model, token[:, None], where, cache, until, config.gamma),
                policy=self.policy,
                arrays=selections,
                backends=config.backends,
            )
            return model.logits(hidden)[:, 0], cache

        axes = vocabulary_axes(models.target)
        drafted, cache = autoregressive(state, config, advance, state.cache, axis_name=axes)
        return drafted, dataclasses.replace(state, cache=cache)

    def learn(self, state: DecodeState, seen: Seen, verified: Verified) -> DecodeState:
        held: Guide = state.draft
        found = picks(self.policy, state.cache, seen.found, seen.positions, verified.accepted)
        picked = tuple(
            None if before is None or after is None else _padded(after, before.shape[-1])
            for before, after in zip(held.picked, found, strict=True)
        )
        index = jnp.arange(held.since.shape[1], dtype=jnp.int32)
        since = seen.positions[:, :1] + index[None]
        known = (seen.positions[:, :1] >= 0) & (since < state.cache.lengths[:, None])
        since = jnp.where(known, since, -1)
        return dataclasses.replace(state, draft=Guide(picked, since))


def _padded(positions: Array, size: int) -> Array:
    """``positions [..., n]`` with -1 behind, ``[..., size]``."""
    widths = [(0, 0)] * (positions.ndim - 1) + [(0, size - positions.shape[-1])]
    return jnp.pad(positions, widths, constant_values=-1)
