"""The suites of meshes: what is right is timed, what is wrong is told, and what cannot run."""

import jax
import jax.numpy as jnp
import pytest

from bench import collectives, helix_attention, hopb, mesh
from bench.__main__ import SUITES
from bench.settings import Settings
from jspec.helix import attention as exchange

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
QUICK = Settings(quick=True)
MODULES = {"collectives": collectives, "helix-attention": helix_attention, "hopb": hopb}


@pytest.fixture(autouse=True)
def no_loops(monkeypatch):
    """Compiling loops takes longer than what is looked at here."""
    monkeypatch.setattr(mesh, "marginal", lambda *args: [1000])


def rows(name: str, *cases: str) -> list[dict]:
    return list(SUITES[name].run(Settings(quick=True, cases=cases))["rows"])


def refused(row: dict) -> bool:
    """Whether a row is of an exchange that has no place here, as Mosaic GPU's on a CPU."""
    said = row.get("reason") or ""
    return row["checked"] is None and said.startswith("exchange='pallas' cannot run here: ")


@pytest.mark.parametrize(
    ("kvp", "tpa", "strategy"), [(4, 1, "helix"), (2, 2, "gather"), (2, 1, "medha")]
)
def test_attention_on_a_mesh_is_checked_and_timed(kvp, tpa, strategy):
    text = f"B=2,S=64,heads=4/2,H=16,T=3,kvp={kvp},tpa={tpa},strategy={strategy}"
    (row,) = rows("helix-attention", text)
    assert (row["name"], row["checked"], row["step_ns"]) == (strategy, True, [1000])
    assert row["bytes"] == 2 * 2 * 2 * 64 * 2 * 16 // (kvp * tpa)


@pytest.mark.slow
@pytest.mark.parametrize("up", ["before", "after"])
def test_latent_attention_on_a_mesh_is_checked_and_timed(up):
    (row,) = rows("helix-attention", f"B=3,S=64,heads=4/1,H=24,latent=16,kvp=2,up={up},overlap=2")
    assert (row["name"], row["checked"]) == (f"helix, up {up}", True)
    assert row["bytes"] == 3 * 64 * 24 * 2 // 2


def test_chunks_are_held_against_attention_and_message():
    found = rows("hopb", "B=3,S=64,heads=4/1,H=24,latent=16")
    names = ["attention alone", "message alone", "message alone, pallas", "message alone, cuda"]
    names += ["1 chunk", "2 chunks", "1 chunk, pallas", "1 chunk, cuda"]
    assert [row["name"] for row in found] == names
    times = [(row["checked"], row.get("exposed_ns")) for row in found if not refused(row)]
    exposed = [None if name.startswith(("attention", "message")) else 0 for name in names]
    wanted = zip(found, exposed, strict=True)
    assert times == [(True, time) for row, time in wanted if not refused(row)]


@pytest.mark.slow
def test_chunks_that_are_wrong_are_told(monkeypatch):
    monkeypatch.setattr(exchange, "merge_attention", lambda outs, lses: (outs[0], lses[0]))
    found = rows("hopb", "B=2,S=64,heads=4/2,H=16")
    told = {row["name"]: row["checked"] for row in found if not refused(row)}
    # Attention alone exchanges nothing.
    assert told == dict.fromkeys(told, False) | {"attention alone": True}


def test_an_exchange_that_is_wrong_is_told(monkeypatch):
    monkeypatch.setattr(exchange, "merge_attention", lambda outs, lses: (outs[0], lses[0]))
    (row,) = rows("helix-attention", "S=64,heads=4/2,H=16,kvp=4")
    assert (row["checked"], row["reason"]) == (False, "its output is wrong")


def test_every_collective_is_what_numpy_makes_of_it():
    found = rows("collectives", "P=4,bytes=256")
    assert [row["name"] for row in found] == list(collectives.COLLECTIVES)
    assert all(row["checked"] is True for row in found if not refused(row))


def test_a_collective_that_is_wrong_is_told(monkeypatch):
    _, right = collectives.COLLECTIVES["all_reduce"]
    wrong = {"all_reduce": (jnp.negative, right)}
    monkeypatch.setattr(collectives, "COLLECTIVES", wrong)
    assert [row["checked"] for row in rows("collectives", "P=4,bytes=64")] == [False]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("collectives", "P=64,bytes=32K"), ("helix-attention", "kvp=64,S=1K")),
        ("hopb", "kvp=64,S=1K"),
    ],
)
def test_too_few_devices_are_a_row_with_its_reason(name, text):
    for row in rows(name, text):
        assert row["checked"] is None
        assert row["reason"].startswith("it needs 64 devices, and ")


@pytest.mark.parametrize("name", MODULES)
def test_the_tables_of_a_suite_fit(name, capsys):
    result = {"suite": name, "machine": {"device": "cpu"}}
    case = MODULES[name].grid(QUICK)[0]
    row = {"operation": name, "case": case, "name": "x", "checked": True, "bytes": 2**30}
    row |= {"exposed_ns": 10**8, "message_ns": 10**8}
    SUITES[name].show(result | {"rows": [row | {"wall_ns": [10**9] * 3, "step_ns": [10**9] * 3}]})
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("name", "text"), [("collectives", "P=4"), ("helix-attention", "kvp=4"), ("hopb", "kvp=4")]
)
def test_the_table_has_the_median_step_and_why_there_is_none(name, text, capsys):
    case = MODULES[name].case(text)
    row = {"operation": "all_to_all", "case": case, "name": "helix", "bytes": 3 * 10**6}
    row |= {"exposed_ns": 1500, "message_ns": 6000}
    rows = [row | {"step_ns": [2000, 3000, 4000]}, row | {"reason": "it needs 4 devices"}]
    machine = {"device": "x", "versions": {}, "driver": "", "cores": 2, "date": "today"}
    SUITES[name].show({"suite": name, "machine": machine, "rows": rows})
    shown = " ".join(capsys.readouterr().out.split())
    assert " 3.00 " in shown
    assert "it needs 4 devices" in shown
    assert {"collectives": "", "helix-attention": " 1,000 ", "hopb": " 1.50 25%"}[name] in shown


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("collectives", "P=1", "P must be 2 or more"),
        ("collectives", "P=4,bytes=24", "a multiple of 4 P"),
        ("helix-attention", "heads=8/2,tpa=4", "tpa=4 is more than the 2 key-value heads"),
        ("helix-attention", "strategy=ring", "strategy=ring must be one of helix"),
        ("helix-attention", "kvp=1,overlap=2", "overlap=2 cuts the exchange"),
        ("helix-attention", "latent=512", "latent=512 must be at most H=128"),
        ("hopb", "kvp=1", "kvp=1 must be 2 or more"),
        ("hopb", "heads=8/2,tpa=4", "tpa=4 is more than the 2 key-value heads"),
    ],
    ids=str,
)
def test_cases_that_cannot_be_are_refused(name, text, message):
    with pytest.raises(ValueError, match=message):
        MODULES[name].case(text)
