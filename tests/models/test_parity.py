"""Live comparison with transformers on random checkpoints; needs the extra "parity"."""

import numpy as np
import pytest

from jspec import NgramDraft, SamplingParams, SelfDraft, generate, load_model
from jspec.ops.quantized import dequantized
from jspec.policies import Streaming
from tests.models import goldens
from tests.models.helpers import logits_of, one_pass, ragged

pytestmark = [
    pytest.mark.parity,
    # torch and transformers warn about themselves; what jspec does is checked without them.
    pytest.mark.filterwarnings("ignore"),
]
TOLERANCE = 1e-4

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0},
    "llama3": goldens.LLAMA3,
    "yarn": goldens.YARN,
    "yarn-tuned": goldens.YARN_TUNED,
    "yarn-attention": {**goldens.YARN, "attention_factor": 0.75, "beta_fast": 16.0},
}
SHAPES = {
    "derived-head": {"head_dim": None, "hidden_size": 64},
    "wide-head": {"head_dim": 24, "hidden_size": 48},
    "narrow-head": {"head_dim": 4},
    "one-kv-head": {"num_key_value_heads": 1},
    "all-kv-heads": {"num_key_value_heads": 4},
    "three-layers": {"num_hidden_layers": 3, "vocab_size": 97},
}
FAMILIES = {
    "llama": {},
    "llama-biased": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen2-tied": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3-biased": {"attention_bias": True, "tie_word_embeddings": True},
}
# Every rope with every kind of bias and norm, and every shape with every family.
CASES = [
    (family, rope, "three-layers")
    for family in ("llama-biased", "qwen2", "qwen3-biased")
    for rope in ROPES
] + [(family, "default", shape) for family in FAMILIES for shape in list(SHAPES)[:-1]]


def saved_model(tmp_path, family: str, rope: str, shape: str, seed: int):
    """A random transformers model, and the same saved and loaded by jspec."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    settings = {"rope_parameters": dict(ROPES[rope]), **FAMILIES[family], **SHAPES[shape]}
    if family.startswith("qwen3") and shape == "derived-head":
        settings["head_dim"] = 32
    theirs = goldens.make_model(family.split("-")[0], settings, seed)
    # A shard of an odd size, so that the index is in use as well.
    theirs.save_pretrained(tmp_path / "model", max_shard_size="60KB" if seed % 2 else "1GB")
    return theirs, load_model(tmp_path / "model")


@pytest.mark.parametrize(("family", "rope", "shape"), CASES)
def test_logits(tmp_path, family, rope, shape):
    seed = CASES.index((family, rope, shape))
    assert_logits(*saved_model(tmp_path, family, rope, shape, seed), seed)


def assert_logits(theirs, ours, seed: int = 1):
    tokens = np.random.default_rng(seed).integers(0, ours.config.vocab_size, (2, 90), np.int32)
    expected = goldens.logits_of(theirs, tokens)
    for chunks in (one_pass(tokens), ragged(tokens, seed)):
        got = logits_of(ours, tokens, chunks)
        np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=0)


EXPERTS = {
    "qwen3-moe": ("qwen3_moe", {"tie_word_embeddings": True}),
    "qwen3-moe-layers": (
        "qwen3_moe",
        {
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": False,
            "attention_bias": True,
            "rope_parameters": goldens.YARN,
        },
    ),
    "gpt-oss": ("gpt_oss", {}),
    "gpt-oss-layers": (
        "gpt_oss",
        {
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "num_experts_per_tok": 4,
            "sliding_window": 1,
            "swiglu_limit": 7.0,
            "swiglu_alpha": 0.9,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
    "v2": ("deepseek_v2", {}),
    "v2-groups-yarn": (
        "deepseek_v2",
        {
            **goldens.IN_GROUPS,
            "topk_method": "group_limited_greedy",
            "q_lora_rank": None,
            "rope_parameters": goldens.YARN_TUNED,
        },
    ),
    "v3": ("deepseek_v3", {**goldens.IN_GROUPS, "rope_parameters": goldens.YARN}),
    "v3-one-group": (
        "deepseek_v3",
        {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
    "v3-all-layers": ("deepseek_v3", {**goldens.IN_GROUPS, "first_k_dense_replace": 0}),
}


def mixture(tmp_path, name: str):
    """A random mixture of experts of transformers, and the same saved and loaded by jspec."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    family, settings = EXPERTS[name]
    shared = {"qwen3_moe": goldens.QWEN3_MOE, "gpt_oss": goldens.GPT_OSS}
    settings = {**shared.get(family, goldens.LATENT), **settings}
    theirs = goldens.make_model(family, settings, seed=len(name))
    theirs.save_pretrained(tmp_path / "model", max_shard_size="60KB")
    return theirs, load_model(tmp_path / "model")


def test_transformers_dequantises_mxfp4_alike():
    import torch
    import transformers

    path = goldens.GOLDEN / goldens.MXFP4
    kind = transformers.Mxfp4Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, quantization_config=kind
    )
    stored = {name: value.detach().numpy() for name, value in theirs.named_parameters()}
    name = "model.layers.0.mlp.experts.gate_up_proj"
    expected = stored["model.layers.0.mlp.experts.down_proj"]
    for keep in (True, False):
        ours = load_model(path, keep_mxfp4=keep).layers[0].mlp.experts
        kernels = ours.gate_up.kernel.get_value(), ours.down.kernel.get_value()
        gate_up, down = (dequantized(x, np.float32) for x in kernels) if keep else kernels
        np.testing.assert_array_equal(gate_up[:, :, 0], stored[name][..., ::2])
        np.testing.assert_array_equal(gate_up[:, :, 1], stored[name][..., 1::2])
        np.testing.assert_array_equal(down, expected)


@pytest.mark.parametrize("name", EXPERTS)
def test_logits_with_experts(tmp_path, name):
    assert_logits(*mixture(tmp_path, name))


GEMMA = {
    "gemma2": ("gemma2", {}),
    "gemma2-uncapped": (
        "gemma2",
        {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            # Sharper attention makes float32 itself worse than the tolerance.
            "query_pre_attn_scalar": 256,
            "attention_bias": True,
            "rope_parameters": ROPES["yarn"],
            "num_key_value_heads": 1,
        },
    ),
    "gemma3": ("gemma3_text", {}),
    "gemma3-pattern": (
        "gemma3_text",
        {
            "layer_types": None,
            "sliding_window_pattern": 2,
            "num_hidden_layers": 4,
            "rope_parameters": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
            "query_pre_attn_scalar": 256,
        },
    ),
}


def gemma(tmp_path, name: str):
    """A random Gemma of transformers, and the same saved and loaded by jspec."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    family, settings = GEMMA[name]
    shared = goldens.GEMMA if family == "gemma2" else goldens.GEMMA3
    theirs = goldens.make_model(family, {**shared, **settings}, seed=len(name))
    theirs.save_pretrained(tmp_path / "model", max_shard_size="60KB")
    return theirs, load_model(tmp_path / "model")


@pytest.mark.parametrize("name", GEMMA)
def test_logits_of_gemma(tmp_path, name):
    assert_logits(*gemma(tmp_path, name))


def test_the_language_model_of_gemma_3_with_images(tmp_path):
    import torch
    import transformers

    # transformers leaves the cap of logits out where there are images; Google's models have none.
    sizes = {**goldens.SIZES, **goldens.GEMMA3, "final_logit_softcapping": None}
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=sizes, vision_config=small, eos_token_id=[2, 3])
    torch.manual_seed(0)
    theirs = transformers.Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        for value in theirs.parameters():
            value.copy_(torch.randn(value.shape) * 0.2)
    theirs.eval().save_pretrained(tmp_path / "model")
    ours = load_model(tmp_path / "model")
    assert (ours.config.family, ours.config.stop_tokens) == ("gemma3", (2, 3))
    assert_logits(theirs, ours)


@pytest.mark.parametrize("draft", [None, SelfDraft(Streaming(sinks=4, window=16)), NgramDraft()])
@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_greedy_generation_of_gemma(tmp_path, name, draft):
    assert_generates_alike(*gemma(tmp_path, name), draft)


@pytest.mark.parametrize("draft", [None, SelfDraft(Streaming(sinks=4, window=16)), NgramDraft()])
@pytest.mark.parametrize(
    ("family", "rope"),
    [("llama", "llama3"), ("qwen2", "default"), ("qwen3", "yarn"), ("llama-biased", "linear")],
)
def test_greedy_generation(tmp_path, family, rope, draft):
    theirs, ours = saved_model(tmp_path, family, rope, "one-kv-head", 7)
    assert_generates_alike(theirs, ours, draft)


@pytest.mark.parametrize("draft", [None, SelfDraft(Streaming(sinks=4, window=16)), NgramDraft()])
@pytest.mark.parametrize("name", ["v3", "qwen3-moe", "gpt-oss"])
def test_greedy_generation_with_experts(tmp_path, name, draft):
    assert_generates_alike(*mixture(tmp_path, name), draft)


def assert_generates_alike(theirs, ours, *drafts):
    """Greedy tokens by each of ``drafts``, None for plain decoding, are those of transformers."""
    import torch

    rng = np.random.default_rng(7)
    prompts = [rng.integers(0, 112, size).tolist() for size in (1, 13, 40)]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        with torch.no_grad():
            tokens = theirs.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=48, pad_token_id=0
            )
        expected.append(tokens[0, len(prompt) :].tolist())
    for draft in drafts:
        result = generate(
            ours,
            prompts,
            SamplingParams(max_new_tokens=48),
            draft=draft,
            gamma=4 if draft else 0,
            prefill_chunk=16,
        )
        assert list(map(list, result.tokens)) == expected


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_stopping(tmp_path, family):
    """Generation ends with the same stop token, from a list of them."""
    import torch

    theirs, ours = saved_model(tmp_path, family, "default", "all-kv-heads", 3)
    prompt = [5, 9, 17]
    free = generate(ours, [prompt], SamplingParams(max_new_tokens=32), draft=None, gamma=0)
    stop = free.tokens[0][9]
    theirs.generation_config.eos_token_id = theirs.config.eos_token_id = [2, stop]
    theirs.save_pretrained(tmp_path / "stopping")
    ours = load_model(tmp_path / "stopping")
    result = generate(ours, [prompt], SamplingParams(max_new_tokens=32))
    ids = torch.tensor([prompt])
    with torch.no_grad():
        expected = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32
        )
    assert list(result.tokens[0]) == expected[0, len(prompt) :].tolist()
    assert result.tokens[0][-1] in (2, stop)
    assert result.finished == ("stop",)
