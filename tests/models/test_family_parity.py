"""Families of models compared with transformers on random checkpoints; needs the extra "parity".

Each family has a few variants of its settings, and `random_settings` draws more from a seed.
"""

from __future__ import annotations

import numpy as np
import pytest

from jspec import NgramDraft, SamplingParams, SelfDraft, generate, load_model
from jspec.policies import Streaming
from tests.models import goldens
from tests.models.helpers import logits_of, one_pass
from tests.models.test_parity import assert_generates_alike, assert_logits

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

# The goldens of families that no other file compares, and further settings of each.
VARIANTS: dict[str, tuple[str, dict]] = {
    **{
        name: goldens.CASES[name] for name in ("ernie4_5", "gemma", "granite", "mistral", "mixtral")
    },
    **{name: goldens.CASES[name] for name in ("olmo3", "phi3", "qwen2_moe", "smollm3")},
    "ernie4_5-plain": ("ernie4_5", {"rope_parameters": goldens.YARN}),
    "glm4_moe_lite": ("glm4_moe_lite", {**goldens.LATENT, "num_hidden_layers": 3}),
    "glm4_moe_lite-groups": (
        "glm4_moe_lite",
        {**goldens.LATENT, **goldens.IN_GROUPS, "mlp_layer_types": ["sparse", "dense"]},
    ),
    "internlm3": ("internlm3", {"hidden_size": 64, "head_dim": 24}),
    "internlm3-biased": ("internlm3", {"attention_bias": True, "mlp_bias": True}),
    "mistral-no-window": ("mistral", {"sliding_window": None, "rope_parameters": goldens.YARN}),
    "mixtral-window": ("mixtral", {"num_local_experts": 6, "sliding_window": 9}),
    "olmo2": ("olmo2", {"head_dim": None}),
    "olmo2-biased": ("olmo2", {"num_key_value_heads": 1, "attention_bias": True}),
    "phi3-plain": ("phi3", {"head_dim": None, "tie_word_embeddings": True}),
    "qwen2_moe-layers": (
        "qwen2_moe",
        {
            **goldens.QWEN2_MOE,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 3,
        },
    ),
    "seed_oss": ("seed_oss", {}),
    "seed_oss-biased": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    "smollm3-windows": (
        "smollm3",
        {
            "num_hidden_layers": 3,
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 9,
            "attention_bias": True,
            "rope_parameters": goldens.YARN,
            "tie_word_embeddings": False,
        },
    ),
    "qwen2-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3-windows": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "num_hidden_layers": 3,
            "layer_types": goldens.TYPES,
        },
    ),
    "qwen3_moe-windows": (
        "qwen3_moe",
        {**goldens.QWEN3_MOE, "use_sliding_window": True, "sliding_window": 9},
    ),
}


def saved(tmp_path, family: str, settings: dict, seed: int):
    """A random transformers model, and the same saved and loaded by jspec."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    theirs = goldens.make_model(family, settings, seed)
    theirs.save_pretrained(tmp_path / "model", max_shard_size="60KB")
    return theirs, load_model(tmp_path / "model")


@pytest.mark.parametrize("name", VARIANTS)
def test_logits(tmp_path, name):
    assert_logits(*saved(tmp_path, *VARIANTS[name], seed=len(name)))


FIRST = {family: name for name, (family, _) in reversed(VARIANTS.items())}


@pytest.mark.parametrize("name", FIRST.values())
def test_greedy_generation(tmp_path, name):
    theirs, ours = saved(tmp_path, *VARIANTS[name], seed=len(name))
    assert_generates_alike(theirs, ours, None, SelfDraft(Streaming(sinks=4, window=16)))


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe-layers", "qwen3_moe-windows"])
def test_routed_experts(tmp_path, name):
    """Those of prompts and accepted tokens are the likeliest by transformers' router logits."""
    torch = pytest.importorskip("torch")
    theirs, ours = saved(tmp_path, *VARIANTS[name], seed=len(name))
    prompts = [[*range(3, 14), *range(3, 14)], [7]]
    params = SamplingParams(24, temperature=1.0, seed=1, ignore_eos=True, routed_experts=True)
    draft = NgramDraft(min_match=1)
    got = generate(ours, prompts, params, draft=draft, gamma=3, prefill_chunk=8)
    assert got.stats.accepted < got.stats.drafted
    for text, new, experts in zip(prompts, got.tokens, got.routed_experts, strict=True):
        tokens = torch.tensor([[*text, *new][:-1]])
        routers = theirs(tokens, output_router_logits=True).router_logits
        chosen = [logits.topk(experts.shape[2]).indices.numpy() for logits in routers]
        np.testing.assert_array_equal(experts, np.stack(chosen, axis=1))


def test_documented_differences(tmp_path):
    """Where jspec deliberately differs, transformers still does what docs/checkpoints.md says."""
    yarn = {**goldens.YARN, "attn_factor": 2.0}
    cases: dict[str, tuple[str, dict, dict]] = {
        "softcap": ("gemma3_text", goldens.GEMMA3, {"attn_logit_softcapping": 4.0}),
        "attn_factor": ("qwen2", {"rope_parameters": goldens.YARN}, {"rope_parameters": yarn}),
        "max_window_layers": (
            "qwen3_moe",
            {**goldens.QWEN3_MOE, "use_sliding_window": True, "sliding_window": 9},
            {"max_window_layers": 1},
        ),
    }
    tokens = np.random.default_rng(0).integers(0, 112, (1, 40), np.int32)
    for name, (family, settings, change) in cases.items():
        theirs = [goldens.make_model(family, {**settings, **more}, 0) for more in ({}, change)]
        assert np.array_equal(*(goldens.logits_of(model, tokens) for model in theirs)), name
        for model, part in zip(theirs, ("without", "with"), strict=True):
            model.save_pretrained(tmp_path / name / part)
        without, changed = (load_model(tmp_path / name / part) for part in ("without", "with"))
        logits = [logits_of(model, tokens, one_pass(tokens)) for model in (without, changed)]
        assert np.abs(logits[0] - logits[1]).max() > 0.1, name
