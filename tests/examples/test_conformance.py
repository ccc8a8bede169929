"""The verifiers of the examples are right ones, and the league is a table of them."""

import importlib

import pytest

from examples import conformance_league
from jspec.conformance import check, diagnosis


@pytest.mark.parametrize("name", ["torch", "vllm"])
def test_it_holds(name):
    pytest.importorskip("torch")
    verify = importlib.import_module(f"examples.conformance_{name}").verify
    laws = ("greedy", "one draft token", "top-p", "block")
    assert diagnosis(list(check(verify, laws, rows=5000))) is None


def test_transformers_hold():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from examples.conformance_transformers import verify

    laws = ("greedy", "one draft token", "top-p")
    assert diagnosis(list(check(verify, laws, rows=2000))) is None


def test_the_league_is_a_table(monkeypatch):
    verifiers = {"right": "token", "wrong": "residual", "ends": "leaves"}
    places = {name: f"tests.conformance.verifiers:{x}" for name, x in verifiers.items()}
    monkeypatch.setattr(conformance_league, "VERIFIERS", places | {"none": "no.such:verify"})
    monkeypatch.setattr(conformance_league, "_version", lambda place: "1")
    rows = list(conformance_league.verdicts(20_000, ("greedy", "one draft token")))
    assert {row.count("|") for row in rows} == {6}
    right, wrong, ends, missing = (row.split("|")[-2].strip() for row in rows[2:])
    assert right == "lossless"
    assert wrong == "a wrong residual after a rejected token"
    assert ends == "not run: the verifier exits, with status 0"
    assert missing.startswith("not run: --verifier 'no.such:verify'")
