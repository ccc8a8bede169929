"""gamma="auto": which draft length pays, from measured times and what was accepted."""

from __future__ import annotations

import dataclasses
import math
import statistics
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jspec.decode.acceptance import AcceptanceCounts, RowAcceptance
from jspec.decode.draft import NoDraft
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState, FlatModels, Models

LADDER = (0, 1, 2, 4, 8, 16)
TIMES = 5  # last chunks whose median is the cost of a gamma
ACCEPTED = 0.8  # assumed acceptance rate of draft tokens before any is measured
WORTH = 1.01  # factor by which a longer draft must be better than a shorter one
PROBING = 0.003  # share of the time that may be spent to measure a gamma again
STALE = 16  # chunks after which a gamma may be measured again
AHEAD = 1  # chunks that may still run when the gamma of the next one is chosen
KINDS = 16  # latest rows whose acceptance a new row may resemble
MAX_CHOICES = 32  # cached choices, by what their times depend on


class Took(NamedTuple):
    """Seconds of a step in the mean of a chunk, and how many rows were live."""

    seconds: float
    live: float


class GammaChoice:
    """Chooses a gamma of ``ladder`` for each chunk of steps, so that rows end soonest.

    That is in the mean over rows where others take their places, or for the last row where all are
    waited for. The expected time of a row is the time of a step times the steps that it needs. A
    row needs one step for each ``1 + s_1 + ... + s_gamma`` of its tokens, where ``s_i`` is how
    often at least i draft tokens are accepted: a product of conditional rates, whose last one is
    assumed for drafts longer than any measured. The rates are those of the row's latest steps, in
    `RowAcceptance`; a row with little history may be like any of the latest rows. So a row that
    accepts little weighs more than one that accepts much, as it needs more steps.

    The time of a step is measured: the median of a gamma's last chunks, without its first ``warm``
    ones. Steps take longer the more rows are live, by an amount per live row that is assumed to be
    the same for all gammas, and times are compared at the live rows of the next chunk. A gamma that
    never ran is tried if it would win at the cost of the longest shorter one; 0 is always tried. A
    gamma that lost is measured again when its neighbour runs, in a bounded share of the time.

    A gamma may be chosen while up to `AHEAD` chunks before it run. It depends only on chunks that
    were read.
    """

    def __init__(self, ladder: Sequence[int], start: int, warm: int = 1) -> None:
        self.ladder = tuple(ladder)
        self.start = min(self.ladder, key=lambda g: abs(g - start))
        self.warm = warm
        self.times = {g: deque[Took](maxlen=TIMES) for g in self.ladder}
        self.runs = dict.fromkeys(self.ladder, 0)
        self.last_run = dict.fromkeys(self.ladder, 0)
        longest = max(self.ladder)
        self.accepted = AcceptanceCounts(longest)
        self.kinds = AcceptanceCounts(KINDS, longest)  # of the first chunks of the latest rows
        self.rows_met = 0
        self.chunks = 0
        self.allowance = 0.0
        self.probing: int | None = None  # the gamma that is measured again
        self.probe_end = 0  # the number of chunks by which it has been measured, if it ran
        self.a_row = 0.0  # seconds that a live row adds to a step
        self.live = 0.0  # live rows of the next chunk
        self.current = self.start
        self.seconds_per_token = 0.0  # with the current gamma

    def saw(
        self, gamma: int, seconds: float | None, accepted: np.ndarray, live: np.ndarray
    ) -> None:
        """Add a chunk.

        Args:
            gamma: Most draft tokens of its steps.
            seconds: Seconds of a step, None if unknown.
            accepted: int ``[steps, B]``: draft tokens accepted by each step.
            live: bool ``[steps, B]``: rows that were live then.
        """
        self.chunks += 1
        self.runs[gamma] += 1
        self.last_run[gamma] = self.chunks
        if seconds is not None:
            took = Took(seconds, live.sum() / len(live))
            self._took(gamma, took, _tokens_of(accepted, live))
        if gamma == self.probing or self.chunks >= self.probe_end:
            self.probing = None
        up_to = np.arange(gamma + 1)
        self.accepted.add((accepted[live][:, None] >= up_to).sum(axis=0), len(accepted))

    def met(self, counts: np.ndarray) -> None:
        """Add rows that began: what `RowAcceptance.saw` returned."""
        gamma = counts.shape[1] - 1
        for row in counts[-KINDS:]:
            at = self.rows_met % KINDS
            self.kinds.begun[at], self.kinds.gone_on[at] = 0, 0
            self.kinds.begun[at, :gamma], self.kinds.gone_on[at, :gamma] = row[:-1], row[1:]
            self.rows_met += 1

    def _took(self, gamma: int, took: Took, tokens: float) -> None:
        """Add the time of a chunk with so many tokens per step in the mean."""
        if self.runs[gamma] > self.warm:
            self._keep(gamma, took)
        self.allowance += PROBING * took.seconds
        if gamma == self.probing and self.times[gamma]:  # a program's first runs are slow only once
            self.allowance -= max(took.seconds - self.seconds_per_token * tokens, 0.0)

    def choose(self, rows: RowAcceptance, left: np.ndarray) -> int:
        """The gamma of the next chunk of ``rows``.

        ``left`` int ``[B]``: most tokens that each row still commits, 0 where it has ended.
        """
        known = [g for g in self.ladder if self.times[g]]
        if not known:
            return self.start
        others = self.kinds.rates_with_prior(self.accepted.rates(ACCEPTED))
        tokens = {g: rows.tokens(g, left, others) for g in self.ladder}
        self.live = float((left > 0).sum()) or float(len(left))
        costs = {g: self.cost(g) for g in known}
        rates = {g: tokens[g] / costs[g] for g in known}
        best = min(g for g, rate in rates.items() if WORTH * rate >= max(rates.values()))
        self.current, self.seconds_per_token = best, 1 / rates[best]
        hoped = {}  # of those that never ran, if they cost what the longest shorter one does
        for g in (g for g in self.ladder if g not in known):
            shorter = [k for k in known if k < g]
            hoped[g] = tokens[g] / costs[shorter[-1]] if shorter else math.inf
        if hoped and max(hoped.values()) > WORTH * rates[best]:
            return max(hoped, key=hoped.__getitem__)
        return self._probe(best, costs)

    def cost(self, gamma: int) -> float:
        """Seconds of a step with the live rows of the next chunk."""
        times = self.times[gamma]
        return statistics.median(t.seconds + self.a_row * (self.live - t.live) for t in times)

    def _keep(self, gamma: int, took: Took) -> None:
        """Add a time of a gamma, and fit again what a live row costs.

        That is the slope that fits the times of all gammas best, up to the share of a row in any of
        them.
        """
        self.times[gamma].append(took)
        above = below = 0.0
        share = math.inf
        for times in filter(None, self.times.values()):
            live = statistics.fmean(t.live for t in times)
            above += sum(t.seconds * (t.live - live) for t in times)
            below += sum((t.live - live) ** 2 for t in times)
            share = min(share, *(t.seconds / max(t.live, 1.0) for t in times))
        self.a_row = max(min(above / below, share), 0.0) if below else 0.0

    def _probe(self, best: int, costs: dict[int, float]) -> int:
        """A neighbour of ``best`` that has not run for long, where the allowance pays for it."""
        if self.probing is not None:  # one is running, and not charged yet
            return best
        at = self.ladder.index(best)
        near = [g for g in self.ladder[max(at - 1, 0) : at + 2] if g != best]
        probe = min(near, key=self.last_run.__getitem__, default=best)
        dearer = [g for g in costs if g >= probe]
        if not dearer:
            return best
        # At worst it commits one token a step, and costs what the next longer one does. `saw`
        # charges the measured loss.
        loss = costs[dearer[0]] - self.seconds_per_token
        if self.chunks - self.last_run[probe] < STALE or loss > self.allowance:
            return best
        self.probing, self.probe_end = probe, self.chunks + 1 + AHEAD
        return probe


def _tokens_of(accepted: np.ndarray, live: np.ndarray) -> float:
    """Tokens of a step of a row, by the steps that the rows need per token."""
    steps, ran = live.sum(axis=0), live.any(axis=0)
    tokens = np.where(live, 1 + accepted, 0).sum(axis=0)
    return float(ran.sum() / (steps[ran] / tokens[ran]).sum())


class Gammas:
    """The steps that ``gamma="auto"`` chooses from: ``config`` with each gamma.

    Choices are kept by all that times depend on, the capacity within a factor of two, so that later
    calls begin with what earlier ones measured.

    Raises:
        ValueError: For a drafter that never drafts.
    """

    def __init__(self, config: StepConfig) -> None:
        draft = config.draft
        if isinstance(draft, NoDraft):
            raise ValueError(
                "gamma='auto' chooses how much a drafter drafts; pass one, or gamma=0 for plain "
                "decoding"
            )
        self.draft = draft
        self.configs = {gamma: dataclasses.replace(config, gamma=gamma) for gamma in LADDER}

    @property
    def longest(self) -> StepConfig:
        """The config that a state for all of them is started with."""
        return self.configs[max(self.configs)]

    def choice(self, models: Models | FlatModels, state: DecodeState) -> GammaChoice:
        """The choice for chunks of such a state."""
        leaves, structure = jax.tree.flatten(models)
        batch, capacity = state.tokens.shape
        model = (structure, tuple((x.shape, x.dtype) for x in leaves))
        key = (self.longest, batch, capacity.bit_length(), state.mode, model)
        with _LOCK:
            choice = _CHOICES.pop(key, None)
            if choice is None:
                # A GPU records a program's launches in its second run.
                warm = 1 if jax.default_backend() == "cpu" else 2
                usual = self.draft.traits.default_gamma
                choice = GammaChoice(list(self.configs), usual, warm)
            _CHOICES[key] = choice
            while len(_CHOICES) > MAX_CHOICES:
                _CHOICES.popitem(last=False)
        return choice


_CHOICES: OrderedDict[Any, GammaChoice] = OrderedDict()
_LOCK = threading.Lock()
