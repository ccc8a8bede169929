"""The state that a speculative step takes and returns, and the models that it reads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.cache import Cache
from jspec.config import SamplingMode
from jspec.decode.ending import Ending
from jspec.ops.sample import Sampling
from jspec.ops.vocabulary import Axes
from jspec.typing import Array, Model


class Models(NamedTuple):
    """What a step reads and never changes.

    ``target``: the model whose tokens are decoded. ``draft``: a second model, for
    `ModelDraft`, or what `Drafter.prepare` makes of the target.
    ``policy``: what `jspec.prepare` made for the policy of the step, None where it needs nothing.
    """

    target: Model
    draft: Model | None = None
    policy: Any = None

    @classmethod
    def of(cls, models: Model | Models | FlatModels) -> Models:
        """``models`` as they are, or a target alone."""
        if isinstance(models, FlatModels):
            return models.whole
        return models if isinstance(models, Models) else cls(models)


@jax.tree_util.register_pytree_node_class
class FlatModels:
    """`Models` that are flat already, for a program that is called again and again.

    Flattening a model of 36 layers takes milliseconds of Python at each call, in which a GPU has
    nothing to do. ``signature``: what `jspec.decode.programs` keeps programs for them by, once it
    is found, which takes as long.
    """

    def __init__(self, leaves: Sequence[Any], structure: Any) -> None:
        self._leaves, self._structure = leaves, structure
        self.signature: Any = None

    @classmethod
    def of(cls, models: Models) -> FlatModels:
        return cls(*jax.tree.flatten(models))

    @property
    def whole(self) -> Models:
        return jax.tree.unflatten(self._structure, self._leaves)

    @property
    def target(self) -> Model:
        return self.whole.target

    def tree_flatten(self) -> tuple[Sequence[Any], Any]:
        return self._leaves, self._structure

    @classmethod
    def tree_unflatten(cls, structure: Any, leaves: Sequence[Any]) -> FlatModels:
        return cls(leaves, structure)


def vocabulary_axes(model: Model) -> Axes | None:
    """The axes of an enclosing `jax.shard_map` that the model's logits are sharded over."""
    return getattr(model, "vocabulary_axes", None) or None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepRecord:
    """What the last step did.

    ``drafted``, ``accepted``, ``committed`` int32 ``[B]`` (draft tokens behind a stop token count
    in none of them); ``tokens`` int32 ``[B, gamma + 1]``: the committed block, -1 behind its end;
    ``done`` bool ``[B]``: rows that have ended by then.

    All of it is one array, ``packed`` int32 ``[B, gamma + 5]``, which a loop writes, and the host
    reads, in one go. `jax.device_get` of a record gives one of numpy arrays.
    """

    packed: Array

    @classmethod
    def of(cls, drafted: Array, done: Array, committed: Array) -> StepRecord:
        """The record of a step; ``committed`` is what `jspec.ops.commit.commit` returned."""
        counts = (drafted, done.astype(drafted.dtype))
        return cls(jnp.concatenate([*(x[:, None] for x in counts), committed], axis=1))

    @property
    def drafted(self) -> Array:
        return self.packed[..., 0]

    @property
    def done(self) -> Array:
        return self.packed[..., 1] != 0

    @property
    def accepted(self) -> Array:
        return self.packed[..., 2]

    @property
    def committed(self) -> Array:
        return self.packed[..., 3]

    @property
    def tokens(self) -> Array:
        return self.packed[..., 4:]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields="cache tokens limits done sampling stop_tokens draft_limits ending draft".split(),
    meta_fields=["mode", "exact"],
)
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """A batch of requests in the middle of decoding. Every leaf begins with the batch axis.

    ``cache``: the target's; it holds every known token of a row but the last, which the next step
    feeds.
    ``tokens`` int32 ``[B, S]``: prompt and committed tokens, -1 behind them.
    ``limits`` int32 ``[B]``: most tokens a row may know, prompt included.
    ``done`` bool ``[B]``: rows that have ended; a step leaves them as they are.
    ``sampling``: settings of each row.
    ``stop_tokens`` int32 ``[B, M]``, -1 for none.
    ``draft_limits`` int32 ``[B]``: most draft tokens of a step.
    ``ending``: what says where a draft ends early, for steps that have it do so.
    ``draft``: the drafter's own pytree, None where it keeps none.
    ``mode``: the machinery that the settings need, static: ``greedy`` (argmax only), ``sampled`` or
    ``filtered`` (some row has top-k, top-p or min-p). A row's tokens do not depend on which of the
    sufficient ones runs.
    ``exact``: whether its keys are those of passes with ``exact=True``, static.
    """

    cache: Cache
    tokens: Array
    limits: Array
    done: Array
    sampling: Sampling
    stop_tokens: Array
    draft_limits: Array
    ending: Ending
    draft: Any
    mode: SamplingMode
    exact: bool

    @property
    def lengths(self) -> Array:
        """Known tokens of each row, prompt included, int32 ``[B]``."""
        return self.cache.lengths + 1

    @property
    def last_token(self) -> Array:
        """The last known token of each row, int32 ``[B]``: known, but not in the cache yet."""
        return jnp.take_along_axis(self.tokens, self.cache.lengths[:, None], axis=1)[:, 0]

    def beyond(self, positions: Array) -> Array:
        """Which of ``positions [B, T]`` no token of the row will ever have, bool ``[B, T]``."""
        return self.done[:, None] | (positions >= self.limits[:, None])
