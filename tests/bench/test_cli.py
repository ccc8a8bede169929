"""`python -m bench`: arguments, what is printed, what is written, and the exit code."""

import contextlib
import dataclasses
import json
import signal
import threading

import jax.numpy as jnp
import pytest

import bench.__main__ as command
from bench import attention, decoding, fused, gather, layer, pack, sampling, table, verify
from bench.__main__ import COMMANDS, SUITES, main
from jspec.dispatch import Backend, always
from jspec.ops.verify import VERIFY_GREEDY, greedy_xla

SMALL = {verify: [(2, 8, 0.6), (3, 40, 0.3)], pack: [(2, 8, 16)], fused: [(2, 8, 16)]}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for suite, cases in SMALL.items():
        monkeypatch.setattr(suite, "grid", lambda settings, cases=cases: cases)
    monkeypatch.setattr(sampling, "grid", lambda settings: [(2, 300, "logits")])
    text = "B=2,S=96,heads=4/2,H=16,T=3"
    of_hata = "B=2,S=256,heads=4/2,H=16,n=96,R=32,channels=4"
    for suite, case in ((attention, text), (gather, f"{text},n=20"), (layer, of_hata)):
        found = [suite.case(case)]
        monkeypatch.setattr(suite, "grid", lambda settings, cases=found: cases)
    monkeypatch.setattr("bench.ceilings.SMALL", 2**16)


def add(monkeypatch, name: str, change, reason: str | None = None) -> None:
    """Another backend of greedy verification: the reference with its outputs changed."""
    backend = Backend(name, lambda *arguments: change(greedy_xla(*arguments)), lambda *a: reason)
    backends = {"xla": Backend("xla", greedy_xla, always), name: backend}
    operation = dataclasses.replace(VERIFY_GREEDY, backends=backends)
    for module in (verify, fused):
        monkeypatch.setattr(module, "VERIFY_GREEDY", operation)
    suite = dataclasses.replace(SUITES["verify"], operations=(operation,))
    monkeypatch.setitem(SUITES, "verify", suite)


def test_list_names_every_suite(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [
        *SUITES,
        *COMMANDS,
    ]


def test_env_is_json(capsys):
    assert main(["env"]) == 0
    assert json.loads(capsys.readouterr().out)["platform"] == "cpu"


# The suites of whole steps, of training, of parts and of drafts have other options and clocks.
OWN_CLOCKS = (
    *("hash-training", "hash-losses", "hash-bits", "hata-off", "hata-ablation", "hata-e2e"),
    *(
        "ruler",
        "step",
        "auto",
        "parity",
        "decode",
        "collect",
        "vegas-accept",
        "vegas-overlap",
        "real",
    ),
    *("vegas-breakdown", "throughput", "families", "serving", "collectives", "helix-attention"),
    *("hopb", "helix-step"),
)


@pytest.mark.parametrize("suite", [name for name in SUITES if name not in OWN_CLOCKS])
def test_a_suite_checks_times_prints_and_writes(suite, capsys, tmp_path):
    path = tmp_path / "deep" / "result.json"
    only = [] if suite == "ceilings" else ["--backend", "xla"]
    assert main([suite, "--quick", *only, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "xla" in out
    assert "no device clock" in out
    assert max(map(len, out.splitlines())) <= 100
    result = json.loads(path.read_text())
    assert (result["suite"], result["quick"]) == (suite, True)
    assert all(row["checked"] and len(row["wall_ns"]) >= 10 for row in result["rows"])
    assert {row["name"] for row in result["rows"]} <= {"xla", "xla+xla"}


def test_a_wrong_backend_is_named_not_timed_and_fails_the_run(monkeypatch, capsys, tmp_path):
    add(monkeypatch, "wrong", lambda out: (out[0] + 1, *out[1:]))
    path = tmp_path / "result.json"
    assert main(["verify", "--quick", "--json", str(path)]) == 1
    assert "wrong: its output is wrong" in capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    wrong = [row for row in rows if row["name"] == "wrong"]
    assert wrong
    assert all(row["checked"] is False and "wall_ns" not in row for row in wrong)
    assert any(row["name"] == "xla" and row["wall_ns"] for row in rows)


@pytest.mark.parametrize("field", range(6))
def test_every_field_is_checked(monkeypatch, field):
    def change(out):
        changed = ~out[field] if out[field].dtype == bool else out[field] + 1
        return (*out[:field], changed, *out[field + 1 :])

    add(monkeypatch, "wrong", change)
    assert main(["verify", "--quick", "--backend", "wrong"]) == 1


def test_a_wrong_row_is_found_in_packing(monkeypatch):
    def run(kv, accepted):
        packed, *rest = right.run(kv, accepted)
        return packed.at[0, 0].add(jnp.float16(1)), *rest

    right = pack.PACK.backend("xla")
    wrong = {"wrong": Backend("wrong", run, always)}
    operation = dataclasses.replace(pack.PACK, backends=wrong | dict(pack.PACK.backends))
    monkeypatch.setattr(pack, "PACK", operation)
    monkeypatch.setitem(SUITES, "pack", dataclasses.replace(pack.SUITE, operations=(operation,)))
    assert main(["pack", "--quick", "--backend", "wrong"]) == 1


def test_a_backend_that_raises_fails_the_run_and_a_refusal_does_not(monkeypatch, capsys):
    def broken(out):
        raise TypeError("not today")

    add(monkeypatch, "broken", broken)
    assert main(["verify", "--quick"]) == 1
    assert "broken: failed: TypeError: not today" in capsys.readouterr().out
    add(monkeypatch, "broken", broken, "needs sm_90")
    assert main(["verify", "--quick"]) == 0
    out = capsys.readouterr().out
    assert out.count("broken: needs sm_90") == out.count("broken [") == 1


def test_without_the_check_no_speed_is_shown_or_written(capsys, tmp_path):
    path = tmp_path / "result.json"
    assert main(["verify", "--quick", "--backend", "xla", "--no-check", "--json", str(path)]) == 0
    assert "not checked, so not timed" in capsys.readouterr().out
    assert not any(key.endswith("_ns") for r in json.loads(path.read_text())["rows"] for key in r)


@pytest.mark.parametrize("lost", [False, True], ids=("raised", "lost"))
def test_an_interrupted_run_keeps_what_it_measured(monkeypatch, capsys, tmp_path, lost):
    measure, calls = verify.point.measure, []

    def interrupted(*arguments, **settings):
        calls.append(arguments)
        # What a signal raises in a callback of the garbage collector goes no further.
        with contextlib.suppress(*[KeyboardInterrupt] if lost else []):
            if len(calls) == (1 if lost else 2):
                command._interrupt(signal.SIGINT, None)
        return measure(*arguments, **settings)

    monkeypatch.setattr(command, "_INTERRUPTED", threading.Event())
    monkeypatch.setattr(verify.point, "measure", interrupted)
    path = tmp_path / "result.json"
    assert main(["verify", "--quick", "--backend", "xla", "--json", str(path)]) == 130
    assert "interrupted: verify has only" in capsys.readouterr().out
    result = json.loads(path.read_text())
    assert result["interrupted"]
    assert [row["case"]["B"] for row in result["rows"]] == [2]


def test_an_interrupted_decoding_keeps_what_it_measured(monkeypatch, tmp_path):
    calls = []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            command._interrupt(signal.SIGTERM, None)
        return {"decode_tokens_per_s": 2.0, "mean_accepted_length": 1.0}, [(1, 2)]

    monkeypatch.setattr(command, "_INTERRUPTED", threading.Event())
    monkeypatch.setattr(decoding, "decoded", interrupted)
    monkeypatch.setattr(decoding, "texts", lambda *arguments: [[1, 2, 3]])
    monkeypatch.setattr(decoding, "_marginal", lambda *arguments: {"step_ms": 0.5})
    path = tmp_path / "result.json"
    assert main(["step", "--quick", "--json", str(path)]) == 130
    result = json.loads(path.read_text())
    assert result["interrupted"]
    assert [row["source"] for row in result["rows"]] == ["none"]


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
    measure, calls = verify.point.measure, []

    def broken(*arguments, **settings):
        calls.append(arguments)
        if len(calls) == 2:
            raise RuntimeError("broken")
        return measure(*arguments, **settings)

    monkeypatch.setattr(verify.point, "measure", broken)
    path = tmp_path / "result.json"
    with pytest.raises(RuntimeError, match="broken"):
        main(["verify", "--quick", "--backend", "xla", "--json", str(path)])
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
        (["ceilings", "--backend", "xla"], "--backend does not apply to ceilings"),
        (["verify", "--compare", "no/such.json"], "--compare cannot read no/such.json"),
        (["all", "--compare", "no/such"], "--compare cannot read no/such/ceilings.json"),
        (["verify", "--compare", "text"], "--compare cannot read text"),
        (["verify", "--compare", "list"], "--compare list is no result of verify"),
        (["verify", "--compare", "bare"], "--compare bare is no result of verify: KeyError"),
        (["verify", "--compare", "rows"], "--compare rows is no result of verify"),
        (["step", "--compare", "rows"], "is a result of 'verify', not of 'step'"),
        (["step", "--compare", "step"], "--compare step is no result of step: KeyError"),
        (["verify", "--json", "folder"], "--json cannot write folder: "),
        (["all", "--json", "text"], "--json cannot write text/ceilings.json: "),
        (["verify", "--json", "text/deeper.json"], "--json cannot write text/deeper.json: "),
        (["verify", "--plot", "text"], "--plot cannot write text/figure: "),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, list) else "",
)
def test_what_cannot_be_done_is_said_before_anything_runs(
    arguments, message, capsys, tmp_path, monkeypatch
):
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    machine = {"machine": {"date": "today"}}
    for name, found in {
        "text": "no JSON",
        "list": "[]",
        "bare": json.dumps({"suite": "verify"}),
        "rows": json.dumps({"suite": "verify", "rows": [1], **machine}),
        "step": json.dumps({"suite": "step", "rows": [{"source": "none"}], **machine}),
    }.items():
        (tmp_path / name).write_text(found)
    monkeypatch.setattr(command, "_run", lambda *arguments: pytest.fail("measured"))
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_figures_without_matplotlib_are_refused_before_anything_runs(capsys, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    monkeypatch.setattr(command, "_run", lambda *arguments: pytest.fail("measured"))
    for arguments in (["verify", "--plot", "."], ["report"]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert "figures need matplotlib: pip install '.[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize(("columns", "percentiles"), [(100, True), (72, False)])
def test_a_table_fits_the_terminal_and_explains_its_ratios(
    columns, percentiles, capsys, monkeypatch
):
    samples = {"wall_ns": [10**6, 2 * 10**6], "device_ns": [10**5]}
    case = {"B": 1024, "gamma": 128, "alpha": 0.9, "l2": "warm"}
    rows = [
        {"operation": "verify_greedy", "case": case, "name": name, "checked": True, "ratio": 1.5}
        | samples
        for name in ("cuda_naive", "eager PyTorch")
    ]
    rows[1] |= {"device_ns": [2 * 10**5], "chosen": True}
    monkeypatch.setenv("COLUMNS", str(columns))
    table.show({"suite": "verify", "rows": rows, "machine": {"device": "x"}}, list(case))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    text = " ".join(lines)
    assert ("p10-p90" in text) == percentiles
    assert [line.split()[-2:] for line in lines[2:4]] == [["1.00x", "1.50x"], ["0.50x", "1.50x"]]
    assert "x: how many times as fast, above 1 for faster" in text


def test_decoding_is_compared_by_the_time_of_a_step():
    case = {"source": "none", "gamma": 0, "batch": 1}
    result = {"rows": [case | {"context": c, "step_ms": 2.0} for c in (2048, 8192)]}
    assert decoding.compare(result, {"rows": [case | {"context": 8192, "step_ms": 3.0}]}) == 1
    assert [row.get("ratio") for row in result["rows"]] == [None, 1.5]


def test_compare_gives_the_ratio_of_each_row(capsys, tmp_path):
    path = tmp_path / "result.json"
    arguments = ["verify", "--quick", "--backend", "xla"]
    assert main([*arguments, "--json", str(path)]) == 0
    earlier = json.loads(path.read_text())
    for row in earlier["rows"]:
        row["wall_ns"] = [ns * 1000 for ns in row["wall_ns"]]
    earlier["rows"] = earlier["rows"][:1]
    path.write_text(json.dumps(earlier))
    capsys.readouterr()
    again = tmp_path / "again.json"
    assert main([*arguments, "--compare", str(path), "--json", str(again)]) == 0
    assert "1 rows compared" in capsys.readouterr().out
    ratios = [row.get("ratio") for row in json.loads(again.read_text())["rows"]]
    assert ratios[0] > 100
    assert ratios[1:] == [None]
