"""The interface of drafters, and the draft that is always empty."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jspec.decode.state import DecodeState, Models
from jspec.ops.verify import Verified, leading
from jspec.policies import Dense, Guided, Policy
from jspec.typing import Array


@dataclasses.dataclass(frozen=True)
class DrafterTraits:
    """What the host loop must know of a drafter.

    Attributes:
        default_gamma: Draft tokens of a step with sampled rows where the caller names no number and
            the drafter is not ``one_hot``; what ``gamma="auto"`` begins with.
        one_hot: Whether its drafts never have logits: a request with a seed then has the tokens of
            plain decoding at any gamma (docs/sampling.md, *One-hot drafts*).
        branches: Whether its drafts are trees (`Drafted.parents`): ``gamma="auto"`` then measures
            the acceptance of each gamma by itself.
        runs_model: Whether drafts take passes of a model: a step then takes several times as long
            as a plain one.
        needs_model: Whether it drafts with a model that the caller passes, as `Models.draft`. Only
            such a drafter is synced before it drafts again after plain steps; any other has learned
            from these.
        makes_model: Whether `Drafter.prepare` makes `Models.draft`.
        learns_from_rejected: Whether what it learns depends on draft tokens that were not accepted.
            Each step then samples with random numbers of its own (docs/sampling.md, *Numbers of a
            block*).
        runs_on_mesh: Whether it drafts the same on a `jspec.helix` mesh, where each device has only
            part of the target's cache. True for one that reads that cache by the target's passes
            alone.
    """

    default_gamma: int = 4
    one_hot: bool = False
    branches: bool = False
    runs_model: bool = False
    needs_model: bool = False
    makes_model: bool = False
    learns_from_rejected: bool = False
    runs_on_mesh: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafted:
    """A draft of each row.

    Attributes:
        tokens: int32 ``[B, gamma]``: draft tokens.
        lengths: int32 ``[B]``: how many of them count; the step cuts this at the row's limits.
        logits: float32 ``[B, gamma, V]`` that the tokens were drawn from; None for a draft without
            probabilities.
        parents: int32 ``[B, gamma]``: which draft token each one comes after, counted from 1, of
            those before it; 0 for the last known token. None where each comes after the one before
            it. For drafts without ``logits`` and of at most 31 tokens.
    """

    tokens: Array
    lengths: Array
    logits: Array | None = None
    parents: Array | None = None

    @property
    def first_path(self) -> Drafted:
        """The draft up to the first token that does not come after the one before it."""
        if self.parents is None:
            return self
        index = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None]
        lengths = leading(self.parents == index, self.lengths)
        return dataclasses.replace(self, lengths=lengths, parents=None)

    @classmethod
    def empty(cls, batch: int, gamma: int) -> Drafted:
        """A draft without tokens, in arrays of ``gamma``."""
        return cls(jnp.zeros((batch, gamma), jnp.int32), jnp.zeros((batch,), jnp.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetPass:
    """The target's pass over a draft.

    Attributes:
        positions: int32 ``[B, T]``: positions of the tokens, -1 for padding.
        hidden: ``[B, T, D]``: the hidden states that the model returned.
        collected: What `Drafter.collect_policy` collected of each layer; None without one.
        routed_experts: int32 ``[B, T, mixtures, c]``: the experts of the tokens; None where
            `DecodeState.routed_experts` is False.
    """

    positions: Array
    hidden: Array
    collected: Any = None
    routed_experts: Array | None = None


@dataclasses.dataclass(frozen=True)
class Drafter:
    """Where draft tokens come from. Subclasses are frozen dataclasses of settings.

    A drafter's arrays are in ``DecodeState.draft``, any pytree whose leaves begin with the batch
    axis. On a `jspec.helix` mesh they are replicated, except the parts of a `Cache` and of a node
    with a method ``partition_specs(tpa_axes, kvp_axes)``, which returns the node with a
    `PartitionSpec` for each array. A drafter may write keys and values of its draft into the
    target's cache: verification overwrites them, and shorter lengths undo them.

    Attributes:
        traits: What the host loop must know of the drafter.
    """

    traits: ClassVar[DrafterTraits] = DrafterTraits()

    @property
    def cache_policy(self) -> Policy:
        """The policy whose columns the target's cache has for this drafter."""
        return Dense()

    @property
    def collect_policy(self) -> Guided | None:
        """The policy for which verification collects what it attended to; None without one."""
        return None

    def prepare(self, models: Models) -> Models:
        """``models`` with what the drafter makes of the target once, before the first step."""
        return models

    def init(self, models: Models, batch: int, capacity: int, max_gamma: int) -> Any:
        """The drafter's state before any token.

        Args:
            models: The models of the step.
            batch: Rows.
            capacity: Positions per row.
            max_gamma: Most draft tokens of a step.

        Returns:
            A pytree whose leaves begin with the batch axis, None where it needs none.

        Raises:
            ValueError: Where ``models`` lack what it needs.
        """
        return None

    def sync(
        self,
        models: Models,
        drafter_state: Any,
        tokens: Array,
        lengths: Array,
        max_tokens: int,
        target_pass: TargetPass | None = None,
    ) -> Any:
        """Bring the drafter's state to the committed tokens: called in prefill and after pauses.

        It drops what the state has past ``lengths`` and adds the next tokens up to there. Each
        piece of a prompt is followed by a call with as many ``max_tokens``; like the target's
        cache, it takes every prompt token but the last.

        Args:
            models: The models of the step.
            drafter_state: The drafter's state.
            tokens: int32 ``[B, S]``: known tokens of each row.
            lengths: int32 ``[B]``: how many of them the target's cache has.
            max_tokens: Most tokens per row to add.
            target_pass: The target's pass over a piece of prompts of which some end there, where
                the drafter has a `collect_policy`; None otherwise. In each row the query of the
                last token has selected among the first ``lengths`` positions without the last
                ``max_gamma + 1``.

        Returns:
            The drafter's state.
        """
        return drafter_state

    def grow(self, drafter_state: Any, capacity: int) -> Any:
        """Its state with room for ``capacity`` positions per row; the old one is donated."""
        return drafter_state

    def draft(self, models: Models, state: DecodeState, gamma: int) -> tuple[Drafted, DecodeState]:
        """Draft ``gamma`` tokens per row, which follow its last known token.

        Args:
            models: The models of the step.
            state: The batch.
            gamma: Most draft tokens, at least 1.

        Returns:
            The draft, and the state with the drafter's own state and the cache as the draft leaves
            them.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must have a method draft(models, state, gamma)"
        )

    def learn(self, state: DecodeState, target_pass: TargetPass, verified: Verified) -> DecodeState:
        """Learn from a verification, after plain steps too.

        Args:
            state: The batch, with the committed tokens and lengths.
            target_pass: The target's pass.
            verified: The outcome of its verification.

        Returns:
            The batch with the drafter's new state.
        """
        return state


def learn_with(
    drafter: Drafter, state: DecodeState, target_pass: TargetPass, verified: Verified
) -> DecodeState:
    """What `Drafter.learn` returns. Raises `TypeError` where that is no `DecodeState`."""
    result = drafter.learn(state, target_pass, verified)
    if not isinstance(result, DecodeState):
        wrong = type(result).__name__
        raise TypeError(f"{type(drafter).__name__}.learn must return a DecodeState, not {wrong}")
    return result


@dataclasses.dataclass(frozen=True)
class NoDraft(Drafter):
    """Plain decoding.

    With gamma above 0 a pass has gamma positions of padding after its token, so that it has the
    shape of a pass that verifies.
    """

    traits = DrafterTraits(default_gamma=0, one_hot=True, runs_on_mesh=True)

    def draft(self, models: Models, state: DecodeState, gamma: int) -> tuple[Drafted, DecodeState]:
        return Drafted.empty(len(state.tokens), gamma), state
