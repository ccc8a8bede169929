"""Prompts taken up piece by piece, in a row of their own beside the rows that decode."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jspec.cache import Cache
from jspec.config import SamplingParams
from jspec.decode.on_mesh import mesh_model
from jspec.decode.plan import Plan
from jspec.decode.prefill import (
    jitted_own_state,
    padded,
    power_of_two,
    prefill_chunk,
    put_row,
    start_decoding,
    state_of,
)
from jspec.decode.programs import Timed
from jspec.decode.state import DecodeState
from jspec.sharding import beside, place
from jspec.typing import Array

LEAST = 16  # tokens of a piece: shorter ones take as long


class Prefix(NamedTuple):
    """The beginning of prompts, and a row that has taken it up."""

    tokens: np.ndarray
    cache: Cache
    own: Any


class Intake:
    """Takes up one prompt at a time, in pieces of at most ``chunk`` tokens.

    Pieces are padded to a power of two, so that few programs serve prompts of all lengths. A prompt
    that goes on behind a prefix starts from a copy of its row. ``capacity``: positions of a row.
    """

    def __init__(
        self,
        plan: Plan,
        capacity: int,
        chunk: int,
        cache_dtype: DTypeLike | None,
        programs: Timed,
    ) -> None:
        self._plan, self._chunk, self._programs = plan, chunk, programs
        self._settings = {"capacity": capacity, "chunk": chunk, "cache_dtype": cache_dtype}
        on_mesh = mesh_model(plan.models.target)
        self._sharding = beside(plan.models) if on_mesh is None else on_mesh.placing
        self._prefixes: list[Prefix] = []
        state = self.started([np.zeros(1, np.int32)])
        self._cache: Any = state.cache
        self._own: Any = state.draft
        self._prompt, self._done = np.zeros(1, np.int32), 0

    def started(self, prompts: list[np.ndarray]) -> DecodeState:
        """A state of such rows that has taken up ``prompts``."""
        return start_decoding(
            self._plan.models,
            prompts,
            SamplingParams(max_new_tokens=1, seed=0),
            self._plan.config,
            run=self._programs,
            **self._settings,
        )

    def begin(self, prompt: np.ndarray) -> None:
        """Take up ``prompt`` from now on, in place of any other."""
        self._prompt, self._done, own = prompt, 0, None
        if (prefix := self._longest(prompt)) is not None:
            self._done = len(prefix.tokens)
            self._cache = None  # freed before there is another
            self._cache, own = jax.tree.map(_copied, (prefix.cache, prefix.own))
        lengths = np.array([len(prompt) - 1], np.int32)
        self._own = self._own_state(lengths, own)
        self._cache = self._placed("cache", self._cache.with_lengths(jnp.asarray(lengths)))

    @property
    def ready(self) -> bool:
        """Whether it has all of the prompt but its last token, which the first step feeds."""
        return self.left <= 0

    @property
    def piece(self) -> int:
        """Tokens of the next piece, padding included."""
        return min(self._chunk, max(power_of_two(self.left), LEAST))

    @property
    def left(self) -> int:
        """Prompt tokens that it has not taken up."""
        return len(self._prompt) - 1 - self._done

    def advance(self) -> None:
        """Take up the next piece."""
        end = min(self._done + self.piece, len(self._prompt) - 1)
        self._pass(self._done, end, self.piece)
        self._done = end

    def _pass(self, begin: int, end: int, size: int) -> None:
        """A pass of ``size`` tokens, of which those of the prompt from ``begin`` count."""
        tokens, positions = np.full((2, 1, size), -1, np.int32)
        tokens[0, : end - begin] = self._prompt[begin:end]
        positions[0, : end - begin] = np.arange(begin, end)
        args = (self._plan.flat, self._cache, self._own, tokens, positions)
        self._cache, self._own = self._programs(prefill_chunk, *args, config=self._plan.config)

    def put(self, state: DecodeState, slot: int, params: SamplingParams) -> DecodeState:
        """``state``, which is donated, with the prompt in ``slot``, to be decoded by ``params``."""
        room, capacity = state.stop_tokens.shape[1], state.tokens.shape[1]
        ends = self._plan.models.target.config.stop_tokens
        row = (*padded([self._prompt], capacity), [params], ends, room, self._cache, self._own)
        one = place(state_of(*row, mode=state.mode, exact=state.exact), self._sharding)
        return put_row(state, one, slot, self._programs)

    def wait(self) -> None:
        """Until the device is done with what it was given."""
        jax.block_until_ready((self._cache, self._own))

    def keep(self, tokens: np.ndarray) -> bool:
        """Take up a prefix in a row of its own, for all prompts that go on behind it.

        False where it has done so before.
        """
        if any(np.array_equal(tokens, prefix.tokens) for prefix in self._prefixes):
            return False
        state = self.started([np.append(tokens, tokens[:1])])
        self._prefixes.append(Prefix(tokens, state.cache, state.draft))
        self._prefixes.sort(key=lambda prefix: -len(prefix.tokens))
        self._own_state(np.array([len(tokens)], np.int32), state.draft)  # compiles it
        return True

    def drop(self, tokens: np.ndarray) -> bool:
        """Let go of a prefix; False where there is none of these tokens."""
        before = len(self._prefixes)
        self._prefixes = [x for x in self._prefixes if not np.array_equal(x.tokens, tokens)]
        return len(self._prefixes) < before

    def warm(self) -> None:
        """Compile what any prompt may need. No prompt may be at work."""
        sizes = {min(self._chunk, LEAST << n) for n in range(self._chunk.bit_length())}
        self.begin(np.zeros(1, np.int32))
        for size in sorted(sizes):
            self._pass(0, 0, size)

    def is_fresh(self, prompt: np.ndarray) -> bool:
        """Whether the prompt goes on behind no prefix."""
        return self._longest(prompt) is None

    def _longest(self, prompt: np.ndarray) -> Prefix | None:
        """The longest prefix that the prompt goes on behind."""
        for prefix in self._prefixes:  # the longest comes first
            size = len(prefix.tokens)
            if size < len(prompt) and np.array_equal(prompt[:size], prefix.tokens):
                return prefix
        return None

    def _own_state(self, lengths: np.ndarray, own: Any) -> Any:
        """The drafter's state before prompts; ``own``: behind their prefix, None where none is."""
        args = (self._plan.flat, jnp.asarray(lengths), own)
        settings = {"config": self._plan.config, "capacity": self._settings["capacity"]}
        return self._placed("draft", self._programs(jitted_own_state, *args, **settings))

    def _placed(self, name: str, tree: Any) -> Any:
        return place({name: tree}, self._sharding)[name]


def _copied(x: Array) -> Array:
    """A copy of ``x`` in the same memory."""
    return jax.device_put(x, x.sharding, may_alias=False)
