"""gamma="auto": which draft length pays, from measured times and what was accepted."""

from __future__ import annotations

import math
import statistics
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState, FlatModels, Models

LADDER = (0, 1, 2, 4, 8, 16)
TIMES = 5  # last chunks whose median is the cost of a gamma
PACES = 5  # last chunks, of any gamma, whose median is the pace of the device
SETTLED = 3  # times of a gamma from which on its next one tells the pace
STEADY = 0.15  # share by which the pace must change to count
ACCEPTED = 0.8  # assumed acceptance rate of draft tokens before any is measured
WORTH = 1.01  # factor by which a longer draft must be better than a shorter one
HOPED = 1.15  # factor by which one must be hoped to be better to be timed with fewer or more rows
PROBING = 0.003  # share of the time that may be spent to measure a gamma again
STALE = 16  # chunks after which a gamma may be measured again
MAX_UNREAD = 1  # chunks that may still run when the gamma of the next one is chosen
RECENT_ROWS = 16  # latest rows whose acceptance a new row may resemble
MAX_CHOICES = 32  # cached choices, by what their times depend on
MEMORY = 128.0  # steps after which a count weighs half
PRIOR_STEPS = 8.0  # weight of other rows' rates, in steps of a row
HORIZON = 512  # most tokens of a row to plan for: stop tokens may end it earlier


class AcceptanceCounts:
    """How often a count of accepted draft tokens that is at least i exceeds i.

    ``begun``, ``gone_on`` float64 ``[*rows, longest]``: how many steps had at least i, and how many
    of these at least i + 1. Older steps weigh less.
    """

    def __init__(self, *shape: int) -> None:
        self.begun, self.gone_on = np.zeros(shape), np.zeros(shape)

    def add(self, at_least: np.ndarray, steps: int) -> None:
        """Add ``at_least [*rows, gamma + 1]`` of so many steps: how many had at least 0, 1, ... of
        them.
        """
        gamma, fade = at_least.shape[-1] - 1, 0.5 ** (steps / MEMORY)
        for before, new in (self.begun, at_least[..., :-1]), (self.gone_on, at_least[..., 1:]):
            before[..., :gamma] = fade * before[..., :gamma] + new

    def rates(self, first: float) -> np.ndarray:
        """The rate ``gone_on / begun``, float64 ``[longest]``.

        The prior of each is the rate before it, that of the first ``first``.
        """
        rates, rate = np.zeros_like(self.begun), first
        for i, (begun, gone_on) in enumerate(zip(self.begun, self.gone_on, strict=True)):
            rates[i] = rate = (gone_on + rate) / (begun + 1)
        return rates

    def rates_with_prior(self, others: np.ndarray) -> np.ndarray:
        """The rates of each row, with ``others`` as their prior, of the weight of `PRIOR_STEPS`."""
        return (self.gone_on + PRIOR_STEPS * others) / (self.begun + PRIOR_STEPS)


class AcceptanceByGamma:
    """`AcceptanceCounts` of each gamma.

    The beginning of a chain is a shorter chain, so that all gammas share the counts of chains.
    Trees of several gammas differ at each depth: each gamma has counts of its own.
    """

    def __init__(self, *shape: int, branches: bool) -> None:
        self._counts = [AcceptanceCounts(*shape) for _ in range(shape[-1] + 1 if branches else 1)]

    def at(self, gamma: int) -> AcceptanceCounts:
        return self._counts[gamma if len(self._counts) > 1 else 0]

    @property
    def pooled(self) -> AcceptanceCounts:
        """Those of all gammas."""
        if len(self._counts) == 1:
            return self._counts[0]
        result = AcceptanceCounts(*self._counts[0].begun.shape)
        for counts in self._counts:
            result.begun += counts.begun
            result.gone_on += counts.gone_on
        return result

    def add(self, at_least: np.ndarray, steps: int) -> None:
        """As `AcceptanceCounts.add`; steps of other gammas weigh less after it too."""
        ran = self.at(at_least.shape[-1] - 1)
        for counts in self._counts:
            counts.add(at_least if counts is ran else np.zeros_like(at_least), steps)

    def forget(self, rows: int | list[int]) -> None:
        """Forget ``rows``."""
        for counts in self._counts:
            counts.begun[rows] = counts.gone_on[rows] = 0.0


def mean(rates: np.ndarray) -> np.ndarray:
    """The mean count where it goes on at these ``rates [..., gamma]``, and ends at gamma."""
    return np.cumprod(rates, axis=-1).sum(axis=-1)


class RowAcceptance:
    """How many draft tokens each row of a session accepted.

    Args:
        batch: Rows.
        longest: The largest gamma.
        steps: Steps of a chunk.
        together: Whether all rows are waited for, and none is replaced when it has ended.
        branches: Whether drafts are trees.
    """

    def __init__(
        self, batch: int, longest: int, steps: int, *, together: bool, branches: bool = False
    ) -> None:
        self.accepted = AcceptanceByGamma(batch, longest, branches=branches)
        self.steps, self.together = steps, together

    def observe(self, gamma: int, accepted: np.ndarray, live: np.ndarray) -> np.ndarray:
        """Add a chunk, with arguments as in `GammaChoice.observe`.

        A row whose request came after the chunk began is not ``live``. Returns how many draft
        tokens were accepted of each row whose first drafts these are, int ``[n, gamma + 1]``.
        """
        up_to = np.arange(gamma + 1)
        counts = ((accepted[..., None] >= up_to) & live[..., None]).sum(axis=0)
        is_new = live.any(axis=0) & ~self.accepted.pooled.begun.any(axis=1)
        self.accepted.add(counts, len(accepted))
        return counts[is_new] if gamma else counts[:0]

    def renew(self, rows: list[int]) -> None:
        """Forget ``rows``, which other requests take."""
        self.accepted.forget(rows)

    def tokens(self, gamma: int, left: np.ndarray, others: np.ndarray) -> float:
        """Tokens of a step of a row, by the steps that rows need to their end.

        In the mean, or, where they are waited for ``together``, by the row that ends last. A row
        that ends within a chunk idles until the chunk ends. ``left [B]``: most tokens that each row
        still commits; ``others [n, longest]``: rates of other rows with this gamma, any of which it
        may be like.
        """
        planned = np.clip(left, 0, HORIZON)
        planned = planned if planned.any() else np.full_like(left, HORIZON)
        rates = self.accepted.at(gamma).rates_with_prior(others[:, None])[..., :gamma]
        chunks = np.ceil(planned / (1 + mean(rates)) / self.steps)  # [n, B]
        needed = (
            (planned > 0).sum() * mean_of_last(chunks) if self.together else chunks.mean(0).sum()
        )
        return float(planned.sum() / (self.steps * needed))


def mean_of_last(chunks: np.ndarray) -> float:
    """The expected largest number over all rows.

    Each of a row's ``chunks [n, B]`` is as likely as the others.
    """
    numbers = np.arange(chunks.max())[:, None, None]
    return float((1 - (chunks <= numbers).mean(axis=1).prod(axis=1)).sum())


class StepTime(NamedTuple):
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
    ones, divided by the pace: how many times as long as usual the last chunks took, whatever their
    gammas. What a long draft costs next to a short one depends on how many rows are live: their
    passes may be bound by arithmetic where many are, and by memory where few are left. So times are
    of numbers of live rows within a factor of four. Within it, and where a gamma was not timed yet,
    an amount per live row is assumed that is the same for all gammas.

    A gamma that did not run with about as many rows is tried if it would win at the cost of the
    longest shorter one that did; 0 is always tried. A gamma that lost is measured again when its
    neighbour runs, in a bounded share of the time.

    With ``branches`` drafts are trees, and the rates of each gamma are its own: more tokens may be
    accepted more often at every depth. The rates of all gammas are their prior. A gamma that never
    ran is hoped to have as many chances at each depth more as it has tokens more.

    A gamma may be chosen while up to `MAX_UNREAD` chunks before it run. It depends only on chunks
    that were read.
    """

    def __init__(
        self, ladder: Sequence[int], start: int, warm: int = 1, *, branches: bool = False
    ) -> None:
        self.ladder = tuple(ladder)
        self.start = min(self.ladder, key=lambda g: abs(g - start))
        self.warm = warm
        # By gamma and `_row_class`.
        self.times = {g: dict[int, deque[StepTime]]() for g in self.ladder}
        self.ran = set[tuple[int, int]]()  # gammas, and the `_row_class` that they ran with
        self.runs = dict.fromkeys(self.ladder, 0)
        self.last_run = dict.fromkeys(self.ladder, 0)
        longest = max(self.ladder)
        self.branches = branches
        self.accepted = AcceptanceByGamma(longest, branches=branches)
        # Of the first chunks of the latest rows.
        self.recent_rows = AcceptanceByGamma(RECENT_ROWS, longest, branches=branches)
        self.rows_added = 0
        self.chunks = 0
        self.allowance = 0.0
        self.probing: int | None = None  # the gamma that is measured again
        self.probe_end = 0  # the number of chunks by which it has been measured, if it ran
        self.row_seconds = 0.0  # seconds that a live row adds to a step
        # How many times as long as usual a step takes: a device that others share slows down and
        # recovers, which would count against the gamma that runs.
        self.pace = 1.0
        self.paces = deque[float](maxlen=PACES)
        self.live = 0.0  # live rows of the next chunk
        self.current = self.start
        self.seconds_per_token = 0.0  # with the current gamma

    def observe(
        self, gamma: int, seconds: float | None, accepted: np.ndarray, live: np.ndarray
    ) -> None:
        """Add a chunk, whose steps took ``seconds`` each, None if unknown.

        ``accepted`` int ``[steps, B]``: draft tokens accepted; ``live`` bool ``[steps, B]``: which
        rows were live.
        """
        self.chunks += 1
        self.runs[gamma] += 1
        self.last_run[gamma] = self.chunks
        rows = float(live.sum() / len(live))
        self.ran.add((gamma, _row_class(rows)))
        if seconds is not None:
            if self.runs[gamma] > self.warm:
                seconds = self._at_usual_pace(gamma, seconds, rows)
                self._fit_row_seconds(gamma, StepTime(seconds, rows))
            self.allowance += PROBING * seconds
            if gamma == self.probing and self.times[gamma]:  # first runs are slow only once
                loss = seconds - self.seconds_per_token * _tokens_of(accepted, live)
                self.allowance -= max(loss, 0.0)
        if gamma == self.probing or self.chunks >= self.probe_end:
            self.probing = None
        up_to = np.arange(gamma + 1)
        self.accepted.add((accepted[live][:, None] >= up_to).sum(axis=0), len(accepted))

    def add_rows(self, counts: np.ndarray) -> None:
        """Add rows that began: what `RowAcceptance.observe` returned."""
        gamma = counts.shape[1] - 1
        for row in counts[-RECENT_ROWS:]:
            oldest, recent = self.rows_added % RECENT_ROWS, self.recent_rows.at(gamma)
            self.recent_rows.forget(oldest)
            recent.begun[oldest, :gamma], recent.gone_on[oldest, :gamma] = row[:-1], row[1:]
            self.rows_added += 1

    def choose(self, rows: RowAcceptance, left: np.ndarray) -> int:
        """The gamma of the next chunk of ``rows``.

        ``left`` int ``[B]``: most tokens that each row still commits, 0 where it has ended.
        """
        known = [g for g in self.ladder if self.times[g]]
        if not known:
            return self.start
        tokens = {g: rows.tokens(g, left, self._rates(g)) for g in self.ladder}
        self.live = float((left > 0).sum()) or float(len(left))
        costs = {g: self.cost(g) for g in known}
        rates = {g: tokens[g] / costs[g] for g in known}
        best = min(g for g, rate in rates.items() if WORTH * rate >= max(rates.values()))
        self.current, self.seconds_per_token = best, 1 / rates[best]
        hoped = {}  # of those that did not run with about as many rows
        for g in (g for g in self.ladder if not self._is_known(g)):
            # If it costs what the longest shorter one does.
            shorter = [k for k in known if k < g]
            shorter = [k for k in shorter if self._is_known(k)] or shorter[:1]
            worth = HOPED if self.times[g] else WORTH
            hoped[g] = tokens[g] / costs[shorter[-1]] / worth if shorter else math.inf
        if hoped and max(hoped.values()) > rates[best]:
            return max(hoped, key=hoped.__getitem__)
        return self._probe(best, costs)

    def _rates(self, gamma: int) -> np.ndarray:
        """The rates of the latest rows with a gamma, ``[RECENT_ROWS, longest]``."""
        rates = self.accepted.pooled.rates(ACCEPTED)
        if self.branches:
            shorter = [g for g in self.ladder if 0 < g < gamma and self.runs[g]]
            if shorter and not self.runs[gamma]:
                rates = 1 - (1 - rates) ** (gamma / shorter[-1])
            rates = self.accepted.at(gamma).rates_with_prior(rates)
        return self.recent_rows.at(gamma).rates_with_prior(rates)

    def cost(self, gamma: int) -> float:
        """Seconds of a step with the live rows of the next chunk."""
        at = _row_class(self.live)
        times = min(self.times[gamma].items(), key=lambda item: abs(item[0] - at))[1]
        return statistics.median(t.seconds + self.row_seconds * (self.live - t.live) for t in times)

    def _is_known(self, gamma: int) -> bool:
        """Whether it was timed, and ran with about as many live rows as the next chunk has."""
        return bool(self.times[gamma]) and (gamma, _row_class(self.live)) in self.ran

    def _at_usual_pace(self, gamma: int, seconds: float, live: float) -> float:
        """What a step of ``seconds`` takes at the usual pace of the device."""
        times = self.times[gamma].get(_row_class(live), ())
        usual = [t.seconds for t in times if abs(t.live - live) < 0.5]
        if len(usual) >= SETTLED:
            self.paces.append(seconds / statistics.median(usual))
            pace = statistics.median(self.paces)
            self.pace = 1.0 if abs(pace - 1) < STEADY else pace
        return seconds / self.pace

    def _fit_row_seconds(self, gamma: int, time: StepTime) -> None:
        """Add a time of a gamma, and fit again what a live row costs.

        That is the slope that fits the times of all gammas best, up to the share of a row in any of
        them.
        """
        by_class = self.times[gamma]
        by_class.setdefault(_row_class(time.live), deque(maxlen=TIMES)).append(time)
        above = below = 0.0
        share = math.inf
        for timed in filter(None, self.times.values()):
            times = [time for recent in timed.values() for time in recent]
            live = statistics.fmean(t.live for t in times)
            above += sum(t.seconds * (t.live - live) for t in times)
            below += sum((t.live - live) ** 2 for t in times)
            share = min(share, *(t.seconds / max(t.live, 1.0) for t in times))
        self.row_seconds = max(min(above / below, share), 0.0) if below else 0.0

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
        # At worst it commits one token a step, and costs what the next longer one does. `observe`
        # charges the measured loss.
        loss = costs[dearer[0]] - self.seconds_per_token
        if self.chunks - self.last_run[probe] < STALE or loss > self.allowance:
            return best
        self.probing, self.probe_end = probe, self.chunks + 1 + MAX_UNREAD
        return probe


def _row_class(live: float) -> int:
    """The class of so many live rows: 1 and 2, 3 to 11, 12 to 47, and so on.

    The usual numbers of slots, powers of two, are far from the limits of a class.
    """
    return math.floor(math.log(max(live, 1.0) / 0.75, 4))


def _tokens_of(accepted: np.ndarray, live: np.ndarray) -> float:
    """Tokens of a step of a row, by the steps that the rows need per token."""
    steps, ran = live.sum(axis=0), live.any(axis=0)
    tokens = np.where(live, 1 + accepted, 0).sum(axis=0)
    return float(ran.sum() / (steps[ran] / tokens[ran]).sum())


def choice_of(
    models: Models | FlatModels,
    state: DecodeState,
    config: StepConfig,
    ladder: tuple[int, ...] = LADDER,
) -> GammaChoice:
    """What chooses among ``ladder`` for each chunk of such a state; ``config``: the longest step's.

    It is cached by all that times depend on, the capacity within a factor of two, so that later
    calls begin with what earlier ones measured.
    """
    leaves, structure = jax.tree.flatten(models)
    batch, capacity = state.tokens.shape
    model = (structure, tuple((x.shape, x.dtype) for x in leaves))
    processors = state.processing and state.processing.processors
    static = (state.mode, state.logprobs, state.routed_experts, processors)
    key = (config, ladder, batch, capacity.bit_length(), static, model)
    with _LOCK:
        choice = _CHOICES.pop(key, None)
        if choice is None:
            # A GPU records a program's launches in its second run.
            warm = 1 if jax.default_backend() == "cpu" else 2
            traits = config.draft.traits
            choice = GammaChoice(ladder, traits.default_gamma, warm, branches=traits.branches)
        _CHOICES[key] = choice
        while len(_CHOICES) > MAX_CHOICES:
            _CHOICES.popitem(last=False)
    return choice


_CHOICES: OrderedDict[Any, GammaChoice] = OrderedDict()
_LOCK = threading.Lock()
