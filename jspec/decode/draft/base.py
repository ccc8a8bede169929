"""What every drafter is: frozen settings, its own state, and drafting as part of a step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jspec.cache import Cache
from jspec.decode.draft.early import while_it_pays
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


CATCH_UP = 64  # tokens that a second model takes up in a pass after it rested
# How many of the last positions a second model may still lack when it has learned a step: the last
# token of a draft that was accepted whole and, in a chain, the one that the middle level added.
LACKING = 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafted:
    """A draft of each row.

    ``tokens`` int32 ``[B, gamma]``; ``lengths`` int32 ``[B]``: how many of them count, which the
    step cuts at the row's limits; ``logits`` float32 ``[B, gamma, V]`` that they were drawn from,
    None where the draft was certain of its tokens. ``levels`` int32 ``[B, gamma]``: how certain of
    them it was, of a draft that may end early.
    """

    tokens: Array
    lengths: Array
    logits: Array | None = None
    levels: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetPass:
    """The target's pass over a draft: ``positions`` int32 ``[B, T]``, -1 for padding, and the
    hidden states ``[B, T, D]`` that the model returned. ``found``: what a guided policy collected
    of each layer, None where none asked for it."""

    positions: Array
    hidden: Array
    found: Any = None


@dataclasses.dataclass(frozen=True)
class Drafter:
    """Where draft tokens come from. Subclasses are frozen dataclasses of settings.

    A drafter's arrays live in ``DecodeState.draft``, any pytree whose leaves begin with the batch
    axis. It may write its keys into the target's cache: verification overwrites them, and lengths
    undo them.
    """

    usual_gamma: ClassVar[int] = 4  # where the caller names none
    # Whether drafts take passes of a model: a step then takes several times as long as a plain one.
    runs_model: ClassVar[bool] = False

    @property
    def cache_policy(self) -> Policy:
        """The policy whose columns the target's cache keeps for this drafter."""
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
        """``models`` with what it makes of the target once, before the first step."""
        return models

    @property
    def learns_from_rejected(self) -> bool:
        """Whether what it learns depends on draft tokens that were not accepted.

        Each step then has random numbers of its own (docs/sampling.md, *Numbers of a block*).
        """
        return False

    @property
    def may_end_early(self) -> bool:
        """Whether its tokens are drawn one by one, by `autoregressive`, which may then end before
        gamma of them: `StepConfig.ends_early`."""
        return False

    @property
    def guided(self) -> Guided | None:
        """The policy for which verification collects what it attended to; None for none."""
        return None

    def init(self, models: Models, lengths: Array, capacity: int, gamma: int) -> Any:
        """The drafter's own state before prompts of which it will hear ``lengths [B]`` tokens.

        None if it keeps none. Raises `ValueError` where ``models`` lack what it needs.
        """
        return None

    def resumed(self, models: Models, own: Any, lengths: Array, capacity: int, gamma: int) -> Any:
        """Its own state behind a prompt that longer ones begin with, before the rest of these.

        ``lengths [B]``: the tokens of which it will have heard in the end; the others as in `init`.
        """
        return own

    def prefill(
        self, models: Models, own: Any, tokens: Array, positions: Array, config: StepConfig
    ) -> Any:
        """Take up a piece of the prompts: ``tokens [B, T]`` at ``positions [B, T]``, -1 padding.

        Like the target's cache, it hears every prompt token of a row but the last.
        """
        return own

    def grow(self, own: Any, capacity: int) -> Any:
        """Its own state with room for ``capacity`` positions a row; that of before is donated."""
        return own

    def undone(self, own: Any, before: Any) -> Any:
        """Its own state where what it learned since ``before`` is taken back.

        A `Chain` asks for it: within a step, its first drafter learns from drafts.
        """
        return before

    def before_rounds(self, models: Models, state: DecodeState, config: StepConfig) -> DecodeState:
        """The state where it took up what the last rounds of a `Chain` left to it."""
        return state

    def caught_up(self, models: Models, state: DecodeState, config: StepConfig) -> DecodeState:
        """The state where it took up `CATCH_UP` more of the tokens that `rest` left to it."""
        return state

    def draft(
        self, models: Models, state: DecodeState, config: StepConfig
    ) -> tuple[Drafted, DecodeState]:
        """Draft ``config.gamma`` tokens a row behind its last known token."""
        raise NotImplementedError

    def learn(self, state: DecodeState, target_pass: TargetPass, verified: Verified) -> DecodeState:
        """Take up what was verified; ``state`` has the committed tokens and lengths."""
        return state

    def rest(self, state: DecodeState, target_pass: TargetPass, verified: Verified) -> DecodeState:
        """Take up a plain step, as `learn` does, or leave its token to `caught_up`.

        That is for a drafter with a model of its own, of which a plain step should cost no pass.
        """
        return self.learn(state, target_pass, verified)


class SparseDrafter(Drafter):
    """A drafter that is the model itself over a sparse view of its own cache.

    A `Chain` runs passes over that view by itself. ``quantized``: ``int8``, ``fp8`` or ``mxfp4``
    has the draft read a copy of the linear weights of so many bits, as `quantized_copy` says, which
    `prepare` makes and ``models.draft`` holds; verification reads the target's own. Subclasses have
    it as a setting, "" for no copy, and check it by `check_quantized`.
    """

    runs_model: ClassVar[bool] = True

    quantized: str

    def check_quantized(self) -> None:
        """Raise `ValueError` for a kind of copy that there is not."""
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

    def view(self, models: Models, own: Any, context_len: Array) -> tuple[Policy, Any]:
        """The policy that says what a pass reads, and the arrays that the policy takes.

        ``own``: the drafter's own state; ``context_len [B]``: positions in the cache.
        """
        raise NotImplementedError

    @property
    def refresh(self) -> int:
        """After how many passes of a draft the next one picks anew what it reads; 0 for none."""
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
        anew: bool = False,
    ) -> tuple[Array, Cache, Any]:
        """A pass over ``tokens [B, T]`` of a draft behind ``context_len [B]``, by what `view` gave.

        The hidden states, the cache with the tokens' columns, and the arrays for the next pass.
        ``anew``: whether it is one of `refresh`.
        """
        policy, policy_params = view
        hidden, cache, found = run_selected(
            *(self.model_of(models), tokens, positions, cache, context_len, config.gamma),
            policy=policy,
            policy_params=policy_params.anew() if anew else policy_params,
            backends=config.backends,
        )
        return hidden, cache, policy_params.holding(found) if anew else policy_params

    def model_of(self, models: Models) -> Model:
        """The model that drafts: the target, or its copy."""
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
    most = jnp.minimum(_room(state), gamma)
    return dataclasses.replace(drafted, lengths=jnp.minimum(drafted.lengths, most))


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
    anew: Callable[[Array, Array, Array, Any], tuple[Array, Any]] | None = None,
    every: int = 0,
) -> tuple[Drafted, Any]:
    """Draw gamma tokens one by one; fewer where ``config.ends_early`` and they do not pay.

    ``advance(step, token [B], positions [B], carry)`` gives the logits ``[B, V]`` behind the token
    at ``positions`` and the next carry; ``anew`` in its place where `in_turn` has the other one.
    ``axis_name`` as in `jspec.ops.sample.sample`.
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
        return (token, drafted, carry), logits

    def kept(advance, carried, step):
        carried, logits = body(advance, carried, step)
        return carried, None if state.mode == "greedy" else logits

    token = state.last_token
    drafted = jnp.broadcast_to(token[:, None], (len(token), config.gamma))
    carried = token, drafted, carry
    if config.ends_early:
        usual, room = functools.partial(body, advance), _room(state)
        found = while_it_pays(state, config.gamma, room, usual, carried, axis_name)
        count, levels, (_, tokens, carry), logits = found
        return Drafted(tokens, jnp.full(room.shape, count, jnp.int32), logits, levels), carry
    usual, other = functools.partial(kept, advance), functools.partial(kept, anew)
    (_, tokens, carry), logits = in_turn(usual, other, every, carried, config.gamma)
    lengths = jnp.full(state.lengths.shape, config.gamma, jnp.int32)
    logits = None if logits is None else jnp.swapaxes(logits, 0, 1)
    return Drafted(tokens, lengths, logits), carry


def in_turn(
    usual: Callable[[Any, Array], tuple[Any, Any]],
    other: Callable[[Any, Array], tuple[Any, Any]],
    every: int,
    carry: Any,
    count: int,
) -> tuple[Any, Any]:
    """`lax.scan` of ``usual(carry, step)`` over ``count`` steps, of which each ``every``-th is
    ``other(carry, step)``: the first such one is step ``every``, and 0 is for none.

    Which steps these are is compiled in: for a condition in a loop, a GPU waits for the host.
    """
    index = jnp.arange(count, dtype=jnp.int32)
    if not 0 < every < count:
        return lax.scan(usual, carry, index)

    def turn(carry, steps):
        carry, outs = lax.scan(usual, carry, steps[:-1])
        carry, last = other(carry, steps[-1])
        return carry, jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), outs, last)

    def joined(first, middle, rest):
        return jnp.concatenate([first, middle.reshape(-1, *first.shape[1:]), rest])

    turns = (count - 1) // every
    end = turns * every + 1
    carry, first = lax.scan(usual, carry, index[:1])
    carry, middle = lax.scan(turn, carry, index[1:end].reshape(turns, every))
    carry, rest = lax.scan(usual, carry, index[end:])
    return carry, jax.tree.map(joined, first, middle, rest)
