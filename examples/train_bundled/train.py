"""The training loop: schedules run by the share of the planned time that has passed."""

from __future__ import annotations

import collections
import copy
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled

from examples.train_bundled.batches import Batch, Loader, Stage
from examples.train_bundled.checkpoint import CURVE_FIELDS, Journal
from examples.train_bundled.model import (
    Implementation,
    TrainState,
    make_score,
    make_train_step,
)
from jspec.config import ModelConfig

PEAK_RATE = 2e-3
WARM_UP = 0.02  # share of the plan
LEAST_RATE = 0.05  # of the peak, at the end
REWARM = 0.015  # share of the plan after a resume without the optimiser's state
IN_FLIGHT = 2  # steps the host may be ahead of the device
RECORD_SECONDS = 3.0
SNAPSHOT_SECONDS = 60.0

Snapshot = tuple[TrainState, Journal]


def learning_rate(share: float, rewarm_from: float | None = None) -> float:
    """Linear warm-up, cosine to `LEAST_RATE`; after a fresh optimiser, a second linear ramp."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
    rate = PEAK_RATE * (LEAST_RATE + (1 - LEAST_RATE) * cosine) * min(1.0, share / WARM_UP + 0.01)
    if rewarm_from is not None:
        rate *= min(1.0, (share - rewarm_from) / REWARM + 0.01)
    return rate


def stage_at(stages: Sequence[Stage], share: float) -> Stage:
    """The stage in which ``share`` of the plan falls."""
    for stage in stages:
        if share < stage.share:
            return stage
        share -= stage.share
    return stages[-1]


def compile_programs(
    config: ModelConfig,
    state: TrainState,
    stages: Sequence[Stage],
    score_shapes: dict[int, int],
    implementation: Implementation,
) -> tuple[dict[int, Compiled], dict[int, Compiled]]:
    """Training steps by length and score programs by length, compiled side by side in threads.

    ``state`` may be abstract. ``score_shapes`` maps a length to its rows.
    """
    step = make_train_step(config, implementation)
    score = make_score(config, implementation)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)

    def tokens(rows: int, length: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, length + 1), jnp.uint16)

    def compile_step(stage: Stage) -> Compiled:
        kinds = jax.ShapeDtypeStruct((stage.rows, stage.length), jnp.uint8)
        rate = jax.ShapeDtypeStruct((), jnp.float32)
        return step.lower(abstract, tokens(stage.rows, stage.length), kinds, rate).compile()

    def compile_score(shape: tuple[int, int]) -> Compiled:
        return score.lower(abstract[0], tokens(shape[1], shape[0])).compile()

    with ThreadPoolExecutor(8) as pool:
        steps = [pool.submit(compile_step, stage) for stage in stages]
        scores = [pool.submit(compile_score, shape) for shape in score_shapes.items()]
        return (
            {stage.length: job.result() for stage, job in zip(stages, steps, strict=True)},
            {length: job.result() for length, job in zip(score_shapes, scores, strict=True)},
        )


class Trainer:
    """Trains from ``journal.share`` to ``until`` within the time left, and keeps host snapshots."""

    def __init__(
        self,
        state: TrainState,
        journal: Journal,
        stages: Sequence[Stage],
        steps: dict[int, Compiled],
        loader: Loader,
    ):
        self.state, self.journal = state, journal
        self.stages, self.steps, self.loader = stages, steps, loader
        self.parameter_count = sum(leaf.size for leaf in jax.tree.leaves(state[0]))
        self.snapshot: Snapshot | None = None
        self._window: list[dict] = []
        self._pending: collections.deque = collections.deque()

    def run(self, deadline: float, until: float, rewarm: bool) -> None:
        """Train until ``deadline`` (`time.monotonic`), when the share of the plan is ``until``."""
        first, began = self.journal.share, time.monotonic()
        seconds = self.journal.seconds
        self._opened = snapped = began
        stage = stage_at(self.stages, first)
        batches = self.loader.batches(stage, self.journal.step)
        while (now := time.monotonic()) < deadline:
            share = first + (until - first) * (now - began) / (deadline - began)
            if stage_at(self.stages, share) is not stage:
                self._flush(stage)
                stage = stage_at(self.stages, share)
                batches = self.loader.batches(stage, self.journal.step)
            self._advance(stage, next(batches), learning_rate(share, first if rewarm else None))
            self.journal.share, self.journal.seconds = share, seconds + now - began
            if now - self._opened > RECORD_SECONDS:
                self._flush(stage)
            if now - snapped > SNAPSHOT_SECONDS:
                self.take_snapshot()
                snapped = now
        self._flush(stage)
        self.journal.share, self.journal.seconds = until, seconds + time.monotonic() - began

    def take_snapshot(self) -> None:
        """Copy the state to the host, for an export in case of trouble."""
        self.snapshot = (jax.device_get(self.state), copy.deepcopy(self.journal))

    def _advance(self, stage: Stage, batch: Batch, rate: float) -> None:
        self.state, metrics = self.steps[stage.length](
            self.state, batch.tokens, batch.kinds, np.float32(rate)
        )
        self._pending.append(metrics)
        self.journal.step += 1
        self.journal.bytes += stage.rows * stage.length
        if len(self._pending) > IN_FLIGHT:
            self._window.append(jax.device_get(self._pending.popleft()))

    def _flush(self, stage: Stage) -> None:
        """Record and print the mean of the metrics since the last time."""
        while self._pending:
            self._window.append(jax.device_get(self._pending.popleft()))
        if not self._window:
            return
        now = time.monotonic()
        mean = {key: float(np.mean([m[key] for m in self._window])) for key in self._window[0]}
        speed = len(self._window) * stage.rows * stage.length / (now - self._opened)
        mean |= {"step": self.journal.step, "share": self.journal.share, "bytes_per_s": speed}
        mean["length"] = stage.length
        self.journal.curve.append([round(mean[field], 5) for field in CURVE_FIELDS])
        print(
            f"[{self.journal.seconds:6.1f} s] {stage.length:6d} x {stage.rows:<3d} "
            f"step {self.journal.step:5d} share {self.journal.share:.3f} loss {mean['loss']:.3f} "
            f"text {mean['text_bits']:.3f} bpb answers {mean['answer_accuracy']:.3f} "
            f"norm {mean['norm']:.2f} {speed / 1e6:.2f} MB/s"
            + (f" SKIPPED {mean['skipped']:.0%}" if mean["skipped"] else ""),
            flush=True,
        )
        if mean["skipped"] == 1.0:
            raise FloatingPointError(f"no step since {self.journal.step} had finite gradients")
        self._window, self._opened = [], now
