"""The suite `quality`: what it asks for, what becomes of scores and answers, and its checks."""

import jax
import numpy as np
import pytest

from bench import quality
from bench.real import check
from bench.settings import Settings
from jspec.eval.evaluate import Score
from jspec.eval.ruler_bytes import TASKS
from jspec.policies import Dense, Hata, Streaming

READ, DRAFT = quality.READING, quality.DRAFTING


def test_every_policy_reads_at_its_budget(monkeypatch):
    """With scores that follow from the settings; the model is not asked."""
    calls = []

    def evaluate_all(model, tokenizer, runs, questions, *, length, batch, on_batch):
        calls.append((runs, questions, length))
        budgets = [getattr(run.policy, "budget", 1.0) for run in runs]
        return [Score(100 * x, dict.fromkeys(TASKS, 100 * x), (1.0,), ("",), None) for x in budgets]

    monkeypatch.setattr(quality, "evaluate_all", evaluate_all)
    rows = list(READ.rows(READ.case("S=2K,questions=1"), Settings(quick=True)))
    ((runs, questions, length),) = calls
    assert (len(questions), length) == (len(TASKS), 2048)
    assert runs[0].policy == Dense()
    assert all(run.policy.hashes for run in runs if isinstance(run.policy, Hata))
    window = next(run.policy for run in runs if isinstance(run.policy, Streaming))
    assert window.window == 1 / 64, "of the context, the sinks included"
    sizes = {row["name"]: row["bytes"] for row in rows}
    assert {sizes[name] for name in quality.EQUAL_BYTES} == {16}
    assert (sizes["exact_topk"], sizes["dense"]) == (256, 0)
    assert next(row["score"] for row in rows if row["name"] == "hata") == 100 / 64
    rows = list(READ.rows(READ.case("S=2K"), Settings(only=("hata", "loki-16"))))
    assert len(rows) == 1 + 2 * (2 + 3)  # dense; two policies at two usual and three more budgets


CASE = "S=128,texts=2,B=2,new=12,gamma=3"


@pytest.mark.slow
def test_drafters_are_compared_with_plain_decoding(small_bundled):
    rows = list(DRAFT.rows(DRAFT.case(CASE), Settings(only=("ngram", "vegas-first"))))
    assert [row["name"] for row in rows] == ["none", "vegas-first", "ngram"]
    plain, vegas, ngram = rows
    assert plain["length"] == 1
    assert {row["checked"] for row in rows} == {True}
    assert (vegas["compared"], vegas["flips"]) == (24, 0)
    assert "over vegas-first" not in vegas
    lengths = [np.divide(row["tokens"], row["steps"]) for row in (ngram, vegas)]
    assert ngram["over vegas-first"] == pytest.approx((lengths[0] - lengths[1]).mean())
    assert len(vegas["attempts_at"]) == 3


def test_answers_that_differ_are_wrong_and_the_error_is_that_of_pairs():
    rng = np.random.default_rng(0)
    steps, tokens = rng.integers(5, 20, 9), rng.integers(20, 60, 9)
    measured = {"tokens": tokens, "steps": steps, "attempts_at": [], "accepted_at": []}
    measured |= {"rows": 9, "identical_rows": 7, "compared": 300, "checked": False}
    reference = rng.uniform(1, 4, 9)
    figures = quality.figures_of(measured, reference)
    assert (figures["flips"], figures["reason"]) == (2, "its answers are not the model's")
    differences = tokens / steps - reference
    assert figures["over vegas-first"] == pytest.approx(differences.mean())
    assert figures["standard error"] == pytest.approx(differences.std(ddof=1) / 3)
    assert figures["length"] == pytest.approx(tokens.sum() / steps.sum())


def test_tokens_are_compared_up_to_the_first_that_differs():
    plain = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    answers = [[1, 2, 3], [4, 0, 0], [7, 8, 9]]

    def scorer(rows, texts, params):
        assert (rows, texts) == ([1, 1], [[4, 0], [4, 5]])
        return [np.array([[0.0, 0, 0], [x, 0, 0]]) for x in (-1.0, -1.2)]

    result = check.greedy(scorer, answers, plain, exact=False)
    assert (result["compared"], result["identical_rows"]) == (3 + 2 + 3, 2)
    assert result["flip_margins"] == pytest.approx([0.2])
    assert result["checked"]
    assert not check.greedy(scorer, answers, plain, exact=True)["checked"]


def test_where_nothing_can_be_exact_a_row_says_why(small_bundled):
    (row,) = DRAFT.rows(DRAFT.case(f"{CASE},exact=yes"), Settings(only=("ngram",)))
    assert row["checked"] is None
    assert "Triton needs an NVIDIA GPU" in row["reason"]


def test_cases_and_defaults(monkeypatch):
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        for benchmark in (READ, DRAFT):
            assert benchmark.grid(Settings())
    for benchmark, text in ((READ, "gamma=2"), (DRAFT, "questions=2"), (DRAFT, "rule=lax")):
        with pytest.raises(ValueError, match="must be one of"):
            benchmark.case(text)
