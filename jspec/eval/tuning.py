"""Tuning a sparse drafter in the three steps of Vegas (Yue et al. 2026, section 3.4)."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from jspec.cache import Cache
from jspec.config import SamplingParams
from jspec.decode.draft import Drafter, NoDraft, SparseDrafter, named_draft
from jspec.decode.generation import generate
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.decode.stats import Stats
from jspec.dispatch import Backends
from jspec.policies import Streaming
from jspec.policies.budgeted import Budgeted

RATIOS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1)
GAMMAS = (3, 5, 7, 9, 12)
SETTLED = 0.98  # of the most accepted draft tokens: where more of the context adds little
RUNS = 5  # timed runs of a setting; of two alike, all runs of one are faster in 1 of 252 cases


class Setting(NamedTuple):
    """What is measured: a ratio and a gamma.

    Attributes:
        ratio: Share of the context that a draft reads; None for what the draft reads by default.
        gamma: Draft tokens of a step; 0 is plain decoding.
    """

    ratio: float | None
    gamma: int


PLAIN = Setting(None, 0)


@dataclasses.dataclass(frozen=True)
class Trial:
    """A measurement of a setting.

    Attributes:
        setting: The setting.
        accepted: Accepted draft tokens a step.
        speeds: Tokens a second of each timed run.
    """

    setting: Setting
    accepted: float
    speeds: tuple[float, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """The median of the timed runs."""
        return statistics.median(self.speeds)

    def beats(self, other: Trial) -> bool:
        """Whether it is faster beyond the noise: in each run than ``other`` in any."""
        return min(self.speeds) > max(other.speeds)


class Measure(Protocol):
    def __call__(self, settings: Sequence[Setting], *, runs: int) -> tuple[Trial, ...]:
        """Measure settings, each in ``runs`` timed runs, in turn; with 0 runs without times."""
        ...


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The trials of each step, and what was chosen.

    Attributes:
        acceptance: Each ratio at the largest gamma, without times.
        settled: The smallest ratio that has nearly the acceptance of the best one.
        gammas: Each gamma at that ratio.
        ratios: Each ratio at the fastest of these gammas.
        best: The fastest trial of ``ratios``.
        default: The drafter as it is without a ratio and a gamma, measured in turn with ``ratios``.
        plain: Plain decoding, measured in turn with ``ratios``.
        chosen: ``best`` or ``plain`` where it is faster than ``default`` beyond the noise, and
            ``default`` otherwise.
    """

    acceptance: tuple[Trial, ...]
    settled: float
    gammas: tuple[Trial, ...]
    ratios: tuple[Trial, ...]
    best: Trial
    default: Trial
    plain: Trial
    chosen: Trial

    @property
    def gains(self) -> bool:
        """Whether ``chosen`` is faster than plain decoding beyond the noise."""
        return self.chosen.beats(self.plain)


def tune(
    measure: Measure, ratios: Sequence[float], gammas: Sequence[int], default: Setting
) -> Tuning:
    """Choose the ratio and gamma of a sparse drafter in three steps (Yue et al. 2026, 3.4).

    Args:
        measure: Measures settings.
        ratios: Shares of the context that the drafter may read.
        gammas: Numbers of draft tokens.
        default: What the drafter does without either.

    Returns:
        The trials and the setting to take.
    """
    ratios, gammas = sorted(ratios), sorted(gammas)
    acceptance = measure([Setting(ratio, gammas[-1]) for ratio in ratios], runs=0)
    max_accepted = max(trial.accepted for trial in acceptance)
    settled = next(
        ratio
        for ratio, trial in zip(ratios, acceptance, strict=True)
        if trial.accepted >= SETTLED * max_accepted
    )
    by_gamma = measure([Setting(settled, gamma) for gamma in gammas], runs=RUNS)
    gamma = max(by_gamma, key=_speed).setting.gamma
    by_ratio = [Setting(ratio, gamma) for ratio in ratios]
    settings = list(dict.fromkeys([PLAIN, default, *by_ratio]))
    trials = dict(zip(settings, measure(settings, runs=RUNS), strict=True))
    tuned = tuple(trials[setting] for setting in by_ratio)
    best, chosen = max(tuned, key=_speed), trials[default]
    for trial in (trials[PLAIN], best):
        chosen = trial if trial.beats(chosen) else chosen
    return Tuning(
        *(acceptance, settled, by_gamma, tuned, best),
        default=trials[default],
        plain=trials[PLAIN],
        chosen=chosen,
    )


def _speed(trial: Trial) -> float:
    return trial.tokens_per_s


def draft_at(text: str, ratio: float | None) -> tuple[str, Drafter]:
    """Add a ratio to the name of a sparse drafter.

    Args:
        text: Name of the drafter, such as ``vegas`` or ``streaming:sinks=4``.
        ratio: Share of the context that it reads; None leaves the name as it is.

    Returns:
        The name with the ratio, and the drafter.

    Raises:
        ValueError: Where ``text`` names no sparse drafter, or has a ratio already.
    """
    name, _, settings = text.partition(":")
    size = "window" if name == "streaming" else "budget"
    if any(setting.startswith(f"{size}=") for setting in settings.split(",")):
        raise ValueError(f"draft {text!r}: {size} is what is tuned; leave it out")
    kind = named_draft(text)
    if not isinstance(kind, SparseDrafter):
        raise ValueError(f"draft {text!r} has no ratio to tune; take a policy, such as vegas")
    if ratio is None:
        return text, kind
    whole = f"{name}:{settings}{',' if settings else ''}{size}={ratio}"
    return whole, named_draft(whole)


class Bench:
    """Measures settings of a sparse drafter on one batch of requests, which are prefilled once.

    The device needs room for two copies of the cache.

    Args:
        model: The model.
        prompts: Token ids of each request.
        params: Sampling parameters of each request.
        text: Name of the drafter, without a ratio.
        max_gamma: The most draft tokens that will be measured.
        make_params: ``make_params(draft)`` returns the parameters of the draft's policy, as
            `jspec.policies.prepare_params` makes them.
        backends: As in `jspec.generate`.
        report: Called after each run.
    """

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        text: str,
        max_gamma: int,
        make_params: Callable[[Drafter], Any],
        backends: Backends = Backends(),
        report: Callable[[], None] = lambda: None,
    ):
        self._model, self._prompts, self._params = model, prompts, params
        self._text, self._make_params = text, make_params
        self._backends, self._report = backends, report
        self._copy: Any = None
        self._policy_params: dict[Hashable, Any] = {}
        self._compiled: dict[Setting, Stats] = {}
        # With room in layers with a sliding window for the longest draft.
        max_gamma = max(max_gamma, draft_at(text, None)[1].traits.default_gamma)
        config = StepConfig(max_gamma, NoDraft(), backends)
        self._state = start_decoding(model, prompts, params, config)

    def same_programs(self, ratios: Sequence[float]) -> list[tuple[float, ...]]:
        """``ratios``, ascending, those together that read as many positions of these requests."""
        groups: dict[Hashable, list[float]] = {}
        for ratio in sorted(set(ratios)):
            groups.setdefault(self._positions_read(ratio), []).append(ratio)
        return [tuple(group) for group in groups.values()]

    def default(self, groups: Sequence[Sequence[float]]) -> Setting:
        """The drafter's own gamma, and the first ratio of the group that reads what it reads."""
        read = self._positions_read(None)
        same = (group[0] for group in groups if self._positions_read(group[0]) == read)
        return Setting(next(same, None), draft_at(self._text, None)[1].traits.default_gamma)

    def measure(self, settings: Sequence[Setting], *, runs: int) -> tuple[Trial, ...]:
        """Measure settings. The first run of each compiles and is not timed.

        Args:
            settings: The settings.
            runs: Timed runs of each. They take turns, so that all of them see the same drift.

        Returns:
            The trial of each setting.
        """
        for setting in settings:
            if setting not in self._compiled:
                self._compiled[setting] = self._run(setting)
        speeds = [
            [self._run(setting).decode_tokens_per_s for setting in settings] for _ in range(runs)
        ]
        trials = []
        for index, setting in enumerate(settings):
            stats = self._compiled[setting]
            accepted = stats.accepted / max(stats.steps, 1)
            trials.append(Trial(setting, accepted, tuple(turn[index] for turn in speeds)))
        return tuple(trials)

    def _run(self, setting: Setting) -> Stats:
        draft = draft_at(self._text, setting.ratio)[1] if setting.gamma else NoDraft()
        key = setting.ratio if setting.gamma else PLAIN
        if key not in self._policy_params:
            self._policy_params[key] = self._make_params(draft)
        # One copy of the weights serves all trials.
        models = Models(self._model, self._copy if draft.traits.makes_model else None)
        copy = draft.prepare(models).draft
        self._copy = self._copy if copy is None else copy
        stats = generate(
            *(self._model, self._prompts, self._params),
            draft=draft,
            gamma=setting.gamma,
            draft_model=copy,
            policy_params=self._policy_params[key],
            backends=self._backends,
            prefilled=self._state,
        ).stats
        self._report()
        return stats

    def _positions_read(self, ratio: float | None) -> Hashable:
        """What of a drafter depends on its ratio: how much it reads, at each length of a row."""
        draft: Any = draft_at(self._text, ratio)[1]
        pairs = list(zip(self._prompts, self._params, strict=True))
        ends = [len(prompt) + params.max_new_tokens for prompt, params in pairs]
        lengths = jnp.arange(min(map(len, self._prompts)) - 1, max(ends), dtype=jnp.int32)
        return tuple(
            _read(draft.policy, self._state.cache, layer, lengths)
            for layer, spec in enumerate(self._state.cache.specs)
            if spec.window is None
        )


def _read(policy: Any, cache: Cache, layer: int, lengths: Any) -> Hashable:
    """How much a policy reads of a layer in rows of ``lengths [B]``."""
    if isinstance(policy, Budgeted):
        k, limits = policy.limits(cache.layouts[layer].capacity, lengths)
        counts = limits.pop("counts")
        return k, *limits.values(), None if counts is None else np.asarray(counts).tobytes()
    assert isinstance(policy, Streaming)
    policy = Streaming(policy.sinks, policy.window)  # rotations of keys change no position
    positions = policy.select(None, layer, cache, None, lengths).positions
    assert positions is not None
    return positions.shape, np.asarray(positions).tobytes()
