"""The suite `hata-off`: what it times, and that it says when an output is wrong."""

import json

import numpy as np
import pytest

from bench import hata_off, report
from bench.__main__ import main
from bench.settings import Settings


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "results" / "some" / "hata-off.json"
    assert main(["hata-off", "--json", str(path)]) == 0
    return path


@pytest.mark.slow
def test_every_policy_is_checked_and_timed(result, capsys):
    rows = {row["name"]: row for row in json.loads(result.read_text())["rows"]}
    assert list(rows) == list(hata_off.policies(0.1))
    assert {row["checked"] for row in rows.values()} == {"2 layers", "as hata", "as hata_off"}
    assert all(len(row["step_ns"]) == hata_off.REPEATS for row in rows.values())
    # Of three layers one selects: its keys and values are all that is in the host's memory.
    off = rows["hata_off"]
    assert rows["hata"]["host_bytes"] == 0
    assert off["host_bytes"] + off["device_bytes"] == rows["hata"]["device_bytes"]
    for row in (row for name, row in rows.items() if "hata_off" in name):
        assert sum(row[name] for name in ("again", "right", "late")) == pytest.approx(1)
        assert row["late"] <= row["moved"]
    assert rows["hata_off, no prediction"]["right"] == rows["hata_off, no reuse"]["again"] == 0
    assert rows["hata_off, published"]["moved"] > 1
    assert off["bus_bytes"] == 26 * 2 * 2 * 16 * 2
    earlier = {"rows": [off | {"step_ns": [2 * ns for ns in off["step_ns"]]}]}
    found = {"rows": [dict(off)]}
    assert hata_off.compare(found, earlier) == 1
    assert found["rows"][0]["vs_before"] == 2


@pytest.mark.slow
def test_it_is_reported(result, tmp_path):
    pytest.importorskip("matplotlib")
    report.write(result.parents[1], tmp_path)
    assert "| small | 256 |" in (tmp_path / "RESULTS.md").read_text()


def test_what_is_hidden_is_a_share_of_the_bus():
    rows = {
        "hata": {"step_ns": [100]},
        "hata_off": {"step_ns": [130]},
    }
    rows["hata_off"]["bus_ns"] = [120]
    assert hata_off.hidden(rows["hata_off"], rows) == pytest.approx(0.75)
    assert hata_off.hidden(rows["hata"], rows) is None
    assert hata_off.hidden(rows["hata_off"], {}) is None


def test_tokens_that_differ_fail_both_ways():
    case = object.__new__(hata_off._Case)
    case.at = {"model": "small"}
    tokens = {"hata": np.array([1, 2]), "hata_off": np.array([1, 3])}
    for name, other in (("hata", "hata_off"), ("hata_off", "hata")):
        reason = case._judged(name, tokens, {})["reason"]
        assert reason == f"its tokens differ from those of {other}"
    assert case._judged("dense", {}, {"error": 0.2})["reason"] == "its logits are wrong by 20.0%"


def test_rows_come_when_what_they_are_compared_with_ran(monkeypatch):
    case = object.__new__(hata_off._Case)
    case.at = {"model": "small"}
    case.paper = None
    case.policies = dict.fromkeys(("dense", "hata", "hata_off"))
    ran = iter(("dense", "hata"))

    def timed(policy):
        name = next(ran, None)
        if name is None:
            raise RuntimeError("no memory")
        return {"error": 0.0}, np.array([1])

    monkeypatch.setattr(case, "_timed", timed)
    rows = [(row["name"], row["checked"]) for row in case.rows(Settings())]
    assert rows == [("dense", "2 layers"), ("hata_off", False), ("hata", False)]
    # Alone, neither has anything to be compared with.
    case.policies = {"hata": None}
    ran = iter(("hata",))
    (row,) = case.rows(Settings())
    assert row["reason"] == "hata_off did not run, which its tokens are compared with"
