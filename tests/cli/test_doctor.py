"""`jspec doctor`."""

import json

from jspec.cli import main
from jspec.dispatch import Backend, Operation, always
from jspec.ops.pack import PACK, pack_xla


def test_doctor_finds_what_decoding_needs(capsys):
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


def test_doctor_names_a_backend_that_refuses_or_is_wrong(capsys, monkeypatch):
    wrong = Backend("wrong", lambda rows, accepted: (rows[0] * 2, accepted, accepted[0]), always)
    refuses = Backend("refuses", pack_xla, lambda *arguments: "needs a better machine")
    backends = {"xla": PACK.backends["xla"], "wrong": wrong, "refuses": refuses}
    toy = Operation("pack", backends, PACK.preference)
    monkeypatch.setattr("jspec.cli.doctor.PACK", toy)
    assert main(["doctor", "--json"]) == 0
    found = {f["what"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert found["pack, wrong"]["seen"] == "differs from the reference"
    assert found["pack, refuses"]["seen"] == "needs a better machine"


def test_doctor_says_when_the_model_is_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("jspec.cli.doctor.bundled_path", lambda: tmp_path)
    assert main(["doctor"]) == 1
    assert "install jspec again" in capsys.readouterr().err
