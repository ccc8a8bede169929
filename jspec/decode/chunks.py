"""Chunks of steps as the host runs them: timed, each with the gamma that was chosen for it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from jspec.decode.auto import GammaChoice, RowAcceptance, choice_of
from jspec.decode.on_mesh import agreed, is_shared
from jspec.decode.options import ResolvedOptions
from jspec.decode.programs import PROGRAMS, OnCompile
from jspec.decode.request import Request
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState, StepRecord
from jspec.decode.step import decode_chunk, sync_drafter
from jspec.processes import steps_are_limited
from jspec.typing import Array

# Least seconds that the host is taken to need between two chunks, about what one row of a small
# model takes: the GPU waits for so long where the next chunk starts once the last one is read.
HOST_SECONDS = 0.002
# An engine runs ahead where a chunk takes less than so many times the seconds of the host: a
# request that is submitted meanwhile waits for both chunks.
MAX_CHUNK_RATIO = 10
SYNC_TOKENS = 64  # tokens per pass of a drafter with a model that is synced after plain steps
LATELY = 16  # chunks over which the share of rows that end is averaged


class Prompts(NamedTuple):
    """Prompts that were given to the device at ``begin``; ``ready`` is an array made after them."""

    ready: Array
    begin: float


@dataclasses.dataclass
class Chunk:
    """A chunk of steps that was given to the device.

    Attributes:
        record: Its record, still on the device.
        gamma: Most draft tokens of its steps.
        choice: What chose the gamma, None where it is fixed.
        begin: When it was given to the device.
        compiled: Seconds of compiling by then.
        prompts: The prompts before it, None without any.
        filled: Rows that other requests fill after it, so that none of them idles.
        requests: The request of each row in it, None where its tokens are dropped.
        is_timed: Whether it is known when it ended.
        version: The version of the weights that it runs with.
    """

    record: StepRecord
    gamma: int
    choice: GammaChoice | None
    begin: float
    compiled: float
    prompts: Prompts | None = None
    filled: set[int] = dataclasses.field(default_factory=set)
    requests: list[Request | None] = dataclasses.field(default_factory=list)
    is_timed: bool = True
    version: int = 0


class Chunks:
    """Runs chunks of steps of ``options`` over ``count`` rows, each by `start` and `finish`.

    They run in order. The next one may start before the last one is finished: the device then goes
    from one to the other while the host reads. What the device does between two chunks is prefill.

    Attributes:
        programs: Runs the jitted functions, and counts compiling.
        seconds: Seconds of the device in prefill and in steps, without compiling.
        last_s: Seconds of the last finished chunk.
        paces: int32 ``[B]``: tokens that each row commits in a chunk, by the last one.
        together: As in `RowAcceptance`.
        is_shared: Whether several processes share the model.
        running: Chunks that were started, and whose tokens were not passed on; two at most.
        version: How many times the weights were replaced.
    """

    def __init__(
        self,
        options: ResolvedOptions,
        count: int,
        on_compile: OnCompile | None = None,
        *,
        together: bool = False,
    ) -> None:
        self.options, self.together = options, together
        self.programs = PROGRAMS.timed(on_compile)
        self.seconds = {"prefill_s": 0.0, "decode_s": 0.0}
        self.last_s = math.inf
        self.paces = np.zeros(count, np.int32)
        # Moving averages: the share of live rows that end in a chunk, of which one in `LATELY` is
        # the prior, and the seconds from the end of a chunk to the start of the next one.
        self._ending = 1 / LATELY
        self._host_s = 0.0
        self._ended_at: float | None = None  # when a chunk was finished, until another one starts
        self._plain_steps = 0  # since the drafter last drafted
        self.is_shared = is_shared(options.models.target)
        self.running: list[Chunk] = []
        self.version = 0
        longest, branches = options.config.gamma, options.config.draft.traits.branches
        self._acceptance = RowAcceptance(
            *(count, longest, options.steps), together=together, branches=branches
        )
        self._finished = 0.0  # until when the time of the device is in ``seconds``
        self._prompts: Prompts | None = None  # before the next chunk

    def looks_ahead(self, left: np.ndarray, *, waiting: bool = False, fills: bool = False) -> bool:
        """Whether the next chunk is to start before the running one is finished.

        Where that saves more than it wastes: the seconds that the device would wait for the host
        against the expected seconds of a chunk that are wasted. With other requests ``waiting`` for
        rows, these are the share of rows that end in the running chunk, as they idle through the
        next, and of free ones where one of the requests ``fills`` them before the next chunk
        otherwise; without, the probability that all rows end in it. Both are estimated from
        ``left [B]``, the most tokens that each row commits from the running chunk on, and from the
        share of rows that ended in the last chunks, as at stop tokens. An engine whose chunks are
        long does not run ahead: what is submitted next would wait for two. Nor do processes that
        share a model, which would have to agree, nor does a run whose steps have a time limit,
        where each program is waited for.
        """
        if self.is_shared or steps_are_limited():
            return False
        host_s = self._host_seconds()
        if not self.together and self.last_s >= MAX_CHUNK_RATIO * host_s:
            return False
        goes_on = left > self.paces
        if not goes_on.any():
            return False
        if waiting:
            idles = ~goes_on if fills else ~goes_on & (left > 0)
            wasted = max(self._ending, np.mean(idles))
        else:
            wasted = self._ending ** int(goes_on.sum())
        return bool(wasted * self.last_s < host_s)

    @contextlib.contextmanager
    def clock_prefill(self) -> Iterator[None]:
        """Counts the time spent inside as prefill; no chunk may run."""
        begin = self._now()
        try:
            yield
        finally:
            self._add_time("prefill_s", begin)

    def follow(self, prefill: Callable[[], Array]) -> None:
        """Have the next chunk follow prompts.

        ``prefill()`` gives them to the device, and returns an array that is ready when they are.
        """
        begin = self._now() if self._prompts is None else self._prompts.begin
        self._prompts = Prompts(prefill(), begin)

    def wait_for_prompts(self) -> None:
        """Wait for prompts that no chunk follows yet."""
        if self._prompts is not None:
            self._finish_prompts(self._prompts)
            self._prompts = None

    def resume(self, chunk: Chunk) -> None:
        """Call when the caller comes back, who left while only ``chunk`` ran.

        If the chunk ended meanwhile, its time is unknown. Then it counts as long as the one before
        it, at most, and the next one is timed again.
        """
        now = self._now()
        away = now - max(chunk.begin, self._finished)
        if away > self.last_s and _is_ready(chunk.record.packed):
            chunk.begin, chunk.is_timed = now - self.last_s, False
            self.last_s = math.inf

    def renew(self, rows: list[int]) -> None:
        """Other requests fill ``rows``, after all running chunks."""
        for chunk in self.running:
            chunk.filled.update(rows)
        self._acceptance.renew(rows)

    def start(self, state: DecodeState, left: np.ndarray) -> tuple[DecodeState, Chunk]:
        """Give a chunk to the device; returns the state after it, and the chunk.

        ``state`` is donated. ``left`` int ``[B]``: most tokens that each row commits after those
        that were read, 0 where it has ended.
        """
        options, config, choice = self.options, self.options.config, None
        if len(options.configs) > 1:
            configs = options.configs_of(state.mode)
            gamma = min(configs)
            if len(configs) > 1:
                choice = choice_of(options.flat, state, config, tuple(configs))
                gamma = choice.choose(self._acceptance, self._left_after_work(left))
                gamma = agreed(gamma) if self.is_shared else gamma
            config = configs[gamma]
            state = self._with_synced_drafter(state, config)
        prompts, self._prompts = self._prompts, None
        begin = self._now()
        state, record = self._chunk(state, config)
        self._watch_host()
        chunk = Chunk(record, config.gamma, choice, begin, self.programs.compile_s, prompts)
        chunk.version = self.version
        self.running.append(chunk)
        return state, chunk

    def finish(self, chunk: Chunk) -> StepRecord:
        """The record of the earliest running chunk, copied to the host: all that is read of it."""
        # Where prompts are ready already, it is unknown since when: their time counts as steps.
        is_alone = chunk.prompts is None or not _is_ready(chunk.prompts.ready)
        if chunk.prompts is not None and is_alone:
            self._finish_prompts(chunk.prompts)
        record = jax.device_get(chunk.record)
        seconds = self._add_time("decode_s", chunk.begin)
        # If a program was compiled meanwhile, it is unknown when the chunk ended.
        is_measured = chunk.is_timed and self.programs.compile_s == chunk.compiled
        if is_measured:
            self.last_s = seconds
        self._watch_rows(record, chunk.filled)
        self._learn(
            chunk, record, seconds / self.options.steps if is_measured and is_alone else None
        )
        # Where all rows have ended, the next chunk waits for its caller.
        self._ended_at = None if record.done[-1].all() else self._finished
        return record

    def _finish_prompts(self, prompts: Prompts) -> None:
        jax.block_until_ready(prompts.ready)
        self._add_time("prefill_s", prompts.begin)

    def _add_time(self, name: str, begin: float) -> float:
        """Add, and return, the seconds of what was given to the device at ``begin`` and just ended.

        The device began it then, or when it had finished what was given to it before.
        """
        now = self._now()
        seconds = now - max(begin, self._finished)
        self.seconds[name] += seconds
        self._finished = now
        return seconds

    def _learn(self, chunk: Chunk, record: StepRecord, step_seconds: float | None) -> None:
        """Pass a chunk to what chooses gammas; ``step_seconds`` are None if unknown."""
        accepted, live = np.asarray(record.accepted), np.asarray(record.committed) > 0
        if chunk.choice is None or not live.any():  # all rows had ended before it
            return
        chunk.choice.observe(chunk.gamma, step_seconds, accepted, live)
        has_same_request = np.ones(live.shape[1], bool)
        has_same_request[list(chunk.filled)] = False
        new_rows = self._acceptance.observe(chunk.gamma, accepted, live & has_same_request)
        chunk.choice.add_rows(new_rows)

    def _left_after_work(self, left: np.ndarray) -> np.ndarray:
        """``left`` after the running chunks, at the pace of the last chunk."""
        for chunk in self.running:
            paces = self.paces.copy()
            paces[list(chunk.filled)] = 0
            left = np.maximum(left - paces, 0)
        return left

    def _watch_rows(self, record: StepRecord, filled: set[int]) -> None:
        """Update the pace of rows, and how many of them ended and were not ``filled``."""
        tokens = record.committed.sum(axis=0)
        if tokens.any():
            # A row that was idle is taken to be fast.
            self.paces = np.where(tokens > 0, tokens, tokens.max())
        is_live = tokens > 0
        is_live[list(filled)] = False
        if is_live.any():
            self._ending += (float(np.mean(record.done[-1][is_live])) - self._ending) / LATELY

    def _host_seconds(self) -> float:
        """What the host takes between two chunks."""
        return max(self._host_s, HOST_SECONDS)

    def _watch_host(self) -> None:
        """Update the seconds of the host between chunks, at most those of a chunk: beyond that, the
        caller was away."""
        if self._ended_at is not None:
            seconds = min(self._now() - self._ended_at, self.last_s)
            self._host_s += (seconds - self._host_s) / LATELY
            self._ended_at = None

    def _now(self) -> float:
        """Seconds by a clock that stops while a program is compiled."""
        return time.perf_counter() - self.programs.compile_s

    def warmed(self, state: DecodeState) -> DecodeState:
        """The same state, all of whose rows are done, with every program compiled that `start` may
        need.
        """
        for config in self.options.configs_of(state.mode).values():
            state, _ = self._chunk(state, config)
        if len(self.options.configs) > 1 and self.options.config.draft.traits.needs_model:
            state = self._synced(state)
        return state

    def _chunk(self, state: DecodeState, config: StepConfig) -> tuple[DecodeState, StepRecord]:
        args = (self.options.flat, state)
        return self.programs(decode_chunk, *args, config=config, steps=self.options.steps)

    def _synced(self, state: DecodeState) -> DecodeState:
        static = {"config": self.options.config, "max_tokens": SYNC_TOKENS}
        return self.programs(sync_drafter, self.options.flat, state, **static)

    def _with_synced_drafter(self, state: DecodeState, config: StepConfig) -> DecodeState:
        """``state`` for a chunk: a drafter with a model that paused is synced."""
        if not self.options.config.draft.traits.needs_model:
            return state
        if not config.gamma:
            # No row lacks more than it holds, whatever rows came and went.
            self._plain_steps = min(self._plain_steps + self.options.steps, state.tokens.shape[1])
            return state
        while self._plain_steps > 0:
            state = self._synced(state)
            self._plain_steps -= SYNC_TOKENS
        self._plain_steps = 0
        return state


def _is_ready(x: Array) -> bool:
    """Whether the device has made ``x``."""
    return x.is_ready()  # pyright: ignore[reportAttributeAccessIssue]
