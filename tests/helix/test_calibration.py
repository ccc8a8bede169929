"""Constants fitted to measurements: by the law exactly, noisy, and files that hold none."""

import json

import numpy as np
import pytest

from bench.helix import LAYER, MESSAGE, layer
from bench.helix.messages import COLLECTIVES, ONE_SIDED
from jspec.cli import main
from jspec.helix.simulator import Constants, calibrated, load_fits, load_hardware

H200 = load_hardware("h200")
LATER = 1000.0  # microseconds that `reads` adds over several devices
SIZES = (2048, 32768, 262144, 2**20, 2**24)


def message(name: str, ranks: int, size: int, microseconds: float) -> dict:
    case = MESSAGE.default | {"P": ranks, "bytes": size}
    return {"operation": "message", "name": name, "case": case, "step_ns": [1e3 * microseconds] * 3}


def sent(name: str, ranks: int, size: int) -> float:
    """Bytes on a device's link by a ring: each step passes on a part to the next one."""
    steps = {"all_reduce": 2 * (ranks - 1), "all_gather": ranks * (ranks - 1)}
    return steps.get(name, ranks - 1) * size / ranks


def messages(fixed: float, gbps: float, error: float = 0.0) -> dict:
    rng = np.random.default_rng(0)
    rows = []
    for name in COLLECTIVES:
        for ranks in (2, 4):
            for size in SIZES:
                if name in ONE_SIDED:  # left out, whatever it takes
                    rows.append(message(name, ranks, size, 1000.0))
                    continue
                time = fixed + sent(name, ranks, size) / gbps / 1e3
                time *= 1 + error * rng.uniform(-1, 1)
                rows.append(message(name, ranks, size, time))
    return {"suite": "helix", "rows": [*rows, {"operation": "x", "reason": "2 devices"}]}


def reads(fixed: float, gbps: float, slots=(2**15, 2**18)) -> dict:
    rows = []
    for size in slots:
        for kvp in (1, 2):  # what is shared has an exchange in it
            case = layer.DEFAULT | {"S": size, "kvp": kvp}
            moved = size * 4096 // kvp
            time = 1e3 * fixed + moved / gbps + (kvp - 1) * 1e3 * LATER
            row = {"operation": "attend", "case": case, "name": "helix", "bytes": moved}
            rows.append(row | {"step_ns": [time]})
    return {"suite": "helix", "rows": rows}


def written(tmp_path, result) -> str:
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
    path.write_text(result if isinstance(result, str) else json.dumps(result))
    return str(path)


def test_times_by_the_law_give_its_constants(tmp_path):
    both = messages(7.5, 360.0)
    both["rows"] += reads(3.5, 4320.0)["rows"]
    fits = load_fits(written(tmp_path, both))
    assert [fit.fixed_us for fit in fits] == pytest.approx([7.5, 3.5, LATER])
    assert [fit.gbps for fit in fits] == [pytest.approx(360), pytest.approx(4320), None]
    assert [len(fit.points) for fit in fits] == [40, 2, 2]
    assert all(abs(point.residual) < 1e-9 for fit in fits for point in fit.points)
    constants = calibrated(Constants(row_us=1.0), H200, fits)
    expected = Constants(
        row_us=1.0,
        collective_us=7.5,
        link_share=360 / 450,
        attention_us=3.5,
        memory_share=0.9,
        exchange_us=LATER,
    )
    assert vars(constants) == pytest.approx(vars(expected))
    # Without attention over several devices the exchange is as other collectives.
    assert calibrated(Constants(), H200, fits[:1]).exchange_us == pytest.approx(7.5)


def test_the_exchange_is_what_attention_over_devices_takes_longer(tmp_path):
    result = reads(3.5, 4320.0)
    shared = result["rows"][1::2]
    for row, us in zip(shared, (9.0, 21.0), strict=True):
        row["step_ns"] = [row["step_ns"][0] + 1e3 * (us - LATER)]
    for how in ("tpa=2", "kvp=2,strategy=medha", "kvp=2,exchange=cuda", "kvp=2,T=2"):
        result["rows"].append(shared[0] | {"case": LAYER.case(how), "step_ns": [1e9]})
    alone, exchange = load_fits(written(tmp_path, result))
    assert (alone.fixed_us, alone.gbps) == pytest.approx((3.5, 4320))
    assert (exchange.kind, exchange.gbps, len(exchange.points)) == ("exchange", None, 2)
    # The least squared relative error, by search.
    times = np.array([row["step_ns"][0] / 1e3 for row in shared])
    grid = np.linspace(0, 30, 30001)[:, None]
    errors = (times - [9.0, 21.0] + grid) / times - 1
    best = grid[(errors**2).sum(axis=1).argmin(), 0]
    assert exchange.fixed_us == pytest.approx(best, abs=1e-3)


def test_noise_is_averaged_and_told(tmp_path):
    (fit,) = load_fits(written(tmp_path, messages(7.5, 360.0, error=0.1)))
    assert (fit.fixed_us, fit.gbps) == pytest.approx((7.5, 360), rel=0.05)
    # The fit is the least of the squared relative errors.
    weights = np.array([[1.0, point.bytes] for point in fit.points])
    weights /= np.array([point.measured_us for point in fit.points])[:, None]
    best = np.linalg.lstsq(weights, np.ones(len(weights)), rcond=None)[0]
    assert (fit.fixed_us, 1e-3 / fit.gbps) == pytest.approx(tuple(best))


def test_one_size_gives_a_rate_alone(tmp_path):
    fit, _ = load_fits(written(tmp_path, reads(0.0, 4000.0, slots=(2**18,))))
    assert (fit.fixed_us, fit.gbps) == (None, pytest.approx(4000))
    assert calibrated(Constants(attention_us=9), H200, [fit]).attention_us == 9


def test_latents_give_the_rate_of_their_arithmetic(tmp_path, capsys):
    result = reads(3.5, 4320.0)
    for kvp in (1, 2):
        case = LAYER.case(f"B=2,S=32K,{layer.LATENT},kvp={kvp},up=before")
        operations = 2 * 2 * 2**15 * 128 * (576 + 512) / kvp
        row = {"operation": "attend", "case": case, "name": "helix"}
        result["rows"].append(row | {"step_ns": [operations / 5e5]})
    path = written(tmp_path, result)
    fit, _ = load_fits(path)
    assert fit.tflops == pytest.approx(500)
    assert len(fit.points) == 3
    assert fit.points[-1].residual == pytest.approx(0)
    constants = calibrated(Constants(arithmetic_share=0.8), H200, [fit])
    assert constants.attention_share == pytest.approx(500 / (0.8 * H200.tflops))
    assert main(["simulate", "measured", path, "--hardware", "h200", "--calibrate", path]) == 0
    assert "500 TFLOP/s: attention_share=" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ({"suite": "helix"}, "has no times of messages or attention: KeyError: 'rows'"),
        ({"suite": "helix", "rows": [3]}, "has no times of messages or attention: Attribute"),
        (
            {"suite": "helix", "rows": []},
            "no times of messages between devices or of attention by one device",
        ),
        (
            {"suite": "helix", "rows": [message("all_to_all, cuda", 2, 8, 1.0)]},
            "no times of messages between devices or of",
        ),
        (
            {"suite": "helix", "rows": [message("send", 2, 8, 1.0)]},
            "has no times of messages or attention: KeyError: 'send'",
        ),
        (
            {"suite": "helix", "rows": [message("all_to_all", 2, 8, -1.0)]},
            "all_to_all, P=2, 8 bytes: -1 us must be above 0",
        ),
        (
            {"suite": "helix", "rows": [message("all_to_all", 2, n, 9 / n) for n in (8, 64)]},
            "the times of messages do not grow with the bytes, 4 to 32",
        ),
    ],
    ids=[
        "text",
        "list",
        "rows",
        "row",
        "empty",
        "one-sided",
        "name",
        "negative",
        "falling",
    ],
)
def test_files_without_what_is_needed_are_refused(result, message, tmp_path, capsys):
    path = written(tmp_path, result)
    with pytest.raises(ValueError, match=message):
        load_fits(path)
    assert main(["simulate", "pareto", "--calibrate", path]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_command_shows_and_uses_what_it_fitted(tmp_path, capsys):
    paths = [written(tmp_path, x) for x in (messages(7.5, 360.0, error=0.1), reads(3.5, 4320.0))]
    command = ["simulate", "pareto", "--model", "qwen3-8b", "--hardware", "h200", "--gpus", "2"]
    command += [part for path in paths for part in ("--calibrate", path)]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "4,320 GB/s: memory_share=0.9 of 4,800, attention_us=3.5" in shown
    assert "all_gather, P=4, 2,048 bytes" in shown
    assert main([*command, "--set", "kernel_us=1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["constants"]["kernel_us"] == 1
    assert printed["constants"]["collective_us"] == printed["fits"][0]["fixed_us"]
    assert main([*command[:8], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["frontiers"] != printed["frontiers"]
