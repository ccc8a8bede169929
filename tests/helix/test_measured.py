"""Predictions of measured times, from the bytes that a device reads and sends."""

import dataclasses
import json

import pytest

from bench.helix import LAYER, STEP
from jspec.cli import main
from jspec.helix.simulator import Constants, load_hardware, predictions

# Arithmetic takes no time.
H200 = dataclasses.replace(load_hardware("h200"), tflops=1e9)
# A microsecond a message, no other fixed times.
FREE = dataclasses.replace(
    Constants(bytes_per_value=2, bytes_per_activation=2),
    **dict.fromkeys(("kernel_us", "attention_us"), 0.0),
    collective_us=1.0,
    exchange_us=1.0,
)
READ, SENT = H200.memory_gbps * 1e3, H200.link_gbps * 1e3  # bytes a microsecond


def written(tmp_path, operation: str, *cases: dict) -> str:
    row = {"operation": operation, "name": "helix", "bytes": 1, "step_ns": [9e3, 2e3, 4e3]}
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


@pytest.mark.parametrize("tokens", [2, 6])
def test_tokens_of_a_row_share_its_reads_and_send_their_own_outputs(tokens, tmp_path):
    layers = written(tmp_path, "attend", *(LAYER.case(f"S=256K,kvp=2,T={n}") for n in (1, tokens)))
    one, several = (x.predicted_us for x in predictions(layers, H200, FREE))
    assert several - one == pytest.approx((tokens - 1) * 128 * (128 * 2 + 4) / 2 / SENT)
    kinds = "draft=plain", f"draft=verify,gamma={tokens - 1}"
    steps = written(tmp_path, "step", *(STEP.case(f"S=256K,kvp=2,{kind}") for kind in kinds))
    one, several = (x.predicted_us for x in predictions(steps, H200, FREE))
    # Of a layer: the exchange of 32 heads, and two all-reduces, over two devices.
    sent = 32 * (128 * 2 + 4) / 2 + 2 * 4096 * 2
    assert several - one == pytest.approx(32 * (tokens - 1) * sent / SENT)


def test_what_the_simulator_does_not_know_is_left_out(tmp_path):
    unknown = ("strategy=gather", "overlap=2", "exchange=cuda", "kernel=xla")
    cases = [LAYER.case(f"kvp=2,{text}") for text in unknown]
    cases.append(LAYER.case("kvp=2") | {"part": "read"})  # of results of earlier versions
    assert predictions(written(tmp_path, "attend", *cases), H200, FREE) == ()
    path = written(tmp_path, "step", STEP.case("draft=vegas"), STEP.case("backends=triton"))
    assert predictions(path, H200, FREE) == ()
    assert main(["simulate", "measured", path]) == 2


def test_rows_that_were_fitted_are_left_out(tmp_path):
    fitted = ["kvp=1", "kvp=2", "heads=128/1,H=576,latent=512"]
    others = ["tpa=2", "kvp=2,T=2", "kvp=2,strategy=medha", "T=2"]
    path = written(tmp_path, "attend", *map(LAYER.case, fitted + others))
    assert len(predictions(path, H200, FREE)) == 7
    left = [x.case for x in predictions(path, H200, FREE, fitted=True)]
    assert left == list(map(LAYER.case, others))


def test_the_command_fits_and_predicts(tmp_path, capsys):
    cases = [LAYER.case(f"S=256K,{how}") for how in ("kvp=1", "tpa=2")]
    path = written(tmp_path, "attend", *cases)
    rows = json.loads((tmp_path / "attend.json").read_text())["rows"]
    for row, size in zip(rows, (2**30, 2**29), strict=True):
        row |= {"bytes": size, "step_ns": [size / 4e3]}  # 4 TB/s
    text = json.dumps({"suite": "helix", "rows": rows})
    (tmp_path / "attend.json").write_text(text)
    command = ["simulate", "measured", path, "--hardware", "h200", "--calibrate", path]
    assert main(command) == 0
    assert "4,000 GB/s: memory_share=0.833 of 4,800" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["constants"]["bytes_per_value"] == 2
    (row,) = printed["predictions"]  # that of one device was fitted
    assert "tpa=2" in row["name"]
    assert row["error"] == pytest.approx(0, abs=0.02)  # of which 2 us are `attention_us`


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


def test_steps_of_some_layers_and_groups_of_experts_are_predicted(tmp_path):
    case = STEP.case("shape=deepseek-r1,layers=11,S=1024K,kvp=4,ep=4")
    some = predictions(written(tmp_path, "step", case), H200, FREE)[0].predicted_us
    (prediction,) = predictions(written(tmp_path, "step", case | {"layers": 0}), H200, FREE)
    assert prediction.name == "helix, deepseek-r1, B=1, S=1048576, kvp=4, tpa=1, ep=4"
    rest = prediction.predicted_us
    assert 61 / 11 * 0.8 < rest / some < 61 / 11 * 1.2
    with pytest.raises(ValueError, match="ep=0 must be a whole number"):
        predictions(written(tmp_path, "step", case | {"ep": 0}), H200, FREE)
