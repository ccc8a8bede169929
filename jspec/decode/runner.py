"""The host loop: requests in the slots of a batch, which decodes by chunks of steps."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np

from jspec.cache.layout import BLOCK
from jspec.config import SamplingMode, SamplingParams
from jspec.decode.blocks import Beginning, Blocks, blocks_of
from jspec.decode.checks import MODES, strongest
from jspec.decode.chunks import Chunks
from jspec.decode.on_mesh import agreed
from jspec.decode.options import ResolvedOptions
from jspec.decode.prefill import rounded_capacity
from jspec.decode.programs import OnCompile
from jspec.decode.request import Request
from jspec.decode.rows import grow_capacity
from jspec.decode.state import DecodeState, StepRecord
from jspec.decode.stats import Stats, Tally
from jspec.sharding import put


@contextlib.contextmanager
def memory_errors(size: str, way_out: str) -> Iterator[None]:
    """A context in which a device without memory for ``size`` raises `MemoryError`."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        raise MemoryError(
            f"the device is out of memory with {size}; {way_out}, or pass cache_dtype='bfloat16'"
        ) from error


class Runner:
    """Decodes the requests in the slots of ``state``, a chunk of steps at a time.

    The next chunk may run while one is read. It has rows that ended in the first one: those that
    the device ended commit nothing in it, and what it commits for those that the caller ended is
    dropped. Slots may be filled after the running chunk, in the order of the device.

    Args:
        options: Options of decoding.
        count: Slots.
        on_compile: As in `jspec.generate`.
        logprobs: How many of the likeliest tokens a chunk scores where a request asks for
            log-probabilities; None where none does.
        together: Whether all requests begin together and are one call of `jspec.generate`: the call
            ends with the last of them, and an error of a callback ends all.

    Attributes:
        state: The batch after all chunks that were started; whoever makes the runner sets it. Its
            mode serves at least the requests without sampling, and a chunk takes a stronger one
            where requests need it.
        slots: The request of each slot, None for a free one.
        chunks: Runs the chunks.
        blocks: The blocks of the slots; None where each slot has memory of its own.
    """

    state: DecodeState
    blocks: Blocks | None = None

    def __init__(
        self,
        options: ResolvedOptions,
        count: int,
        on_compile: OnCompile | None = None,
        *,
        logprobs: int | None = None,
        together: bool = False,
    ) -> None:
        self.slots: list[Request | None] = [None] * count
        self.chunks = Chunks(options, count, on_compile, together=together)
        self._logprobs = logprobs
        self._tally = Tally(options.config.gamma)
        self._is_done = np.zeros(count, bool)  # on the device, after the chunks that were read

    @property
    def free(self) -> list[int]:
        """Slots that may be filled: without a request, or with one that ends in a running chunk."""
        return [
            slot
            for slot, request in enumerate(self.slots)
            if request is None or request._left <= self._least(slot, request)
        ]

    @property
    def requests(self) -> set[Request]:
        """Requests that have not ended yet."""
        every = [self.slots, *(chunk.requests for chunk in self.chunks.running)]
        return {request for slots in every for request in slots if request is not None}

    @property
    def busy(self) -> bool:
        """Whether a request has not ended yet."""
        return bool(self.requests)

    def stats(self, rows: int, prompt_tokens: int) -> Stats:
        """Statistics of so many requests and prompt tokens, and of all tokens so far."""
        return self._tally.stats(
            rows=rows,
            prompt_tokens=prompt_tokens,
            compilations=self.chunks.programs.compilations,
            compile_s=self.chunks.programs.compile_s,
            **self.chunks.seconds,
        )

    def warm(self, params: Sequence[SamplingParams] | None = None) -> None:
        """Compile the steps that requests with any of ``params`` need, None for any settings.

        All slots must be free.
        """
        modes, counts = set(MODES), {None, self._logprobs}
        if params is not None:
            modes = {strongest([self.state.mode, x.mode]) for x in params}
            counts = counts if any(x.logprobs is not None for x in params) else {None}
        state = _with_done(self.state, np.ones(len(self.slots), bool))
        for mode, logprobs in itertools.product(sorted(modes), counts):
            state = self.chunks.warmed(dataclasses.replace(state, mode=mode, logprobs=logprobs))
        self.state = dataclasses.replace(state, mode=self.state.mode, logprobs=None)
        self._is_done[:] = True

    def fill(self, state: DecodeState, slots: Sequence[int], requests: Sequence[Request]) -> None:
        """Continue with ``state``, in which the prompts of ``requests`` are in ``slots``."""
        self.state = state if self.blocks is None else self.blocks.placed(state)
        for slot, request in zip(slots, requests, strict=True):
            self.slots[slot], self._is_done[slot] = request, False
        self.chunks.renew(list(slots))

    # --- blocks -----------------------------------------------------------------------------------

    def make_room(self) -> list[Request]:
        """Free slots until there are blocks for the others' next chunk, where no chunk runs.

        Those that were filled last are freed. A request that is alone always has enough. Returns
        the requests that lost their slots, the one first that had its slot longest.
        """
        removed: list[Request] = []
        if self.blocks is None or self.chunks.running:
            return removed
        while self._missing_blocks(1) > self.blocks.unused(self.free):
            slot = self.blocks.newest(
                {x for x, other in enumerate(self.slots) if other is not None}
            )
            request = self.slots[slot]
            assert request is not None
            removed.insert(0, request)
            self.remove(request)
        return removed

    def fitting(self, requests: Sequence[Request], beginnings: Sequence[Beginning]) -> int:
        """For how many of the first ``requests`` there are blocks up to their first chunk's end.

        Blocks that those in slots need in their next chunk do not count. ``beginnings``: of the
        text of each.
        """
        if self.blocks is None:
            return len(requests)
        free = set(self.free)
        room = self.blocks.unused(free) - self._missing_blocks(len(self.chunks.running) + 1)
        for count, (request, beginning) in enumerate(zip(requests, beginnings, strict=True)):
            room -= blocks_of(self._positions(request, 1))
            if beginning.is_new or beginning.slot not in free:
                room += beginning.tokens // BLOCK
            if room < 0:
                return count
        return len(requests)

    def reserve(
        self, slots: Sequence[int], requests: Sequence[Request], beginnings: Sequence[Beginning]
    ) -> None:
        """Reserve blocks for ``requests``, which are `fitting`, before they fill ``slots``.

        ``beginnings``: of the text of each.
        """
        if self.blocks is None:
            return
        positions = [self._positions(request, 1) for request in requests]
        self.blocks.fill(slots, positions, beginnings, {*self.free} - {*slots})
        self.state = self.blocks.placed(self.state, hiding=True)

    def _positions(self, request: Request, chunks: float) -> int:
        """Positions of a request after so many chunks more than were read, at most."""
        options = self.chunks.options
        new = chunks * options.steps * (options.config.gamma + 1)
        return request._length + int(min(new, request._left))

    def _missing_blocks(self, chunks: int) -> int:
        """Blocks that requests in slots lack for so many chunks more than were read."""
        assert self.blocks is not None
        return sum(
            self.blocks.missing(slot, positions)
            for slot, positions in self._growing(chunks).items()
        )

    def _growing(self, chunks: int) -> dict[int, int]:
        """The slots whose requests do not end in a running chunk, and their positions after it.

        ``chunks`` as in `_positions`.
        """
        free = set(self.free)
        return {
            slot: self._positions(request, chunks)
            for slot, request in enumerate(self.slots)
            if request is not None and slot not in free
        }

    def _reserve_chunk(self) -> None:
        """Reserve the blocks of the next chunk, of which there are enough."""
        if self.blocks is None:
            return
        idle = set(self.free)
        for slot, positions in self._growing(len(self.chunks.running) + 1).items():
            self.blocks.reserve(slot, positions, idle)
        self.state = self.blocks.placed(self.state)

    def remove(self, *requests: Request) -> None:
        """Free the slots of requests, and drop what running chunks decode for them."""
        removed = set(requests)
        for slots in (self.slots, *(chunk.requests for chunk in self.chunks.running)):
            slots[:] = [None if other in removed else other for other in slots]

    def preempt(self) -> list[Request]:
        """Free all slots; returns the requests that were in them, slot by slot.

        What running chunks decode for them is dropped.
        """
        every = [self.slots, *(chunk.requests for chunk in self.chunks.running)]
        requests = [x for slots in every for x in slots if x is not None]
        requests = list(dict.fromkeys(requests))
        self.remove(*requests)
        return requests

    def decode(self, *, waiting: bool = False, fills: bool = False) -> tuple[Request, ...]:
        """Run a chunk of steps, if there is a request; returns the requests that it ended.

        ``waiting``: whether other requests wait for slots. ``fills``: whether one of them may fill
        a free slot before the next chunk, and waits for no blocks.
        """
        if not self.chunks.running:
            if not self.busy:
                self.chunks.wait_for_prompts()
                return ()
            self._start()
        if self._looks_ahead(waiting, fills):
            self._start()
        return self._read()

    def close(self) -> None:
        """Free the slots and the memory of the device."""
        self.slots = [None] * len(self.slots)
        self.chunks.running.clear()
        del self.state

    def reset(self, state: DecodeState) -> None:
        """Begin again with ``state``, none of whose rows has ended. All slots must be free."""
        self.state = state
        self._is_done[:] = False

    # --- chunks -----------------------------------------------------------------------------------

    def _start(self) -> None:
        """Give the device a chunk of steps, with room for all that it may commit."""
        self._reserve_chunk()
        mode = self.state.mode
        modes: list[SamplingMode] = [x.params.mode for x in self.slots if x is not None]
        asked = any(x is not None and x.params.logprobs is not None for x in self.slots)
        state = dataclasses.replace(
            self.state,
            mode=strongest([mode, *modes]),
            logprobs=self._logprobs if asked else None,
        )
        if (idle := self._idle()) is not None:
            state, self._is_done = _with_done(state, idle), idle
        capacity = state.tokens.shape[1]
        if (reach := self._reach(1)) > capacity:
            capacity = rounded_capacity(min(max(reach, 2 * capacity), self._reach(math.inf)))
            state = grow_capacity(state, capacity, self.chunks.options.config)
        state, chunk = self.chunks.start(state, self._left())
        chunk.requests = list(self.slots)
        self.state = dataclasses.replace(state, mode=mode, logprobs=None)

    def _looks_ahead(self, waiting: bool, fills: bool) -> bool:
        """Whether to start the next chunk before the running one is read.

        Not while the device must be told of rows that the caller ended: it is unknown which other
        rows end in the running chunk. Nor where both chunks together need more capacity.
        """
        if self._idle() is not None or self._reach(2) > self.state.tokens.shape[1]:
            return False
        if self.blocks is not None and self._missing_blocks(2) > self.blocks.unused(self.free):
            return False
        left = self._left()
        # Slots that were filled after the running chunk begin with the next one.
        left[list(self.chunks.running[0].filled)] = np.iinfo(left.dtype).max
        return self.chunks.looks_ahead(left, waiting=waiting, fills=fills)

    def _left(self) -> np.ndarray:
        """Most tokens that the request in each slot can still get after those read, int ``[B]``."""
        return np.array([0 if request is None else request._left for request in self.slots])

    def _least(self, slot: int, request: Request) -> int:
        """Tokens that running chunks decode for a request at least: one per step, or to its end."""
        chunks = sum(chunk.requests[slot] is request for chunk in self.chunks.running)
        return chunks * self.chunks.options.steps

    def _reach(self, chunks: float) -> int:
        """Positions of the longest row after so many chunks more than were read, at most."""
        requests = (request for request in self.slots if request is not None)
        return max((self._positions(x, chunks) for x in requests), default=0)

    def _idle(self) -> np.ndarray | None:
        """Slots without a request, bool ``[B]``; None where the device has the same."""
        idle = np.array([request is None for request in self.slots])
        return idle if (idle != self._is_done).any() else None

    # --- tokens -----------------------------------------------------------------------------------

    def _read(self) -> tuple[Request, ...]:
        """Pass on the tokens of the earliest running chunk; returns the requests that it ended."""
        chunk = self.chunks.running[0]
        record = self.chunks.finish(chunk)
        others = [slot for slot in range(len(self.slots)) if slot not in chunk.filled]
        self._is_done[others] = record.done[-1][others]
        live = {slot: request for slot, request in enumerate(chunk.requests) if request is not None}
        for request in live.values():
            request._version = chunk.version
        before, after = np.zeros((2, len(self.slots)), np.int64)
        before[[*live]] = [len(request._tokens) for request in live.values()]
        try:
            self._pass_on(live, record)
        finally:  # an exception of a callback leaves the tokens of the requests before it
            after[[*live]] = [len(request._tokens) for request in live.values()]
            steps = self._tally.add(record, after - before)
            for slot, request in live.items():
                request.steps += int(steps[slot])
        self.chunks.running.pop(0)
        ended = tuple(request for request in live.values() if request.finished is not None)
        self.remove(*ended)
        return ended

    def _pass_on(self, live: dict[int, Request], record: StepRecord) -> None:
        """Give each live request its new tokens, up to where its callback ends it."""
        done = record.done[-1]
        by_slot = np.swapaxes(record.tokens, 0, 1)
        new_tokens = {slot: tuple(x[x >= 0].tolist()) for slot, x in enumerate(by_slot)}
        self._pass_on_scores(live, record)
        answers: Iterable[int | None] = (
            self._ask(request, new_tokens[slot]) for slot, request in live.items()
        )
        may_differ = self.chunks.together and self.chunks.is_shared
        if may_differ and any(request._on_tokens for request in live.values()):
            answers = agreed(list(answers))  # those of process 0
        for (slot, request), keep_count in zip(live.items(), answers, strict=True):
            if request.finished is None:
                request._take(new_tokens[slot], keep_count, is_last=bool(done[slot]))

    def _pass_on_scores(self, live: dict[int, Request], record: StepRecord) -> None:
        """Give each live request what it asked for of its new tokens."""
        asking = {
            slot: (x.params.logprobs is not None, x.params.routed_experts)
            for slot, x in live.items()
        }
        if not any(map(any, asking.values())):
            return
        is_token = np.swapaxes(record.tokens, 0, 1) >= 0
        ends = [0, *np.cumsum(is_token.sum(axis=(1, 2))).tolist()]

        both = record.logprobs, record.routed_experts
        leaves, trees = zip(*map(jax.tree.flatten, both), strict=True)
        of_tokens = [[np.swapaxes(x, 0, 1)[is_token] for x in arrays] for arrays in leaves]
        for slot, asked in asking.items():
            if any(asked):
                place = slice(*ends[slot : slot + 2])
                # Copies: a view would hold the arrays of all slots.
                live[slot]._new_scores = tuple(
                    tree.unflatten([x[place].copy() for x in arrays]) if is_asked else None
                    for is_asked, tree, arrays in zip(asked, trees, of_tokens, strict=True)
                )

    def _ask(self, request: Request, new: tuple[int, ...]) -> int | None:
        """As `Request._ask`; in an engine, what the callback raises is the request's ``error``."""
        if request.finished is not None:  # cancelled by a callback of this chunk
            return None
        try:
            return request._ask(new)
        except Exception as error:
            if self.chunks.together:
                raise
            if request.finished is None:
                request.error = error
            return None


def _with_done(state: DecodeState, done: np.ndarray) -> DecodeState:
    """``state`` with the rows ``done [B]`` ended, and the others not."""
    # A copy: an array on a CPU may share memory with what it was made of.
    return dataclasses.replace(state, done=put(done.copy(), state.done.sharding))
