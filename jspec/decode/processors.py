"""Logits processors: they change the logits of each token by the tokens before it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.config import SamplingParams, positive, refuse_class, shown
from jspec.ops.vocabulary import NO_TOKEN, Axes
from jspec.typing import Array

ROOM = 16  # tokens with a bias that a row has room for at least


class TokenHistory(NamedTuple):
    """The tokens of a batch's rows so far.

    Attributes:
        tokens: int32 ``[B, S]``: prompt and new tokens, -1 after them.
        lengths: int32 ``[B]``: how many there are.
        prompt_lengths: int32 ``[B]``: how many of them are the prompt's.
        stop_tokens: int32 ``[B, M]``: stop tokens of each row, -1 for none.
        vocab_size: Tokens of the vocabulary (V).
    """

    tokens: Array
    lengths: Array
    prompt_lengths: Array
    stop_tokens: Array
    vocab_size: int


class LogitsProcessor:
    """Changes the logits of a token by the tokens before it, in every pass of the target.

    A subclass is a frozen, hashable dataclass; its fields are static. What it knows of the tokens
    is its state, a pytree of arrays that begin with the batch axis. The state is a function of the
    tokens, whether `init` computes it from all of them or `extend` token by token: it is computed
    once for a chunk of steps, then extended by the draft for each of its positions, and by what is
    committed. So each position of a draft gets logits by its own history, and the output follows
    the distribution of plain decoding with the same processors.

    Attributes:
        fields: Fields of `SamplingParams` that it implements.
    """

    fields: ClassVar[tuple[str, ...]] = ()

    def settings(self, params: SamplingParams) -> Any:
        """What it reads of a request: a pytree of numbers or numpy arrays, the same for each.

        Raises `ValueError` for a request that it cannot serve.
        """
        return ()

    def fitted(self, params: Sequence[SamplingParams]) -> LogitsProcessor:
        """The same processor with room for such requests, where it has a limit."""
        return self

    def init(self, settings: Any, history: TokenHistory) -> Any:
        """The state after ``history``; ``settings`` of all rows, stacked: ``[B, ...]``."""
        return settings

    def extend(self, state: Any, tokens: Array) -> Any:
        """The state after one more token of each row, ``tokens`` int32 ``[B]``."""
        return state

    def apply(self, state: Any, logits: Array) -> Array:
        """The logits that replace ``logits``, both float32 ``[B, V]``; minus infinity bans."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class LogitBias(LogitsProcessor):
    """Adds ``logit_bias`` to the logits, and bans ``banned_tokens``.

    Attributes:
        room: Most tokens of a request in both.
    """

    room: int = ROOM
    fields = ("logit_bias", "banned_tokens")

    def __post_init__(self) -> None:
        positive("room", self.room)

    def settings(self, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
        biases = _biases(params)
        tokens, values = np.full(self.room, NO_TOKEN, np.int32), np.zeros(self.room, np.float32)
        tokens[: len(biases)], values[: len(biases)] = [*biases], [*biases.values()]
        return tokens, values

    def fitted(self, params: Sequence[SamplingParams]) -> LogitBias:
        needed = max(len(_biases(one)) for one in params)
        return self if needed <= self.room else LogitBias(1 << (needed - 1).bit_length())

    def apply(self, state: tuple[Array, Array], logits: Array) -> Array:
        tokens, values = state
        rows = jnp.arange(len(logits), dtype=jnp.int32)[:, None]
        return logits.at[rows, tokens].add(values, mode="drop")


def _biases(params: SamplingParams) -> dict[int, float]:
    """What is added to the logits of tokens; minus infinity for those that are banned."""
    return dict(params.logit_bias) | dict.fromkeys(params.banned_tokens, -np.inf)


@dataclasses.dataclass(frozen=True)
class MinNewTokens(LogitsProcessor):
    """Masks the stop tokens of a request until it has ``min_new_tokens`` new tokens."""

    fields = ("min_new_tokens",)

    def settings(self, params: SamplingParams) -> np.int32:
        return np.int32(params.min_new_tokens)

    def init(self, settings: Array, history: TokenHistory) -> tuple[Array, Array]:
        """Tokens that are missing, int32 ``[B]``, and the stop tokens."""
        return settings + history.prompt_lengths - history.lengths, history.stop_tokens

    def extend(self, state: tuple[Array, Array], tokens: Array) -> tuple[Array, Array]:
        missing, stops = state
        return missing - 1, stops

    def apply(self, state: tuple[Array, Array], logits: Array) -> Array:
        missing, stops = state
        masked = jnp.where((missing[:, None] > 0) & (stops >= 0), stops, NO_TOKEN)
        rows = jnp.arange(len(logits), dtype=jnp.int32)[:, None]
        return logits.at[rows, masked].set(-jnp.inf, mode="drop")


class PenaltyState(NamedTuple):
    """What `Penalties` knows of the tokens.

    Attributes:
        penalties: float32 ``[B]`` each: repetition, frequency and presence.
        in_prompt: bool ``[B, V]``: tokens of the prompt.
        counts: int32 ``[B, V]``: how often the answer has each token.
    """

    penalties: tuple[Array, Array, Array]
    in_prompt: Array
    counts: Array


@dataclasses.dataclass(frozen=True)
class Penalties(LogitsProcessor):
    """Repetition, frequency and presence penalties.

    In this order: the logit x of a token of the prompt or the answer becomes x / repetition where x
    is positive, else x * repetition (Keskar et al. 2019, section 4.1, as transformers applies it);
    then a token that the answer has n > 0 times loses n * frequency + presence.
    """

    fields = ("repetition_penalty", "frequency_penalty", "presence_penalty")

    def settings(self, params: SamplingParams) -> tuple[np.float32, ...]:
        return tuple(np.float32(getattr(params, name)) for name in self.fields)

    def init(self, settings: tuple[Array, Array, Array], history: TokenHistory) -> PenaltyState:
        batch, capacity = history.tokens.shape
        index = jnp.arange(capacity, dtype=jnp.int32)[None]
        rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
        is_prompt = index < history.prompt_lengths[:, None]
        is_new = ~is_prompt & (index < history.lengths[:, None])
        none = jnp.zeros((batch, history.vocab_size), jnp.int32)
        of_prompt, new = (jnp.where(x, history.tokens, NO_TOKEN) for x in (is_prompt, is_new))
        in_prompt = (none > 0).at[rows, of_prompt].set(True, mode="drop")
        return PenaltyState(settings, in_prompt, none.at[rows, new].add(1, mode="drop"))

    def extend(self, state: PenaltyState, tokens: Array) -> PenaltyState:
        # A comparison, which XLA fuses into what reads the counts; a scatter would write them.
        index = jnp.arange(state.counts.shape[1], dtype=jnp.int32)[None]
        is_token = (index == tokens[:, None]).astype(jnp.int32)
        return state._replace(counts=state.counts + is_token)

    def apply(self, state: PenaltyState, logits: Array) -> Array:
        repetition, frequency, presence = (x[:, None] for x in state.penalties)
        in_answer = state.counts > 0
        scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(state.in_prompt | in_answer, scaled, logits)
        lost = frequency * state.counts.astype(jnp.float32) + presence
        return jnp.where(in_answer, logits - lost, logits)


@dataclasses.dataclass(frozen=True)
class LogitsFunction(LogitsProcessor):
    """A function of a row's logits and tokens, for all requests.

    Attributes:
        function: Called under `jax.jit` as ``function(logits, tokens, length)`` with float32
            ``[V]``, int32 ``[S]`` and an int32: prompt and new tokens, -1 after the first
            ``length``, and S as large as the capacity. Returns logits ``[V]``. It may not depend on
            anything else that changes, as it is compiled into the step.
    """

    function: Callable[[Array, Array, Array], Array]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"function={shown(self.function)} must be a function")
        with contextlib.suppress(ValueError):  # some built-in functions have no signature
            signature = inspect.signature(self.function)
            try:
                signature.bind(None, None, None)
            except TypeError as error:
                raise TypeError(
                    f"function={shown(self.function)} must take (logits, tokens, length), "
                    f"and takes {signature}"
                ) from error

    def init(self, settings: Any, history: TokenHistory) -> tuple[Array, Array]:
        return history.tokens, history.lengths

    def extend(self, state: tuple[Array, Array], tokens: Array) -> tuple[Array, Array]:
        texts, lengths = state
        index = jnp.arange(texts.shape[1], dtype=jnp.int32)[None]
        return jnp.where(index == lengths[:, None], tokens[:, None], texts), lengths + 1

    def apply(self, state: tuple[Array, Array], logits: Array) -> Array:
        return jax.vmap(self.function)(logits, *state)


BUILT_IN: tuple[LogitsProcessor, ...] = (LogitBias(), MinNewTokens(), Penalties())
_DEFAULTS = SamplingParams()


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields="settings prompt_lengths states".split(),
    meta_fields=["processors", "vocab_size"],
)
@dataclasses.dataclass(frozen=True)
class Processing:
    """The logits processors of a batch.

    Attributes:
        processors: In the order in which they are applied.
        vocab_size: Tokens of the target's vocabulary (V).
        settings: Settings of each processor, arrays ``[B, ...]``.
        prompt_lengths: int32 ``[B]``.
        states: The state of each processor; empty between two chunks of steps.
    """

    processors: tuple[LogitsProcessor, ...]
    vocab_size: int
    settings: tuple[Any, ...]
    prompt_lengths: Array
    states: tuple[Any, ...] = ()

    @classmethod
    def of(
        cls,
        processors: Sequence[LogitsProcessor],
        vocab_size: int,
        params: Sequence[SamplingParams],
        prompt_lengths: Any,
    ) -> Processing | None:
        """That of requests with ``params``, arrays of numpy; None without processors."""
        if not processors:
            return None
        settings = tuple(
            jax.tree.map(lambda *rows: np.stack([*map(_setting, rows)]), *map(x.settings, params))
            for x in processors
        )
        return cls(tuple(processors), vocab_size, settings, prompt_lengths)

    def started(self, tokens: Array, lengths: Array, stop_tokens: Array) -> Processing:
        """With states after ``tokens [B, S]``, of which each row has ``lengths [B]``."""
        texts = TokenHistory(tokens, lengths, self.prompt_lengths, stop_tokens, self.vocab_size)
        pairs = zip(self.processors, self.settings, strict=True)
        states = tuple(processor.init(settings, texts) for processor, settings in pairs)
        return dataclasses.replace(self, states=states)

    def stopped(self) -> Processing:
        """Without states."""
        return dataclasses.replace(self, states=())

    def extended(self, tokens: Array) -> Processing:
        """With the states after ``tokens [B, T]`` more of each row; -1 is no token."""
        states = self.states
        for index in range(tokens.shape[1]):
            states = self._after(states, tokens[:, index])
        return dataclasses.replace(self, states=states)

    def process(self, logits: Array, draft: Array, axis_name: Axes | None = None) -> Array:
        """The processed ``logits [B, T, V]`` of positions before, between and after a draft.

        Args:
            logits: Of the target, or of a draft model whose vocabulary may have another padding.
            draft: int32 ``[B, T - 1]``, which the later positions have before them.
            axis_name: As in `jspec.ops.sample.sample`. Every shard processes all logits, so that a
                processor needs to know nothing of shards.

        Returns:
            float32 ``[B, T, V]``.
        """
        size = logits.shape[-1]
        if axis_name is not None:
            logits = lax.all_gather(logits, axis_name, axis=2, tiled=True)
        states, rows = self.states, []
        for index in range(logits.shape[1]):
            rows.append(self._applied(states, logits[:, index].astype(jnp.float32)))
            if index < draft.shape[1]:
                states = self._after(states, draft[:, index])
        processed = jnp.stack(rows, axis=1)
        if axis_name is None:
            return processed
        start = lax.axis_index(axis_name) * size
        return lax.dynamic_slice_in_dim(processed, start, size, axis=2)

    def _applied(self, states: tuple[Any, ...], logits: Array) -> Array:
        """All processors applied to ``logits [B, n]``; tokens that the target lacks are padding."""
        missing, rest = self.vocab_size - logits.shape[1], logits[:, self.vocab_size :]
        row = jnp.pad(logits, ((0, 0), (0, max(missing, 0))), constant_values=-jnp.inf)
        row = row[:, : self.vocab_size]
        for processor, state in zip(self.processors, states, strict=True):
            row, before = processor.apply(state, row), row
            if (row.shape, row.dtype) != (before.shape, before.dtype):
                raise TypeError(
                    f"{shown(processor)} returned logits {row.dtype} {row.shape} in place of "
                    f"{before.dtype} {before.shape}; return as many, in float32"
                )
        return jnp.concatenate([row[:, : logits.shape[1]], rest], axis=1)

    def _after(self, states: tuple[Any, ...], tokens: Array) -> tuple[Any, ...]:
        """``states`` after one more of ``tokens [B]`` in the rows where that is not -1."""
        is_token = tokens >= 0

        def chosen(after: Array, before: Array) -> Array:
            if after is before:
                return before
            mask = is_token.reshape(-1, *[1] * (before.ndim - 1))
            return jnp.where(mask, after, before)

        return tuple(
            jax.tree.map(chosen, processor.extend(state, jnp.maximum(tokens, 0)), state)
            for processor, state in zip(self.processors, states, strict=True)
        )


def completed(
    processors: Sequence[LogitsProcessor], params: Sequence[SamplingParams]
) -> tuple[LogitsProcessor, ...]:
    """``processors`` after those of jspec that ``params`` need and that are missing.

    Each has room for these requests.
    """
    used = {
        field
        for processor in BUILT_IN
        for field in processor.fields
        if any(getattr(one, field) != getattr(_DEFAULTS, field) for one in params)
    }
    used -= {field for processor in processors for field in processor.fields}
    missing = [processor for processor in BUILT_IN if used & {*processor.fields}]
    return tuple(processor.fitted(params) for processor in (*missing, *processors))


def check_processors(processors: Any) -> tuple[LogitsProcessor, ...]:
    """``processors`` as a tuple. Raises `TypeError` for anything but logits processors."""
    if not isinstance(processors, Sequence):
        raise TypeError(
            f"processors={shown(processors)} must be a list of processors, as in "
            "[jspec.Penalties()]"
        )
    for one in processors:
        refuse_class("processor", one)
        if not isinstance(one, LogitsProcessor):
            raise TypeError(
                f"processors hold {shown(one)}, which is no LogitsProcessor; wrap a function as "
                "jspec.LogitsFunction(function)"
            )
        hash(one)  # a TypeError of its own: programs are compiled for each
    return tuple(processors)


def check_served(processors: Sequence[LogitsProcessor], params: SamplingParams, batch: str) -> None:
    """Raise `ValueError` where ``processors`` of a running ``batch`` do not serve a request."""
    needed = completed(processors, [params])
    if needed != tuple(processors):
        raise ValueError(
            f"the request needs processors={list(needed)!r}, the {batch} has {list(processors)!r}; "
            f"make the {batch} with them"
        )


def _setting(value: Any) -> np.ndarray:
    """A setting as a row of the batch: bool, int32, uint32 or float32, as rows are packed."""
    array = np.asarray(value)
    kinds = {"b": np.bool_, "i": np.int32, "u": np.uint32, "f": np.float32}
    if array.dtype.kind not in kinds:
        raise TypeError(f"a setting of {array.dtype} must be a number or a bool")
    return array.astype(kinds[array.dtype.kind])
