"""`jspec doctor`."""

import json

from jspec.cli import main


def test_doctor_finds_what_decoding_needs(capsys):
    assert main(["doctor"]) == 0
    assert "attention, xla_blocked" in capsys.readouterr().err


def test_doctor_json(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = {f["what"]: f for f in report["findings"]}
    assert found["bundled model"]["works"]
    assert all(f["works"] or f["advice"] for f in report["findings"])


def test_doctor_says_when_the_model_is_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("jspec.cli.doctor.bundled_path", lambda: tmp_path)
    assert main(["doctor"]) == 1
    assert "install jspec again" in capsys.readouterr().err
