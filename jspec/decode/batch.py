"""The batch of an engine: requests that decode side by side, a chunk of steps at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jspec.config import SamplingMode
from jspec.decode.checks import MODES, strongest
from jspec.decode.chunks import Chunk, Chunks, counts_of
from jspec.decode.request import Request
from jspec.decode.state import DecodeState, StepRecord
from jspec.decode.stats import Tally, clip_records
from jspec.sharding import put

RESTING: SamplingMode = "greedy"  # the state's mode between chunks, so that one program fills slots


@dataclasses.dataclass
class Running:
    """A chunk that runs.

    ``rows``: the request of each slot in it, None where its tokens are dropped; ``record``: set
    once it has been read.
    """

    chunk: Chunk
    rows: list[Request | None]
    record: StepRecord | None = None


class Batch:
    """Requests in the slots of ``state``, all of which are free at first.

    The next chunk may run while one is read. It has rows that ended in the first one: those that
    the device ended commit nothing in it, and what it commits for those that the caller ended is
    dropped. Slots may be filled after the running chunk, in the order of the device.
    """

    def __init__(self, chunks: Chunks, state: DecodeState) -> None:
        self._chunks = chunks
        self.tally = Tally(chunks.options.config.gamma)
        slots = state.tokens.shape[0]
        self.rows: list[Request | None] = [None] * slots
        self._is_done = np.ones(slots, bool)  # on the device, after the chunks that were read
        self.state = dataclasses.replace(_with_done(state, self._is_done), mode=RESTING)
        self._at_work: list[Running] = []  # two at most

    @property
    def free(self) -> list[int]:
        """Slots that may be filled: without a request, or with one that ends in a running chunk."""
        return [
            slot
            for slot, request in enumerate(self.rows)
            if request is None or request._left <= self._least(slot, request)
        ]

    @property
    def requests(self) -> set[Request]:
        """Requests that have not ended yet."""
        every = [self.rows, *(running.rows for running in self._at_work)]
        return {request for rows in every for request in rows if request is not None}

    @property
    def busy(self) -> bool:
        """Whether a request has not ended yet."""
        return bool(self.requests)

    def warm(self) -> None:
        """Compile the steps of all modes. All slots must be free."""
        state = _with_done(self.state, np.ones(len(self.rows), bool))
        for mode in MODES:
            state = self._chunks.warmed(dataclasses.replace(state, mode=mode))
        self.state = dataclasses.replace(state, mode=RESTING)

    def fill(self, state: DecodeState, slots: Sequence[int], requests: Sequence[Request]) -> None:
        """Continue with ``state``, in which the prompts of ``requests`` are in ``slots``."""
        self.state = state
        for slot, request in zip(slots, requests, strict=True):
            self.rows[slot], self._is_done[slot] = request, False
        self._chunks.renew(list(slots))

    def remove(self, request: Request) -> None:
        """Free the slot of a request, and drop what running chunks decode for it."""
        for rows in (self.rows, *(running.rows for running in self._at_work)):
            rows[:] = [None if row is request else row for row in rows]

    def decode(self, *, waiting: bool) -> tuple[Request, ...]:
        """Run a chunk of steps, if there is a request; returns the requests that it ended.

        ``waiting``: whether other requests wait for slots.
        """
        if not self._at_work:
            if not self.busy:
                self._chunks.wait_for_prompts()
                return ()
            self._start()
        if self._looks_ahead(waiting):
            self._start()
        return self._read()

    def _read(self) -> tuple[Request, ...]:
        """Pass on the tokens of the earliest running chunk; returns the requests that it ended."""
        running = self._at_work[0]
        record = self._record_of(running)
        done = record.done[-1]
        others = [slot for slot in range(len(self.rows)) if slot not in running.chunk.filled]
        self._is_done[others] = done[others]
        token_counts = np.zeros(len(self.rows), np.int64)
        live = [(slot, request) for slot, request in enumerate(running.rows) if request is not None]
        for slot, request in live:
            block = record.tokens[:, slot]
            new = tuple(block[block >= 0].tolist())
            token_counts[slot] = request._take(new, is_last=bool(done[slot]))
        self._at_work.pop(0)
        *counts, gammas = counts_of(record)
        self.tally.add(*clip_records(*counts, token_counts=token_counts), gammas=gammas)
        ended = tuple(request for _, request in live if request.finished is not None)
        for request in ended:
            self.remove(request)
        return ended

    def settle(self) -> None:
        """Wait for the running chunks; `_read` passes on their tokens later."""
        for running in self._at_work:
            self._record_of(running)

    def resume(self) -> None:
        """Keep the caller's time since the last step out of that of a chunk that had ended."""
        for running in self._at_work:
            if running.record is None:
                self._chunks.resume(running.chunk)

    def close(self) -> None:
        """Free the slots and the memory of the device."""
        self.rows = [None] * len(self.rows)
        self._at_work.clear()
        del self.state

    def _start(self) -> None:
        """Give the device a chunk of steps."""
        mode = strongest([request.params.mode for request in self.rows if request is not None])
        state = dataclasses.replace(self.state, mode=mode)
        if (idle := self._idle()) is not None:
            state, self._is_done = _with_done(state, idle), idle
        state, chunk = self._chunks.start(state, self._left())
        self.state = dataclasses.replace(state, mode=RESTING)
        self._at_work.append(Running(chunk, list(self.rows)))

    def _looks_ahead(self, waiting: bool) -> bool:
        """Whether to start the next chunk before the running one is read.

        Not while the device must be told of rows that the caller ended: it is unknown which other
        rows end in the running chunk.
        """
        if self._idle() is not None:
            return False
        left = self._left()
        # Slots that were filled after the running chunk begin with the next one.
        left[list(self._at_work[0].chunk.filled)] = np.iinfo(left.dtype).max
        return self._chunks.looks_ahead(left, waiting=waiting)

    def _left(self) -> np.ndarray:
        """Most tokens that the request in each slot can still get after those read, int ``[B]``."""
        return np.array([0 if request is None else request._left for request in self.rows])

    def _least(self, slot: int, request: Request) -> int:
        """Tokens that running chunks decode for a request at least: one per step, or to its end."""
        chunks = sum(running.rows[slot] is request for running in self._at_work)
        return chunks * self._chunks.options.steps

    def _idle(self) -> np.ndarray | None:
        """Slots without a request, bool ``[B]``; None where the device has the same."""
        idle = np.array([request is None for request in self.rows])
        return idle if (idle != self._is_done).any() else None

    def _record_of(self, running: Running) -> StepRecord:
        """The record of the earliest running chunk; waits for it once."""
        if running.record is None:
            running.record = self._chunks.finish(running.chunk)
        return running.record


def _with_done(state: DecodeState, done: np.ndarray) -> DecodeState:
    """``state`` with the rows ``done [B]`` ended, and the others not."""
    # A copy: an array on a CPU may share memory with what it was made of.
    return dataclasses.replace(state, done=put(done.copy(), state.done.sharding))
