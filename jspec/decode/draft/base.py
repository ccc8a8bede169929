"""Drafters: frozen settings, state of their own, and drafting as part of a step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jspec.cache import Cache
from jspec.decode.state import DecodeState, Models
from jspec.models.quantized import quantized_copy
from jspec.ops.quantized import KINDS
from jspec.ops.sample import Role, greedy, sample
from jspec.ops.verify import Verified
from jspec.ops.vocabulary import Axes
from jspec.policies import Dense, Guided, Policy
from jspec.policies.attend import run_selected
from jspec.typing import Array, Model

if TYPE_CHECKING:
    from jspec.decode.settings import StepConfig


CATCH_UP = 64  # tokens per pass of a second model that catches up after plain steps
# How many of the last positions a second model may still lack when it has learned a step: the last
# token of a draft that was accepted whole and, in a chain, the one that the middle level added.
LACKING = 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafted:
    """A draft of each row.

    Attributes:
        tokens: int32 ``[B, gamma]``: draft tokens.
        lengths: int32 ``[B]``: how many of them count; the step cuts this at the row's limits.
        logits: float32 ``[B, gamma, V]`` that the tokens were drawn from; None for a draft without
            probabilities.
    """

    tokens: Array
    lengths: Array
    logits: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetPass:
    """The target's pass over a draft.

    Attributes:
        positions: int32 ``[B, T]``: positions of the tokens, -1 for padding.
        hidden: ``[B, T, D]``: the hidden states that the model returned.
        collected: What a guided policy collected of each layer; None without one.
    """

    positions: Array
    hidden: Array
    collected: Any = None


@dataclasses.dataclass(frozen=True)
class Drafter:
    """Where draft tokens come from. Subclasses are frozen dataclasses of settings.

    A drafter's arrays are in ``DecodeState.draft``, any pytree whose leaves begin with the batch
    axis. It may write keys and values of its draft into the target's cache: verification overwrites
    them, and shorter lengths undo them.
    """

    usual_gamma: ClassVar[int] = 4  # where the caller names none
    # Whether drafts take passes of a model: a step then takes several times as long as a plain one.
    runs_model: ClassVar[bool] = False

    @property
    def cache_policy(self) -> Policy:
        """The policy whose columns the target's cache has for this drafter."""
        return Dense()

    @property
    def needs_model(self) -> bool:
        """Whether the caller must pass the second model of `jspec.Models`."""
        return False

    @property
    def takes_model(self) -> bool:
        """Whether it drafts with ``models.draft``, which `prepare` may have made."""
        return self.needs_model

    def prepare(self, models: Models) -> Models:
        """``models`` with what the drafter makes of the target once, before the first step."""
        return models

    @property
    def learns_from_rejected(self) -> bool:
        """Whether what it learns depends on draft tokens that were not accepted.

        Each step then samples with random numbers of its own (docs/sampling.md, *Numbers of a
        block*).
        """
        return False

    @property
    def guided(self) -> Guided | None:
        """The policy for which verification collects what it attended to; None without one."""
        return None

    def init(self, models: Models, lengths: Array, capacity: int, gamma: int) -> Any:
        """The drafter's state before the prompts are prefilled.

        Args:
            models: The models of the step.
            lengths: int32 ``[B]``: prompt tokens of each row that `prefill` will take.
            capacity: Positions per row.
            gamma: Most draft tokens of a step.

        Returns:
            A pytree whose leaves begin with the batch axis, None where it needs none.

        Raises:
            ValueError: Where ``models`` lack what it needs.
        """
        return None

    def resumed(
        self, models: Models, drafter_state: Any, lengths: Array, capacity: int, gamma: int
    ) -> Any:
        """Its state after a shared prefix, before the rest of prompts that begin with it.

        Args:
            models: The models of the step.
            drafter_state: Its state after the prefix.
            lengths: int32 ``[B]``: prompt tokens of each row, those of the prefix included.
            capacity: Positions per row.
            gamma: Most draft tokens of a step.
        """
        return drafter_state

    def prefill(
        self,
        models: Models,
        drafter_state: Any,
        tokens: Array,
        positions: Array,
        config: StepConfig,
    ) -> Any:
        """Its state after a piece of the prompts.

        Like the target's cache, it takes every prompt token of a row but the last.

        Args:
            models: The models of the step.
            drafter_state: Its state before the piece.
            tokens: int32 ``[B, T]``: the piece.
            positions: int32 ``[B, T]``: positions of its tokens, -1 for padding.
            config: The config of the steps to come.
        """
        return drafter_state

    def grow(self, drafter_state: Any, capacity: int) -> Any:
        """Its state with room for ``capacity`` positions per row; the old one is donated."""
        return drafter_state

    def undone(self, drafter_state: Any, before: Any) -> Any:
        """Its state without what it learned since ``before``.

        A `Chain` calls it, as its first drafter learns from drafts within a step.
        """
        return before

    def before_rounds(self, models: Models, state: DecodeState, config: StepConfig) -> DecodeState:
        """The state once the drafter has what the last rounds of a `Chain` left to it."""
        return state

    def caught_up(self, models: Models, state: DecodeState, config: StepConfig) -> DecodeState:
        """The state once the drafter has `CATCH_UP` more of the tokens that `rest` left to it."""
        return state

    def draft(
        self, models: Models, state: DecodeState, config: StepConfig
    ) -> tuple[Drafted, DecodeState]:
        """Draft ``config.gamma`` tokens per row, which follow its last known token.

        Args:
            models: The models of the step.
            state: The batch.
            config: The static settings of the step.

        Returns:
            The draft, and the state with the drafter's own state and the cache as the draft leaves
            them.
        """
        raise NotImplementedError

    def learn(self, state: DecodeState, target_pass: TargetPass, verified: Verified) -> DecodeState:
        """Learn from a verification; ``state`` has the committed tokens and lengths."""
        return state

    def rest(self, state: DecodeState, target_pass: TargetPass, verified: Verified) -> DecodeState:
        """Learn from a plain step, as `learn` does, or leave its token to `caught_up`.

        The latter is for a drafter with a model of its own, which should run no pass in a plain
        step.
        """
        return self.learn(state, target_pass, verified)


class SparseDrafter(Drafter):
    """A drafter that runs the target over a sparse view of its own cache.

    ``quantized``: ``int8``, ``fp8`` or ``mxfp4`` makes drafts with a copy of the target whose
    linear weights have so few bits (`quantized_copy`). `prepare` makes it, and ``models.draft``
    holds it; verification reads the target's own weights. Subclasses have it as a setting, "" for
    no copy, and check it by `check_quantized`.
    """

    runs_model: ClassVar[bool] = True

    quantized: str

    def check_quantized(self) -> None:
        """Raise `ValueError` for a kind of copy that does not exist."""
        if self.quantized not in ("", *KINDS):
            raise ValueError(f"quantized={self.quantized!r} must be one of {', '.join(KINDS)}")

    @property
    def takes_model(self) -> bool:
        return bool(self.quantized)

    def prepare(self, models: Models) -> Models:
        if not self.quantized or models.draft is not None:
            return models
        return models._replace(draft=quantized_copy(models.target, self.quantized))

    def init(self, models: Models, lengths: Array, capacity: int, gamma: int) -> Any:
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
        return 0 if self.guided is None else self.guided.refresh

    def run(
        self,
        models: Models,
        view: tuple[Policy, Any],
        tokens: Array,
        positions: Array,
        cache: Cache,
        context_len: Array,
        config: StepConfig,
        *,
        is_refresh: bool = False,
    ) -> tuple[Array, Cache, Any]:
        """A pass over ``tokens`` of a draft.

        Args:
            models: The models of the step.
            view: What `view` returned.
            tokens: int32 ``[B, T]``: draft tokens.
            positions: int32 ``[B, T]``: their positions, -1 for padding.
            cache: The target's cache.
            context_len: int32 ``[B]``: committed positions per row, after which the draft begins.
            config: The static settings of the step.
            is_refresh: Whether the pass selects again, as `refresh` says.

        Returns:
            The hidden states ``[B, T, D]``, the cache with the tokens' columns, and the policy's
            parameters for the next pass.
        """
        policy, policy_params = view
        hidden, cache, selections = run_selected(
            *(self.model_of(models), tokens, positions, cache, context_len, config.gamma),
            policy=policy,
            policy_params=policy_params.for_refresh() if is_refresh else policy_params,
            backends=config.backends,
        )
        return (
            hidden,
            cache,
            policy_params.with_selections(selections) if is_refresh else policy_params,
        )

    def model_of(self, models: Models) -> Model:
        """The model that drafts: the target, or its quantized copy."""
        if not self.quantized:
            return models.target
        assert models.draft is not None  # `init`
        return models.draft


def within_limits(drafted: Drafted, state: DecodeState, gamma: int) -> Drafted:
    """Cut a draft at its row's limits, and to nothing for a row that is done.

    One token of the limit is left for the corrected or bonus token.
    """
    if gamma == 0:
        return drafted
    max_lengths = jnp.minimum(_room(state), gamma)
    return dataclasses.replace(drafted, lengths=jnp.minimum(drafted.lengths, max_lengths))


def _room(state: DecodeState) -> Array:
    """Most draft tokens that each row can have, int32 ``[B]``."""
    room = jnp.minimum(state.limits - state.lengths - 1, state.draft_limits)
    return jnp.where(state.done, 0, jnp.maximum(room, 0))


def autoregressive(
    state: DecodeState,
    config: StepConfig,
    advance: Callable[[Array, Array, Array, Any], tuple[Array, Any]],
    carry: Any,
    *,
    axis_name: Axes | None = None,
    advance_refresh: Callable[[Array, Array, Array, Any], tuple[Array, Any]] | None = None,
    every: int = 0,
) -> tuple[Drafted, Any]:
    """Draw gamma tokens one by one.

    Args:
        state: The batch.
        config: The static settings of the step.
        advance: ``advance(step, token [B], positions [B], carry)`` returns the logits ``[B, V]`` of
            the token after ``token``, which is at ``positions``, and the next carry.
        carry: The first carry.
        axis_name: As in `jspec.ops.sample.sample`.
        advance_refresh: Replaces ``advance`` in each ``every``-th step, as in `alternating_scan`.
        every: How often it does; 0 is never.

    Returns:
        The draft, and the last carry.
    """

    index = jnp.arange(config.gamma, dtype=jnp.int32)

    def body(advance, carried, step):
        token, drafted, carry = carried
        positions = state.lengths + step
        logits, carry = advance(step, token, positions - 1, carry)
        if state.mode == "greedy":
            token = greedy(logits, axis_name)
        else:
            token = sample(
                logits[:, None],
                state.sampling,
                positions[:, None],
                Role.DRAFT,
                filtered=state.mode == "filtered",
                axis_name=axis_name,
                implementation=config.backends.get("sample"),
            )[:, 0]
        # Of tokens that the loop stacks itself, XLA makes a copy a step on a stream of its own,
        # for which a GPU waits longer than for this kernel.
        drafted = jnp.where(index[None] == step, token[:, None], drafted)
        return (token, drafted, carry), None if state.mode == "greedy" else logits

    token = state.last_token
    drafted = jnp.broadcast_to(token[:, None], (len(token), config.gamma))
    carried = token, drafted, carry
    usual, other = (
        functools.partial(body, advance),
        functools.partial(body, advance_refresh),
    )
    (_, tokens, carry), logits = alternating_scan(usual, other, every, carried, config.gamma)
    lengths = jnp.full(state.lengths.shape, config.gamma, jnp.int32)
    logits = None if logits is None else jnp.swapaxes(logits, 0, 1)
    return Drafted(tokens, lengths, logits), carry


def alternating_scan(
    usual: Callable[[Any, Array], tuple[Any, Any]],
    other: Callable[[Any, Array], tuple[Any, Any]],
    every: int,
    carry: Any,
    count: int,
) -> tuple[Any, Any]:
    """A `lax.scan` over ``count`` steps of which every ``every``-th one runs another body.

    Step ``i`` runs ``other(carry, i)`` where ``i`` is a positive multiple of ``every``, else
    ``usual(carry, i)``; with ``every=0`` always the latter. Which steps these are is compiled in:
    for a condition in a loop, a GPU waits for the host.
    """
    index = jnp.arange(count, dtype=jnp.int32)
    if not 0 < every < count:
        return lax.scan(usual, carry, index)

    def one_group(carry, steps):
        carry, outs = lax.scan(usual, carry, steps[:-1])
        carry, last = other(carry, steps[-1])
        return carry, jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), outs, last)

    def joined(first, middle, rest):
        return jnp.concatenate([first, middle.reshape(-1, *first.shape[1:]), rest])

    num_groups = (count - 1) // every
    end = num_groups * every + 1
    carry, first = lax.scan(usual, carry, index[:1])
    carry, middle = lax.scan(one_group, carry, index[1:end].reshape(num_groups, every))
    carry, rest = lax.scan(usual, carry, index[end:])
    return carry, jax.tree.map(joined, first, middle, rest)
