"""The suite `ruler`: what it asks for, what becomes of the scores, and its section."""

import json

import pytest

from bench import report, ruler
from bench.__main__ import main
from jspec.eval.evaluate import Score
from jspec.eval.ruler import TASKS
from jspec.policies import Dense, Hata, Quest, Streaming
from tests.bench.test_report import MACHINE


@pytest.fixture
def heard(monkeypatch):
    """Scores that follow from the settings; the model is not asked."""
    calls = []

    def score(run):
        budget = getattr(run.policy, "budget", 1.0)
        answers = ("wrong",) if isinstance(run.policy, Quest) and run.drafts else ("right",)
        stats = type(
            "Stats", (), {"mean_accepted_length": 1 + 4 * budget, "acceptance_rate": budget}
        )
        return Score(100 * budget, dict.fromkeys(TASKS, 100 * budget), (1.0,), answers, stats)

    def evaluate_all(model, tokenizer, runs, questions, *, length, batch, on_batch):
        calls.append((runs, questions, length))
        return [score(run) for run in runs]

    monkeypatch.setattr(ruler, "evaluate_all", evaluate_all)
    return calls


def test_a_run_reads_and_drafts_by_every_policy(heard, tmp_path, capsys):
    path = tmp_path / "ruler.json"
    # The drafts of Quest are not what dense reading answers.
    assert main(["ruler", "--quick", "--json", str(path)]) == 1
    ((runs, questions, length),) = heard
    assert (len(questions), length) == (len(TASKS), 2048)
    assert runs[0].policy == Dense()
    assert {run.drafts for run in runs} == {True, False}
    assert all(run.policy.hashes for run in runs if isinstance(run.policy, Hata))
    window = next(run.policy for run in runs if isinstance(run.policy, Streaming))
    assert window.window == 1 / 64, "of the context, the sinks included"
    rows = json.loads(path.read_text())["rows"]
    drafts = {row["name"]: row["checked"] for row in rows if row["case"]["kind"] == "draft"}
    assert {name for name, good in drafts.items() if not good} == {"quest", "quest-16"}
    bytes_read = {row["name"]: row["bytes"] for row in rows}
    assert {bytes_read[name] for name in ruler.EQUAL_BYTES} == {16}
    assert (bytes_read["exact_topk"], bytes_read["dense"]) == (256, 0)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    assert "1.56%" in shown


def test_a_case_says_how_long_and_how_many(heard):
    asked = ["ruler", "--quick", "--backend", "hata", "--backend", "loki-16"]
    assert main([*asked, "--case", "S=2K,questions=2", "--case", "S=3K"]) == 0
    assert all(len(runs) == 1 + 2 * 2 for runs, *_ in heard)  # dense; each reads and drafts
    assert [(len(questions), length) for _, questions, length in heard] == [(12, 2048), (18, 3072)]


def test_the_report_has_a_line_a_policy_and_a_picture(tmp_path):
    pytest.importorskip("matplotlib")

    def row(name, budget, kind, score):
        case = {"S": 8192, "questions": 3, "budget": budget, "kind": kind}
        own = {"operation": "ruler", "case": case, "name": name, "bytes": 16.0, "score": score}
        return own | ({"mean_accepted_length": 4.5} if kind == "draft" else {})

    rows = [row("dense", None, "read", 99.0)]
    rows += [row("hata", budget, "read", 100 * budget) for budget in (1 / 64, 1 / 32)]
    rows += [row("hata", 1 / 64, "draft", 99.0)]
    result = {"suite": "ruler", "machine": MACHINE, "dtype": "float32", "gamma": 4, "rows": rows}
    result["tasks"] = list(TASKS)
    folder = tmp_path / "results" / "some"
    folder.mkdir(parents=True)
    (folder / "ruler.json").write_text(json.dumps(result))
    report.write(tmp_path / "results", tmp_path / "docs")
    text = (tmp_path / "docs" / "RESULTS.md").read_text()
    assert "| Test | 8K | dense | 16 |  |  |  |  |  | 99.0 |  |" in text
    assert "|  |  | hata | 16 |  |  | 1.6 | 3.1 |  |  | 4.50 |" in text
    assert "some-ruler-budget.png" in text
    assert (tmp_path / "docs" / "some-ruler-budget.png").exists()
