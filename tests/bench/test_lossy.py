"""The suite `hata-e2e`: a small model with every policy, its floors, its check and its table."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

from bench import point
from bench.__main__ import main
from bench.decode import catalogue, lossy, running, shapes, steps
from bench.policies import policies
from jspec.ops.attention.gathered import gathered_attention
from jspec.policies import Dense, attend
from tests.bench.test_decode import KERNELS, SPECS, TINY, Device
from tests.bench.test_report import MACHINE

SMALL = dataclasses.replace(TINY, layers=(SPECS[0],) * 3)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(catalogue.MODELS, "llama-3.1-8b", SMALL)
    monkeypatch.setattr(point, "DEVICE", Device())
    monkeypatch.setattr(running, "device_bytes", lambda name: None)
    monkeypatch.setattr(steps, "REPEATS", 3)
    monkeypatch.setattr(lossy, "read_ceiling", lambda: 1e10)


def measured(path, *names) -> tuple[int, dict]:
    asked = ["hata-e2e", "--case", "B=1,S=300", "--json", str(path)]
    code = main([*asked, *(x for name in names for x in ("--backend", name))])
    return code, json.loads(path.read_text())


def test_each_policy_has_a_step_beside_its_floor(small, tmp_path):
    code, result = measured(tmp_path / "out.json", "dense", "quest_32")
    assert code == 0
    found = {step.policy: step for step in lossy.steps(result["rows"])}
    checked = {name: step.row["checked"] for name, step in found.items()}
    assert checked == {"dense": "2 layers", "quest_32": "1 layer"}
    assert {step.row["kernels"] for step in found.values()} == {2 * len(KERNELS)}
    bytes_read = {name: step.row["read_bytes"] for name, step in found.items()}
    # Keys and values of 300 tokens, or of 128 and the new one, with two vectors a page of 32; in
    # one layer of three.
    less = (300 - 129) * 2 * 2 * 16 * 2 - 300 * 2 * 2
    assert bytes_read["dense"] - bytes_read["quest_32"] == less
    dense = found["dense"]
    assert dense.speedup == 1
    assert dense.tokens == pytest.approx(1e6 / dense.time.median)


def test_wrong_attention_over_the_selection_is_found(small, tmp_path, monkeypatch):
    def short(q, k, v, positions, selected, *rest, implementation, **static):
        if implementation is None:  # the reference names one
            selected = selected.at[..., :32].set(-1)
        return gathered_attention(q, k, v, positions, selected, *rest, **static)

    monkeypatch.setattr(attend, "gathered_attention", short)
    code, result = measured(tmp_path / "out.json", "hata")
    assert code == 1
    assert "its logits are wrong by" in result["rows"][0]["reason"]


def lossy_rows():
    """The dense step takes 20 ms, 16 at the floor; that of HATA 5 and 4."""
    for policy, ms in (("dense", 20), ("hata", 5)):
        case = {"model": "llama-3.1-8b", "layers": 32, "B": 4, "context": 131072, "T": 1}
        case |= {} if policy == "dense" else {"policy": policy}
        row = {"operation": "decode_step", "case": case, "name": "triton", "checked": "2 layers"}
        row |= {"floor_ns": 0.8e6 * ms, "cache_bytes": 100, "temp_bytes": 2, "kernels": 400.0}
        yield row | {"idle": 0.1, "step_ns": [ms * 10**6] * 5}


def test_the_table_shows_tokens_a_second_and_the_share_of_the_floor(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    result = {"machine": MACHINE, "rows": list(lossy_rows()), "steps": 8}
    lossy.show(result | {"read_ceiling_bytes_per_s": 4e12})
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    lines = {line.split()[4]: line.split()[5:] for line in out.splitlines() if "128K" in line}
    assert lines["dense"] == ["20.00", "200", "1.00x", "16.00", "80%", "400", "10.0%", "2.0%"]
    assert lines["hata"] == ["5.00", "800", "4.00x", "4.00", "80%", "400", "10.0%", "2.0%"]


def test_bytes_of_a_cache_are_those_of_the_layers_that_select():
    config = catalogue.MODELS["llama-3.1-8b"]
    case = 4, 131072, jnp.bfloat16
    keys = 4 * 131072 * 8
    dense = shapes.read_cache_bytes(config, *case)
    assert dense == 32 * keys * 512
    hata = policies(2048, dense_layers=2)["hata"]
    found = shapes.read_cache_bytes(config, *case, hata, 2048)
    assert found == 2 * keys * 512 + 30 * (keys * 16 + 4 * 2049 * 8 * 512)
    assert shapes.read_cache_bytes(config, *case, Dense(), 2048) == dense
    for text in ("model=llama", "B=0", "T=2"):
        with pytest.raises(ValueError, match="must be"):
            lossy.case(text)


@pytest.mark.parametrize(("model", "least"), [("llama-3.1-8b", 3), ("gpt-oss-20b-attention", 4)])
def test_a_case_has_a_layer_that_selects(model, least):
    assert lossy.case(f"model={model},layers={least}")["layers"] == least
    with pytest.raises(ValueError, match=f"take {least} or more"):
        lossy.case(f"model={model},layers={least - 1}")
