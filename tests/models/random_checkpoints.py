"""Settings of random small models of every family that transformers has, each from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from jspec.models.families import FAMILIES
from tests.models import goldens

# The first holds another family, the second is DeepSeek-V3 under a name that transformers lacks.
NAMES = tuple(name for name in FAMILIES if name not in ("gemma3", "kimi_k2"))
_DERIVED_HEADS = ("granite", "olmo2", "olmo3", "phi3", "smollm3", "qwen2_moe", "qwen2")
_LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")


def random_settings(seed: int) -> tuple[str, dict[str, Any]]:
    """A family and settings for `goldens.make_model`."""
    rng = random.Random(seed)
    name = NAMES[seed % len(NAMES)]
    layers, heads = rng.choice([1, 2, 3]), rng.choice([2, 4, 6])
    size = rng.choice([8, 12, 16])
    settings: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([k for k in (1, 2, 3, 4, 6) if heads % k == 0]),
        "hidden_size": heads * size if name in _DERIVED_HEADS else rng.choice([24, 32, 40]),
        "head_dim": None if name in (*_DERIVED_HEADS, *_LATENT) else size,
        "intermediate_size": rng.choice([20, 36]),
        "vocab_size": rng.choice([64, 97]),
        "rms_norm_eps": rng.choice([1e-6, 1e-5, 1e-3]),
        "tie_word_embeddings": rng.random() < 0.5,
        "rope_parameters": _rope(rng),
        "eos_token_id": None,
    }
    settings |= _OF_FAMILY[name](rng, layers, size)
    if name in _LATENT:
        settings["num_key_value_heads"] = heads
    if name in ("deepseek_v2", "gemma2", "gemma3_text", "llama"):  # transformers asks for it
        settings["hidden_size"] = -(-settings["hidden_size"] // heads) * heads
    return name, settings


def _rope(rng: random.Random) -> dict[str, Any]:
    theta, original = rng.choice([100.0, 1e4, 1e6]), rng.choice([16, 32])
    kinds: list[dict[str, Any]] = [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": rng.choice([1.5, 4.0])},
        {"rope_type": "dynamic", "factor": 2.0},
        {**goldens.LLAMA3, "original_max_position_embeddings": original},
        {**goldens.YARN, "original_max_position_embeddings": original, "beta_fast": 8.0},
        {**goldens.YARN_TUNED, "attention_factor": rng.choice([None, 0.8])},
    ]
    return {**rng.choice(kinds), "rope_theta": theta}


def _biases(*names: str) -> Callable[[random.Random, int, int], dict[str, Any]]:
    return lambda rng, layers, size: {name: rng.random() < 0.5 for name in names}


def _types(rng: random.Random, layers: int) -> dict[str, Any]:
    kinds = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    return {"layer_types": kinds, "sliding_window": rng.choice([1, 5, 17])}


def _experts(rng: random.Random) -> dict[str, Any]:
    count = rng.choice([2, 4, 6])
    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    return dict(zip(names, (count, rng.randint(1, count), 12), strict=True))


def _windows(rng: random.Random, layers: int) -> dict[str, Any]:
    if rng.random() < 0.4:
        return {}
    settings = {"use_sliding_window": True, "sliding_window": rng.choice([1, 5, 17])}
    return {**settings, "max_window_layers": rng.randint(0, layers)}


def _qwen3(rng: random.Random, layers: int, size: int) -> dict[str, Any]:
    return _windows(rng, layers) | _biases("attention_bias")(rng, layers, size)


def _qwen_moe(rng: random.Random, layers: int, size: int) -> dict[str, Any]:
    return {
        **_experts(rng),
        "norm_topk_prob": rng.random() < 0.5,
        "decoder_sparse_step": rng.choice([1, 2]),
        "mlp_only_layers": rng.choice([[], [0]]),
    }


def _qwen2_moe(rng: random.Random, layers: int, size: int) -> dict[str, Any]:
    shared = {"shared_expert_intermediate_size": rng.choice([8, 20])}
    return _qwen_moe(rng, layers, size) | _windows(rng, layers) | shared


def _mixtral(rng: random.Random, layers: int, size: int) -> dict[str, Any]:
    experts = _experts(rng)
    return {
        "num_local_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "sliding_window": rng.choice([None, 5]),
    }


def _smollm3(rng: random.Random, layers: int, size: int) -> dict[str, Any]:
    return {
        "no_rope_layers": rng.choice([None, [rng.randint(0, 1) for _ in range(layers)]]),
        "no_rope_layer_interval": rng.choice([2, 4]),
        "use_sliding_window": rng.random() < 0.5,
        "sliding_window": 5,
        **_biases("attention_bias", "mlp_bias")(rng, layers, size),
    }


def _phi3(rng: random.Random, layers: int, size: int) -> dict[str, Any]:
    share = rng.choice([1.0, 0.5])
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
    if rng.random() < 0.6:
        factors = [1 + rng.random() for _ in range(int(size * share) // 2)]
        rope |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors[::-1]}
        rope["original_max_position_embeddings"] = 64
    return {
        "rope_parameters": {**rope, "partial_rotary_factor": share},
        "original_max_position_embeddings": 64,
        "max_position_embeddings": rng.choice([64, 256]),
        "sliding_window": rng.choice([None, 5]),
    }


def _granite(rng: random.Random, layers: int, size: int) -> dict[str, Any]:
    names = ("embedding_multiplier", "attention_multiplier", "residual_multiplier")
    factors = {name: rng.choice([0.25, 0.4, 1.0]) for name in names}
    biases = _biases("attention_bias", "mlp_bias")(rng, layers, size)
    return {**factors, "logits_scaling": rng.choice([0.5, 1.0, 4.0]), **biases}


def _internlm3(rng: random.Random, layers: int, size: int) -> dict[str, Any]:
    biases = dict.fromkeys(("attention_bias", "mlp_bias"), rng.random() < 0.5)
    return {**biases, "hidden_size": 48}  # a multiple of all numbers of heads


def _olmo3(rng: random.Random, layers: int, size: int) -> dict[str, Any]:
    full, theta = _rope(rng), rng.choice([100.0, 1e4])
    full.pop("truncate", None)  # of the model as a whole in transformers
    sliding = {"rope_type": "default", "rope_theta": theta}
    both = {"full_attention": full, "sliding_attention": sliding}
    return {**_types(rng, layers), "rope_parameters": both}


def _gemma2(rng: random.Random, layers: int, size: int) -> dict[str, Any]:
    return {
        **_types(rng, layers),
        "query_pre_attn_scalar": rng.choice([16, 64, 256]),
        "attn_logit_softcapping": rng.choice([None, 4.0, 50.0]),
        "final_logit_softcapping": rng.choice([None, 3.0, 30.0]),
        **_biases("attention_bias")(rng, layers, size),
    }


def _gemma3(rng: random.Random, layers: int, size: int) -> dict[str, Any]:
    both = _olmo3(rng, layers, size)["rope_parameters"]
    without_cap = {"attn_logit_softcapping": None, "rope_parameters": both}
    return _gemma2(rng, layers, size) | without_cap


def _gpt_oss(rng: random.Random, layers: int, size: int) -> dict[str, Any]:
    limits = {"swiglu_limit": rng.choice([0.5, 7.0])}
    return _mixtral(rng, layers, size) | _types(rng, layers) | limits


def _latent(rng: random.Random, layers: int, size: int) -> dict[str, Any]:
    settings = {**goldens.LATENT, "q_lora_rank": rng.choice([None, 20])}
    settings |= {"n_shared_experts": rng.choice([1, 2]), "num_experts_per_tok": rng.choice([1, 3])}
    settings |= {"norm_topk_prob": rng.random() < 0.5, **rng.choice([{}, goldens.IN_GROUPS])}
    return settings | {"first_k_dense_replace": rng.randint(0, layers)}


def _deepseek_v2(rng: random.Random, layers: int, size: int) -> dict[str, Any]:
    settings = _latent(rng, layers, size) | {"norm_topk_prob": False}
    return settings | {"topk_method": "group_limited_greedy" if "n_group" in settings else "greedy"}


def _latent_in_groups(rng: random.Random, layers: int, size: int) -> dict[str, Any]:
    return {"n_group": 1, "topk_group": 1, **_latent(rng, layers, size)}


_OF_FAMILY: dict[str, Callable[[random.Random, int, int], dict[str, Any]]] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _latent_in_groups,
    "ernie4_5": _biases("use_bias"),
    "gemma": _biases("attention_bias"),
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm4_moe_lite": _latent_in_groups,
    "gpt_oss": _gpt_oss,
    "granite": _granite,
    "internlm3": _internlm3,
    "llama": _biases("attention_bias", "mlp_bias"),
    "mistral": lambda rng, layers, size: {"sliding_window": rng.choice([None, 1, 5, 17])},
    "mixtral": _mixtral,
    "olmo2": _biases("attention_bias"),
    "olmo3": _olmo3,
    "phi3": _phi3,
    "qwen2": lambda rng, layers, size: _windows(rng, layers),
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen_moe,
    "seed_oss": _biases("attention_bias", "attention_out_bias", "mlp_bias"),
    "smollm3": _smollm3,
}
