"""Submits requests to an engine as they arrive, and measures it."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import jspec
from jspec.decode.prefill import rounded_capacity
from jspec.decode.programs import PROGRAMS
from jspec.decode.state import FlatModels

PromptAndParams = tuple[list[int], jspec.SamplingParams]
CHUNKS_PER_SAMPLE = 4  # chunks of a sample


@dataclasses.dataclass
class Watch:
    """Arrival of a request, and times of its tokens in seconds, with how many there were."""

    arrived: float
    times: list[float] = dataclasses.field(default_factory=list)
    counts: list[int] = dataclasses.field(default_factory=list)

    def record(self, tokens: tuple[int, ...], now: float) -> None:
        self.counts.append(len(tokens))
        self.times.append(now)

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first chunk; None for no tokens."""
        rest = sum(self.counts[1:])
        return (self.times[-1] - self.times[0]) / rest if rest else None


@dataclasses.dataclass(frozen=True)
class Load:
    """The ``tokens`` of each request, and figures of all requests together."""

    tokens: list[tuple[int, ...]]
    figures: dict[str, Any]


def arrivals(count: int, rate: float, seed: int) -> np.ndarray:
    """Seconds at which ``count`` requests arrive: a Poisson process of ``rate`` a second."""
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))


def serve(engine: jspec.Engine, requests: Sequence[PromptAndParams], at: np.ndarray) -> Load:
    """Submit each request at its time, ``at`` ascending, and drive the engine to the end."""
    before, begin = engine.stats, time.perf_counter()
    watches = [Watch(arrived) for arrived in at.tolist()]
    submitted: list[jspec.Request] = []
    samples: list[tuple[float, int, int]] = []  # seconds, tokens, requests that have begun

    def now() -> float:
        return time.perf_counter() - begin

    def submit(request: PromptAndParams, watch: Watch) -> None:
        prompt, params = request
        submitted.append(
            engine.submit(prompt, params, on_tokens=lambda tokens: watch.record(tokens, now()))
        )

    while len(submitted) < len(requests) or engine.busy:
        while len(submitted) < len(requests) and watches[len(submitted)].arrived <= now():
            submit(requests[len(submitted)], watches[len(submitted)])
        if engine.busy:
            engine.step()
            begun = sum(1 for watch in watches[: len(submitted)] if watch.times)
            samples.append((now(), engine.stats.committed - before.committed, begun))
        else:
            time.sleep(max(watches[len(submitted)].arrived - now(), 0))
    seconds, tokens = now(), [request.result() for request in submitted]
    after = engine.stats
    first_s = [watch.times[0] - watch.arrived for watch in watches]
    token_s = [x for watch in watches if (x := watch.per_token) is not None]
    return Load(
        tokens,
        {
            "seconds": seconds,
            "tokens_per_s": sum(map(len, tokens)) / seconds,
            "requests_per_s": len(requests) / seconds,
            "full_tokens_per_s": _while_full(samples, engine.slots, len(requests)),
            **phases(watches, engine.slots),
            "token_s": token_s,
            "first_token_s": first_s,
            "mean_accepted_length": (after.committed - before.committed)
            / (after.steps - before.steps),
            "prefill_s": after.prefill_s - before.prefill_s,
            "decode_s": after.decode_s - before.decode_s,
            "compilations": after.compilations - before.compilations,
        },
    )


def phases(watches: Sequence[Watch], slots: int) -> dict[str, float]:
    """Seconds until half of the slots are free for good, and tokens a second of the rest of all."""
    ends = sorted(watch.times[-1] for watch in watches)
    half = ends[max(len(ends) - 1 - slots // 2, 0)]
    rest = [
        count
        for watch in watches
        for count, at in zip(watch.counts, watch.times, strict=True)
        if at > half
    ]
    if not rest:
        return {"half_free_s": half}
    return {"half_free_s": half, "tail_tokens_per_s": sum(rest) / (ends[-1] - half)}


def _while_full(samples: list[tuple[float, int, int]], slots: int, count: int) -> float | None:
    """Tokens a second while all slots are in use and requests are waiting.

    None where the samples have no such interval.
    """
    inside = [(at, tokens) for at, tokens, begun in samples if slots <= begun < count]
    if len(inside) < 2:
        return None
    (begin, first), (end, last) = inside[0], inside[-1]
    return (last - first) / (end - begin)


def step_seconds(
    model: jspec.Model,
    texts: Sequence[list[int]],
    capacity: int,
    config: jspec.StepConfig,
    steps: int,
) -> float:
    """Seconds of a step by itself: chunks of ``steps`` while all rows of ``texts`` decode.

    Chunks of a sample run without waiting for the host, as an engine does at best. The state has
    the shapes of an engine's, so that its compiled program is reused.
    """
    params = [
        jspec.SamplingParams(max_new_tokens=capacity - len(text), seed=0, ignore_eos=True)
        for text in texts
    ]
    models, size = config.draft.prepare(jspec.Models(model)), rounded_capacity(capacity)
    state = jspec.start_decoding(models, texts, params, config, capacity=size, chunk=512)
    stops = np.full((len(texts), 16), -1, np.int32)
    state = dataclasses.replace(state, stop_tokens=jax.device_put(stops))
    flat = FlatModels.of(models)

    def chunks(state: jspec.DecodeState, count: int) -> jspec.DecodeState:
        for _ in range(count):
            state, _ = PROGRAMS(jspec.decode_chunk, flat, state, config=config, steps=steps)
        return jax.block_until_ready(state)

    state, samples = chunks(state, 1), []
    while len(samples) < 5:
        begin = time.perf_counter()
        state = chunks(state, CHUNKS_PER_SAMPLE)
        if samples and bool(state.done.any()):  # a step with finished rows is not representative
            break
        samples.append((time.perf_counter() - begin) / (CHUNKS_PER_SAMPLE * steps))
    return statistics.median(samples)
