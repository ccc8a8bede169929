"""The suite `hash-bits`: what it learns and asks, and that it says when nothing was learned."""

import json

import pytest

from bench import hash_bits, ruler
from bench.__main__ import main
from jspec.eval.evaluate import Score
from jspec.eval.ruler import TASKS
from jspec.policies import Dense, ExactTopK


@pytest.fixture
def results(monkeypatch, tmp_path):
    """A folder for results, where learning finds more by each bit, but nothing with 64 of them."""

    def learn(job, on_progress):
        bits = job.settings.bits
        assert len(job.texts.learned) == 3
        assert not set(map(tuple, job.texts.learned)) & set(map(tuple, job.texts.held_out))
        recall = {"exact": 1.0, "hata-attention": 0.2 if bits == 64 else bits / 256, "random": 0.2}
        found = [{"name": n, "recall": [r, r], "mass": [r, r]} for n, r in recall.items()]
        return {"methods": found}

    def evaluate_all(model, tokenizer, runs, questions, *, length, batch, on_batch):
        assert (len(questions), length) == (len(TASKS), 2048)
        dense, exact, *hashed = (run.policy for run in runs)
        assert isinstance(dense, Dense)
        assert isinstance(exact, ExactTopK)
        scores = [100.0, 90.0, *(float(policy.bits) / 4 for policy in hashed)]
        assert all(policy.hashes.endswith(f"/{policy.bits}") for policy in hashed)
        return [Score(s, dict.fromkeys(TASKS, s), (1.0,), ("",), None) for s in scores]

    monkeypatch.setattr(hash_bits, "learn", learn)
    monkeypatch.setattr(ruler, "evaluate_all", evaluate_all)
    (tmp_path / "results" / "some").mkdir(parents=True)
    return tmp_path / "results"


def test_bits_have_their_rows_and_what_learned_nothing_is_told(results, capsys):
    path = results / "some" / "hash-bits.json"
    case = "S=2K,texts=3,questions=1"
    assert main(["hash-bits", "--case", case, "--json", str(path)]) == 1
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"]["R"] for row in rows] == [None, None, 32, 64, 128, 256]
    assert [row["checked"] for row in rows[2:]] == [False, False, True, True]
    shown = capsys.readouterr().out
    assert "R=64: learned hashes find no more than random ones" in shown
    assert max(map(len, shown.splitlines())) <= 100
    cells = [tuple(hash_bits.cells(row)) for row in rows]
    assert ("hata", "128", "16", "0.500", "0.200", "0.500", "32.0") in cells
    assert ("exact", "", "", "1.000", "", "1.000", "90.0") in cells
