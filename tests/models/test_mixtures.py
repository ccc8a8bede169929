"""Mixtures of experts of Qwen3: settings, refusals, and generation."""

import json

import pytest

from jspec import (
    CheckpointError,
    Experts,
    LayerSpec,
    NgramDraft,
    Rope,
    SamplingParams,
    SelfDraft,
    generate,
    load_model,
)
from jspec.models.families import model_config
from jspec.policies import ExactTopK
from tests.models.goldens import GOLDEN

TINY = json.loads((GOLDEN / "qwen3_moe" / "config.json").read_text())
# As it is on the hub.
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_settings_of_qwen3_30b_a3b():
    config = model_config(QWEN3_30B_A3B)
    assert config.layers == (LayerSpec(kv_heads=4, key_size=128, value_size=128),) * 48
    assert config.experts == Experts(routed=128, chosen=8, size=768, normalized=True)
    assert (config.ropes, config.qk_norm, config.norm_eps) == ((Rope(1e6),), True, 1e-6)


@pytest.mark.parametrize(
    ("step", "listed", "dense"),
    [(1, [], ()), (1, None, ()), (2, [3], (0, 2, 3)), (3, [0], (0, 1, 3)), (9, [], (0, 1, 2, 3))],
)
def test_layers_without_experts(step, listed, dense):
    layers = {"num_hidden_layers": 4, "decoder_sparse_step": step, "mlp_only_layers": listed}
    experts = model_config({**TINY, **layers}).experts
    assert experts is not None
    assert experts.dense_layers == dense


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_local_experts": None}, "num_local_experts is null; it must be a positive integer"),
        ({"num_experts_per_tok": 9}, "chosen=9 must be at most 6"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be a positive integer"),
        (
            {"mlp_only_layers": [2]},
            r"mlp_only_layers=\[2\] must be a list of whole numbers below 2",
        ),
        ({"mlp_only_layers": 1}, "mlp_only_layers=1 must be a list"),
        ({"norm_topk_prob": 1}, "norm_topk_prob=1 must be true or false"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        (
            {"shared_expert_intermediate_size": 8},
            r"fields \['shared_expert_intermediate_size'\] are",
        ),
    ],
)
def test_refused(change, reason):
    with pytest.raises(CheckpointError, match=reason):
        model_config({**TINY, **change})


@pytest.mark.slow
def test_drafts_change_no_token():
    model = load_model(GOLDEN / "qwen3_moe")
    prompts = [list(range(3, 60)), [9, 8, 7]]
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    plain = generate(model, prompts, params, draft=None, gamma=0)
    for draft in (NgramDraft(), SelfDraft(ExactTopK(budget=24, dense_layers=0))):
        drafted = generate(model, prompts, params, draft=draft, gamma=3)
        assert drafted.tokens == plain.tokens
