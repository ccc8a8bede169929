"""Whole steps on a mesh: their tokens are those of one device, and what is not is told."""

from typing import Any

import jax
import numpy as np
import pytest

from bench import helix_state, helix_step
from bench.__main__ import SUITES
from bench.report import SECTIONS
from bench.settings import Settings
from jspec.helix import attention as exchange

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
SMALL = "shape=tiny,B=2,S=64,gamma=2"
TIMED = {"checked": True, "step_ns": [10**7] * 3, "committed": 2.0, "largest_batch": 12}
TIMED |= {"same_tokens": 31, "compared_tokens": 32, "apart": 0.01}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(helix_state, "STEPS", 4)
    monkeypatch.setattr(helix_step, "REPEATS", 1)


def row(text: str) -> dict[str, Any]:
    (found,) = SUITES["helix-step"].run(Settings(quick=True, cases=(f"{SMALL},{text}",)))["rows"]
    return found


@pytest.mark.parametrize(
    "text",
    [
        "kvp=2,overlap=2,draft=verify",
        pytest.param("tpa=2,draft=vegas", marks=pytest.mark.slow),
        pytest.param("kvp=2,tpa=2,draft=vegas", marks=pytest.mark.slow),
        pytest.param("kvp=2,tpa=2,strategy=tp", marks=pytest.mark.slow),
        pytest.param("draft=verify", marks=pytest.mark.slow),
    ],
)
def test_a_step_is_checked_and_timed(text, monkeypatch):
    monkeypatch.setattr(helix_step, "device_bytes", lambda name: 2**30)
    found = row(text)
    assert found["checked"] is True, found
    assert (found["same_tokens"], found["compared_tokens"]) == (8, 8)
    assert found["committed"] >= 1
    assert len(found["step_ns"]) == 1
    # Two layers of keys and values of 2 heads of 16, float32, in 256 slots of 2 rows.
    ranks = found["case"]["kvp"] if found["case"]["strategy"] == "helix" else 1
    assert found["cache_bytes"] == 2 * 2 * 2 * 16 * 4 * 256 * 2 // ranks // found["case"]["tpa"]
    assert 2 < found["largest_batch"] < 2**30 / (found["cache_bytes"] / 2)


def test_an_exchange_that_is_wrong_is_told(monkeypatch):
    monkeypatch.setattr(exchange, "merge_attention", lambda outs, lses: (outs[0], lses[0]))
    found = row("kvp=2")
    assert found["checked"] is False
    assert found["reason"].startswith("its tokens are others, ")
    assert "step_ns" not in found


def test_near_ties_are_told_from_other_tokens():
    logits = np.zeros((2, 3, 4), np.float32)
    logits[:, :, 0], logits[:, :, 1] = 9, 8.9
    right = np.zeros((2, 3), np.int32)
    spread = float(logits[0, 0].std())
    same = {"same_tokens": 6, "compared_tokens": 6, "apart": 0.0}
    assert helix_step.compared(right, right, logits) == same
    other = np.array([[0, 1, 3], [0, 0, 0]])  # what follows another token says nothing
    found = helix_step.compared(other, right, logits)
    assert (found["same_tokens"], found["apart"]) == (4, pytest.approx(0.1 / spread, rel=1e-4))
    found = helix_step.compared(np.array([[2, 0, 0], [0, 0, 1]]), right, logits)
    assert (found["same_tokens"], found["apart"]) == (2, pytest.approx(9 / spread))


def test_too_few_devices_are_a_row_with_its_reason():
    found = row("shape=llama-3.1-8b,kvp=32")
    assert found["checked"] is None
    assert found["reason"].startswith("it needs 32 devices, and ")


def test_tables_say_what_was_measured_and_why_not(capsys):
    case = helix_state.case(f"{SMALL},kvp=2,overlap=2,draft=vegas")
    own = {"operation": "step", "case": case, "name": "helix, 2 chunks"}
    other = own | {"case": case | {"B": 1}, "reason": "it needs 2 devices"}
    machine = {"device": "x", "versions": {}, "driver": "", "cores": 2, "date": "today"}
    result = {"machine": machine, "rows": [own | TIMED, other]}
    SUITES["helix-step"].show(result)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert "[1] it needs 2 devices" in lines
    assert SUITES["helix-step"].compare(result, result) == 1
    SUITES["helix-step"].show(result)
    assert " 1.00x" in capsys.readouterr().out
    found = SECTIONS["helix-step"](result, {}, {})
    assert "| 10.000 | 2.00 | 5.000 | 31/32 | 12 |" in found
    assert "| it needs 2 devices |" in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("S=40", "S=40 must be a multiple of 16"),
        ("tpa=16", "tpa=16 is more than the 8 key-value heads"),
        ("overlap=2", "overlap=2 cuts the exchange"),
        ("draft=hope", "draft=hope must be one of plain, verify, vegas"),
    ],
    ids=str,
)
def test_cases_that_cannot_be_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        helix_state.case(text)
