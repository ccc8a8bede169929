"""The suite `throughput`: the stated acceptance, what it makes of times, tables and sections."""

import json

import numpy as np
import pytest

import jspec
from bench import profiles, throughput
from bench.__main__ import main
from bench.decode import catalogue, drafting
from bench.settings import Settings
from tests.bench.test_breakdown import ONE
from tests.bench.test_report import MACHINE


def test_the_rate_gives_what_the_paper_states():
    """Within 2 % at each gamma, though one rate stands for all positions."""
    for model, stated in profiles.LONGBENCH.items():
        rate = profiles.rate_of(model)
        for gamma, accepted in stated.items():
            assert profiles.committed(rate, gamma) - 1 == pytest.approx(accepted, rel=0.02)
    assert profiles.rate_of("llama-3.1-8b") == profiles.rate_of("qwen3-8b")


def test_tokens_of_an_iteration_against_drawn_ones():
    rng, rate = np.random.default_rng(0), 0.9
    lengths = rng.integers(0, 6, 200_000)
    first_rejected = rng.geometric(1 - rate, 200_000) - 1
    drawn = 1 + np.minimum(first_rejected, lengths).mean()
    at_least = [(lengths >= i).mean() for i in range(1, 6)]
    assert profiles.committed(rate, 5, at_least) == pytest.approx(drawn, rel=0.005)
    assert profiles.committed(rate, 0) == 1


def row(name: str, kind: str, ms: float = 0.0, **rest) -> dict:
    gamma = {"plain": 0, "chain": 20}.get(name, 9)
    case = {"model": "bundled", "layers": "all", "B": 8, "S": 8192, "gamma": gamma, "draft": name}
    own = {"operation": "iteration", "case": case, "name": name, "checked": True}
    if kind == "imposed":
        case |= {"model": "qwen3-8b", "layers": 36, "B": 4, "S": 122880}
        own |= {"step_ns": [round(ms * 1e6)] * 5, "floors_ns": {"verification": ms * 5e5}}
        return throughput.imposed(own, {"chain": [1.0] * 10 + [0.0] * 10})
    return own | {"acceptance": kind} | rest


def rows() -> list[dict]:
    """A plain step of 20 ms, an iteration of Vegas of 60 and of a chain of 50."""
    real = {"tokens_per_iteration": 1.0, "tokens_per_s": 100.0}
    faster = {"tokens_per_iteration": 5.0, "tokens_per_s": 250.0}
    found = [row("plain", "measured", **real), row("vegas", "measured", **faster)]
    times = {"plain": 20, "vegas": 60, "chain": 50}
    return [*found, *(row(name, "imposed", ms) for name, ms in times.items())]


RESULT = {
    "suite": "throughput",
    "machine": MACHINE,
    "rows": rows(),
    "read_ceiling_bytes_per_s": 4e12,
    "acceptance": {"source": profiles.SOURCE},
}


def test_imposed_rows_take_the_time_and_the_stated_tokens():
    _, _, plain, vegas, chain = rows()
    rate = profiles.rate_of("qwen3-8b")
    assert plain["tokens_per_s"] == pytest.approx(4 / 0.020)
    assert vegas["tokens_per_s"] == pytest.approx(4 * profiles.committed(rate, 9) / 0.060)
    assert chain["tokens_per_iteration"] == pytest.approx(profiles.committed(rate, 10))
    assert {own["acceptance"] for own in (plain, vegas, chain)} == {"imposed"}
    speedup = throughput.speedup(vegas, rows())
    assert speedup == pytest.approx(profiles.committed(rate, 9) / 3)


@pytest.mark.parametrize("kind", profiles.QUANTIZED)
def test_drafts_of_a_quantised_copy_are_accepted_as_much_less_often(kind):
    rate = profiles.rate_of("qwen3-8b") * profiles.QUANTIZED[kind]
    for name in (f"vegas-{kind}", f"vegas-{kind}-exact"):
        found = row(name, "imposed", 50)
        assert found["rate"] == rate
        assert found["tokens_per_iteration"] == pytest.approx(profiles.committed(rate, 9))
    assert throughput.QUANTIZED[f"vegas-{kind}"].endswith(f",quantized={kind}")
    assert profiles.QUANTIZED["mxfp4"] < 1
    # Earlier results had one rate for all.
    assert "their tokens are accepted as often as" in throughput.foot(RESULT)
    told = throughput.foot({"acceptance": profiles.STATED})
    assert f"{profiles.QUANTIZED[kind]:.2f} ({kind})" in told


def test_tables_fit_and_say_which_acceptance_they_have(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    result = json.loads(json.dumps(RESULT))
    for own in result["rows"]:
        own |= {"ratio": 1.0, "tokens_per_s": 99999.0}
        own["case"] |= {"model": "gpt-oss-20b-attention", "B": 128}
    throughput.show(result)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert out.index("acceptance measured") < out.index("acceptance imposed")
    assert throughput.compare(result, json.loads(json.dumps(result))) == 5


def test_the_report_has_imposed_acceptance_alone(tmp_path):
    pytest.importorskip("matplotlib")
    from bench import report

    folder = tmp_path / "results" / "some"
    folder.mkdir(parents=True)
    (folder / "throughput.json").write_text(json.dumps(RESULT))
    (tmp_path / "docs").mkdir()
    report.write(tmp_path / "results", tmp_path / "docs")
    text = (tmp_path / "docs" / "RESULTS.md").read_text()
    assert "| qwen3-8b | 4 | 120K | vegas | 9 | 8.47 | 60.00 | 565 | 2.82x |" in text
    assert "| 250 |" not in text  # which was measured
    assert "random weights" in text
    assert (tmp_path / "docs" / "some-throughput.png").exists()


def test_a_chain_is_the_same_wherever_it_is_measured():
    for gamma in (6, 9):
        chains = [
            own for own in throughput.draftings(gamma, Settings()) if own.name.startswith("ch")
        ]
        assert [own.gamma for own in chains] == [throughput.CHAIN_GAMMA] * 2
    asked = throughput.draftings(9, Settings(only=("plain", "chain")))
    assert [own.name for own in asked] == ["plain", "chain"]
    asked = throughput.draftings(9, Settings(only=("vegas-exact", "vegas")))
    assert [(own.name, own.config.exact) for own in asked] == [
        ("vegas", False),
        ("vegas-exact", True),
    ]


def test_a_case_of_the_bundled_model_has_its_own_sizes():
    asked = Settings(cases=("model=bundled,B=4,S=1K,new=32", "B=2,S=2K", "model=bundled,gamma=3"))
    assert throughput.plans(asked) == [
        throughput.Plan(1024, 4, 32, 9, 0.07),
        throughput.Plan(2048, 4, 64, 3, 0.07),
    ]
    with pytest.raises(ValueError, match="'layers=2' must be one of model, gamma, B, S, new"):
        throughput.case("model=bundled,layers=2")


def test_other_drafters_are_those_of_the_bundled_model_alone():
    bundled = ("model=bundled",)
    assert throughput.others(Settings()) == []
    assert throughput.others(Settings(cases=bundled)) == list(throughput.OTHERS)
    assert throughput.others(Settings(cases=bundled, only=("plain", "quest"))) == ["quest"]
    assert throughput.others(Settings(cases=("B=2,S=300",), only=("ngram",))) == ["ngram"]
    assert throughput.grid(Settings(cases=bundled)) == []
    for text in throughput.OTHERS.values():
        assert jspec.named_draft(text).traits.default_gamma > 0


@pytest.mark.slow
def test_a_quick_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(catalogue.MODELS, "qwen3-8b", ONE)
    monkeypatch.setattr(drafting, "read_ceiling", lambda: 1e10)
    path = tmp_path / "out.json"
    asked = ["throughput", "--quick", "--case", "B=2,S=300,gamma=2", "--json", str(path)]
    assert main([*asked, "--backend", "plain", "--backend", "chain-int8"]) == 0
    real, chained, plain, imposed = json.loads(path.read_text())["rows"]
    assert [own["acceptance"] for own in (real, chained, plain, imposed)] == [
        *["measured"] * 2,
        *["imposed"] * 2,
    ]
    assert imposed["drafted_at_least"] == [n / chained["steps"] for n in chained["attempts_at"]]
    assert imposed["tokens_per_iteration"] > plain["tokens_per_iteration"] == 1


def test_a_chain_whose_drafts_were_not_measured_is_a_row_with_the_reason():
    case = {"model": "qwen3-8b", "gamma": 20, "B": 4}
    row = {"case": case, "name": "chain-exact", "step_ns": [1000], "checked": "2 layers"}
    found = throughput.imposed(row, {"chain": [1.0]})
    assert "bundled model's row did not run" in found["reason"]
    assert found["checked"] is None
    assert "tokens_per_s" not in found
