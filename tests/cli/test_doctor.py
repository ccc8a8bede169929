"""`jspec doctor`."""

import dataclasses
import json

import numpy as np
import pytest

from jspec.cli import main
from jspec.dispatch import Backend, always
from jspec.ops import operations
from jspec.ops.attention import ATTENTION
from jspec.ops.pack import PACK, pack_xla


def test_doctor_finds_what_decoding_needs(capsys, monkeypatch):
    monkeypatch.setattr("jspec.cli.doctor.operations", lambda: (ATTENTION,))
    assert main(["doctor"]) == 0
    assert "attention, xla_blocked" in capsys.readouterr().err


def test_doctor_json(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = {f["what"]: f for f in report["findings"]}
    assert found["bundled model"]["works"]
    assert all(f["works"] or f["advice"] for f in report["findings"])

    assert found["pack, xla"]["works"]
    assert {"verify_greedy, cuda", "verify_stochastic, cuda", "sample, cuda"} <= set(found)


def findings(capsys, code: int = 0) -> dict[str, dict]:
    assert main(["doctor", "--json"]) == code
    return {f["what"]: f for f in json.loads(capsys.readouterr().out)["findings"]}


def test_doctor_names_a_backend_that_refuses_or_is_wrong(capsys, monkeypatch):
    def double(kv, accepted):
        return kv[0] * 2, accepted, accepted[0]

    wrong = Backend("wrong", double, lambda *arguments: None)
    refuses = Backend("refuses", pack_xla, lambda *arguments: "needs a better machine")
    backends = {"xla": PACK.backends["xla"], "wrong": wrong, "refuses": refuses}
    toy = dataclasses.replace(PACK, backends=backends)
    monkeypatch.setattr("jspec.cli.doctor.operations", lambda: (toy,))
    found = findings(capsys)
    assert found["pack, wrong"]["seen"] == "all-accepted: differs from what it must give"
    assert found["pack, refuses"]["seen"] == "needs a better machine"


def test_doctor_compares_with_what_a_case_wants_and_to_three_digits(capsys, monkeypatch):
    """Of attention: what is off by a little is right, what is off by more is not."""

    def off(by: float) -> Backend:
        def run(*arguments, **static):
            out, lse = ATTENTION.backend("xla").run(*arguments, **static)
            return out + np.float32(by), lse

        return Backend("xla", run, always)

    for by, code, seen in ((1e-3, 0, "right"), (0.1, 1, "three-tokens: differs from what it must")):
        toy = dataclasses.replace(ATTENTION, name="toy", backends={"near": off(by)})
        monkeypatch.setattr("jspec.cli.doctor.operations", lambda toy=toy: (toy,))
        # A backend that never refuses is one that decoding needs.
        assert findings(capsys, code)["toy, near"]["seen"].startswith(seen)


@pytest.mark.parametrize(
    ("gpu", "seen"),
    [
        (None, "cpu.json, for cpu: measured"),
        (
            ("NVIDIA H100 80GB HBM3", (9, 0)),
            "h100.json, for NVIDIA H100 80GB HBM3: measured",
        ),
        (
            ("NVIDIA H100 PCIe", (9, 0)),
            "h100.json, for NVIDIA H100 80GB HBM3: a guess, this is NVIDIA H100 PCIe",
        ),
    ],
    ids=["cpu", "measured", "another"],
)
def test_doctor_says_which_table_serves_and_whether_it_is_a_guess(gpu, seen, capsys, monkeypatch):
    monkeypatch.setattr("jspec.cli.doctor.gpu_in_use", lambda: gpu)
    monkeypatch.setattr("jspec.cli.doctor.operations", lambda: ())
    found = findings(capsys)["tuning"]
    assert found["seen"] == seen
    assert bool(found["advice"]) == seen.count("a guess")


def test_every_operation_has_a_case_that_doctor_runs():
    for operation in operations():
        assert any(case.small for case in operation.cases()), operation.name


def test_doctor_says_when_the_model_is_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("jspec.cli.doctor.operations", lambda: ())
    monkeypatch.setattr("jspec.cli.doctor.bundled_path", lambda: tmp_path)
    assert main(["doctor"]) == 1
    assert "install jspec again" in capsys.readouterr().err
