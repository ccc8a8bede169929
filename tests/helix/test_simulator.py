"""The simulator against the paper's formulae and figures, sizes of real models, and brute force."""

import csv
import json

import numpy as np
import pytest

from jspec.cli import main
from jspec.helix.simulator import (
    Configurations,
    Constants,
    Hardware,
    configurations,
    kv_read_us,
    load_hardware,
    load_shape,
    pipelined,
    simulate,
    step_times,
    weight_read_us,
)
from jspec.helix.simulator.configurations import STRATEGIES
from jspec.helix.simulator.shapes import shape_of_config

GB200 = load_hardware("gb200")
WIDTHS = 2 ** np.arange(7)
CONFIG = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "vocab_size": 129280,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rope_theta": 10000.0,
}


def one(batch=1):
    """A model on one GPU."""
    return Configurations.single("helix", batch)


def test_appendix_a():
    """The values of figure 1 by the two equations of appendix A, worked out by hand."""
    shape = load_shape("helix-figure-1")
    kv = [1024, 512, 256, 128, 128, 128, 128]
    weights = [236.978176, 118.489088, 59.244544, 29.622272, 14.942208, 7.602176, 3.932160]
    np.testing.assert_allclose(kv_read_us(shape, 8, 1e6, tpa=WIDTHS), kv, rtol=1e-12)
    np.testing.assert_allclose(weight_read_us(shape, tpa=WIDTHS, tpf=WIDTHS), weights, rtol=1e-12)
    kv = [128, 64, 32, 16, 8, 4, 2]
    weights = [29.622272, 17.039360, 10.747904, 7.602176, 6.029312, 5.242880, 4.849664]
    np.testing.assert_allclose(kv_read_us(shape, 8, 1e6, tpa=8, kvp=WIDTHS), kv, rtol=1e-12)
    np.testing.assert_allclose(weight_read_us(shape, tpa=8, tpf=8 * WIDTHS), weights, rtol=1e-12)


def test_a_step_on_one_gpu_is_appendix_a_and_the_rest():
    """Without fixed times a layer takes the reads of appendix A: arithmetic is far below them."""
    shape = load_shape("helix-figure-1")
    constants = Constants(kernel_us=0, attention_us=0, collective_us=0)
    times = step_times(shape, GB200, one(8), 1e6, constants)
    layer = (times.projections + times.attention + times.feed_forward) * 1e6
    np.testing.assert_allclose(layer, kv_read_us(shape, 8, 1e6) + weight_read_us(shape), rtol=1e-9)
    assert times.collectives == 0


def test_figure_3():
    assert pipelined(16, 9.6, 1) == pytest.approx(25.6)
    assert pipelined(16, 9.6, 8) == pytest.approx(17.2)


@pytest.mark.parametrize(("one_row", "message", "fixed"), [(2, 1.2, 0), (1, 3, 0.5), (1, 1, 0)])
def test_overlap_is_two_queues(one_row, message, fixed):
    """A GPU that computes and a link that sends, each one chunk at a time."""
    for chunks in (1, 2, 5):
        link = 0.0
        for chunk in range(1, chunks + 1):
            link = max(link, chunk * one_row) + message + fixed
        result = pipelined(one_row * chunks, message * chunks, chunks, fixed)
        assert result == pytest.approx(link)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *(("llama-405b", 405.9), ("deepseek-r1", 671.0), ("qwen3-8b", 8.19)),
        *(("deepseek-v2-lite", 15.7), ("qwen3-30b-a3b", 30.5)),
    ],
)
def test_weights_are_the_models(name, billions):
    """Parameters as the models' authors count them, which the sizes give within half a percent."""
    shape = load_shape(name)
    times = step_times(shape, GB200, one(), 1, Constants(bytes_per_value=1))
    assert times.memory_gb == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize("name", ["llama-405b", "deepseek-r1"])
def test_shards_hold_the_model_once(name):
    """What all GPUs of a layout hold together, without a cache, is at least the model."""
    shape = load_shape(name)
    result = configurations(shape, 64, [64])
    stored = step_times(shape, GB200, result, 1e-9).memory_gb * result.gpus
    whole = step_times(shape, GB200, one(), 1e-9).memory_gb
    assert (stored > whole * 0.999).all()
    # Helix copies q, k and v over KVP alone, no expert and none of the dense layers.
    once = stored[result.of("helix") & (result.kvp == 1) & (result.pp == 1)]
    np.testing.assert_allclose(once, whole[0], rtol=0.03)


def test_a_cache_is_not_copied_by_helix_and_is_by_tp():
    shape = load_shape("llama-405b")
    result = configurations(shape, 64, [8])
    empty, full = (step_times(shape, GB200, result, s).memory_gb for s in (1e-9, 1e6))
    cache = (full - empty) * result.gpus
    rows = 8 * result.pp
    stages = np.ceil(126 / result.pp) * result.pp  # a last stage with fewer layers is counted full
    least = rows * 2 * 8 * 128 * 1e6 * stages * 0.5 / 1e9
    np.testing.assert_allclose(cache[result.of("helix")], least[result.of("helix")])
    copies = np.maximum(result.tpa / 8, 1)
    np.testing.assert_allclose(cache[result.of("tp")], (least * copies)[result.of("tp")])


@pytest.mark.parametrize("gpus", [64, 6])
@pytest.mark.parametrize("latency", [0.02, 0.05])
def test_the_rows_that_are_served_are_those_of_whole_copies_of_a_layout(latency, gpus):
    """By a loop over all layouts."""
    simulation = simulate(load_shape("llama-405b"), GB200, gpus=gpus)
    best = 0
    for i in range(len(simulation.layouts)):
        one = simulation.layouts.one(i)
        if one["strategy"] != "helix" or not simulation.fits[i]:
            continue
        if simulation.times.total[i] <= latency:
            copies = gpus // (one["kvp"] * one["tpa"] * one["dp"] * one["pp"])
            best = max(best, one["batch"] * one["pp"] * copies)
    assert simulation.served([latency, 1e-6], "helix").tolist() == [best, 0]


def test_a_frontier_is_what_nothing_beats():
    result = simulate(load_shape("llama-405b"), GB200, gpus=16, context=2e5)
    frontier = result.frontier(*STRATEGIES)
    fits = np.flatnonzero(result.fits)
    users, gpus = result.users[fits], result.gpus[fits]
    best = [
        i
        for i, u, g in zip(fits, users, gpus, strict=True)
        if not ((users >= u) & (gpus >= g) & ((users > u) | (gpus > g))).any()
    ]
    points = set(zip(result.users[best], result.gpus[best], strict=True))
    assert set(zip(frontier.users, frontier.gpus, strict=True)) == points
    for rate in (1.0, frontier.users[0], frontier.users[-1], frontier.users[0] * 1.01):
        expected = max(gpus[users >= rate], default=0)
        assert frontier.throughput(rate) == expected
    for rate in (0.1, frontier.gpus[0], frontier.gpus[-1], frontier.gpus[-1] * 1.01):
        assert frontier.interactivity(rate) == max(users[gpus >= rate], default=0)


def test_layouts_use_each_gpu_and_split_rows_evenly():
    for name in ("llama-405b", "deepseek-r1"):
        shape = load_shape(name)
        result = configurations(shape, 64)
        whole = ~result.of("medha")
        assert (result.stage == result.tpf * result.ep)[whole].all()
        assert (result.tpa[result.of("helix")] <= shape.kv_heads).all()
        assert (result.batch % result.dp == 0).all()
        assert (result.gpus <= 64).all()
        assert (result.ep <= max(shape.experts, 1)).all()


def test_config_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    result = load_shape(str(tmp_path))
    assert result == type(result)(**vars(load_shape("deepseek-r1")) | {"name": tmp_path.name})
    with pytest.raises(ValueError, match="lacks hidden"):
        shape_of_config("x", {k: v for k, v in CONFIG.items() if k != "hidden_size"})
    with pytest.raises(ValueError, match="whole number"):
        shape_of_config("x", CONFIG | {"num_hidden_layers": "61"})
    with pytest.raises(ValueError, match="no multiple of 3 KV heads"):
        shape_of_config("x", CONFIG | {"kv_lora_rank": None, "num_key_value_heads": 3})
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="JSON object"):
        load_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("pareto --set speed=1", "constant 'speed' is unknown; choose one of"),
        ("pareto --set row_us=1,2", "--sweep takes several"),
        ("pareto --set link_share=0", "link_share=0.0 must be above 0"),
        ("pareto --set row_us=nan", "row_us=nan must be at least 0"),
        ("pareto --gpus 0", "gpus=0 must be at least 1"),
        ("pareto --gpus 100", "exceeds the 72 of gb200"),
        ("pareto --gpus 1", "take more or larger GPUs"),
        ("pareto --context many", "must be a number"),
        ("pareto --model none", "neither a file nor one of deepseek-r1"),
        ("roofline --batch 0", "--batch 0 must be at least 1"),
        ("roofline --model deepseek-r1", "latent cache"),
        ("hopb --compute 0", "--compute 0.0 must be above 0"),
    ],
)
def test_what_cannot_be_simulated(arguments, message, capsys):
    assert main(["simulate", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


RATES = {"gpus": 8, "memory_gb": 80, "memory_gbps": 3000, "link_gbps": 450, "tflops": 990}


@pytest.mark.parametrize(
    ("value", "message"),
    [("1" + "0" * 400, "memory_gb=1"), ('"80"', "memory_gb=80 "), ("NaN", "memory_gb=nan")],
    ids=["huge", "text", "nan"],
)
def test_rates_of_a_file_are_bounded(value, message, tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(RATES).replace("80", value))
    assert main(["simulate", "pareto", "--hardware", str(path)]) == 2
    assert message in (err := capsys.readouterr().err)
    assert err.count("\n") == 1


def test_chunks_are_the_divisors_of_the_requests(capsys):
    assert main(["simulate", "hopb", "--json", "--requests", "2147483646"]) == 0
    spans = json.loads(capsys.readouterr().out)["spans"]
    assert len(spans) == 192  # 2147483646 = 2 * 3**2 * 7 * 11 * 31 * 151 * 331
    assert [x["chunks"] for x in spans[:5]] == [1, 2, 3, 6, 7]


def test_hardware_of_a_file(tmp_path):
    path = tmp_path / "tiny.json"
    fields = {"gpus": 2, "memory_gb": 1, "memory_gbps": 2, "link_gbps": 3, "tflops": 4}
    path.write_text(json.dumps(fields | {"source": "a test"}))
    assert load_hardware(str(path)) == Hardware("tiny", **fields)
    path.write_text(json.dumps(fields | {"color": 1}))
    with pytest.raises(ValueError, match="color"):
        load_hardware(str(path))


@pytest.mark.parametrize("what", ["roofline", "pareto --sweep row_us=0,1 --gpus 16", "hopb"])
def test_the_command(what, tmp_path, capsys):
    arguments = ["simulate", *what.split()]
    assert main(arguments) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100
    table = tmp_path / "rows.csv"
    assert main([*arguments, "--json", "--csv", str(table)]) == 0
    result = json.loads(capsys.readouterr().out)
    with table.open() as file:
        rows = list(csv.DictReader(file))
    if what == "roofline":
        assert [row["kv_us"] for row in result["tp"]][:4] == [1024, 512, 256, 128]
        assert len(rows) == sum(len(result[name]) for name in ("tp", "context", "kvp"))
    elif what == "hopb":
        assert [row["chunks"] for row in result["spans"]] == [1, 2, 4, 8]
    else:
        assert result["frontiers"][0]["strategy"] == "helix"
        assert [row["row_us"] for row in result["sweeps"]] == [0, 1]
        assert len(rows) == len(result["frontiers"])
        assert set(result["sources"]) == set(result["constants"])


@pytest.mark.parametrize("what", ["roofline", "pareto --gpus 16", "hopb"])
def test_pictures(what, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.png"
    assert main(["simulate", *what.split(), "--json", "--png", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
