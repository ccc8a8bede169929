"""Chunks of steps as the host runs them: timed, each with the gamma that was chosen for it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator

import jax
import numpy as np

from jspec.decode.auto import GammaChoice
from jspec.decode.draft import CATCH_UP, LACKING
from jspec.decode.plan import Plan
from jspec.decode.programs import PROGRAMS, OnCompile
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState, StepRecord
from jspec.decode.step import catch_up, decode_chunk
from jspec.decode.together import agreed, is_shared
from jspec.processes import steps_are_limited


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A chunk of steps that the device was given.

    ``record``: still on the device; ``begin``: when, and ``compiled``: the seconds of compiling by
    then.
    """

    record: StepRecord
    gamma: int
    choice: GammaChoice | None
    begin: float
    compiled: float


class Chunks:
    """Runs chunks of steps of ``plan``, each by `start` and `finish`, in order.

    The next one may start before the last one is finished: the device then goes from one to the
    other while the host reads. ``programs`` counts compiling; ``seconds``: what `clock` measured by
    name, without it. ``last_s``: seconds of the last chunk that was finished.
    """

    def __init__(self, plan: Plan, on_compile: OnCompile | None = None) -> None:
        self.plan = plan
        self.programs = PROGRAMS.timed(on_compile)
        self.seconds = {"prefill_s": 0.0, "decode_s": 0.0}
        self.last_s = math.inf
        self._rested = 0  # steps since the drafter last drafted
        self._is_shared = is_shared(plan.models.target)
        self._at_work = 0  # chunks that were started and not finished
        self._clocked = 0.0  # until when the last clock ran
        self._finished = 0.0  # when the last chunk did

    @property
    def may_overlap(self) -> bool:
        """Whether a chunk may start before the one before it is finished.

        Processes that share a model would have to agree on it, and where the time of steps is
        limited each program is waited for.
        """
        return not self._is_shared and not steps_are_limited()

    @contextlib.contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to ``seconds``, less that of compiling.

        While a chunk is at work, the time since the last clock is added, too.
        """
        begin = self._clocked if self._at_work else self._now()
        try:
            yield
        finally:
            self._clocked = self._now()
            self.seconds[name] += self._clocked - begin

    def start(self, state: DecodeState) -> tuple[DecodeState, Chunk]:
        """The state behind a chunk that the device is given now. ``state`` is donated."""
        plan, config, choice = self.plan, self.plan.config, None
        if plan.gammas is not None:
            choice = plan.gammas.choice(plan.flat, state)
            gamma = choice.choose()
            config = plan.gammas.configs[agreed(gamma) if self._is_shared else gamma]
            state = self._awake(state, config)
        with self.clock("decode_s"):
            begin = self._now()
            state, record = self._chunk(state, config)
        self._at_work += 1
        return state, Chunk(record, config.gamma, choice, begin, self.programs.compile_s)

    def finish(self, chunk: Chunk) -> StepRecord:
        """The record of the earliest chunk at work, on the host: all that is read of it."""
        with self.clock("decode_s"):
            record = jax.device_get(chunk.record)
        self._at_work -= 1
        seconds = self._clocked - max(chunk.begin, self._finished)
        self._finished = self._clocked
        # If the next one's program was compiled meanwhile, nothing tells when this one ended.
        is_measured = self.programs.compile_s == chunk.compiled
        if is_measured:
            self.last_s = seconds
        if chunk.choice is not None:
            a_step = seconds / self.plan.steps if is_measured else None
            chunk.choice.saw(chunk.gamma, a_step, record.accepted[record.committed > 0])
        return record

    def _now(self) -> float:
        """Seconds by a clock that stands still while a program is compiled."""
        return time.perf_counter() - self.programs.compile_s

    def warmed(self, state: DecodeState) -> DecodeState:
        """The same state, all of whose rows are done, with every program compiled that `start` may
        need for it."""
        gammas = self.plan.gammas
        for config in [self.plan.config] if gammas is None else gammas.configs.values():
            state, _ = self._chunk(state, config)
        if gammas is not None and self.plan.config.draft.needs_model:
            state = self._caught_up(state)
        return state

    def _chunk(self, state: DecodeState, config: StepConfig) -> tuple[DecodeState, StepRecord]:
        args = (self.plan.flat, state)
        return self.programs(decode_chunk, *args, config=config, steps=self.plan.steps)

    def _caught_up(self, state: DecodeState) -> DecodeState:
        return self.programs(catch_up, self.plan.flat, state, config=self.plan.config)

    def _awake(self, state: DecodeState, config: StepConfig) -> DecodeState:
        """``state`` for a chunk: a drafter with a model that rested is caught up."""
        if not self.plan.config.draft.needs_model:
            return state
        if not config.gamma:
            # No row lacks more than it holds, whatever rows came and went.
            self._rested = min(self._rested + self.plan.steps, state.tokens.shape[1])
            return state
        with self.clock("decode_s"):
            while self._rested > 0:
                state = self._caught_up(state)
                self._rested -= CATCH_UP - LACKING  # the first of its tokens are taken up anew
        self._rested = 0
        return state


def counts_of(record: StepRecord) -> tuple[np.ndarray, ...]:
    """Drafted, accepted and committed tokens, int32 ``[steps, B]``, and the gamma of each step."""
    counts = (record.drafted, record.accepted, record.committed)
    # A record has a token for each of gamma + 1 positions.
    gammas = np.full(len(record.tokens), record.tokens.shape[-1] - 1)
    return *map(np.asarray, counts), gammas
