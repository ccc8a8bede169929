"""Settings that a config.json leaves out: each family has the defaults of transformers."""

import json

import pytest

from jspec import Experts, ModelConfig, Rope
from jspec.models.families import model_config
from jspec.parts import ClampedSwiGLU
from tests.models.helpers import GOLDEN, LLAMA


def windows_of(config: ModelConfig) -> list[int | None]:
    return [spec.window for spec in config.layers]


def biases_of(config: ModelConfig) -> tuple[bool, bool, bool]:
    return config.qkv_bias, config.out_bias, config.mlp_bias


def experts_of(config: ModelConfig) -> Experts:
    assert config.experts is not None
    return config.experts


# By family: fields of its golden, or of a Llama, that are changed or left out, what is read of the
# settings, and what it is then, as transformers fills it in.
DEFAULTS = [
    ("deepseek_v3", {"norm_topk_prob": ...}, lambda c: experts_of(c).normalized, True),
    ("ernie4_5", {"use_bias": ...}, biases_of, (False, False, False)),
    ("ernie4_5", {"rope_parameters": ...}, lambda c: c.ropes, (Rope(5e5),)),
    ("ernie4_5", {"tie_word_embeddings": ...}, lambda c: c.tie_embeddings, True),
    ("gemma", {"tie_word_embeddings": ...}, lambda c: c.tie_embeddings, True),
    ("gemma2", {"layer_types": ...}, windows_of, [9, None]),
    (
        "gemma3",
        {"layer_types": ..., "num_hidden_layers": 8},
        windows_of,
        [9, 9, 9, 9, 9, None, 9, 9],
    ),
    (
        "gpt_oss",
        {"swiglu_limit": ..., "swiglu_alpha": ...},
        lambda c: experts_of(c).clamped,
        ClampedSwiGLU(7.0, 1.702),
    ),
    ("gpt_oss", {"attention_bias": ...}, biases_of, (True, True, False)),
    (
        "granite",
        dict.fromkeys(
            (
                *("attention_multiplier", "embedding_multiplier", "residual_multiplier"),
                *("logits_scaling", "attention_bias"),
            ),
            ...,
        ),
        lambda c: (c.layers[0].scale, c.embedding_scale, c.residual_scale, c.logit_scale),
        (1.0, None, None, 1.0),
    ),
    ("internlm3", {}, biases_of, (False, False, False)),
    ("mistral", {"sliding_window": ...}, windows_of, [4096]),
    ("mixtral", {"rope_parameters": ...}, lambda c: c.ropes, (Rope(1e6),)),
    ("mixtral", {"sliding_window": ...}, windows_of, [None, None]),
    ("olmo2", {}, lambda c: (c.pre_norms, c.post_norms, c.joint_qk_norm), (False, True, True)),
    (
        "olmo3",
        {"layer_types": ..., "num_hidden_layers": 5},
        windows_of,
        [9, 9, 9, None, 9],
    ),
    ("olmo3", {"rope_parameters": ...}, lambda c: c.ropes, (Rope(5e5), Rope(5e5))),
    ("phi3", {"sliding_window": ...}, windows_of, [None, None]),
    (
        "qwen2_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
            "layer_types": ...,
            "num_hidden_layers": 4,
        },
        windows_of,
        [9, None, None, None],
    ),
    ("qwen2_moe", {"qkv_bias": ...}, biases_of, (True, False, False)),
    ("qwen2_moe", {"norm_topk_prob": ...}, lambda c: experts_of(c).normalized, False),
    ("qwen3_moe", {"norm_topk_prob": ...}, lambda c: experts_of(c).normalized, False),
    ("seed_oss", {}, biases_of, (True, False, False)),
    (
        "smollm3",
        {"no_rope_layers": ..., "layer_types": ..., "num_hidden_layers": 5},
        lambda c: [spec.rope for spec in c.layers],
        [0, 0, 0, 1, 0],
    ),
    (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 9, "layer_types": ...},
        windows_of,
        [9, None],  # the golden's first layer does not rotate
    ),
    ("smollm3", {"rope_parameters": ...}, lambda c: c.ropes, (Rope(2e6), Rope(rotated=0))),
    ("smollm3", {"tie_word_embeddings": ...}, lambda c: c.tie_embeddings, True),
]


@pytest.mark.parametrize(
    ("family", "change", "of", "expected"), DEFAULTS, ids=[f"{x[0]}-{[*x[1]]}" for x in DEFAULTS]
)
def test_what_a_file_leaves_out_is_as_in_transformers(family, change, of, expected):
    path = GOLDEN / family / "config.json"
    values = json.loads(path.read_text()) if path.exists() else {**LLAMA, "model_type": family}
    values = {key: value for key, value in {**values, **change}.items() if value is not ...}
    assert of(model_config(values)) == expected
