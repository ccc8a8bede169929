"""Writes tests/golden/: tiny checkpoints of every family and scaling with transformers' logits.

Run it with the extra "parity", and compressed-tensors for the int8 case:
``python -m tests.models.goldens [name ...]``. Each directory holds
config.json, safetensors and logits.npz (``tokens`` int32 [B, T], ``logits`` float32 [B, T, V]). All
weights are random, biases and norms too, and wide enough that attention is far from uniform.
"""

from __future__ import annotations

import json
import shutil
import sys
import zlib
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent.parent / "golden"
TOKENS = (2, 72)

SIZES = {
    "vocab_size": 112,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# Scalings with short original contexts, so that 72 positions reach well beyond them.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_TUNED = {
    **YARN,
    "beta_fast": 2.0,
    "beta_slow": 0.25,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "truncate": False,
}

# Latent attention; the first layer has no experts, the others choose three of them.
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
IN_GROUPS = {"n_group": 4, "topk_group": 2}

# A token chooses three experts in each layer.
QWEN3_MOE = {
    "moe_intermediate_size": 12,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}

# Windows shorter than the text, and a limit that many numbers are beyond.
GPT_OSS = {
    "intermediate_size": 12,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "rope_parameters": {**YARN, "truncate": False},
    "swiglu_limit": 0.5,
    "attention_bias": True,
}

# Windows shorter than the text, a scale that is not that of the head size, and caps that bend.
GEMMA = {
    "num_hidden_layers": 3,
    "sliding_window": 9,
    "query_pre_attn_scalar": 24,
    "rms_norm_eps": 1e-4,
    "attn_logit_softcapping": 4.0,
    "final_logit_softcapping": 3.0,
}
GEMMA3 = {
    **GEMMA,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "attn_logit_softcapping": None,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}

TYPES = ["full_attention", "sliding_attention", "full_attention"]
# Half of a head is rotated by factors of each wave, with an attention factor beyond 1.
PHI3 = {
    "head_dim": None,
    "hidden_size": 64,
    "sliding_window": 9,
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1000.0,
        "short_factor": [1.0, 1.1, 1.3, 1.7],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 128,
        "partial_rotary_factor": 0.5,
    },
}
OLMO3 = {
    "head_dim": None,
    "num_hidden_layers": 3,
    "layer_types": TYPES,
    "sliding_window": 9,
    "rope_parameters": {
        "full_attention": YARN,
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
}
GRANITE = {
    "head_dim": None,
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.5,
    "attention_bias": True,
}
QWEN2_MOE = {
    "head_dim": None,
    "moe_intermediate_size": 12,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 20,
}

CASES: dict[str, tuple[str, dict]] = {
    "deepseek_v2": ("deepseek_v2", {**LATENT, "q_lora_rank": None, "n_shared_experts": 1}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, **IN_GROUPS, "rope_parameters": YARN_TUNED}),
    "ernie4_5": ("ernie4_5", {"use_bias": True, "num_hidden_layers": 1}),
    "gemma": ("gemma", {"num_hidden_layers": 1}),
    "gemma2": ("gemma2", {**GEMMA, "num_hidden_layers": 2}),
    "gemma3": ("gemma3_text", GEMMA3),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss_mxfp4": ("gpt_oss", {**GPT_OSS, "intermediate_size": 64, "num_hidden_layers": 1}),
    "granite": ("granite", GRANITE),
    "llama2": ("llama", {"num_key_value_heads": 4, "hidden_size": 64, "num_hidden_layers": 1}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "eos_token_id": [2, 3]}),
    "llama_linear": (
        "llama",
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "llama_int8": ("llama", {"num_hidden_layers": 1}),
    "mistral": ("mistral", {"sliding_window": 9, "num_hidden_layers": 1}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo3": ("olmo3", OLMO3),
    "phi3": ("phi3", PHI3),
    "qwen2": ("qwen2", {"head_dim": None, "hidden_size": 64, "num_hidden_layers": 1}),
    "qwen2_yarn": ("qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen2_moe": ("qwen2_moe", QWEN2_MOE),
    "qwen3": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3_moe": ("qwen3_moe", QWEN3_MOE),
    "qwen3_yarn": ("qwen3", {"rope_parameters": YARN_TUNED, "num_key_value_heads": 1}),
    "smollm3": ("smollm3", {"head_dim": None, "no_rope_layers": [0, 1]}),
}
SHARDED = "qwen2"
OLD_KEYS = "llama_linear"
INT8 = "llama_int8"
MXFP4 = "gpt_oss_mxfp4"


def make_model(family: str, settings: dict, seed: int):
    """A random transformers model in float32, in evaluation mode."""
    import torch
    import transformers

    settings = {
        key: value
        for key, value in {**SIZES, **settings}.items()
        if value is not None or key == "q_lora_rank"  # which means something there
    }
    config = transformers.AutoConfig.for_model(family, **settings)
    # Other implementations of Gemma 2's attention leave its soft cap out.
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if value.ndim == 2:
                scale = 1.0 if "embed" in name else 1.5
                value.copy_(noise * scale * value.shape[-1] ** -0.5)
            else:
                value.copy_(noise * 0.3 + (1.0 if "norm" in name else 0.0))
        for name, value in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                value.copy_(torch.randn(value.shape, generator=generator) * 0.3)
    return model.eval()


def logits_of(model, tokens: np.ndarray) -> np.ndarray:
    """Logits float32 ``[B, T, V]`` of a transformers model."""
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64))).logits.float().numpy()


def _write(name: str) -> None:
    family, settings = CASES[name]
    seed = zlib.crc32(name.encode())
    path = GOLDEN / name
    shutil.rmtree(path, ignore_errors=True)
    model = make_model(family, settings, seed)
    tokens = np.random.default_rng(seed).integers(0, SIZES["vocab_size"], TOKENS, np.int32)
    if name == INT8:
        logits = _write_int8(model, path, tokens)
    elif name == MXFP4:
        logits = _write_mxfp4(model, path, tokens)
    else:
        logits = logits_of(model, tokens)
        model.save_pretrained(path, max_shard_size="40KB" if name == SHARDED else "1GB")
    (path / "generation_config.json").unlink(missing_ok=True)
    if name == OLD_KEYS:
        _use_old_keys(path / "config.json")
    np.savez_compressed(path / "logits.npz", tokens=tokens, logits=logits)


def _write_int8(model, path: Path, tokens: np.ndarray) -> np.ndarray:
    """Quantise the linear layers but the head, save them as int8; logits of the same model."""
    from compressed_tensors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )

    weights = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel")
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data = module.weight.data.abs().amax(1, keepdim=True) / 127
            module.quantization_status = QuantizationStatus.FROZEN
    logits = logits_of(model, tokens)
    compressor = ModelCompressor.from_pretrained_model(model, "int-quantized")
    compressor.compress_model(model)
    model.save_pretrained(path)
    compressor.update_config(path)
    return logits


def _write_mxfp4(model, path: Path, tokens: np.ndarray) -> np.ndarray:
    """Save experts of random MXFP4 numbers; logits of the model with transformers' dequantised."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    rng = np.random.default_rng(0)
    for name, kernel in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            count, inputs, outputs = kernel.shape
            shape = (count, outputs, inputs // 32)
            blocks = torch.from_numpy(rng.integers(0, 256, (*shape, 16), np.uint8))
            scales = torch.from_numpy(rng.integers(122, 126, shape, np.uint8))
            dequantized = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            with torch.no_grad():
                kernel.copy_(dequantized)
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return logits_of(model, tokens)


def _use_old_keys(path: Path) -> None:
    """Say rope as transformers 4 did: rope_theta at the top, and rope_scaling with a type."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    path.write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or CASES:
        _write(chosen)
        print(chosen)
