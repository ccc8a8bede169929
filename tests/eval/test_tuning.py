"""The three steps of tuning on made-up acceptance and times, and on a model."""

import numpy as np
import pytest

from jspec.config import SamplingParams
from jspec.decode.draft import GuidedDraft, SelfDraft
from jspec.decode.generation import generate
from jspec.eval import tuning
from jspec.eval.tuning import PLAIN, Bench, Setting, Trial, draft_at, tune
from jspec.policies import Streaming, Vegas
from tests.decode.common import prompts

RATIOS, GAMMAS = (0.2, 0.01, 0.05, 0.1), (2, 12, 6)
DEFAULT = Setting(0.1, 4)
NOISE = np.array([-0.1, 0.05, 0.1, 0, -0.05])


class Timings:
    """Measures made-up settings: ``speed(ratio, gamma)`` tokens a second, times ``1 + noise``."""

    def __init__(self, speed, noise=0 * NOISE, accepted=lambda ratio, gamma: 1.0):
        self.speed, self.noise, self.accepted = speed, noise, accepted
        self.calls: list[tuple[list[Setting], int]] = []

    def __call__(self, settings, *, runs):
        self.calls.append((list(settings), runs))
        return tuple(
            Trial(x, self.accepted(*x), tuple(self.speed(*x) * (1 + self.noise[:runs])))
            for x in settings
        )


def accepted(ratio, gamma) -> float:
    """Acceptance that settles at 5 %."""
    rate = 0.9 if ratio is not None and ratio >= 0.05 else 0.5
    return float((rate ** np.arange(1, gamma + 1)).sum())


def speed(ratio, gamma) -> float:
    """The cost of a draft token grows with the ratio."""
    return (1 + accepted(ratio, gamma)) / (1 + gamma * (0.15 + (ratio or 0) / 4))


def test_the_three_steps():
    timings = Timings(speed, accepted=accepted)
    result = tune(timings, RATIOS, GAMMAS, DEFAULT)
    assert result.settled == 0.05
    fastest = max(GAMMAS, key=lambda gamma: speed(0.05, gamma))
    assert result.best.setting.gamma == fastest == 6
    assert result.best.tokens_per_s == max(speed(ratio, 6) for ratio in RATIOS)
    assert result.chosen is result.best
    ratios = sorted(RATIOS)
    assert timings.calls == [
        ([Setting(ratio, 12) for ratio in ratios], 0),
        ([Setting(0.05, gamma) for gamma in (2, 6, 12)], tuning.RUNS),
        ([PLAIN, DEFAULT, *(Setting(ratio, 6) for ratio in ratios)], tuning.RUNS),
    ]


def test_a_default_that_is_tried_is_measured_once():
    timings = Timings(speed, accepted=accepted)
    result = tune(timings, RATIOS, GAMMAS, Setting(0.1, 6))
    settings, _ = timings.calls[-1]
    assert settings.count(Setting(0.1, 6)) == 1
    assert result.default in result.ratios


def test_the_settled_ratio_may_be_left_for_a_faster_one():
    """Step 3 takes a ratio below the one where acceptance settles where that is faster."""
    timings = Timings(lambda ratio, _: 100 - 100 * (ratio or 1), accepted=lambda r, _: 2 + (r or 0))
    result = tune(timings, (0.1, 0.5, 0.9), (3,), DEFAULT)
    assert (result.settled, result.best.setting.ratio) == (0.9, 0.1)


@pytest.mark.parametrize("name", ["tuned", "plain"])
def test_a_gain_within_the_noise_is_no_reason_to_leave_the_default(name):
    """Runs vary from 0.9 to 1.1 of their median: what is 1.1 times as fast may be no faster."""
    at = PLAIN if name == "plain" else Setting(0.05, 6)
    for gain, is_chosen in ((1.1, False), (1.3, True)):
        fast = Timings(lambda *x, gain=gain: 10 * gain if Setting(*x) == at else 10, NOISE)
        result = tune(fast, RATIOS, (6,), DEFAULT)
        assert result.chosen.setting == (at if is_chosen else DEFAULT)


def test_a_draft_must_beat_plain_decoding_too_beyond_the_noise():
    speeds = {PLAIN: 13.0, Setting(0.05, 6): 13.5}
    result = tune(Timings(lambda *x: speeds.get(Setting(*x), 10), NOISE), RATIOS, (6,), DEFAULT)
    assert result.best.setting == Setting(0.05, 6)
    assert result.chosen is result.plain


def test_a_ratio_becomes_a_setting():
    text, draft = draft_at("vegas:collect=all", 0.05)
    assert text == "vegas:collect=all,budget=0.05"
    assert draft == GuidedDraft(Vegas(budget=0.05, collect="all"))
    assert draft_at("streaming", 0.1)[1] == SelfDraft(Streaming(window=0.1))
    for text, message in (
        ("vegas:budget=0.1", "budget is what is tuned; leave it out"),
        ("ngram", "has no ratio to tune"),
        ("suffix > vegas", "has no ratio to tune"),
    ):
        with pytest.raises(ValueError, match=message):
            draft_at(text, 0.1)


@pytest.fixture
def make_bench(tiny):
    def make(text: str, sizes=(30, 20), report=lambda: None) -> Bench:
        params = [SamplingParams(max_new_tokens=10, seed=row) for row in range(len(sizes))]
        return Bench(tiny, prompts(sizes), params, text, 3, lambda draft: None, report=report)

    return make


@pytest.mark.parametrize(
    ("text", "groups", "default"),
    [
        ("vegas", [(0.1, 0.2, 0.5)], Setting(0.1, 4)),  # it reads 256 positions at least
        ("vegas:least=0", [(0.1,), (0.2,), (0.5,)], Setting(None, 4)),
        ("streaming:sinks=2", [(0.1,), (0.2,), (0.5,)], Setting(None, 4)),
        ("streaming:sinks=64,positions=window", [(0.1, 0.2), (0.5,)], Setting(None, 4)),
    ],
)
def test_ratios_that_read_alike_are_one_program(make_bench, text, groups, default):
    bench = make_bench(text)
    assert bench.same_programs((0.5, 0.1, 0.2)) == groups
    assert bench.default(groups) == default


@pytest.mark.exhaustive
def test_a_trial_counts_what_generate_counts(make_bench, tiny):
    """Settings take turns, each after a run of its own that compiles and counts for no time."""
    reports: list[None] = []
    bench = make_bench("vegas:least=0", report=lambda: reports.append(None))
    sparse, plain = bench.measure([Setting(0.25, 3), PLAIN], runs=2)
    draft = draft_at("vegas:least=0", 0.25)[1]
    params = [SamplingParams(max_new_tokens=10, seed=row) for row in range(2)]
    stats = generate(tiny, prompts((30, 20)), params, draft=draft, gamma=3).stats
    assert sparse.accepted == stats.accepted / stats.steps
    assert plain.accepted == 0
    assert len(sparse.speeds) == len(plain.speeds) == 2
    assert min(*sparse.speeds, *plain.speeds) > 0
    assert len(reports) == 2 + 2 * 2


def test_runs_of_settings_take_turns(make_bench, monkeypatch):
    bench, order = make_bench("vegas"), []

    def run(setting):
        order.append(setting)
        return generate(bench._model, [[1]], SamplingParams(max_new_tokens=1), draft=None).stats

    monkeypatch.setattr(bench, "_run", run)
    settings = [PLAIN, Setting(0.25, 3)]
    bench.measure(settings, runs=2)
    assert order == 3 * settings
    bench.measure(settings[1:], runs=1)
    assert order == [*3 * settings, settings[1]]  # compiled before
