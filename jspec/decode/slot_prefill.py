"""Prefill for the slots of a running batch: short prompts in one pass, others piece by piece."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jspec.cache import Cache
from jspec.config import SamplingParams
from jspec.decode.blocks import Beginning
from jspec.decode.on_mesh import is_on_mesh, placing_of
from jspec.decode.options import ResolvedOptions
from jspec.decode.prefill import start_empty
from jspec.decode.prefill_pass import (
    BUSY_PASS,
    SHORTEST_PASS,
    empty_record,
    init_drafter_state,
    pass_size,
    pass_sizes,
    prefill_chunk,
)
from jspec.decode.programs import Timed
from jspec.decode.request import Request
from jspec.decode.rows import PackedRows, insert_row, packed_rows, padded
from jspec.decode.slot_programs import prefill_slots, row_of, sum_of, synced_drafter
from jspec.decode.slot_texts import SlotTexts
from jspec.decode.state import DecodeState, PromptRecord
from jspec.sharding import place
from jspec.typing import Array

MAX_ROWS = 8  # most prompts of a pass that differ
MAX_REQUESTS = 16  # most requests of a pass
# What passes record for prompts whose requests do not ask.
NOTHING: dict[str, Any] = {"prompt_logprobs": None, "routed_experts": False}
IDLE = Request(np.zeros(1, np.int32), SamplingParams(seed=0), (), None)  # of a row that is unused


@dataclasses.dataclass
class Row:
    """A row of cache for all tokens of ``prompt`` but the last, which the first step takes.

    Attributes:
        prompt: int32 ``[n]``: the prompt.
        tokens: int32 ``[1, S]``: the prompt, padded.
        done: How many of its tokens the cache has.
        cache: The row's cache.
        drafter_state: The drafter's state after these tokens.
        records: What was recorded of the prompt's tokens by now, in parts, and of how many tokens
            each; None where no request asked.
    """

    prompt: np.ndarray
    tokens: np.ndarray
    done: int
    cache: Any
    drafter_state: Any
    records: list[tuple[PromptRecord, int]] | None = None

    @property
    def left(self) -> int:
        """Tokens that are not in the cache yet."""
        return len(self.prompt) - 1 - self.done


class SlotPrefill:
    """Prefills prompts for the slots of a running batch.

    A *short* prompt, of at most ``chunk + 1`` tokens, is prefilled straight into its slot, where
    there are several in one pass: few tokens take about as long as reading the weights, which they
    share. Requests with equal prompts share a row of the pass. Any other prompt is prefilled in
    pieces of at most ``chunk`` tokens in a row of cache of its own, which is then copied to a slot,
    and to those of the requests with the same prompt that follow. So are all prompts on a mesh, all
    whose policy stores keys in the host's memory, and those after a shared prefix, which start from
    a copy of its row.

    Such a prompt also starts from a row that has `SHARED` of its first tokens or more, as those of
    a system prompt or of the earlier turns of a conversation: the row of the last prompt, or a
    slot, even if its request has ended.

    Passes and pieces are padded to one of `pass_sizes`, so that few programs serve all prompts.

    With ``exact="tokens"`` all prompts are prefilled piece by piece, and start from whole pieces of
    other prompts alone: the shapes of the passes over a prompt follow from its length.

    Args:
        options: Options of decoding.
        slots: Slots of the batch.
        capacity: Positions of a slot.
        chunk: Most tokens of a pass over several prompts, or of a piece, padding included.
        programs: Runs the jitted functions.
        prompt_logprobs: How many of the likeliest tokens are scored with each token of a prompt
            whose request asks for log-probabilities; None where none does.
        routed_experts: Whether experts are recorded of prompts whose request asks for them.
        cache_blocks: Blocks of the batch's cache; None where each slot has its own memory.

    Attributes:
        options: The same.
        pass_tokens: Most tokens of a pass over several prompts, padding included.
        chunk: Most tokens of one prompt in a pass or piece.
        current_row: The row of the prompt that is being prefilled.
        texts: The texts of the slots.
    """

    current_row: Row

    def __init__(
        self,
        options: ResolvedOptions,
        slots: int,
        capacity: int,
        chunk: int,
        programs: Timed,
        prompt_logprobs: int | None = None,
        routed_experts: bool = False,
        cache_blocks: int | None = None,
    ) -> None:
        self.options, self._programs = options, programs
        self._cache_blocks = cache_blocks
        self._recorded: dict[str, Any] = {
            "prompt_logprobs": prompt_logprobs,
            "routed_experts": routed_experts,
        }
        self._slots, self._capacity = slots, capacity
        is_alone = options.config.exact == "tokens"
        self.pass_tokens = chunk
        self.chunk = chunk if is_alone else min(chunk, capacity)
        sizes = pass_sizes(chunk, BUSY_PASS if is_alone else SHORTEST_PASS)
        self._sizes = sorted({min(size, self.chunk) for size in sizes})
        self._sharding = placing_of(options.models)
        storage = options.config.cache_policy.storage
        self._has_passes = not (is_on_mesh(options.models) or storage is not None or is_alone)
        self._prefixes: dict[tuple[int, ...], Row] = {}
        self.current_row = self._fresh_row(np.zeros(1, np.int32))
        cache = self.current_row.cache
        # A prompt starts from a multiple of so many tokens of another one.
        self._unit = math.lcm(cache.page, self.chunk) if is_alone else cache.page
        self.texts = SlotTexts(self._unit, only_prefilled=options.config.is_lossy or is_alone)
        # Rings have lost the first positions, and host memory is copied layer by layer.
        wraps = any(layout.wraps for layout in cache.layouts)
        self._finds_prefixes = storage is None and not wraps
        self._forget_row()

    def restore(self) -> None:
        """Make a row of cache for prompts, where there is none."""
        self.current_row = self._fresh_row(np.zeros(1, np.int32))
        self._forget_row()

    def release(self) -> None:
        """Free the memory of the device, shared prefixes included, until `restore`."""
        self.flush()
        del self.current_row

    def flush(self) -> None:
        """Forget what was prefilled: shared prefixes, and the texts of all rows."""
        self._prefixes.clear()
        self._forget_row()
        self.texts.clear()

    def started(self) -> DecodeState:
        """A batch whose slots have prompts of one token."""
        return self._started(self._slots, self._cache_blocks)

    def _started(self, rows: int, blocks: int | None = None) -> DecodeState:
        options = self.options
        return start_empty(
            *(options.models, rows, options.config, self._capacity),
            cache_dtype=options.cache_dtype,
            run=self._programs,
            processors=options.processors,
            blocks=blocks,
        )

    def completion_of(self, state: DecodeState, row: Row) -> Array:
        """A new array to wait for, which is ready once ``state`` and ``row`` are."""
        return self._programs(sum_of, state.done, row.cache.lengths)

    def warmed(self, state: DecodeState) -> DecodeState:
        """``state``, which is donated, with every program compiled.

        All rows of it must be free, and no prompt in prefill.
        """
        self.current_row = self._begun(np.zeros(1, np.int32), self.current_row.cache, None, 0)
        records = [None] if self._recorded == NOTHING else [None, []]
        every_selects = {False, self.options.config.selects_in_prefill}
        for size, selects, of_row in itertools.product(self._sizes, every_selects, records):
            self.current_row.records = of_row
            self._pass(self.current_row, size, selects)
        state = self.insert(state, 0, IDLE)
        if self._finds_prefixes:
            self.current_row.cache = self._placed("cache", self._copy_of(state, 0))
            self._sync_drafter(self.current_row, 1)
        if self._has_passes:
            for size in self._sizes:
                for rows in {1, self._max_rows(size)}:
                    state = self.fill(state, rows, size, (), ())
        self.completion_of(state, self.current_row)
        self.flush()
        return state

    # --- short prompts ----------------------------------------------------------------------------

    def is_short(self, prompt: np.ndarray) -> bool:
        """Whether `fill` can prefill the prompt."""
        fits = self._has_passes and len(prompt) - 1 <= self.chunk
        return fits and self._longest_prefix(prompt) is None

    def group(self, prompts: Sequence[np.ndarray]) -> tuple[int, int, int]:
        """How many of the first ``prompts``, which are short, go into one pass.

        Also the rows of that pass, and the tokens of a row, padding included.
        """
        different: set[bytes] = set()
        count, size = 0, 0
        for prompt in prompts[:MAX_REQUESTS]:
            wider = max(size, next(x for x in self._sizes if len(prompt) - 1 <= x))
            more = different | {prompt.tobytes()}
            if count and len(more) > self._max_rows(wider):
                break
            count, size, different = count + 1, wider, more
        return count, 1 if len(different) == 1 else self._max_rows(size), size

    def fill(
        self,
        state: DecodeState,
        rows: int,
        size: int,
        slots: Sequence[int],
        requests: Sequence[Request],
    ) -> DecodeState:
        """``state``, which is donated, with ``requests`` in ``slots``, by one pass.

        ``rows``, ``size``: of the pass, as `group` says; the prompts must be short.
        """
        self.texts.fill(slots, requests)
        prompts = [request._known.tobytes() for request in requests]
        # One of each prompt comes first: those are the rows of the pass.
        order = sorted(range(len(prompts)), key=lambda at: prompts.index(prompts[at]) < at)
        missing = min(MAX_REQUESTS, self._slots) - len(requests)
        requests = [*(requests[at] for at in order), *[IDLE] * missing]
        slots = [*(slots[at] for at in order), *[self._slots] * missing]  # past the end: nowhere
        cache = dataclasses.replace(state.cache, columns=(), pages=(), table=None)
        packed = self._packed(state, slots, requests, cache, None)
        static = {"rows": rows, "size": size, "config": self.options.config}
        return self._programs(prefill_slots, self.options.flat, state, packed, **static)

    def _max_rows(self, size: int) -> int:
        """Rows of a pass over several prompts of ``size`` tokens each."""
        return min(MAX_ROWS, self._slots, self.pass_tokens // size)

    # --- others, piece by piece -------------------------------------------------------------------

    def begin(self, prompt: np.ndarray, state: DecodeState, *, records: bool = False) -> int:
        """Begin to prefill ``prompt``, in place of any other, or go on where the row has it.

        ``state``: the batch, whose slots may have its first tokens. ``records``: whether all tokens
        of the prompt are recorded, and so prefilled, whatever rows have. Returns how many of its
        tokens are not in the row yet, the last one included.
        """
        row, drafter_state = self.current_row, None
        if np.array_equal(prompt, row.prompt) and not (records and row.records is None):
            return len(prompt) - row.done
        if records:
            self.current_row = self._begun(prompt, row.cache, None, 0)
            empty = empty_record(self.options.models, (1, 0), **self._recorded)
            self.current_row.records = [(empty, 0)]
            return len(prompt)
        # How many of its tokens there are: in a shared prefix, in a slot, and in the row itself.
        prefix = self._longest_prefix(prompt)
        in_prefix = 0 if prefix is None else prefix.done
        slot = in_slot = in_row = 0
        if self.options.config.exact == "tokens":
            in_prefix -= in_prefix % self._unit
        if self._finds_prefixes:
            slot, in_slot = self.texts.slot_with(prompt)
            in_row = self.texts.shared_tokens(prompt, row.prompt[: row.done])
        done = max(in_prefix, in_row, in_slot)
        if prefix is not None and in_prefix and done == in_prefix:
            row.cache = row.drafter_state = None  # freed before there is another
            row.cache, drafter_state = jax.tree.map(
                lambda x: jax.device_put(x, x.sharding, may_alias=False),
                (prefix.cache, prefix.drafter_state if done == prefix.done else None),
            )
        elif done > in_row:
            row.cache = row.drafter_state = None
            row.cache = self._copy_of(state, slot)
        self.current_row = self._begun(prompt, row.cache, drafter_state, done)
        if done and drafter_state is None:
            self._sync_drafter(self.current_row, done)
        return len(prompt) - done

    def piece_of(self, row: Row) -> int:
        """Tokens of the next piece of a row, padding included."""
        return pass_size(row.left, self._sizes)

    def advance(self, row: Row) -> None:
        """Prefill the next piece of a row."""
        size = self.piece_of(row)
        selects = self.options.config.selects_in_prefill and row.left <= size
        self._pass(row, size, selects)
        row.done = min(row.done + size, len(row.prompt) - 1)

    def insert(self, state: DecodeState, slot: int, request: Request) -> DecodeState:
        """``state``, which is donated, with ``request``, whose prompt the row has, in ``slot``."""
        row = self.current_row
        self.texts.fill([slot], [request])
        if request._needs_prompt_record:
            request._prompt_record = row.records
        packed = self._packed(state, [slot], [request], row.cache, row.drafter_state)
        return insert_row(state, packed, slot, self._programs)

    # --- prefixes ---------------------------------------------------------------------------------

    def has(self, tokens: np.ndarray) -> bool:
        """Whether ``tokens`` are a shared prefix."""
        return tuple(tokens.tolist()) in self._prefixes

    def prefix(self, tokens: np.ndarray) -> Row:
        """A row for a prefix, to be filled by `advance`."""
        return self._fresh_row(np.append(tokens, tokens[:1]))

    def share(self, row: Row) -> None:
        """Share a complete prefix with all later prompts that begin with it."""
        self._prefixes[tuple(row.prompt[:-1].tolist())] = row

    def drop(self, tokens: np.ndarray) -> bool:
        """Free a prefix; False where these tokens are none."""
        return self._prefixes.pop(tuple(tokens.tolist()), None) is not None

    def beginnings(self, slots: Sequence[int], requests: Sequence[Request]) -> list[Beginning]:
        """What each of ``requests`` that fill ``slots`` begins with that a slot has."""
        if self._cache_blocks is None or not self._finds_prefixes:
            return [Beginning()] * len(slots)
        first: dict[bytes, int] = {}
        beginnings = []
        for slot, request in zip(slots, requests, strict=True):
            prompt = request._known
            equal = first.setdefault(prompt.tobytes(), slot)
            if equal == slot:
                beginnings.append(Beginning(*self.texts.slot_with(prompt)))
            else:
                beginnings.append(Beginning(equal, len(prompt) - 1, is_new=True))
        return beginnings

    def _longest_prefix(self, prompt: np.ndarray) -> Row | None:
        """The longest shared prefix that the prompt begins with."""
        fitting = [
            prefix
            for prefix in self._prefixes.values()
            if prefix.done < len(prompt)
            and np.array_equal(prompt[: prefix.done], prefix.prompt[: prefix.done])
        ]
        return max(fitting, key=lambda prefix: prefix.done, default=None)

    def _copy_of(self, state: DecodeState, slot: int) -> Cache:
        return self._programs(row_of, state.cache, np.int32(slot))

    def _sync_drafter(self, row: Row, count: int) -> None:
        """Bring the drafter's state, which is empty, to the first ``count`` tokens of ``row``."""
        if not jax.tree.leaves(row.drafter_state):
            return
        lengths, static = np.array([count], np.int32), {"config": self.options.config}
        for _ in range(0, count, self.chunk):
            args = (self.options.flat, row.drafter_state, row.tokens, lengths)
            after = self._programs(synced_drafter, *args, **static, max_tokens=self.chunk)
            row.drafter_state = self._placed("draft", after)

    # --- rows -------------------------------------------------------------------------------------

    def _packed(
        self,
        state: DecodeState,
        slots: Sequence[int],
        requests: Sequence[Request],
        cache: Cache,
        drafter_state: Any,
    ) -> PackedRows:
        """``requests`` for ``slots`` of ``state``, packed."""
        return packed_rows(
            state,
            slots,
            [request._known for request in requests],
            [request.params for request in requests],
            self.options.models.target.config.stop_tokens,
            cache,
            drafter_state,
            [request.prompt_tokens for request in requests],
        )

    def _forget_row(self) -> None:
        """The row has nothing of any prompt."""
        self.current_row.prompt = np.zeros(0, np.int32)

    def _fresh_row(self, prompt: np.ndarray) -> Row:
        """A row with memory of its own, for ``prompt``."""
        cache = self._started(1).cache
        return self._begun(prompt, cache, None, 0)

    def _begun(self, prompt: np.ndarray, cache: Any, drafter_state: Any, done: int) -> Row:
        """A row for ``prompt``, of which ``cache`` has the first ``done`` tokens.

        ``drafter_state``: the drafter's state after these, None where there are none.
        """
        capacity = self._capacity
        if drafter_state is None:
            static = {"config": self.options.config, "batch": 1, "capacity": capacity}
            drafter_state = self._programs(init_drafter_state, self.options.flat, **static)
        drafter_state = self._placed("draft", drafter_state)
        tokens, lengths = padded([prompt], capacity)
        cache = self._placed("cache", cache.with_lengths(jax.device_put(lengths - 1)))
        return Row(prompt, tokens, done, cache, drafter_state)

    def _pass(self, row: Row, size: int, selects: bool) -> None:
        """A pass of the next ``size`` tokens of the prompt, padding included.

        ``selects``: as `prefill_chunk` takes it.
        """
        args = (self.options.flat, row.cache, row.drafter_state, row.tokens, np.int32(row.done))
        static = {"config": self.options.config, "size": size, "selects": selects}
        static |= NOTHING if row.records is None else self._recorded
        row.cache, row.drafter_state, record = self._programs(prefill_chunk, *args, **static)
        if row.records is not None:
            row.records.append((record, min(size, row.left)))

    def _placed(self, name: str, tree: Any) -> Any:
        return tree if self._sharding is None else place({name: tree}, self._sharding)[name]
