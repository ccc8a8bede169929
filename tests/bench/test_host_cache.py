"""Steps with the cache in host memory: what is timed, and that a wrong output is told."""

import numpy as np
import pytest

from bench.hata import off
from bench.settings import Settings

CASE = off.BENCHMARK.case("model=small,S=256")


@pytest.mark.slow
def test_every_policy_is_checked_and_timed():
    rows = {row["name"]: row for row in off.BENCHMARK.measure(CASE, Settings())}
    assert list(rows) == list(off.policies(0.1))
    assert {row["checked"] for row in rows.values()} == {"2 layers", "as hata", "as hata_off"}
    assert all(len(row["step_ns"]) == off.REPEATS for row in rows.values())
    # Of three layers one selects: its keys and values are all that is in the host's memory.
    host = rows["hata_off"]
    assert rows["hata"]["host_bytes"] == 0
    assert host["host_bytes"] + host["device_bytes"] == rows["hata"]["device_bytes"]
    assert host["bus_bytes"] == 26 * 2 * 2 * 16 * 2


def _case() -> off._Case:
    case = object.__new__(off._Case)
    case.case = CASE
    return case


def test_tokens_that_differ_fail_both_ways():
    tokens = {"hata": np.array([1, 2]), "hata_off": np.array([1, 3])}
    for name, other in (("hata", "hata_off"), ("hata_off", "hata")):
        reason = _case()._judged(name, tokens, {})["reason"]
        assert reason == f"its tokens differ from those of {other}"
    assert _case()._judged("dense", {}, {"wrong": "its logits"})["reason"] == "its logits"


def test_rows_come_when_what_they_are_compared_with_ran(monkeypatch):
    case = _case()
    case.policies = dict.fromkeys(("dense", "hata", "hata_off"))
    ran = iter(("dense", "hata"))

    def timed(policy):
        name = next(ran, None)
        if name is None:
            raise RuntimeError("no memory")
        return {"wrong": None}, np.array([1])

    monkeypatch.setattr(case, "_timed", timed)
    rows = [(row["name"], row["checked"]) for row in case.rows(Settings())]
    assert rows == [("dense", "2 layers"), ("hata_off", False), ("hata", False)]
    # Alone, neither has anything to be compared with.
    case.policies = {"hata": None}
    ran = iter(("hata",))
    (row,) = case.rows(Settings())
    assert row["reason"] == "hata_off did not run, which its tokens are compared with"
