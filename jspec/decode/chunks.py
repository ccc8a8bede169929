"""Chunks of steps as the host runs them: timed, each with the gamma that was chosen for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import jax
import numpy as np

from jspec.decode.draft import CATCH_UP, LACKING
from jspec.decode.plan import Plan
from jspec.decode.programs import PROGRAMS, OnCompile
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState, StepRecord
from jspec.decode.step import catch_up, decode_chunk
from jspec.decode.together import agreed, is_shared


class Chunks:
    """Runs chunks of steps of ``plan``.

    ``programs`` counts compiling; ``seconds``: what `clock` measured by name, without it.
    """

    def __init__(self, plan: Plan, on_compile: OnCompile | None = None) -> None:
        self.plan = plan
        self.programs = PROGRAMS.timed(on_compile)
        self.seconds = {"prefill_s": 0.0, "decode_s": 0.0}
        self._rested = 0  # steps since the drafter last drafted
        self._is_shared = is_shared(plan.models.target)

    @contextlib.contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to ``seconds``, less that of compiling."""
        compiled, begin = self.programs.compile_s, time.perf_counter()
        try:
            yield
        finally:
            compiling = self.programs.compile_s - compiled
            self.seconds[name] += time.perf_counter() - begin - compiling

    def run(self, state: DecodeState) -> tuple[DecodeState, StepRecord]:
        """The state behind a chunk, and its `StepRecord` on the host: all that it reads of it."""
        plan, config, choice = self.plan, self.plan.config, None
        if plan.gammas is not None:
            choice = plan.gammas.choice(plan.flat, state)
            gamma = choice.choose()
            config = plan.gammas.configs[agreed(gamma) if self._is_shared else gamma]
            state = self._awake(state, config)
        before = self.seconds["decode_s"]
        with self.clock("decode_s"):
            state, record = self._chunk(state, config)
            record = jax.device_get(record)
        if choice is not None:
            seconds = (self.seconds["decode_s"] - before) / plan.steps
            choice.saw(config.gamma, seconds, record.accepted[record.committed > 0])
        return state, record

    def warmed(self, state: DecodeState) -> DecodeState:
        """The same state, all of whose rows are done, with every program compiled that `run` may
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
