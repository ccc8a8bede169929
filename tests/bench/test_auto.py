"""The suite `auto`: each gamma of the ladder and auto beside, checked, compared and reported."""

import json
import re

import pytest

from bench import auto
from bench.__main__ import main
from jspec.decode import auto as choice


@pytest.fixture
def small(small_bundled, monkeypatch):
    monkeypatch.setattr(choice, "LADDER", (0, 2))
    monkeypatch.setattr(auto, "NEW_TOKENS", 24)
    monkeypatch.setattr(auto, "CHUNK", 4)
    monkeypatch.setattr(auto, "WARM", 1)
    monkeypatch.setattr(auto, "SETS", 2)


def test_it_holds_auto_against_each_gamma(small, tmp_path, capsys):
    path = tmp_path / "results" / "some" / "auto.json"
    cases = ["--case", "ngram,B=2,S=64,t=0", "--case", "ngram,B=1,S=48,t=1"]
    assert main(["auto", *cases, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["gamma"] for row in rows] == [0, 2, "auto"] * 2
    assert all(row["checked"] for row in rows)
    for of_case in (rows[:3], rows[3:]):
        speeds = [row["tokens_per_s"] for row in of_case]
        for row, speed in zip(of_case, speeds, strict=True):
            assert row["vs_plain"] == pytest.approx(speed / speeds[0])
            assert row["vs_best"] == pytest.approx(speed / max(speeds[:2]))
    for row in rows:
        assert ("chunks" in row) == (row["gamma"] == "auto")
        for gamma, step_ns, accepted in row.get("chunks", ()):
            assert step_ns > 0
            assert 0 <= accepted <= gamma
    shown = capsys.readouterr().out
    assert "auto at its worst of 2 cases" in shown
    slower = {"rows": [rows[0] | {"tokens_per_s": rows[0]["tokens_per_s"] / 2}]}
    assert auto.compare({"rows": rows}, slower) == 1
    assert rows[0]["ratio"] == pytest.approx(2)
    assert f"{min(rows[2]['vs_plain'], rows[5]['vs_plain']):.2f}x plain decoding" in shown


def test_every_row_of_every_batch_has_a_text_and_a_seed_of_its_own(monkeypatch):
    taken = []
    monkeypatch.setattr(auto.jspec, "start_decoding", lambda *given: taken.append(given[1:3]))
    gammas = auto.Gammas(auto.jspec.StepConfig(draft=auto.jspec.named_draft("ngram")))
    texts = [[row] for row in range(6)]
    list(auto._states(None, texts, {"B": 2, "t": 0.8}, gammas))  # pyright: ignore
    assert [prompts for prompts, _ in taken] == [texts[:2], texts[2:4], texts[4:]]
    params = [own for _, both in taken for own in both]
    assert len({own.seed for own in params}) == 6
    assert all(own.ignore_eos and own.temperature == 0.8 for own in params)


def test_tokens_that_differ_fail_the_run(small, monkeypatch, tmp_path):
    monkeypatch.setattr(auto.decoding, "check_tokens", lambda *_: {"checked": False})
    path = tmp_path / "result.json"
    assert main(["auto", "--case", "ngram,B=1,S=48,t=0", "--json", str(path)]) == 1


@pytest.mark.parametrize("text", ["model,B=1,S=2048,t=0", "ngram,B=1,S=2048", "ngram,B=1,S=9,t=0"])
def test_a_case_that_is_none_says_what_one_is(text, capsys):
    with pytest.raises(SystemExit):
        main(["auto", "--case", text])
    wanted = "must be DRAFT,B=N,S=N,t=X with one of ngram, streaming"
    assert wanted in re.sub(r"\s+", " ", capsys.readouterr().err)
