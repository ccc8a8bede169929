"""`python -m bench`: arguments, what is printed, what is written, and the exit code."""

import contextlib
import dataclasses
import json
import re
import signal
import threading

import pytest

import bench.__main__ as command
from bench import point, table, verify
from bench.__main__ import COMMANDS, SUITES, main
from bench.report import DOCS
from bench.suite import suite_of
from jspec.dispatch import Backend
from jspec.ops.verify import VERIFY_GREEDY

SMALL = ["--case", "B=2,gamma=8,alpha=0.6", "--case", "B=3,gamma=40,alpha=0.3"]
XLA = ["verify", *SMALL, "--backend", "xla"]


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch):
    monkeypatch.setattr("bench.ceilings.SMALL", 2**16)


def test_list_names_every_suite(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [
        *SUITES,
        *COMMANDS,
    ]


def test_help_fits_100_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert max(map(len, command._parser().format_help().splitlines())) <= 100


def test_the_page_names_every_suite_and_operation():
    """docs/bench.md: a line for each suite, and one with the operations of each that has some."""
    page = (DOCS / "bench.md").read_text()
    listed, of_cases = (
        dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section.partition("\n## ")[0], re.MULTILINE))
        for section in (
            page.partition(f"## {title}\n")[2] for title in ("Suites", "Operations and their cases")
        )
    )
    assert listed.keys() == SUITES.keys()
    for name, suite in SUITES.items():
        for benchmark in suite.benchmarks:
            assert f"`{benchmark.name}`" in of_cases[name], f"{name}, op={benchmark.name}"


def test_env_is_json(capsys):
    assert main(["env"]) == 0
    assert json.loads(capsys.readouterr().out)["platform"] == "cpu"


def test_a_backend_that_raises_fails_the_run_and_a_refusal_does_not(monkeypatch, capsys):
    def broken(*arguments):
        raise TypeError("not today")

    def run(reason):
        broken_backend = Backend("broken", broken, lambda *arguments: reason)
        backends = {"xla": VERIFY_GREEDY.backend("xla"), "broken": broken_backend}
        operation = dataclasses.replace(VERIFY_GREEDY, backends=backends)
        suite = suite_of("verify", "", dataclasses.replace(verify.GREEDY, operation=operation))
        monkeypatch.setitem(SUITES, "verify", suite)
        return main(["verify", *SMALL]), capsys.readouterr().out

    code, out = run(None)
    assert code == 1
    assert "broken: failed: TypeError: not today" in out
    code, out = run("needs sm_90")
    assert code == 0
    assert out.count("broken: needs sm_90") == out.count("broken [") == 1


@pytest.mark.parametrize("lost", [False, True], ids=("raised", "lost"))
def test_an_interrupted_run_keeps_what_it_measured(monkeypatch, capsys, tmp_path, lost):
    measure, calls = point.measure, []

    def interrupted(*arguments, **settings):
        if arguments[0] == "verify_greedy":  # not a ceiling
            calls.append(arguments)
        # What a signal raises in a callback of the garbage collector goes no further.
        with contextlib.suppress(*[KeyboardInterrupt] if lost else []):
            if len(calls) == (1 if lost else 2):
                command._interrupt(signal.SIGINT, None)
        return measure(*arguments, **settings)

    monkeypatch.setattr(command, "_INTERRUPTED", threading.Event())
    monkeypatch.setattr(point, "measure", interrupted)
    path = tmp_path / "result.json"
    assert main([*XLA, "--json", str(path)]) == 130
    assert "interrupted: verify has only" in capsys.readouterr().out
    result = json.loads(path.read_text())
    assert result["interrupted"]
    assert [row["case"]["B"] for row in result["rows"]] == [2]


def test_signals_that_come_together_count_as_one(monkeypatch):
    monkeypatch.setattr(command, "_INTERRUPTED", threading.Event())
    with pytest.raises(KeyboardInterrupt):
        command._interrupt(signal.SIGINT, None)
    try:
        command._interrupt(signal.SIGINT, None)
    except KeyboardInterrupt:  # which would end pytest
        pytest.fail("the second one counted as well")
    monkeypatch.setattr(command, "SIGNAL_WINDOW", 0.0)
    with pytest.raises(KeyboardInterrupt):
        command._interrupt(signal.SIGINT, None)


def test_an_error_costs_no_row_before_it(monkeypatch, tmp_path):
    measure, calls = point.measure, []

    def broken(*arguments, **settings):
        if arguments[0] == "verify_greedy":
            calls.append(arguments)
        if len(calls) == 2:
            raise RuntimeError("broken")
        return measure(*arguments, **settings)

    monkeypatch.setattr(point, "measure", broken)
    path = tmp_path / "result.json"
    with pytest.raises(RuntimeError, match="broken"):
        main([*XLA, "--json", str(path)])
    result = json.loads(path.read_text())
    assert result["interrupted"]
    assert [row["case"]["B"] for row in result["rows"]] == [2]


def test_an_unknown_backend_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit) as error:
        main(["verify", "--backend", "cuba"])
    assert error.value.code == 2
    assert "--backend cuba must be one of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "--json", "folder"], "--json cannot write folder: "),
        (["all", "--json", "text"], "--json cannot write text/verify.json: "),
        (["verify", "--json", "text/deeper.json"], "--json cannot write text/deeper.json: "),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, list) else "",
)
def test_what_cannot_be_done_is_said_before_anything_runs(
    arguments, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("no folder")
    monkeypatch.setattr(command, "_run", lambda *arguments: pytest.fail("measured"))
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_figures_without_matplotlib_are_refused_before_anything_runs(capsys, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    monkeypatch.setattr(command, "_run", lambda *arguments: pytest.fail("measured"))
    with pytest.raises(SystemExit):
        main(["report"])
    assert "figures need matplotlib: pip install '.[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize(("columns", "percentiles"), [(100, True), (60, False)])
def test_a_table_fits_the_terminal_and_explains_its_ratios(
    columns, percentiles, capsys, monkeypatch
):
    samples = {"wall_ns": [10**6, 2 * 10**6], "device_ns": [10**5]}
    case = {"B": 1024, "gamma": 128, "alpha": 0.9, "l2": "warm"}
    rows = [
        {"operation": "verify_greedy", "case": case, "name": name, "checked": True} | samples
        for name in ("cuda_naive", "eager PyTorch")
    ]
    rows[1] |= {"device_ns": [2 * 10**5], "chosen": True}
    monkeypatch.setenv("COLUMNS", str(columns))
    rows.append(rows[0] | {"case": case | {"B": 1}})
    table.show({"suite": "verify", "rows": rows, "machine": {"device": "x"}})
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    text = " ".join(lines)
    assert ("p5-p95" in text) == percentiles
    speeds = [line.split()[-1] for line in lines if re.search(r"\dx ?$", line)]
    assert speeds == ["1.00x", "0.50x", "1.00x"]
    assert "x: how many times as fast, above 1 for faster" in text
