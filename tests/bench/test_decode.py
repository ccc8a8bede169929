"""The suite `decode`: a small model from end to end, its checks, its formulas and its cases."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import point, profiles
from bench.ceilings import Ceilings
from bench.clocks import Kernel
from bench.decode import (
    BACKEND,
    DRAFT,
    PASS,
    PREFILL,
    READ,
    backend_config,
    catalogue,
    check,
    draft_config,
    floors,
    iterations,
    kernels,
    prefill,
    running,
    shapes,
    with_rate,
)
from bench.decode.states import Blueprint, NoisyPadding
from bench.policies import policies
from bench.settings import Settings
from jspec.config import LayerSpec, ModelConfig
from jspec.decode.draft import named_draft
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.models.decoder import Decoder
from jspec.ops.attention.dense import attention
from jspec.ops.quantized import MXFP4, Quantized, dequantized
from jspec.parts import Experts
from jspec.policies import Dense

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
ONE = dataclasses.replace(TINY, layers=SPECS[:1])
MIXTURE = dataclasses.replace(TINY, experts=Experts(routed=8, chosen=2, size=16), sinks=True)
WINDOWS = dataclasses.replace(TINY, layers=SPECS[::-1], post_norms=True, centered_norms=True)
CEILINGS = Ceilings(1e9, None)  # a byte a nanosecond
NAMES = {"attention_kernel": 1000, "gemm_fusion_dot_1": 600, "loop_add_fusion": 400}
LAUNCHED = [Kernel(name, ns, True) for name, ns in NAMES.items()]


class Device:
    """A device clock that records the same kernels for each chunk."""

    reason = None

    def kernels(self, call):
        call()
        return LAUNCHED


def timed(self, steps):
    """Times of chunks that ran; a machine under load gives others."""
    self.run(1)
    return [10**6] * 3


@pytest.fixture
def tiny(monkeypatch):
    """A small model under the name of `tiny`, and clocks."""
    monkeypatch.setattr(running.Loop, "step_ns", timed)
    monkeypatch.setitem(catalogue.MODELS, "tiny", TINY)
    monkeypatch.setattr(shapes, "_DRAWN", {})
    monkeypatch.setattr(point, "DEVICE", Device())
    monkeypatch.setattr("bench.ceilings.measured", lambda: CEILINGS)


def rows(benchmark, text: str, *names: str, **settings) -> dict[str, dict]:
    case = benchmark.case(f"model=tiny,{text}")
    measured = benchmark.rows(case, Settings(quick=True, only=names, **settings))
    return {row["name"]: row for row in measured}


@pytest.mark.exhaustive
def test_a_pass_is_checked_timed_and_compared_with_its_floor(tiny):
    row = rows(PASS, "S=300,T=3")["plain"]
    assert (row["operation"], row["checked"], len(row["step_ns"])) == ("pass", "2 layers", 3)
    assert row["case"] == {"model": "tiny", "layers": 2, "B": 1, "S": 300, "T": 3}
    # All weights but the table of embeddings; 300 tokens of one layer and 8 of the other.
    weights = 2 * sum(math.prod(x.shape) for x in jax.tree.leaves(Decoder(TINY, rngs=None)))
    read = weights - 2 * 128 * 32 + 2 * (300 + 8) * 2 * 2 * 16
    assert row["floors_ns"] == {"verification": read, "bookkeeping": 4 * 3 * 128}
    assert row["memory"]["weight_bytes"] == weights
    # A ring of 8 + 3 slots, and room for two chunks.
    assert row["memory"]["cache_bytes"] == 2 * (512 + 11) * 2 * 2 * 16
    assert row["over_floor"] == pytest.approx(1e6 / sum(row["floors_ns"].values()))
    assert row["kernels"] == len(LAUNCHED)
    assert row["parts_ns"]["verification"] == {"attention": 1000, "matmuls": 600, "rest": 400}


@pytest.mark.exhaustive
def test_a_pass_over_a_tree_is_next_to_one_over_a_chain(tiny, monkeypatch):
    both = rows(PASS, "S=300,T=4", "chain", "tree")
    assert [row["checked"] for row in both.values()] == ["2 layers"] * 2
    assert "tokens_per_s" not in both["tree"]
    right = check.run_target

    def as_chain(models, state, drafted, config):
        if config.backends:  # the reference
            drafted = dataclasses.replace(drafted, parents=None)
        return right(models, state, drafted, config)

    monkeypatch.setattr(check, "run_target", as_chain)
    check._iteration.clear_cache()  # what is traced is kept
    row = rows(PASS, "S=300,T=4", "tree")["tree"]
    check._iteration.clear_cache()
    assert row["checked"] is False


def test_a_wrong_step_is_not_timed_and_neither_is_one_that_does_not_fit(tiny, monkeypatch):
    right = check.run_target

    def late(models, state, drafted, config):
        if config.backends:  # the reference
            state = dataclasses.replace(
                state, cache=state.cache.with_lengths(state.cache.lengths - 9)
            )
        return right(models, state, drafted, config)

    monkeypatch.setattr(check, "run_target", late)
    check._iteration.clear_cache()  # what is traced is kept
    row = rows(PASS, "S=300")["plain"]
    check._iteration.clear_cache()
    assert row["checked"] is False
    assert "from the reference's" in row["reason"]
    monkeypatch.setattr(running, "device_bytes", lambda name: 10**4)
    row = rows(PASS, "S=300")["plain"]
    assert row["checked"] is None
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in row["reason"]


@pytest.mark.slow
def test_iterations_are_checked_and_their_acceptance_is_imposed(tiny):
    measured = rows(DRAFT, "B=2,S=300,gamma=2", "plain", "verification", "vegas", "streaming")
    assert {row["checked"] for row in measured.values()} == {"2 layers"}
    rate = profiles.rate_of("tiny")
    vegas = measured["vegas"]
    assert (vegas["acceptance"], vegas["rate"]) == ("imposed", rate)
    assert vegas["tokens"] == profiles.committed(rate, 2)
    assert "tokens_per_s" not in measured["verification"]
    assert measured["plain"]["vs_plain"] == 1


@pytest.mark.exhaustive
def test_a_step_by_a_backend_says_what_each_operation_took(tiny):
    row = rows(BACKEND, "B=2,S=300,gamma=2,sampling=t0.8", "xla")["xla"]
    assert (row["checked"], len(row["step_ns"])) == ("2 layers", 3)
    took = {choice["operation"]: choice["backend"] for choice in row["backends"]}
    assert {"attention", "sample", "verify_greedy"} <= set(took)
    assert set(took.values()) == {"xla"}
    assert "tokens_per_s" not in row  # the draft is noise


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sampling", "draft"),
    [("penalties", "vegas"), pytest.param("top5-paper", "verification", marks=pytest.mark.slow)],
)
def test_a_step_with_processors_or_log_probabilities_is_timed(sampling, draft, tiny):
    row = rows(BACKEND, f"B=2,S=300,gamma=2,sampling={sampling},draft={draft}", "default")
    assert len(row["default"]["step_ns"]) == 3


def test_a_prefill_is_over_the_dense_one_and_wrong_keys_are_told(tiny, monkeypatch):
    measured = rows(PREFILL, "S=130", "hata")
    assert [row["checked"] for row in measured.values()] == [True, True]
    assert measured["dense"]["over_dense"] == 1
    assert measured["hata"]["over_dense"] > 0
    assert measured["hata"]["tokens_per_s"] > 0
    turns = itertools.count()
    monkeypatch.setattr(prefill, "measured", lambda *args: ([1.0, 2.0], 10 + 5 * next(turns)))
    drifting = rows(PREFILL, "S=130", "hata")  # dense: 20, 30, 40, 50, 60; hata: 25 to 65
    assert drifting["hata"]["over_dense"] == pytest.approx(45 / 40)
    sums = itertools.cycle(([1.0, 2.0], [1.0, 2.5]))
    monkeypatch.setattr(prefill, "measured", lambda *args: (next(sums), 10))
    wrong = rows(PREFILL, "S=130", "hata")["hata"]
    assert (wrong["checked"], wrong["reason"]) == (False, "its keys are not those without a policy")


def test_a_step_by_a_backend_is_that_of_its_draft():
    case = BACKEND.case("draft=vegas,gamma=3")
    assert backend_config(case, "default") == draft_config(case, "vegas")
    preferred = backend_config(case, "pallas")
    assert preferred.backends.preferred == "pallas"
    assert preferred == dataclasses.replace(
        draft_config(case, "vegas"), backends=preferred.backends
    )
    assert backend_config(BACKEND.case("draft=hata"), "xla").is_lossy


@pytest.mark.slow
def test_a_step_that_reads_a_selection_is_checked_in_the_first_layer_that_selects(
    tiny, monkeypatch
):
    monkeypatch.setitem(catalogue.MODELS, "tiny", dataclasses.replace(TINY, layers=SPECS[:1] * 3))
    measured = rows(READ, "B=1,S=300", "dense", "hata", "hata_off", "quest_32")
    of_layers = {name: row["checked"] for name, row in measured.items()}
    assert of_layers.pop("dense") == "2 layers"
    assert set(of_layers.values()) == {"1 layer"}
    # Of three layers one selects: its keys and values are all that is in host memory.
    cached = {name: row["memory"] for name, row in measured.items()}
    assert cached["hata"]["host_bytes"] == 0
    assert cached["hata_off"]["host_bytes"] == 512 * 2 * 2 * 16 * 2
    assert (
        sum(cached["hata_off"][x] for x in ("host_bytes", "cache_bytes"))
        == (cached["hata"]["cache_bytes"])
    )
    # Keys and values of 300 tokens, or of 128 and the new one, with two vectors a page of 32; in
    # one layer of three.
    less = (300 - 129) * 2 * 2 * 16 * 2 - 300 * 2 * 2
    read = {name: row["floors_ns"]["verification"] for name, row in measured.items()}
    assert read["dense"] - read["quest_32"] == pytest.approx(less)


@pytest.mark.slow
@pytest.mark.parametrize("config", [MIXTURE, WINDOWS], ids=["mixture", "windows"])
def test_mixtures_and_windows_are_checked_and_timed(config, tiny, monkeypatch):
    monkeypatch.setitem(catalogue.MODELS, "tiny", config)
    assert rows(PASS, "B=2,S=300,T=4")["plain"]["checked"] == "2 layers"


def test_many_rows_are_compared_with_the_matrix_ceiling():
    ceilings = Ceilings(read=10.0, matrix=100.0)
    assert ceilings.floor_ns(weights=50, cached=20, flops=400) == pytest.approx(7e9)
    assert ceilings.floor_ns(weights=50, cached=20, flops=900) == pytest.approx(11e9)
    assert Ceilings(10.0, None).floor_ns(50, 20, 900) == pytest.approx(7e9)


@pytest.mark.parametrize(
    ("name", "billions"),
    # As the models' cards have them; gpt-oss-20b's active 3.6 with both tables, and no router.
    [
        *(("qwen3-8b", 8.19), ("qwen3-4b", 4.02), ("llama-3.1-8b", 8.03)),
        *(("qwen3-1.7b", 1.72), ("qwen3-0.6b", 0.60), ("llama-3.2-1b", 1.24)),
        *(("gpt-oss-20b", 20.91), ("qwen3-30b-a3b", 30.53)),
        *(("deepseek-v2-lite", 15.706), ("deepseek-r1", 671.026)),  # without its further token
        *(("gemma-3-4b", 3.88), ("gemma-3-27b", 27.01)),  # without the vision encoder
    ],
)
def test_the_shapes_have_their_models_parameters(name, billions):
    leaves = jax.tree.leaves(Decoder(catalogue.MODELS[name], dtype=jnp.bfloat16, rngs=None))
    assert sum(math.prod(leaf.shape) for leaf in leaves) / 1e9 == pytest.approx(billions, abs=0.006)


def test_windows_are_where_their_models_have_them():
    config = catalogue.MODELS["gpt-oss-20b-attention"]
    assert [spec.window for spec in config.layers[:3]] == [128, None, 128]
    assert {(spec.kv_heads, spec.key_size) for spec in config.layers} == {(8, 64)}
    config = catalogue.MODELS["gemma-3-27b"]
    whole = [layer for layer, spec in enumerate(config.layers) if spec.window is None]
    assert whole == [5, 11, 17, 23, 29, 35, 41, 47, 53, 59]
    assert {(spec.window, config.ropes[spec.rope].theta) for spec in config.layers} == {
        (None, 1e6),
        (1024, 1e4),
    }


def test_a_pass_reads_the_experts_that_its_tokens_hit():
    """Against tokens that choose at random, each two of eight."""
    model = Decoder(MIXTURE, dtype=jnp.bfloat16, rngs=None)
    model = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), model)
    one = 2 * (3 * 32 * 16) * len(SPECS)  # bytes of an expert in all layers
    rest = sum(x.nbytes for x in jax.tree.leaves(model)) - 2 * 128 * 32 - 8 * one
    rng = np.random.default_rng(0)
    for tokens in (1, 2, 5, 40):
        chosen = rng.random((20_000, tokens, 8)).argsort(axis=2)[:, :, :2].reshape(20_000, -1)
        hit = np.mean([len(set(row)) for row in chosen.tolist()])
        assert shapes.read_weight_bytes(model, tokens) == pytest.approx(rest + hit * one, rel=0.005)
    # A token multiplies two experts, however many are read.
    assert shapes.product_flops(model, 40) == 40 * (rest + 2 * one)


@pytest.mark.exhaustive
def test_padding_differs_at_all_positions():
    """Equal tokens would all choose the same experts."""
    model = shapes.random_model(dataclasses.replace(MIXTURE, vocab_size=40009))
    config = StepConfig(9, NoisyPadding())
    state = start_decoding(model, [[1, 2], [3, 4]], config=config)
    drafted, _ = check.draft(Models(model), state, config)
    assert not drafted.lengths.any()
    assert len(set(drafted.tokens.reshape(-1).tolist())) == 18
    assert 0 <= drafted.tokens.min() <= drafted.tokens.max() < 40009


def test_random_weights_keep_their_size_from_layer_to_layer():
    """A kernel is drawn by its inputs, and a centred norm scales by 1; MXFP4 has fewer bytes."""
    config = dataclasses.replace(MIXTURE, experts=Experts(routed=8, chosen=2, size=64))
    quantized, unquantized = (shapes.random_model(config, mxfp4=kind) for kind in (True, False))
    for kernel, inputs, factor in (("gate_up", 32, 1), ("down", 64, shapes.EXPERT_SCALE)):
        kernels_of = [
            getattr(model.layers[0].mlp.experts, kernel).kernel.get_value()
            for model in (quantized, unquantized)
        ]
        assert isinstance(kernels_of[0], MXFP4)
        to_dense = jax.jit(dequantized, static_argnums=1)
        for x in map(np.float32, (to_dense(kernels_of[0], jnp.float32), kernels_of[1])):
            assert x.shape == kernels_of[1].shape
            assert float(x.std()) == pytest.approx(factor * inputs**-0.5, rel=0.05)
    router = np.float32(unquantized.layers[0].mlp.router.kernel[...])
    assert float(router.std()) == pytest.approx(shapes.ROUTER_SCALE * 32**-0.5, rel=0.1)
    assert not shapes.random_model(WINDOWS).layers[0].mlp_norm.scale[...].any()
    one = 3 * 32 * 64 * len(SPECS)  # weights of an expert in all layers
    read = [shapes.read_weight_bytes(model, 2) for model in (quantized, unquantized)]
    hit = 8 * (1 - 0.75**2)
    assert read[1] - read[0] == pytest.approx(hit * one * (2 - 4.25 / 8), abs=1)


def test_bytes_of_a_cache_are_those_of_the_layers_that_select():
    config = catalogue.MODELS["llama-3.1-8b"]
    case = 4, 131072, jnp.bfloat16
    keys = 4 * 131072 * 8
    dense = shapes.read_cache_bytes(config, *case)
    assert dense == 32 * keys * 512
    hata = policies(2048, dense_layers=2)["hata"]
    read = shapes.read_cache_bytes(config, *case, hata, 2048)
    assert read == 2 * keys * 512 + 30 * (keys * 16 + 4 * 2049 * 8 * 512)
    assert shapes.read_cache_bytes(config, *case, Dense(), 2048) == dense


def floors_of(text: str, gamma: int = 4) -> dict[str, int]:
    draft = NoisyPadding() if text == "none" else named_draft(text)
    config = StepConfig(gamma, draft)
    models = draft.prepare(Models(shapes.random_model(ONE)))
    by_part = floors.of_iteration(models, 2, 1000, config, CEILINGS)
    return {part: round(ns) for part, ns in by_part.items()}


def test_floors_are_bytes_of_what_each_part_reads():
    shape = jax.tree.map(lambda x: x, Decoder(ONE, dtype=jnp.bfloat16, rngs=None))
    weights = 2 * sum(x.size for x in jax.tree.leaves(shape)) - 2 * 128 * 32
    row = 2 * 2 * 16 * 2  # bytes of a key and its value
    plain = floors_of("none", 0)
    assert plain == {"verification": weights + 2 * 1000 * row, "bookkeeping": 4 * 2 * 128}
    vegas = floors_of("vegas:budget=0.125,least=0")
    assert vegas["draft passes"] == 4 * (weights + 2 * 126 * row)
    assert vegas["verification"] == plain["verification"]
    assert vegas["collection"] == vegas["selection"] == 4 * 2 * 2 * 1000
    assert vegas["bookkeeping"] == 5 * 4 * 2 * 128
    streaming = floors_of("streaming:window=0.125")
    assert streaming["compaction"] == 2 * 2 * 126 * row
    assert "selection" not in streaming
    # Two vectors a page of 16 are half a key for eight positions.
    quest = floors_of("quest:budget=0.125,dense_layers=0")
    assert quest["selection"] == 4 * 2 * 1000 * row / 16
    chain = floors_of("suffix > vegas:budget=0.125,least=0,quantized=int8; inner=3, rounds=2")
    less = vegas["draft passes"] / 4 - chain["draft passes"] / 2
    matrices = weights - 2 * (2 * 32 + 32)  # all but the norms
    columns = (64 + 32 + 32) + 32 + 2 * 64 + 32 + 128
    assert less == matrices / 2 - 4 * columns
    quantized = floors_of("vegas:budget=0.125,least=0,quantized=mxfp4")
    assert vegas["draft passes"] - quantized["draft passes"] == 4 * matrices * (1 - 4.25 / 16)
    assert floors_of("ngram").keys() == plain.keys()


STEP = "jit(decode_chunk)/while/body/closed_call"
MADE = {
    "fusion_1": f"{STEP}/draft/while/body/closed_call/linear/mul",
    "fusion_2": f"{STEP}/verification/scored_attention/exp",
    "fusion_3": f"{STEP}/verification/collection/sum",
    "fusion_4": f"{STEP}/verify_and_commit/add",
    "fusion_5": f"{STEP}/draft/compaction/gather",
    "fusion_6": "reduce_sum",
    "fusion_7": f"{STEP}/packing/scatter",
}


def test_a_kernel_belongs_to_the_phase_that_runs():
    names = ("nvjet_tst_64x8", "fusion_1", "gathered_kernel", "fusion_5", "fusion_2")
    names += ("nvjet_tst_64x8", "fusion_3", "row_kernel", "weights_kernel", "fusion_6")
    names += ("commit_kernel", "fusion_4", "tree_kernel", "path_kernel", "fusion_7")
    ran = [Kernel(name, 2**index, True) for index, name in enumerate(names)]
    sums = kernels.by_part(ran, MADE)
    # A library's kernel before any that is known belongs to the first phase.
    assert sums["draft passes"] == {"attention": 4, "matmuls": 1, "rest": 2}
    assert sums["compaction"]["rest"] == 8
    assert sums["verification"] == {"attention": 16, "matmuls": 32, "rest": 512}
    assert sum(sums["collection"].values()) == 64 + 256
    assert sums["selection"]["rest"] == 128
    assert sums["bookkeeping"]["rest"] == 1024 + 2048 + 4096
    assert sums["packing"]["rest"] == 8192 + 16384


def test_a_kernel_belongs_to_the_operation_that_it_was_made_from():
    q = jnp.ones((1, 2, 4, 16))
    program = jax.jit(lambda q: jnp.tanh(attention(q, q, q, jnp.zeros((1, 2), jnp.int32))[0]))
    origins = kernels.origins(program.lower(q).compile().as_text())
    inside = {name: origin for name, origin in origins.items() if "/attention/" in origin}
    assert inside
    assert {kernels.kind_of(*pair) for pair in inside.items()} == {"attention"}
    mosaic = (
        r' %mpmd_map.6 = f32[2]{0} custom-call(%q), custom_call_target="mosaic_gpu_v2", metadata='
        r'{op_name="jit(f)/attention/mpmd_map"}, backend_config={"t\00stable_mosaic_gpu\00llv'
        r"face\00entry_mosaic_gpu\00ord"
    )
    assert kernels.origins(mosaic)["entry_mosaic_gpu"] == "jit(f)/attention/mpmd_map"
    names = {
        "matmuls": ["nvjet_hsh_128x64", "gemm_fusion_dot_3", "void gemv2T_kernel", "dot_4"],
        "attention": ["attention_kernel", "cudnn_generated_fort_native_sdpa_sm90", "merge_kernel"],
        "rest": ["loop_add_fusion", "verify", "input_concatenate_fusion", "dotted"],
    }
    for kind, of_kind in names.items():
        assert {kernels.kind_of(kernel, "") for kernel in of_kind} == {kind}, kind


def test_one_wrong_position_is_an_error_and_so_is_a_wrong_row():
    right = np.random.default_rng(0).standard_normal((4, 10, 50), np.float32)
    assert check._error(right, right) == 0

    def with_zeros(x, where):
        x = x.copy()
        x[where] = 0
        return x

    for wrong in (np.s_[2, 7], np.s_[:, 3], np.s_[1]):
        assert check._error(with_zeros(right, wrong), right) >= 0.1
    other, known = with_zeros(right, 1), with_zeros(np.ones((4, 10), bool), 1)
    assert check._error(other, right, known) == 0
    assert not check._error(right * np.float32(np.nan), right) <= 1


# The most rounding of the reference that is judged, over what there is; how far from float32 the
# other is, over the same; and whether it is right.
TRIALS = [(1.2, 1.3, True), (1.2, 1.8, False), (0.8, 1.3, False)]


def test_rounding_explains_an_error_up_to_a_limit(monkeypatch):
    model, config = shapes.random_model(ONE), StepConfig(2, NoisyPadding())
    blueprint = Blueprint.of(model, 2, 100, 2, 6)
    checks = check.Check(Models(model), config, lambda models: None)
    state = running.rewound(blueprint.filled(ONE.vocab_size), 100)
    calls, in_float32 = {}, checks._in_float32

    def reference(*arguments):
        calls["reference"] = check._iteration(*arguments, checks._reference)
        return calls["reference"]

    def widened(*arguments):
        calls["exact"] = in_float32(*arguments)
        return calls["exact"]

    programs = {"checked": reference, "reference": reference}
    assert checks.wrong(state, programs) == (None, 0)
    monkeypatch.setattr(checks, "_in_float32", widened)
    monkeypatch.setattr(check, "TOLERANCE", -1)
    checks.wrong(state, programs)
    target = calls["exact"].target
    off = calls["reference"].target - target
    rounding = check._error(calls["reference"].target, target, overall=True)
    assert 1e-3 < rounding < 0.05  # of bfloat16
    for factor, times, right in TRIALS:

        def other(*arguments, times=times):
            return dataclasses.replace(calls["reference"], target=target + times * off)

        monkeypatch.setattr(check, "MAX_ROUNDING", factor * rounding)
        monkeypatch.setattr(check, "TOLERANCE", 0.1 * rounding)
        reason, _ = checks.wrong(state, programs | {"checked": other})
        assert (reason is None) == right
        assert right or "of float32" in reason


def test_a_selection_that_differs_is_wrong():
    right = np.arange(40).reshape(2, 20)
    assert check.share(right, right) == 1
    other = np.where(right % 5 == 0, 77, right)
    assert check.share(other, right) == pytest.approx(0.8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scopes"),
    [
        ("vegas", {"draft", "verification", "collection", "selection"}),
        ("streaming", {"draft", "verification", "compaction"}),
    ],
)
def test_a_compiled_iteration_names_its_parts(name, scopes, tiny, monkeypatch):
    texts = []
    monkeypatch.setattr(
        iterations, "compiled", lambda x: texts.append(x["chunk"]().as_text(debug_info=True))
    )
    rows(DRAFT, "B=2,S=100,gamma=2", name)
    for scope in ("draft", "verification", "collection", "selection", "compaction"):
        assert (f"/{scope}/" in texts[0] or f"{scope}/" in texts[0]) == (scope in scopes), scope


def test_the_rate_gives_what_the_paper_states():
    """Within 2 % at each gamma, though one rate stands for all positions."""
    for model, stated in profiles.LONGBENCH.items():
        rate = profiles.rate_of(model)
        for gamma, accepted in stated.items():
            assert profiles.committed(rate, gamma) - 1 == pytest.approx(accepted, rel=0.02)
    assert profiles.rate_of("llama-3.1-8b") == profiles.rate_of("qwen3-8b")
    assert profiles.rate_of("qwen3-8b", "mxfp4") < profiles.rate_of("qwen3-8b")


def test_imposed_tokens_are_those_of_draws():
    rng, rate = np.random.default_rng(0), 0.9
    first_rejected = rng.geometric(1 - rate, 200_000) - 1
    drawn = 1 + np.minimum(first_rejected, 5).mean()
    assert profiles.committed(rate, 5) == pytest.approx(drawn, rel=0.005)
    case = DRAFT.case("B=4,S=120K")
    row = {"name": "vegas", "case": case, "step_ns": [60 * 10**6] * 5}
    rated = with_rate(row, draft_config(case, "vegas"))
    tokens = profiles.committed(profiles.rate_of("qwen3-8b"), 9)
    assert rated["tokens_per_s"] == pytest.approx(4 * tokens / 0.060)
    plain = with_rate(row | {"name": "plain"}, draft_config(case, "plain"))
    assert plain["tokens_per_s"] == pytest.approx(4 / 0.060)
    assert "acceptance" not in plain


def test_sparse_drafters_read_the_share_of_a_case():
    for text, share in (("S=2K", 0.07), ("S=2K,percent=15", 0.15)):
        case = DRAFT.case(text)
        assert draft_config(case, "vegas-first").draft.policy.budget == share
        assert draft_config(case, "streaming").draft.policy.window == share


def test_quantised_drafts_of_one_kind_read_the_same_copy():
    case = DRAFT.case("gamma=3")
    model, copies = shapes.random_model(ONE), {}
    for name, kind in (("vegas", type(None)), ("vegas-int8", Quantized), ("vegas-mxfp4", MXFP4)):
        config = draft_config(case, name)
        copy = config.draft.prepare(Models(model)).draft
        copies[floors.quantized_in(config)] = copy
        assert isinstance(copy and copy.layers[0].mlp.down.kernel.get_value(), kind)
    assert list(copies) == ["", "int8", "mxfp4"]


@pytest.mark.parametrize(
    ("benchmark", "text", "message"),
    [
        (PASS, "model=gpt-5", "model=gpt-5 must be one of"),
        (PASS, "gamma=3", "'gamma=3' must be one of model, layers, B, S, T"),
        (DRAFT, "B=0", "B=0 must be a whole number of 1 or more"),
        (READ, "layers=2", "selects in none of 2 layers"),
        (READ, "model=gpt-oss-20b-attention,layers=3", "selects in none of 3 layers"),
    ],
)
def test_cases_that_cannot_be_are_refused(benchmark, text, message):
    with pytest.raises(ValueError, match=message):
        benchmark.case(text)


def test_every_default_case_is_one(monkeypatch):
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        for benchmark in (PASS, DRAFT, READ, BACKEND, PREFILL):
            for quick in (False, True):
                assert benchmark.grid(Settings(quick=quick))
