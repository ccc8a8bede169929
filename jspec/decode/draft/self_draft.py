"""Self-speculation over a sparse view of the model's own cache."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from jspec.cache import Cache
from jspec.config import shown
from jspec.decode.draft.autoregressive import autoregressive
from jspec.decode.draft.drafter import Drafted, Drafter, DrafterTraits
from jspec.decode.state import DecodeState, Models, vocabulary_axes
from jspec.models.quantized import quantized_copy
from jspec.ops.quantized import KINDS
from jspec.policies import Guided, Policy, Streaming
from jspec.policies.attend import run_selected
from jspec.policies.compact import Compact, CompactAttend
from jspec.policies.policy import check_policy
from jspec.typing import Array, Model


class SparseDrafter(Drafter):
    """A drafter that runs the target over a sparse view of its own cache.

    ``quantized``: ``int8``, ``fp8`` or ``mxfp4`` makes drafts with a copy of the target whose
    linear weights have so few bits (`quantized_copy`). `prepare` makes it, and ``models.draft``
    holds it; verification reads the target's own weights. Subclasses have it as a setting, "" for
    no copy, and check it by `check_quantized`.
    """

    quantized: str

    def check_quantized(self) -> None:
        """Raise `ValueError` for a kind of copy that does not exist."""
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

    def view(self, models: Models, drafter_state: Any, context_len: Array) -> tuple[Policy, Any]:
        """The policy by which a pass selects what it reads, and the policy's parameters.

        ``context_len`` int32 ``[B]``: committed positions per row.
        """
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
        policy, policy_params = self.view(models, state.draft, context_len)

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
    quantized: str = ""

    def __post_init__(self) -> None:
        self.check_quantized()
        check_policy("policy", self.policy)
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
