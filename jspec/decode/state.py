"""The state that a speculative step takes and returns, and the models that it reads."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.cache import Cache
from jspec.config import SamplingMode, SamplingParams
from jspec.decode.logprobs import Logprobs, TokenScores
from jspec.decode.processors import Processing
from jspec.ops.sample import Sampling
from jspec.ops.vocabulary import Axes
from jspec.typing import Array, Model

Exact = Literal["tokens", "bits"]  # what does not depend on drafts, neighbours and lengths


class Models(NamedTuple):
    """The models that a step reads.

    Attributes:
        target: The model whose tokens are decoded.
        draft: A second model, for `ModelDraft`, or what `Drafter.prepare` made of the target.
        policy: What `jspec.policies.prepare_params` made for the policy of the step, None where it
            needs nothing.
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
    """`Models` as the leaves of a pytree, for a program that is called again and again.

    Flattening a model of 36 layers takes milliseconds of Python per call, in which a GPU has
    nothing to do. ``signature``: the key of these models in `jspec.decode.programs`, which takes as
    long to compute, and is set once it is known.
    """

    def __init__(self, leaves: Sequence[Any], structures: tuple[Any, ...]) -> None:
        self._leaves, self._structures = leaves, structures
        self.signature: Any = None

    @classmethod
    def of(cls, models: Models, target: tuple[list[Any], Any] | None = None) -> FlatModels:
        """``models``; ``target``: leaves and structure of theirs, where the caller has these."""
        target = jax.tree.flatten(models.target) if target is None else target
        parts = [target, *map(jax.tree.flatten, models[1:])]
        leaves = [leaf for leaves, _ in parts for leaf in leaves]
        return cls(leaves, tuple(structure for _, structure in parts))

    @property
    def whole(self) -> Models:
        left = iter(self._leaves)
        return Models(
            *(x.unflatten(itertools.islice(left, x.num_leaves)) for x in self._structures)
        )

    def tree_flatten(self) -> tuple[Sequence[Any], Any]:
        return self._leaves, self._structures

    @classmethod
    def tree_unflatten(cls, structures: Any, leaves: Sequence[Any]) -> FlatModels:
        return cls(leaves, structures)


def vocabulary_axes(model: Model) -> Axes | None:
    """The axes of an enclosing `jax.shard_map` that the model's logits are sharded over."""
    return getattr(model, "vocabulary_axes", None) or None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepRecord:
    """What one step did, in one array ``packed`` int32 ``[B, gamma + 5]``.

    A loop writes that array, and the host reads it, at once. `jax.device_get` of a record gives a
    record of numpy arrays. Draft tokens after a stop token count nowhere.

    Attributes:
        drafted: int32 ``[B]``: draft tokens per row.
        accepted: int32 ``[B]``: draft tokens accepted per row.
        committed: int32 ``[B]``: tokens committed per row.
        tokens: int32 ``[B, gamma + 1]``: the committed tokens, -1 after them.
        done: bool ``[B]``: rows that have ended by then.
        logprobs: Log-probabilities of ``tokens``, arrays ``[B, gamma + 1, ...]``; None where
            `DecodeState.logprobs` asks for none.
        routed_experts: int32 ``[B, gamma + 1, mixtures, c]``: the experts of the token before each
            of ``tokens``; None where `DecodeState.routed_experts` is False.
    """

    packed: Array
    logprobs: Logprobs | None = None
    routed_experts: Array | None = None

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptRecord:
    """What prefill computed of the tokens of a prompt in addition to their keys and values.

    Attributes:
        logprobs: Log-probabilities of the prompt's tokens but the first; None where the request
            asks for none.
        routed_experts: int32 ``[n - 1, mixtures, c]``: the experts of its tokens but the last; None
            likewise.
    """

    logprobs: TokenScores | None = None
    routed_experts: Any = None

    @classmethod
    def joined(cls, parts: Sequence[tuple[PromptRecord, int]], row: int) -> PromptRecord:
        """``parts``, one or more, of ``row`` one after the other as numpy arrays.

        Of each part, arrays ``[B, T, ...]``, so many positions count.
        """
        rows = [jax.tree.map(lambda x, n=n: np.asarray(x)[row, :n], part) for part, n in parts]
        return jax.tree.map(lambda *arrays: np.concatenate(arrays), *rows)

    def asked(self, params: SamplingParams) -> PromptRecord:
        """What a request with ``params`` asks for."""
        count = params.prompt_logprobs
        return PromptRecord(
            None if count is None or self.logprobs is None else self.logprobs.likeliest(count),
            self.routed_experts if params.routed_experts else None,
        )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "cache tokens limits done sampling stop_tokens draft_limits draft processing".split()
    ),
    meta_fields=["mode", "exact", "logprobs", "routed_experts"],
)
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """A batch of requests that is being decoded. Every leaf begins with the batch axis, but for
    columns of a cache in blocks.

    Attributes:
        cache: The target's cache. It has every known token of a row but the last, which the next
            step takes.
        tokens: int32 ``[B, S]``: prompt and committed tokens, -1 after them.
        limits: int32 ``[B]``: most tokens of a row, prompt included.
        done: bool ``[B]``: rows that have ended; a step does not change them.
        sampling: Sampling settings of each row.
        stop_tokens: int32 ``[B, M]``: stop tokens of each row, -1 for none.
        draft_limits: int32 ``[B]``: most draft tokens per step.
        draft: The drafter's own pytree, None where it has none.
        processing: Logits processors and their settings, None without any.
        logprobs: How many of the likeliest tokens steps score with each token that they commit,
            static; None for no log-probabilities.
        routed_experts: Whether steps record the experts that tokens are routed to, static.
        mode: How much sampling the rows need, static: ``greedy`` (argmax only), ``sampled`` or
            ``filtered`` (some row has top-k, top-p or min-p). A row's tokens do not depend on which
            of the sufficient modes runs.
        exact: The level of exactness with which its keys were computed, static.
    """

    cache: Cache
    tokens: Array
    limits: Array
    done: Array
    sampling: Sampling
    stop_tokens: Array
    draft_limits: Array
    draft: Any
    mode: SamplingMode
    exact: Exact | None
    processing: Processing | None = None
    logprobs: int | None = None
    routed_experts: bool = False

    @property
    def lengths(self) -> Array:
        """Known tokens of each row, prompt included, int32 ``[B]``."""
        return self.cache.lengths + 1

    @property
    def last_token(self) -> Array:
        """The last known token of each row, int32 ``[B]``: known, but not in the cache yet."""
        return jnp.take_along_axis(self.tokens, self.cache.lengths[:, None], axis=1)[:, 0]

    def with_processor_states(self) -> DecodeState:
        """With the states of its logits processors, for a step or several."""
        if self.processing is None or self.processing.states:
            return self
        texts = self.tokens, self.lengths, self.stop_tokens
        return dataclasses.replace(self, processing=self.processing.started(*texts))

    def beyond(self, positions: Array) -> Array:
        """Which of ``positions [B, T]`` no token of the row will ever have, bool ``[B, T]``."""
        return self.done[:, None] | (positions >= self.limits[:, None])
