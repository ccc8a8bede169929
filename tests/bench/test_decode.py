"""The suite `decode`: a small model from end to end, its formulas, its options and its tables."""

import contextlib
import io
import json
import math
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from bench import decode, families, point
from bench.__main__ import main
from bench.decode import catalogue, parts, prefill, running, shapes, steps, tables
from bench.settings import DecodeSettings, Settings
from jspec.config import LayerSpec, ModelConfig
from jspec.dispatch import Backend, Backends, always
from jspec.models.decoder import Decoder
from jspec.ops.attention.dense import ATTENTION, attention

SPECS = (
    LayerSpec(kv_heads=2, key_size=16, value_size=16),
    LayerSpec(kv_heads=2, key_size=16, value_size=16, window=8),
)
TINY = ModelConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_heads=4,
    layers=SPECS,
    max_context=4096,
)
ASKED = "decode --model qwen3-8b --context 300 --steps 2".split()
KERNELS = [("attention_kernel", 1000), ("gemm_fusion_dot_1", 600), ("loop_add_fusion", 400)]


class Device:
    """A device clock that gives the same kernels for each step of a chunk."""

    reason = None

    def kernels(self, call):
        call()
        return KERNELS * 2


def measured(*arguments, peaks=(), limit=None) -> tuple[int, dict, str]:
    """Exit code, result and what was printed, where each chunk takes what `Device` says.

    ``peaks``: of memory before and after the first run of each pass; ``limit``: of memory.
    """
    seen, out = iter(peaks), io.StringIO()
    device = {"peak_bytes_in_use": lambda: next(seen, None), "bytes_limit": lambda: limit}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setitem(catalogue.MODELS, "qwen3-8b", TINY)
        patch.setattr(point, "DEVICE", Device())
        patch.setattr(running, "device_bytes", lambda name: device[name]())
        patch.setattr(steps, "REPEATS", 3)
        patch.setattr(decode, "read_ceiling", lambda: 1e10)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "result.json"
            code = main([*ASKED, *arguments, "--json", str(path)])
            return code, json.loads(path.read_text()), out.getvalue()


@pytest.fixture(scope="module")
def whole():
    """Passes of one and of three tokens; the first sets the peak of memory, the second does not."""
    return measured("--tokens", "1", "--tokens", "3", peaks=(10, 123456, 123456, 123456))


def test_a_row_has_its_floor_its_parts_and_its_memory(whole):
    code, result, _ = whole
    assert code == 0
    one, three = result["rows"]
    assert one["case"] == {"model": "qwen3-8b", "layers": 2, "B": 1, "context": 300, "T": 1}
    assert (one["name"], one["checked"], len(one["step_ns"])) == ("xla_blocked", "2 layers", 3)
    # All weights but the table of embeddings; 300 tokens of one layer and 8 of the other.
    weights = 2 * sum(math.prod(x.shape) for x in jax.tree.leaves(Decoder(TINY, rngs=None)))
    assert one["weight_bytes"] == weights
    assert one["read_bytes"] == weights - 2 * 128 * 32 + 2 * (300 + 8) * 2 * 2 * 16
    assert result["read_ceiling_bytes_per_s"] == 1e10
    assert one["floor_ns"] == pytest.approx(one["read_bytes"] / 10)
    # A ring of 8 + 3 slots, and room for two chunks of 2 steps.
    assert one["cache_bytes"] == 2 * (512 + 11) * 2 * 2 * 16
    assert {"1", "3"} <= one["compile_s"].keys()
    assert min(one["compile_s"].values()) > 0
    assert one["kernels"] == len(KERNELS)
    assert one["parts_ns"] == {"attention": 1000, "products": 600, "rest": 400}
    assert one["longest"]["gemm_fusion_dot_1"] == [1, 600]
    assert one["idle"] == pytest.approx(1 - 2000 / sorted(one["step_ns"])[1])
    assert (one["peak_bytes"], one["peak_measured"]) == (123456, True)
    assert "peak_measured" not in three
    assert three["peak_bytes"] > three["weight_bytes"] + three["cache_bytes"]


def test_many_rows_are_held_against_the_matrix_ceiling():
    ceilings = shapes.Ceilings(read=10.0, matrix=100.0)
    assert ceilings.floor_ns(weights=50, cached=20, flops=400) == pytest.approx(7e9)
    assert ceilings.floor_ns(weights=50, cached=20, flops=900) == pytest.approx(11e9)
    assert shapes.Ceilings(10.0, None).floor_ns(50, 20, 900) == pytest.approx(7e9)


def test_a_table_fits_and_explains_itself(whole, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    _, result, _ = whole
    # A machine under load takes so long that columns fold: the times are set.
    rows = json.loads(json.dumps(result["rows"]))
    for own in rows:
        own |= {"step_ns": [2 * 10**6] * 3, "idle": 0.1}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        tables.show(result | {"rows": rows})
    out = printed.getvalue()
    table = out.splitlines()
    assert max(map(len, table)) <= 100
    row = next(line for line in table if line.startswith("qwen3-8b"))
    assert row.split()[:6] == ["qwen3-8b", "2", "1", "300", "1", "xla_blocked"]
    assert "where the time of a step goes" in out
    assert "at the read ceiling of this run" in " ".join(out.split())
    for own in rows:
        own["case"] |= {"model": "gpt-oss-20b-attention", "B": 32, "context": 122880, "T": 16}
        own |= {"ratio": 1.0, "step_ns": [123456789] * 3, "idle": 0.123, "kernels": 1234}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        tables.show(result | {"rows": rows})
    assert max(map(len, printed.getvalue().splitlines())) <= 100


def late(q, k, v, positions, **settings):
    """Attention that leaves out each query's own key."""
    return attention(q, k, v, positions - 1, window=settings["window"], implementation="xla")


def test_wrong_attention_is_found_and_not_timed(monkeypatch):
    monkeypatch.setitem(ATTENTION.backends, "late", Backend("late", late, always))
    code, result, out = measured("--tokens", "1", "--backend", "attention=late")
    (row,) = result["rows"]
    assert code == 1
    assert (row["name"], row["checked"]) == ("late", False)
    assert row["error"] > 0.3
    assert "step_ns" not in row
    assert "its logits are wrong by" in out


def test_what_does_not_fit_or_compile_is_a_row_with_its_reason(monkeypatch):
    code, result, out = measured("--tokens", "1", "--no-check", limit=10**4)
    assert (code, result["rows"][0]["checked"]) == (0, None)
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in " ".join(out.split())

    def broken(*arguments, **settings):
        raise TypeError("not today")

    monkeypatch.setitem(ATTENTION.backends, "broken", Backend("broken", broken, always))
    code, _, out = measured("--tokens", "1", "--no-check", "--backend", "attention=broken")
    assert code == 1
    assert "failed: TypeError: not today" in out


def test_where_the_device_clock_fails_the_step_is_kept(monkeypatch):
    def lost(self, call):
        raise RuntimeError("CUPTI lost 7 kernels")

    monkeypatch.setattr(Device, "kernels", lost)
    code, result, _ = measured("--tokens", "1")
    step, reason = result["rows"]
    assert code == 1
    assert len(step["step_ns"]) == 3
    assert "kernels" not in step
    assert reason["reason"] == "device clock: CUPTI lost 7 kernels"


def test_without_the_check_nothing_is_timed():
    code, result, _ = measured("--tokens", "1", "--no-check")
    (row,) = result["rows"]
    assert code == 0
    assert row["reason"] == "not checked, so not timed"
    assert "step_ns" not in row


@pytest.mark.parametrize(
    ("name", "billions"),
    # As the models' cards have them; gpt-oss-20b's active 3.6 with both tables, and no router.
    [
        *(("qwen3-8b", 8.19), ("qwen3-4b", 4.02), ("llama-3.1-8b", 8.03)),
        *(("gpt-oss-20b", 20.91), ("qwen3-30b-a3b", 30.53)),
        *(("gemma-3-4b", 3.88), ("gemma-3-27b", 27.01)),  # without the vision encoder
    ],
)
def test_the_shapes_have_their_models_parameters(name, billions):
    leaves = jax.tree.leaves(Decoder(catalogue.MODELS[name], dtype=jnp.bfloat16, rngs=None))
    assert sum(math.prod(leaf.shape) for leaf in leaves) / 1e9 == pytest.approx(billions, abs=0.006)


def test_the_attention_of_gpt_oss_alternates():
    config = catalogue.MODELS["gpt-oss-20b-attention"]
    assert (config.num_heads, config.num_layers) == (64, 24)
    assert [spec.window for spec in config.layers[:3]] == [128, None, 128]
    assert {(spec.kv_heads, spec.key_size) for spec in config.layers} == {(8, 64)}


def test_the_operations_of_a_prefill_are_those_of_its_pairs():
    model = shapes.random_model(TINY)
    tokens = 21
    # A layer's products: q and output 32 x 64, k and v 32 x 32, three of 32 x 64.
    products = 2 * (2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 64) * tokens * len(SPECS)
    pairs = [sum(min(i + 1, window) for i in range(tokens)) for window in (tokens, 8)]
    wanted = products + sum(2 * 4 * (16 + 16) * own for own in pairs)
    # The formula counts half of a square, without the half of its diagonal.
    assert shapes.prefill_flops(model, tokens) == pytest.approx(wanted, rel=0.01)
    assert shapes.prefill_flops(model, tokens) <= wanted


def test_a_prefill_is_timed_where_its_keys_are_right(monkeypatch):
    model = shapes.random_model(TINY)
    row = prefill.row("tiny", model, 40, Settings(), 1e12)
    assert (row["checked"], len(row["wall_ns"])) == ("2 layers", prefill.REPEATS)
    assert row["flops"] == shapes.prefill_flops(model, 40)
    monkeypatch.setitem(ATTENTION.backends, "late", Backend("late", late, always))
    asked = DecodeSettings(backends=Backends(attention="late"))
    row = prefill.row("tiny", model, 40, Settings(decode=asked), 1e12)
    assert row["checked"] is False
    assert "wall_ns" not in row


def test_a_kernel_belongs_to_the_operation_that_it_was_made_from():
    q = jnp.ones((1, 2, 4, 16))
    program = jax.jit(lambda q: jnp.tanh(attention(q, q, q, jnp.zeros((1, 2), jnp.int32))[0]))
    origins = parts.origins(program.lower(q).compile().as_text())
    inside = {name for name, origin in origins.items() if "/attention/" in origin}
    assert inside
    assert {parts.part_of(name, origins) for name in inside} == {"attention"}
    mosaic = (
        r' %mpmd_map.6 = f32[2]{0} custom-call(%q), custom_call_target="mosaic_gpu_v2", metadata='
        r'{op_name="jit(f)/attention/mpmd_map"}, backend_config={"t\00stable_mosaic_gpu\00llv'
        r"face\00entry_mosaic_gpu\00ord"
    )
    assert parts.part_of("entry_mosaic_gpu_kernel", parts.origins(mosaic)) == "attention"
    assert parts.part_of("stable_mosaic_gpu", parts.origins(mosaic)) == "rest"
    names = {
        "products": [
            "nvjet_hsh_128x64",
            "gemm_fusion_dot_general_3",
            "void gemv2T_kernel",
            "dot_4",
        ],
        "attention": ["attention_kernel", "cudnn_generated_fort_native_sdpa_sm90", "merge_kernel"],
        "rest": ["loop_add_fusion", "verify", "input_concatenate_fusion", "dotted"],
    }
    for part, kernels in names.items():
        assert {parts.part_of(kernel, {}) for kernel in kernels} == {part}, part


def test_the_cases_are_those_that_were_asked_for(monkeypatch):
    asked = DecodeSettings(batches=(1, 2), contexts=(8192,), tokens=(1,))
    assert decode.cases(Settings(decode=asked)) == [
        decode.Case("qwen3-8b", batch, 8192, (1,)) for batch in (1, 2)
    ]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    quick = decode.cases(Settings(quick=True))
    assert [(case.batch, case.context) for case in quick] == [(1, 8192), (32, 8192), (4, 122880)]
    assert {case.model for case in quick} == {"qwen3-8b"}
    assert {case.tokens for case in quick} == {(1, 10)}
    every = decode.cases(Settings())
    assert {case.model for case in every} == set(catalogue.MODELS) - {
        "llama-2-7b",
        *families.MODELS,
    }
    assert {count for case in every for count in case.tokens} == {1, 2, 4, 8, 10, 16}
    llama = Settings(decode=DecodeSettings(models=("llama-3.1-8b",)))
    assert decode.cases(llama) == [case for case in every if case.model == "llama-3.1-8b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("verify --model qwen3-8b", "--model does not apply to verify, only to decode"),
        ("verify --backend attention=xla", "--backend attention=xla does not apply to verify"),
        ("decode --backend xla", "--backend xla must be OPERATION=NAME, as in attention=xla"),
        ("decode --backend attention=cuba", "attention has no implementation 'cuba'"),
        ("decode --backend attend=xla", "there is no operation 'attend'"),
        ("decode --model gpt-5", "invalid choice: 'gpt-5'"),
        ("decode --batch 0", "'0' must be a whole number of at least 1, such as 8192 or 8K"),
        ("decode --context 8M", "'8M' must be a whole number of at least 1, such as 8192 or 8K"),
    ],
)
def test_what_cannot_be_asked_for_is_said(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments.split())
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_a_row_is_compared_by_the_time_of_its_step(whole):
    result = json.loads(json.dumps(whole[1]))
    earlier = json.loads(json.dumps(result))
    earlier["rows"] = earlier["rows"][1:]
    earlier["rows"][0]["step_ns"] = [3 * ns for ns in earlier["rows"][0]["step_ns"]]
    assert tables.compare(result, earlier) == 1
    assert [row.get("ratio") for row in result["rows"]] == [None, pytest.approx(3)]
