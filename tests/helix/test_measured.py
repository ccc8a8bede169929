"""Predictions of measured times, from the bytes that a device reads and sends."""

import dataclasses
import json
from pathlib import Path

import pytest

from bench.helix import LAYER, STEP
from jspec.cli import main
from jspec.helix.simulator import Constants, calibrated, load_fits, load_hardware, predictions

# Arithmetic takes no time.
H200 = dataclasses.replace(load_hardware("h200"), tflops=1e9)
# A microsecond a message, no other fixed times.
FREE = dataclasses.replace(
    Constants(bytes_per_value=2, bytes_per_activation=2),
    **dict.fromkeys(("kernel_us", "attention_us"), 0.0),
    collective_us=1.0,
)
READ, SENT = H200.memory_gbps * 1e3, H200.link_gbps * 1e3  # bytes a microsecond


def written(tmp_path, operation: str, *cases: dict) -> str:
    row = {"operation": operation, "name": "helix", "step_ns": [9e3, 2e3, 4e3]}
    path = tmp_path / f"{operation}.json"
    path.write_text(json.dumps({"suite": "helix", "rows": [row | {"case": x} for x in cases]}))
    return str(path)


@pytest.mark.parametrize(
    ("text", "read", "sent"),
    [
        ("kvp=1", 2**30, None),
        ("kvp=2", 2**29, 128 * (128 * 2 + 4) / 2),
        ("tpa=2", 2**29, None),
        ("heads=128/1,kvp=2,strategy=tp", 2**27, None),
        ("heads=128/1,H=576,latent=512,kvp=2,up=before", 2**18 * 576, 128 * (128 * 2 + 4) / 2),
    ],
)
def test_attention_is_its_reads_and_its_message(text, read, sent, tmp_path):
    path = written(tmp_path, "attend", LAYER.case(f"S=256K,{text}"))
    (prediction,) = predictions(path, H200, FREE)
    expected = read / READ + (0 if sent is None else 1 + sent / SENT)
    assert prediction.measured_us == 4
    assert prediction.predicted_us == pytest.approx(expected)
    assert prediction.error == pytest.approx(expected / 4 - 1)


@pytest.mark.parametrize(("text", "messages"), [("kvp=1", 0), ("kvp=2", 3), ("tpa=2", 2)])
def test_a_step_is_weights_cache_and_messages(text, messages, tmp_path):
    path = written(tmp_path, "step", STEP.case(f"S=256K,{text}"))
    (prediction,) = predictions(path, H200, dataclasses.replace(FREE, link_share=1e9))
    devices = 1 + (messages > 0)
    # Llama 3.1 8B without the embedding that looks tokens up; all of KVP project q, k and v.
    weights = 2 * (8_030_261_248 - 128_256 * 4096 - 65 * 4096)
    copied = 2 * 32 * 4096 * 48 * 128 if text == "kvp=2" else 0
    read = (weights + copied + 2**18 * 2**17) / devices
    assert prediction.predicted_us == pytest.approx(read / READ + 32 * messages, rel=1e-6)


def test_what_the_simulator_does_not_know_is_left_out(tmp_path):
    unknown = ("kvp=2,strategy=gather", "T=10", "kvp=2,overlap=2")
    cases = [LAYER.case(text) for text in unknown]
    cases.append(LAYER.case("kvp=2") | {"part": "read"})  # of results of earlier versions
    assert predictions(written(tmp_path, "attend", *cases), H200, FREE) == ()
    path = written(tmp_path, "step", STEP.case("draft=vegas"))
    assert predictions(path, H200, FREE) == ()
    assert main(["simulate", "measured", path]) == 2


def test_the_command_fits_and_predicts(tmp_path, capsys):
    cases = [LAYER.case(f"S=256K,kvp={kvp}") for kvp in (1, 2)]
    path = written(tmp_path, "attend", *cases)
    rows = json.loads((tmp_path / "attend.json").read_text())["rows"]
    for row, size in zip(rows, (2**30, 2**29), strict=True):
        row |= {"bytes": size, "step_ns": [size / 4e3]}  # 4 TB/s
    text = json.dumps({"suite": "helix", "rows": rows})
    (tmp_path / "attend.json").write_text(text)
    command = ["simulate", "measured", path, "--hardware", "h200", "--calibrate", path]
    assert main(command) == 0
    assert "memory_share=0.833 of 4,800" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["constants"]["bytes_per_value"] == 2
    assert printed["predictions"][0]["error"] == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize(("name", "size"), [("kvp", 0), ("B", -1), ("S", 1e308), ("tpa", True)])
def test_sizes_that_no_mesh_has_are_refused(name, size, tmp_path):
    path = written(tmp_path, "attend", LAYER.case("S=256K,kvp=2") | {name: size})
    with pytest.raises(ValueError, match=f"{name}={size}".replace("+", ".") + " must be a whole"):
        predictions(path, H200, FREE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ('{"suite": "helix"}', "has no times of steps or attention: KeyError: 'rows'"),
        ('{"suite": "helix", "rows": [{"step_ns": [1]}]}', "no times of steps or attention: KeyE"),
    ],
    ids=["text", "rows", "row"],
)
def test_files_that_hold_no_steps_are_refused(text, message, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        predictions(path, H200, FREE)


def test_what_two_gpus_took_is_predicted_within_a_quarter():
    results = Path(__file__).parents[2] / "bench" / "results" / "h200"
    step, attention, messages = (
        results / f"{name}.json" for name in ("helix-step", "helix-attention", "collectives")
    )
    hardware = load_hardware("h200")
    two_bytes = Constants(bytes_per_value=2, bytes_per_activation=2)
    constants = calibrated(two_bytes, hardware, [*load_fits(messages), *load_fits(attention)])
    all_predictions = [
        x for path in (step, attention) for x in predictions(path, hardware, constants)
    ]
    assert len(all_predictions) >= 20
    assert max(abs(x.error) for x in all_predictions) <= 0.25
