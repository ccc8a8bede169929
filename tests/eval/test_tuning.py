"""The three steps of tuning on made-up acceptance and times, and on a model."""

import numpy as np
import pytest

from jspec.config import SamplingParams
from jspec.decode.draft import GuidedDraft, SelfDraft
from jspec.decode.generation import generate
from jspec.eval import tuning
from jspec.eval.tuning import Bench, Trial, draft_at, tune
from jspec.policies import Streaming, Vegas
from tests.decode.common import prompts

RATIOS, GAMMAS = (0.2, 0.01, 0.05, 0.1), (2, 12, 6)


def measure(ratio: float, gamma: int) -> Trial:
    """Acceptance that settles at 5 %, and a cost of a draft token that grows with the ratio."""
    rate = 0.9 if ratio >= 0.05 else 0.5
    accepted = float((rate ** np.arange(1, gamma + 1)).sum())
    cost = 1 + gamma * (0.15 + ratio / 4)
    return Trial(ratio, gamma, accepted, (1 + accepted) / cost)


def test_the_three_steps():
    result = tune(measure, RATIOS, GAMMAS)
    assert [measured.ratio for measured in result.acceptance] == sorted(RATIOS)
    assert {measured.gamma for measured in result.acceptance} == {12}
    assert result.settled == 0.05
    assert [measured.gamma for measured in result.gammas] == [2, 6, 12]
    fastest = max((measure(0.05, gamma) for gamma in GAMMAS), key=lambda x: x.tokens_per_s)
    assert result.best.gamma == fastest.gamma == 6
    assert {measured.gamma for measured in result.ratios} == {6}
    every = [measure(ratio, 6).tokens_per_s for ratio in RATIOS]
    assert result.best.tokens_per_s == max(every)


def test_no_setting_is_measured_twice():
    asked = []

    def noted(ratio: float, gamma: int) -> Trial:
        asked.append((ratio, gamma))
        return measure(ratio, gamma)

    tune(noted, RATIOS, GAMMAS)
    assert len(asked) == len(set(asked)) == 4 + 2 + 3


def test_the_settled_ratio_may_be_left_for_a_faster_one():
    """Step 3 takes a ratio below the one where acceptance settles where that is faster."""

    def measure(ratio: float, gamma: int) -> Trial:
        return Trial(ratio, gamma, 2 + ratio, 100 - 100 * ratio)

    result = tune(measure, (0.1, 0.5, 0.9), (3,))
    assert (result.settled, result.best.ratio) == (0.9, 0.1)


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


def test_a_trial_counts_what_generate_counts(tiny, monkeypatch):
    monkeypatch.setattr(tuning, "RUNS", 2)
    reports: list[None] = []
    params = [SamplingParams(max_new_tokens=10, seed=row) for row in range(2)]
    texts = prompts((30, 20))
    bench = Bench(tiny, texts, params, 3, lambda draft: None, report=lambda: reports.append(None))
    trial = bench.sparse("vegas:least=0")(0.25, 3)
    draft = draft_at("vegas:least=0", 0.25)[1]
    stats = generate(tiny, texts, params, draft=draft, gamma=3).stats
    assert trial.accepted == stats.accepted / stats.steps
    assert trial.tokens_per_s > 0
    assert len(reports) == 1
