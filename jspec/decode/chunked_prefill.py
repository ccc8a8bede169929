"""Chunked prefill: prompts prefilled piece by piece, in rows that do not decode yet."""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any, Literal

import jax
import numpy as np

from jspec.config import SamplingParams
from jspec.decode.on_mesh import mesh_model
from jspec.decode.options import ResolvedOptions
from jspec.decode.prefill import (
    jitted_init_drafter_state,
    pass_sizes,
    prefill_chunk,
    start_decoding,
)
from jspec.decode.programs import Timed
from jspec.decode.rows import insert_row, packed_rows, padded
from jspec.decode.state import DecodeState
from jspec.sharding import explicit_mesh_sharding, place
from jspec.typing import Array

BUSY = 128  # tokens of a piece: shorter ones take about as long as reading the weights does


@dataclasses.dataclass
class Row:
    """A row of cache for all tokens of ``prompt`` but the last, which the first step takes.

    ``tokens`` int32 ``[1, S]``: the prompt, padded; ``done``: tokens that the cache has;
    ``drafter_state``: the drafter's state after them.
    """

    prompt: np.ndarray
    tokens: np.ndarray
    done: int
    cache: Any
    drafter_state: Any

    @property
    def left(self) -> int:
        """Tokens that are not in the cache yet."""
        return len(self.prompt) - 1 - self.done

    @property
    def prefix_tokens(self) -> np.ndarray:
        """The tokens that are in the cache once the row is complete."""
        return self.prompt[:-1]


class ChunkedPrefill:
    """Prefills one prompt at a time, in pieces of at most ``chunk`` tokens, and shared prefixes.

    Pieces are padded to one of `pass_sizes`, so that few programs serve prompts of all lengths. A
    prompt that begins with a shared prefix starts from a copy of its row.

    Args:
        options: Options of decoding.
        capacity: Positions of a row.
        chunk: Most tokens of a piece.
        programs: Runs the jitted functions.
        overtaken: Which prompts `overtake` may prefill while another one is being prefilled: all,
            those after a shared prefix, or none. They take a second row, which exists where such
            prompts may come.
    """

    def __init__(
        self,
        options: ResolvedOptions,
        capacity: int,
        chunk: int,
        programs: Timed,
        *,
        overtaken: Literal["all", "after prefixes", "none"],
    ) -> None:
        self._options, self._chunk, self._programs = options, chunk, programs
        self._sizes = pass_sizes(chunk)
        self._settings = {"capacity": capacity, "chunk": chunk, "cache_dtype": options.cache_dtype}
        on_mesh = mesh_model(options.models.target)
        self._sharding = (
            explicit_mesh_sharding(options.models) if on_mesh is None else on_mesh.placing
        )
        self._prefixes: list[Row] = []
        self._row, self._overtaken = self._fresh_row(np.zeros(1, np.int32)), overtaken
        self._overtaking_row = (
            self._fresh_row(np.zeros(1, np.int32)) if overtaken == "all" else None
        )

    def started(self, prompts: list[np.ndarray]) -> DecodeState:
        """A state of such rows with ``prompts`` prefilled."""
        return start_decoding(
            self._options.models,
            prompts,
            SamplingParams(max_new_tokens=1, seed=0),
            self._options.config,
            run=self._programs,
            **self._settings,
        )

    def begin(self, prompt: np.ndarray) -> None:
        """Begin to prefill ``prompt``, in place of any other."""
        row, drafter_state, done = self._row, None, 0
        if (prefix := self._longest(prompt)) is not None:
            row.cache = row.drafter_state = None  # freed before there is another
            row.cache, drafter_state = jax.tree.map(_copied, (prefix.cache, prefix.drafter_state))
            done = prefix.done
        self._row = self._begun(prompt, row.cache, drafter_state, done)

    @property
    def ready(self) -> bool:
        """Whether all of the prompt is prefilled."""
        return self.left <= 0

    @property
    def overtakes(self) -> bool:
        """Whether `overtake` has a row."""
        return self._overtaking_row is not None

    @property
    def left(self) -> int:
        """Prompt tokens that are not prefilled yet."""
        return self._row.left

    @property
    def piece(self) -> int:
        """Tokens of the next piece, padding included."""
        return self._padded(self._row.left)

    def advance(self) -> None:
        """Prefill the next piece."""
        self._advance(self._row)

    def insert(self, state: DecodeState, slot: int, params: SamplingParams) -> DecodeState:
        """``state``, which is donated, with the prompt in ``slot``, to be decoded by ``params``."""
        row, ends = self._row, self._options.models.target.config.stop_tokens
        states = (row.cache, row.drafter_state)
        packed = packed_rows(state, [slot], [row.prompt], [params], ends, *states)
        return insert_row(state, packed, slot, self._programs)

    def overtake(
        self, state: DecodeState, slot: int, prompt: np.ndarray, params: SamplingParams
    ) -> DecodeState:
        """As `insert`, for all of ``prompt``, while another prompt is being prefilled."""
        assert self._overtaking_row is not None
        at_work, self._row = self._row, self._overtaking_row
        self.begin(prompt)
        while not self.ready:
            self.advance()
        state = self.insert(state, slot, params)
        self._row, self._overtaking_row = at_work, self._row
        return state

    def mark(self, state: DecodeState) -> Array:
        """An array of its own that is ready once ``state`` and the current prompt are."""
        return self._programs(_sum_of, state.done, self._row.cache.lengths)

    # --- prefixes ---------------------------------------------------------------------------------

    def has(self, tokens: np.ndarray) -> bool:
        """Whether ``tokens`` are a shared prefix."""
        return any(np.array_equal(tokens, prefix.prefix_tokens) for prefix in self._prefixes)

    def prefix(self, tokens: np.ndarray) -> Row:
        """A row for a prefix, which `advance_prefix` fills and `keep` shares."""
        return self._fresh_row(np.append(tokens, tokens[:1]))

    def advance_prefix(self, row: Row) -> None:
        """Prefill the next piece of a prefix, and wait for it."""
        self._advance(row)
        jax.block_until_ready((row.cache, row.drafter_state))

    def keep(self, row: Row) -> None:
        """Share a prefix with all later prompts that begin with it."""
        if self._overtaken != "none" and self._overtaking_row is None:
            self._overtaking_row = self._fresh_row(np.zeros(1, np.int32))
        self._prefixes.append(row)
        self._prefixes.sort(key=lambda prefix: -prefix.done)

    def drop(self, tokens: np.ndarray) -> bool:
        """Free a prefix; False where these tokens are none."""
        before = len(self._prefixes)
        self._prefixes = [x for x in self._prefixes if not np.array_equal(x.prefix_tokens, tokens)]
        if self._overtaken != "all" and not self._prefixes:
            self._overtaking_row = None
        return len(self._prefixes) < before

    def is_fresh(self, prompt: np.ndarray) -> bool:
        """Whether the prompt begins with no shared prefix."""
        return self._longest(prompt) is None

    def tokens_after_prefix(self, prompt: np.ndarray) -> int:
        """Prompt tokens after its longest shared prefix, the last one included."""
        prefix = self._longest(prompt)
        return len(prompt) - (0 if prefix is None else prefix.done)

    def tokens_of(self, prompt: np.ndarray) -> int:
        """Tokens of the pieces that prefill the prompt, padding included.

        0 where the prompt is longer than a piece may be.
        """
        left, tokens = self.tokens_after_prefix(prompt) - 1, 0
        if left > self._chunk:
            return 0
        while left > 0:
            piece = self._padded(left)
            left, tokens = left - piece, tokens + piece
        return tokens

    def _longest(self, prompt: np.ndarray) -> Row | None:
        """The longest shared prefix that the prompt begins with."""
        for prefix in self._prefixes:  # the longest comes first
            if prefix.done < len(prompt) and np.array_equal(
                prompt[: prefix.done], prefix.prefix_tokens
            ):
                return prefix
        return None

    # --- programs ---------------------------------------------------------------------------------

    def warm(self) -> None:
        """Compile what any prompt and any prefix may need. No prompt may be in prefill."""
        self._row = self._begun(np.zeros(1, np.int32), self._row.cache, None, 0)
        for size in self._sizes:
            self._pass(self._row, size)

    def _padded(self, left: int) -> int:
        """Tokens of the next piece where so many are ``left``.

        Two pieces in place of one that is half padding, where they are long enough to save time.
        """
        at = bisect.bisect_left(self._sizes[:-1], left)
        size, shorter = self._sizes[at], self._sizes[max(at - 1, 0)]
        return shorter if size > BUSY and left <= 2 * shorter else size

    def _fresh_row(self, prompt: np.ndarray) -> Row:
        """A row with memory of its own, for ``prompt``."""
        cache = self.started([np.zeros(1, np.int32)]).cache
        return self._begun(prompt, cache, None, 0)

    def _begun(self, prompt: np.ndarray, cache: Any, drafter_state: Any, done: int) -> Row:
        """A row for ``prompt``, of which ``cache`` has the first ``done`` tokens.

        ``drafter_state``: the drafter's state after these, None where there are none.
        """
        capacity = self._settings["capacity"]
        if drafter_state is None:
            static = {"config": self._options.config, "batch": 1, "capacity": capacity}
            drafter_state = self._programs(jitted_init_drafter_state, self._options.flat, **static)
        drafter_state = self._placed("draft", drafter_state)
        tokens, lengths = padded([prompt], capacity)
        cache = self._placed("cache", cache.with_lengths(jax.device_put(lengths - 1)))
        return Row(prompt, tokens, done, cache, drafter_state)

    def _advance(self, row: Row) -> None:
        size = self._padded(row.left)
        self._pass(row, size)
        row.done = min(row.done + size, len(row.prompt) - 1)

    def _pass(self, row: Row, size: int) -> None:
        """A pass of the next ``size`` tokens of the prompt, padding included."""
        args = (self._options.flat, row.cache, row.drafter_state, row.tokens, np.int32(row.done))
        row.cache, row.drafter_state = self._programs(
            prefill_chunk, *args, config=self._options.config, size=size
        )

    def _placed(self, name: str, tree: Any) -> Any:
        return tree if self._sharding is None else place({name: tree}, self._sharding)[name]


@jax.jit
def _sum_of(done: Array, lengths: Array) -> Array:
    return done.sum() + lengths.sum()


def _copied(x: Array) -> Array:
    """A copy of ``x`` in the same memory."""
    return jax.device_put(x, x.sharding, may_alias=False)
