"""gpt-oss: settings, rings of windows, and what is refused."""

import dataclasses
import json

import numpy as np
import pytest
from flax import nnx

from jspec import (
    CheckpointError,
    ClampedSwiGLU,
    Experts,
    GuidedDraft,
    LayerSpec,
    LinearLayout,
    NgramDraft,
    RingLayout,
    Rope,
    RopeScaling,
    SamplingParams,
    SelfDraft,
    StepConfig,
    generate,
    load_model,
    save_model,
    start_decoding,
)
from jspec.models.families import model_config
from jspec.policies import ExactTopK, Vegas
from tests.models.goldens import GOLDEN
from tests.models.helpers import assert_equal, logits_of, one_pass, parameters
from tests.parameters import default_run

TINY = json.loads((GOLDEN / "gpt_oss" / "config.json").read_text())
# As it is on the hub.
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}


@pytest.fixture(scope="module")
def model():
    return load_model(GOLDEN / "gpt_oss")


def test_settings_of_gpt_oss_20b():
    config = model_config(GPT_OSS_20B)
    whole = LayerSpec(kv_heads=8, key_size=64, value_size=64)
    assert config.layers == (dataclasses.replace(whole, window=128), whole) * 12
    assert config.ropes == (Rope(150000.0, RopeScaling("yarn", 32.0, 4096, truncate=False)),)
    assert config.experts == Experts(
        32, 4, 2880, normalized=True, bias=True, clamped=ClampedSwiGLU(limit=7.0, alpha=1.702)
    )
    assert (config.sinks, config.qkv_bias, config.out_bias) == (True, True, True)
    assert (config.max_context, config.stop_tokens) == (131072, (200002,))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"experts_per_token": 3}, "experts_per_token=3 disagrees with 2, which other fields say"),
        ({"initial_context_length": 9}, "initial_context_length=9 disagrees with 32"),
        ({"layer_types": ["full_attention"]}, "must be full_attention or sliding_attention for ea"),
        ({"layer_types": ["chunked_attention"] * 2}, r"layer_types=\['chunked_attention', "),
        ({"sliding_window": None}, "sliding_window is null; it must be a positive integer"),
        ({"swiglu_limit": -1}, "swiglu_limit=-1 must be a positive number"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; jspec has silu"),
        ({"num_experts_per_tok": 5}, "chosen=5 must be at most 4"),
        ({"router_jitter": 0.1}, r"fields \['router_jitter'\] are unknown to jspec"),
    ],
)
def test_refused(change, reason):
    with pytest.raises(CheckpointError, match=reason):
        model_config({**TINY, **change})


def test_without_layer_types_every_other_layer_has_a_window():
    config = model_config({**TINY, "layer_types": None, "num_hidden_layers": 5})
    assert [spec.window for spec in config.layers] == [9, None, 9, None, 9]


def test_a_saved_model_comes_back(model, tmp_path):
    save_model(model, tmp_path / "saved")
    again = load_model(tmp_path / "saved")
    assert again.config == model.config
    assert_equal(again, parameters(model))


def without_sinks(model):
    for layer in model.layers:
        layer.attention.sinks = None
    return model.config


def with_experts(**change):
    def changed(model):
        settings = dataclasses.replace(model.config.experts, **change)
        for layer in model.layers:
            layer.mlp.router.experts = settings
            layer.mlp.experts.clamped = settings.clamped
        return model.config

    return changed


def without_windows(model):
    layers = tuple(dataclasses.replace(spec, window=None) for spec in model.config.layers)
    return dataclasses.replace(model.config, layers=layers)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        without_sinks,
        without_windows,
        with_experts(clamped=None),
        with_experts(clamped=ClampedSwiGLU(limit=0.5, alpha=1.0)),
        with_experts(clamped=ClampedSwiGLU()),
        with_experts(normalized=False),
    ],
    ids=["sinks", "windows", "clamped", "alpha", "limit", "normalized"],
)
def test_the_golden_depends_on_every_setting(model, change):
    copy = nnx.merge(*nnx.split(model))
    copy.config = change(copy)
    with np.load(GOLDEN / "gpt_oss" / "logits.npz") as golden:
        tokens, logits = golden["tokens"], golden["logits"]
    assert np.abs(logits_of(copy, tokens, one_pass(tokens)) - logits).max() > 0.01


def test_layers_with_a_window_hold_no_more_than_it_needs(model):
    gamma, window = 3, 9
    config = StepConfig(gamma, NgramDraft())
    prompts = [list(range(3, 43)), [9, 8, 7]]
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    cache = start_decoding(model, prompts, params, config, capacity=4096).cache
    assert cache.layouts == (RingLayout(window + gamma + 1), LinearLayout(4096))
    stored = [sum(x.nbytes for x in columns.values()) for columns in cache.columns]
    a_token = 2 * 2 * 16 * 4  # keys and values of two heads in float32
    assert stored == [2 * slots * a_token for slots in (window + gamma + 1, 4096)]


PROMPTS = [list(range(3, 60)), [9, 8, 7]]
DRAFTS = {
    "ngram": NgramDraft(),
    "top-k": SelfDraft(ExactTopK(budget=24, dense_layers=0)),
    "vegas": GuidedDraft(Vegas(budget=16, least=0)),
    "int8": SelfDraft(ExactTopK(budget=24, dense_layers=0), quantized="int8"),
}


@pytest.mark.parametrize(
    "name", default_run(list(DRAFTS), slow=[name for name in DRAFTS if name != "ngram"])
)
def test_drafts_change_no_token(model, name):
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    plain = generate(model, PROMPTS, params, draft=None, gamma=0)
    drafted = generate(model, PROMPTS, params, draft=DRAFTS[name], gamma=3)
    assert drafted.tokens == plain.tokens
