"""The suite `parity`: how flips are counted, and every row, with ordinary passes for exact ones."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from bench import parity, report
from bench.__main__ import main
from jspec.decode import exact
from jspec.dispatch import Backends

CASE = "S=24,prompts=3,new=6,B=2"


def test_the_first_token_that_differs_is_a_flip_and_ends_its_text():
    margins = np.arange(12.0).reshape(3, 4)
    reference = [[1, 2, 3, 4]] * 3
    found = parity.first_flips([[1, 2, 3, 4], [9, 8, 7, 6], [1, 2, 9, 4]], reference, margins)
    assert found == parity.Flips(compared=4 + 1 + 3, margins=[4.0, 10.0])
    assert found.figures["flips_per_1000"] == 250
    with pytest.raises(ValueError, match="a text has 1 tokens and its reference 2"):
        parity.first_flips([[1]], [[1, 2]], margins[:1])


def test_every_token_of_the_references_text_is_compared():
    choices, reference = np.array([[1, 9], [9, 4]]), np.array([[1, 2], [3, 4]])
    margins = np.array([[0.0, 0.5], [0.25, 1.0]])
    assert parity.forced_flips(choices, reference, margins) == parity.Flips(4, [0.5, 0.25])


@pytest.fixture
def as_if_exact(monkeypatch, small_bundled):
    """Ordinary passes in place of exact ones, which a CPU refuses."""
    monkeypatch.setattr(exact, "refuses_triton", lambda: None)
    monkeypatch.setattr(exact, "BACKENDS", Backends())
    monkeypatch.setattr(parity, "FORCED", (1, 2))
    monkeypatch.setattr(parity, "MAX_WORKERS", 1)  # so that rows end in the order of the cases


def measured(tmp_path, *arguments: str) -> tuple[int, list[dict]]:
    path = tmp_path / "results" / "some" / "parity.json"
    code = main(["parity", *arguments, "--json", str(path)])
    return code, json.loads(path.read_text())["rows"]


def test_rows_are_judged_shown_and_reported(as_if_exact, monkeypatch, tmp_path, capsys):
    right = parity.decoded

    def one_off(model, prompts, batch, new, **settings):
        tokens, stats = right(model, prompts, batch, new, **settings)
        if not settings["exact"]:
            tokens = [*tokens[:-1], (*tokens[-1][:-1], (tokens[-1][-1] + 1) % 256)]
        return tokens, stats

    monkeypatch.setattr(parity, "decoded", one_off)
    code, rows = measured(tmp_path, "--case", f"draft=ngram,gamma=2,{CASE}")
    assert code == 0
    assert [(r["mode"], r["kind"]) for r in rows] == [
        *(("exact", "decode"), ("ordinary", "decode")),
        *(("ordinary", "forced"), ("ordinary", "forced")),
    ]
    assert [r["flips"] for r in rows] == [0, 1, 0, 0]
    assert [r["compared"] for r in rows] == [18] * 4
    assert rows[1]["margins"][0] > 0
    out = capsys.readouterr().out
    assert "forced" in out
    assert max(map(len, out.splitlines())) <= 100
    assert parity.compare({"rows": rows}, {"rows": [rows[1] | {"flips": 3}]}) == 1
    assert [row.get("flips_before") for row in rows] == [None, 3, None, None]
    pytest.importorskip("matplotlib")
    (tmp_path / "docs").mkdir()
    report.write(tmp_path / "results", tmp_path / "docs")
    text = (tmp_path / "docs" / "RESULTS.md").read_text()
    assert "| ordinary | 1 | 18 | 1 | 55.556 | " in text


def test_one_mode_alone_may_be_asked_for(as_if_exact, tmp_path):
    for mode, kinds in (("exact", ["decode"]), ("ordinary", ["decode", "forced", "forced"])):
        code, rows = measured(tmp_path, "--case", f"draft=none,{CASE}", "--backend", mode)
        assert code == 0
        assert [(row["mode"], row["kind"]) for row in rows] == [(mode, kind) for kind in kinds]


def test_a_flip_of_an_exact_row_fails_the_run(as_if_exact, monkeypatch, tmp_path):
    right = parity.first_flips

    def one_off(tokens, *rest):
        return right([(tokens[0][0] + 1, *tokens[0][1:]), *tokens[1:]], *rest)

    monkeypatch.setattr(parity, "first_flips", one_off)
    code, rows = measured(tmp_path, "--case", f"draft=none,{CASE}")
    assert code == 1
    assert [r["checked"] for r in rows[:2]] == [False, True]


def test_where_nothing_can_be_exact_a_row_says_why(small_bundled, tmp_path, capsys):
    code, rows = measured(tmp_path, "--quick")
    assert code == 0
    assert {row["checked"] for row in rows} == {None}
    assert all("Triton needs an NVIDIA GPU" in row["reason"] for row in rows)
    assert capsys.readouterr().out.count("not run") == 1


def test_a_case_that_is_none_says_what_one_is(capsys):
    with pytest.raises(SystemExit):
        main(["parity", "--case", "draft=hata,gamma=none"])
    assert "gamma=none must be a whole number" in capsys.readouterr().err


# Rows of figures that nobody measured; that of ngram never ends, and no signal wakes its thread.
STUCK = """
import runpy, sys, types
from bench import parity

def made(baseline, case, mode, settings):
    if case["draft"] == "ngram":
        libc = __import__("ctypes").CDLL(None)
        while True:
            libc.sleep(60)
    row = {"case": case, "mode": mode, "kind": "decode", "mean_accepted_length": 1.0}
    return row | parity.Flips(1, []).figures | {"checked": True}

parity.Baseline.of = lambda case: types.SimpleNamespace(workers=2)
parity._of_drafter = made
sys.argv = ["bench", "parity", "--backend", "exact", "--json", sys.argv[1]]
for draft in ("ngram", "none", "vegas"):
    sys.argv += ["--case", f"draft={draft}"]
runpy.run_module("bench.__main__", run_name="__main__")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=("interrupt", "kill"))
def test_a_row_that_never_ends_costs_no_other(tmp_path, number):
    path = tmp_path / "parity.json"
    run = subprocess.Popen(
        [sys.executable, "-c", STUCK, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until = time.monotonic() + 120
        while not path.exists() or len(json.loads(path.read_text())["rows"]) < 2:
            assert time.monotonic() < until
            assert run.poll() is None
            time.sleep(0.1)
        for _ in range(2):  # as `timeout` sends it, to the process and to its group
            run.send_signal(number)
        out, err = run.communicate(timeout=30)
    finally:
        run.kill()
    result = json.loads(path.read_text())
    assert result["interrupted"]
    assert [row["case"]["draft"] for row in result["rows"]] == ["none", "vegas"]
    if number == signal.SIGINT:
        assert run.returncode == 130
        assert "interrupted: parity has only" in out
        assert "parity: 2 of 3, at work: exact ngram gamma=8 B=8 (" in err
