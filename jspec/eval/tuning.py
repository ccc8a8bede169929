"""Tuning a sparse drafter in the three steps of Vegas (Yue et al. 2026, section 3.4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jspec.config import SamplingParams
from jspec.decode.draft import Drafter, NoDraft, SparseDrafter, named_draft
from jspec.decode.generation import generate
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.decode.stats import Stats
from jspec.dispatch import Backends

RATIOS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1)
GAMMAS = (3, 5, 7, 9, 12)
SETTLED = 0.98  # of the most accepted draft tokens: where more of the context adds little
RUNS = 3  # of which the first is not timed, and the faster of the others counts


@dataclasses.dataclass(frozen=True)
class Trial:
    """A measurement: accepted draft tokens a step, and tokens a second, at a ratio and a gamma."""

    ratio: float
    gamma: int
    accepted: float
    tokens_per_s: float


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The trials of each step, and what was chosen.

    ``acceptance``: each ratio at the largest gamma; ``gammas``: each gamma at the ratio ``settled``
    where acceptance settles; ``ratios``: each ratio at the chosen gamma, of which ``best`` is the
    fastest.
    """

    acceptance: tuple[Trial, ...]
    settled: float
    gammas: tuple[Trial, ...]
    ratios: tuple[Trial, ...]
    best: Trial


def tune(
    measure: Callable[[float, int], Trial], ratios: Sequence[float], gammas: Sequence[int]
) -> Tuning:
    """Choose the ratio and gamma of a sparse drafter in three steps (Yue et al. 2026, 3.4).

    Args:
        measure: measures a ratio and a gamma; called at most once for each pair.
        ratios: shares of the context that the drafter may read.
        gammas: numbers of draft tokens.

    Returns:
        The trials and the fastest settings.
    """
    trials: dict[tuple[float, int], Trial] = {}

    def trial(ratio: float, gamma: int) -> Trial:
        if (ratio, gamma) not in trials:
            trials[ratio, gamma] = measure(ratio, gamma)
        return trials[ratio, gamma]

    ratios, gammas = sorted(ratios), sorted(gammas)
    acceptance = tuple(trial(ratio, gammas[-1]) for ratio in ratios)
    max_accepted = max(point.accepted for point in acceptance)
    settled = next(point.ratio for point in acceptance if point.accepted >= SETTLED * max_accepted)
    by_gamma = tuple(trial(settled, gamma) for gamma in gammas)
    gamma = max(by_gamma, key=_speed).gamma
    by_ratio = tuple(trial(ratio, gamma) for ratio in ratios)
    return Tuning(acceptance, settled, by_gamma, by_ratio, max(by_ratio, key=_speed))


def _speed(trial: Trial) -> float:
    return trial.tokens_per_s


def draft_at(text: str, ratio: float) -> tuple[str, Drafter]:
    """Add a ratio to the name of a sparse drafter.

    Args:
        text: name of the drafter, such as ``vegas`` or ``streaming:sinks=4``.
        ratio: share of the context that it reads.

    Returns:
        The name with the ratio, and the drafter.

    Raises:
        ValueError: ``text`` names no sparse drafter, or has a ratio already.
    """
    name, _, settings = text.partition(":")
    size = "window" if name == "streaming" else "budget"
    if any(setting.startswith(f"{size}=") for setting in settings.split(",")):
        raise ValueError(f"draft {text!r}: {size} is what is tuned; leave it out")
    whole = f"{name}:{settings}{',' if settings else ''}{size}={ratio}"
    kind = named_draft(text)
    if not isinstance(kind, SparseDrafter):
        raise ValueError(f"draft {text!r} has no ratio to tune; take a policy, such as vegas")
    return whole, named_draft(whole)


class Bench:
    """Measures settings on one batch of requests, which are prefilled once.

    The device needs room for two copies of the cache.

    Args:
        model: the model.
        prompts: token ids of each request.
        params: sampling parameters of each request.
        longest: the most draft tokens that will be measured.
        arrays: ``arrays(draft)`` returns the parameters of the draft's policy, as
            `jspec.policies.prepare_params` makes them.
        backends: as in `jspec.generate`.
        report: called after each measurement.
    """

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        longest: int,
        arrays: Callable[[Drafter], Any],
        backends: Backends = Backends(),
        report: Callable[[], None] = lambda: None,
    ):
        self._model, self._prompts, self._params = model, prompts, params
        self._arrays, self._backends, self._report = arrays, backends, report
        self._copy: Any = None
        # With room in layers with a sliding window for the longest draft.
        config = StepConfig(longest, NoDraft(), backends)
        self._state = start_decoding(model, prompts, params, config)

    def sparse(self, text: str) -> Callable[[float, int], Trial]:
        """Return a function that measures the draft ``text`` at a ratio and a gamma."""

        def measure(ratio: float, gamma: int) -> Trial:
            stats = self._stats(draft_at(text, ratio)[1], gamma)
            accepted = stats.accepted / max(stats.steps, 1)
            return Trial(ratio, gamma, accepted, stats.decode_tokens_per_s)

        return measure

    def plain(self) -> float:
        """Tokens a second of plain decoding."""
        return self._stats(NoDraft(), 0).decode_tokens_per_s

    def _stats(self, draft: Drafter, gamma: int) -> Stats:
        # One copy of the weights serves all trials.
        models = Models(self._model, self._copy if draft.traits.makes_model else None)
        copy = draft.prepare(models).draft
        self._copy = self._copy if copy is None else copy
        arrays = self._arrays(draft)
        runs = [
            generate(
                *(self._model, self._prompts, self._params),
                draft=draft,
                gamma=gamma,
                draft_model=copy,
                policy_params=arrays,
                backends=self._backends,
                prefilled=self._state,
            ).stats
            for _ in range(RUNS)
        ]
        self._report()
        return max(runs[1:], key=lambda stats: stats.decode_tokens_per_s)
