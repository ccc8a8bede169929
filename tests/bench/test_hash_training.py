"""The suite `hash-training`: what it times, and that it says when nothing was learned."""

import json

import pytest

pytest.importorskip("optax")

from bench import hash_training
from bench.__main__ import main
from jspec.config import LayerSpec
from jspec.train.loss import HashTraining


def test_it_times_each_layer_and_all_and_is_compared(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        hash_training, "HashTraining", lambda **asked: HashTraining(epochs=5, **asked)
    )
    path = tmp_path / "results" / "some" / "hash-training.json"
    assert main(["hash-training", "--quick", "--json", str(path)]) == 0
    assert "all layers" in capsys.readouterr().out
    (row,) = json.loads(path.read_text())["rows"]
    assert row["case"] == {"layers": 2, "pairs": 1200, "K": 2, "H": 32, "R": 32}
    assert len(row["label_s"]) == len(row["learn_s"]) == 2
    assert row["total_s"] == pytest.approx(sum(row["label_s"] + row["learn_s"]))
    found = {"rows": [{"case": row["case"], "checked": True, "total_s": 2 * row["total_s"]}]}
    assert hash_training.compare_rows(found, {"rows": [row]}) == 1
    assert found["rows"][0]["vs_before"] == pytest.approx(0.5)


def test_hashes_that_learned_nothing_fail_the_run_and_are_not_timed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        hash_training, "HashTraining", lambda **asked: HashTraining(rate=0.0, epochs=1, **asked)
    )
    path = tmp_path / "result.json"
    assert main(["hash-training", "--quick", "--json", str(path)]) == 1
    assert "learned hashes find no more than random ones" in capsys.readouterr().out
    assert "total_s" not in json.loads(path.read_text())["rows"][0]


def test_without_the_check_nothing_is_timed(tmp_path):
    spec, path = LayerSpec(1, 8, 8), tmp_path / "result.json"
    assert len(hash_training._samples(spec, 100)) == hash_training.TEXTS
    assert main(["hash-training", "--quick", "--no-check", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["rows"][0]["reason"] == "not checked, so not timed"
