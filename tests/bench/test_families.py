"""The suite `families`: what mixtures of experts need, and the suite on small models."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import families, point
from bench.__main__ import main
from bench.decode import catalogue, drafting, shapes
from bench.decode.padding import NoisyPadding
from bench.profiles import committed, rate_of
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.models.decoder import Decoder
from jspec.ops.quantized import MXFP4, dequantized
from jspec.parts import Experts
from tests.bench.test_breakdown import rows as iteration_rows
from tests.bench.test_decode import SPECS, TINY, Device
from tests.bench.test_report import MACHINE, decode_rows

EXPERTS = Experts(routed=8, chosen=2, size=16)
MIXTURE = dataclasses.replace(TINY, experts=EXPERTS, sinks=True)
NARROW = dataclasses.replace(MIXTURE, experts=Experts(routed=8, chosen=2, size=32))
WINDOWS = dataclasses.replace(TINY, layers=SPECS[::-1], post_norms=True, centered_norms=True)


def test_a_pass_reads_the_experts_that_its_tokens_hit():
    """Against tokens that choose at random, each two of eight."""
    model = Decoder(MIXTURE, dtype=jnp.bfloat16, rngs=None)
    model = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), model)
    one = 2 * (3 * 32 * 16) * len(SPECS)  # bytes of an expert in all layers
    rest = sum(x.nbytes for x in jax.tree.leaves(model)) - 2 * 128 * 32 - 8 * one
    rng = np.random.default_rng(0)
    for tokens in (1, 2, 5, 40):
        taken = rng.random((20_000, tokens, 8)).argsort(axis=2)[:, :, :2].reshape(20_000, -1)
        hit = np.mean([len(set(row)) for row in taken.tolist()])
        assert shapes.read_weight_bytes(model, tokens) == pytest.approx(rest + hit * one, rel=0.005)
    # A token multiplies two experts, however many are read.
    assert shapes.product_flops(model, 40) == 40 * (rest + 2 * one)


def test_a_pass_of_padding_has_a_token_of_its_own_at_each_position():
    """Equal ones would all choose the same experts."""
    model = shapes.random_model(dataclasses.replace(MIXTURE, vocab_size=40009))
    config = StepConfig(9, NoisyPadding())
    state = start_decoding(model, [[1, 2], [3, 4]], config=config)
    drafted, _ = config.draft.draft(Models(model), state, config.gamma)
    assert not drafted.lengths.any()
    assert len(set(drafted.tokens.reshape(-1).tolist())) == 18
    assert 0 <= drafted.tokens.min() <= drafted.tokens.max() < 40009
    assert isinstance(drafting.Drafting("plain", "none", 3).config.draft, NoisyPadding)


def test_random_weights_keep_their_size_from_layer_to_layer():
    """A kernel is drawn by its inputs, and a centred norm scales by 1."""
    model = shapes.random_model(MIXTURE)
    for kernel, inputs, factor in (("gate_up", 32, 1), ("down", 16, shapes.EXPERT_SCALE)):
        drawn = getattr(model.layers[0].mlp.experts, kernel).kernel[...].astype(jnp.float32)
        assert float(drawn.std()) == pytest.approx(factor * inputs**-0.5, rel=0.05)
    router = model.layers[0].mlp.router.kernel[...].astype(jnp.float32)
    assert float(router.std()) == pytest.approx(shapes.ROUTER_SCALE * 32**-0.5, rel=0.1)
    assert not shapes.random_model(WINDOWS).layers[0].mlp_norm.scale[...].any()


def test_experts_in_mxfp4_are_those_in_bfloat16_in_fewer_bytes():
    config = dataclasses.replace(MIXTURE, experts=Experts(routed=8, chosen=2, size=64))
    narrow, wide = (shapes.random_model(config, mxfp4=kind) for kind in (True, False))
    for kernel, inputs, factor in (("gate_up", 32, 1), ("down", 64, shapes.EXPERT_SCALE)):
        mine, own = (
            getattr(model.layers[0].mlp.experts, kernel).kernel.get_value()
            for model in (narrow, wide)
        )
        assert isinstance(mine, MXFP4)
        assert mine.shape == own.shape
        deviation = float(dequantized(mine, jnp.float32).std())
        assert deviation == pytest.approx(factor * inputs**-0.5, rel=0.05)
    one = 3 * 32 * 64 * len(SPECS)  # weights of an expert in all layers
    for tokens, hit in ((1, 2), (2, 8 * (1 - 0.75**2))):
        bytes_read = [shapes.read_weight_bytes(model, tokens) for model in (narrow, wide)]
        assert bytes_read[1] - bytes_read[0] == pytest.approx(hit * one * (2 - 4.25 / 8), abs=1)
    assert shapes.product_flops(narrow, 3) == shapes.product_flops(wide, 3)
    assert shapes.prefill_flops(narrow, 30) == shapes.prefill_flops(wide, 30)


def test_mixtures_in_bfloat16_draft_by_quantised_copies_too():
    copies = {"vegas-int8", "vegas-mxfp4"}
    for model in families.MODELS:
        names = {own.name for own in families.draftings(model, 9)}
        assert names >= {"plain", "verification", "vegas"}
        assert (names & copies) == (copies if model in ("gpt-oss-20b", "qwen3-30b-a3b") else set())


def test_gemma_has_a_window_of_its_own_rope_in_five_layers_of_six():
    config = catalogue.MODELS["gemma-3-27b"]
    whole = [layer for layer, spec in enumerate(config.layers) if spec.window is None]
    assert whole == [5, 11, 17, 23, 29, 35, 41, 47, 53, 59]
    assert {(spec.window, config.ropes[spec.rope].theta) for spec in config.layers} == {
        (None, 1e6),
        (1024, 1e4),
    }


def test_cases_have_an_iteration_where_a_gamma_is_asked_for(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    own = families.grid(families.Settings())
    assert {here["model"] for here in own} == set(families.MODELS)
    assert {(here["B"], here["S"]) for here in own if here["gamma"]} == {(4, 122880)}
    with pytest.raises(ValueError, match=r"model=llama-3\.1-8b must be one of gpt-oss-20b"):
        families.case("model=llama-3.1-8b")


def test_the_report_has_steps_parts_and_imposed_speeds(tmp_path):
    pytest.importorskip("matplotlib")
    from bench import report

    own = [row for row in iteration_rows() if row["name"] in ("plain", "verification", "vegas")]
    own = [families.throughput.imposed(x, {}) if x["name"] != "verification" else x for x in own]
    steps = [row for row in decode_rows() if row["operation"] == "decode_step"]
    result = {"suite": "families", "machine": MACHINE, "rows": [*steps, *own], "steps": 4}
    result |= {"read_ceiling_bytes_per_s": 4e12, "acceptance": {"source": "Yue et al. 2026"}}
    folder = tmp_path / "results" / "some"
    folder.mkdir(parents=True)
    (folder / "families.json").write_text(json.dumps(result))
    (tmp_path / "docs").mkdir()
    report.write(tmp_path / "results", tmp_path / "docs")
    text = (tmp_path / "docs" / "RESULTS.md").read_text()
    assert "| Test | a | 1 | 8K | 5.00 ms, 1.25 | 5.00 ms, 1.25 |" in text
    assert "| vegas | 9 | 40.00 | 1.86 | " in text
    assert f"| vegas | 9 | {committed(rate_of('qwen3-8b'), 9):.2f} | 40.00 |" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config"),
    [("gpt-oss-20b", NARROW), ("gpt-oss-20b-mxfp4", NARROW), ("gemma-3-4b", WINDOWS)],
    ids=["mixture", "mxfp4", "windows"],
)
def test_a_small_model_is_checked_and_measured(name, config, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(catalogue.MODELS, name, config)
    monkeypatch.setattr(drafting, "read_ceiling", lambda: 1e10)
    monkeypatch.setattr(point, "DEVICE", Device())
    path = tmp_path / "out.json"
    case = f"model={name},B=2,S=300,gamma=2"
    assert main(["families", "--case", case, "--json", str(path)]) == 0
    found = json.loads(path.read_text())["rows"]
    timed = {row["case"].get("T") or row["name"] for row in found if "step_ns" in row}
    copies = ("vegas-int8", "vegas-mxfp4") if name == "gpt-oss-20b" else ()
    assert timed == {*families.CPU_TOKENS, "plain", "verification", "vegas", *copies}
    assert {row["checked"] for row in found} == {"2 layers"}
    by_name = {row["name"]: row for row in found}
    assert by_name["vegas"]["tokens_per_iteration"] == committed(rate_of(name), 2)
    for copy in copies:
        kind = copy.removeprefix("vegas-")
        wanted = committed(rate_of(name, kind), 2)
        assert by_name[copy]["tokens_per_iteration"] == wanted
        assert by_name[copy]["draft_weight_bytes"] < by_name["vegas"]["draft_weight_bytes"]
    out = capsys.readouterr().out
    assert "E (1 - (1 - k / E) ** n)" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 100
