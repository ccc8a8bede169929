"""The suite `hash-losses`: what it learns from, what it checks, and its table."""

import json

import pytest

pytest.importorskip("optax")

from bench import hash_losses
from bench.__main__ import main

FOUND = {
    "exact": 1.0,
    "hata-attention": 0.6,
    "hata-paper": 0.5,
    "hata-authors": 0.4,
    "random": 0.4,
    "loki": 0.3,
    "quest": 0.2,
}


@pytest.fixture
def path(monkeypatch, tmp_path):
    """A file for a result, where learning finds `FOUND`, and the authors' loss learns nothing."""

    def learn(job, on_progress):
        assert (len(job.texts.learned), job.compares, job.settings.variant) == (3, True, "paper")
        assert not set(map(tuple, job.texts.learned)) & set(map(tuple, job.texts.held_out))
        methods = [
            {"name": name, "bytes": 16.0, "recall": [x, x], "mass": [x / 2, x / 4]}
            for name, x in FOUND.items()
        ]
        return {"methods": methods, "bits": 128, "pairs": 12345, "budgets": [1 / 64, 1 / 32]}

    monkeypatch.setattr(hash_losses, "learn", learn)
    (tmp_path / "results" / "some").mkdir(parents=True)
    return tmp_path / "results" / "some" / "hash-losses.json"


def test_each_method_has_its_row_and_a_loss_that_teaches_nothing_is_told(path, capsys):
    asked = ["hash-losses", "--case", "texts=3", "--json", str(path)]
    assert main(asked) == 1
    rows = json.loads(path.read_text())["rows"]
    assert {row["name"]: row["checked"] for row in rows} == {
        "exact": True,
        "hata-attention": True,
        "hata-paper": True,
        "hata-authors": False,
        "random": None,
        "loki": None,
        "quest": None,
    }
    shown = capsys.readouterr().out
    assert "hata-authors: learned hashes find no more than random ones" in shown
    assert max(map(len, shown.splitlines())) <= 100
    cells = ["hata-paper", "3", "12,345", "16", "0.500", "0.250", "0.500", "0.125"]
    assert (
        list(hash_losses.cells(next(row for row in rows if row["name"] == "hata-paper"))) == cells
    )


def test_an_earlier_result_is_held_against_it(path, capsys):
    asked = ["hash-losses", "--case", "texts=3", "--json", str(path)]
    main(asked)
    main([*asked[:3], "--compare", str(path)])
    assert "loki: recall was 0.300, 0.300" in capsys.readouterr().out


def test_an_exact_selection_that_misses_a_key_is_wrong(path, monkeypatch):
    monkeypatch.setitem(FOUND, "exact", 0.99)
    assert main(["hash-losses", "--case", "texts=3", "--json", str(path)]) == 1
    exact, *_ = json.loads(path.read_text())["rows"]
    assert exact["checked"] is False
