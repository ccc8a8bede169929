"""GGUF files made of tiny checkpoints by the gguf package's writer, as llama.cpp's converter does.

The names of tensors are those of the package's own table. What the converter changes is done here
from its definitions: Llama's queries and keys have their channels in pairs, Gemma's norms have 1
added, experts are stacked, and gpt-oss's gate and up are apart.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.models.goldens import GOLDEN

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
}
_EXPERT = re.compile(r"(.*\.experts)\.([0-9]+)\.(.*)")


def write_gguf(path: Path, name: str, kind: str = "F32", **fields: Any) -> Path:
    """The golden ``name`` as a GGUF file whose matrices are of ``kind``; ``fields`` override."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    return write_model(path, config, _tensors(GOLDEN / name), kind, **fields)


def write_model(
    path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], kind: str, **fields: Any
) -> Path:
    """`write_gguf` of the ``config`` and ``tensors`` of a Hugging Face checkpoint."""
    import gguf

    architecture = ARCHITECTURES[config["model_type"]]
    arch = next(a for a, called in gguf.MODEL_ARCH_NAMES.items() if called == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**_fields(config, architecture), **fields}.items():
        _add(writer, key if key.startswith("tokenizer") else f"{architecture}.{key}", value)
    for stored, value in _converted(config, tensors).items():
        module, _, suffix = stored.rpartition(".")
        result = names.get_name(stored) or f"{names.get_name(module)}.{suffix}"
        if not result.endswith((".weight", ".bias")):
            result = f"{result}.weight"
        quantised = value.ndim > 1 and value.shape[-1] % 32 == 0
        chosen = gguf.GGMLQuantizationType[kind if quantised else "F32"]
        writer.add_tensor(result, gguf.quantize(value, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, key: str, value: Any) -> None:
    if value is None:
        return
    kinds = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
    kinds |= {list: writer.add_array, bool: writer.add_bool}
    kinds[type(value)](key, value)


def _fields(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """The metadata that the converter writes for a config.json."""
    rope = config.get("rope_parameters", {"rope_theta": 1e4, "rope_type": "default"})
    if "rope_scaling" in config:  # as transformers 4 has it
        rope = {**config["rope_scaling"], "rope_theta": config["rope_theta"]}
        rope["rope_type"] = rope.pop("type")
    rope = rope.get("full_attention", rope)
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    expert_size = config.get("moe_intermediate_size")
    if architecture == "gpt-oss":
        expert_size = config["intermediate_size"]
    kind = rope["rope_type"] if rope["rope_type"] in ("linear", "yarn") else None
    stop = config["eos_token_id"]
    windows = architecture in ("gemma2", "gemma3", "gpt-oss")
    return {
        "vocab_size": config["vocab_size"],
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.sliding_window": config["sliding_window"] if windows else None,
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "rope.dimension_count": size,
        "rope.freq_base": rope["rope_theta"],
        "rope.scaling.type": kind,
        "rope.scaling.factor": rope["factor"] if kind else None,
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings")
        if kind == "yarn"
        else None,
        "expert_count": config.get("num_local_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": expert_size,
        "tokenizer.ggml.eos_token_id": stop if isinstance(stop, int) else stop[0],
    }


def _tensors(path: Path) -> dict[str, np.ndarray]:
    parts = [load_file(file) for file in sorted(path.glob("*.safetensors"))]
    return {name: value for part in parts for name, value in part.items()}


def _converted(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    family, result, experts = config["model_type"], {}, {}
    for name, value in tensors.items():
        if match := _EXPERT.fullmatch(name):
            before, expert, rest = match.groups()
            experts.setdefault(f"{before}.{rest}", {})[int(expert)] = value
        elif family == "llama" and re.search(r"[qk]_proj\.(weight|bias)$", name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
            result[name] = halves.swapaxes(1, 2).reshape(value.shape)
        elif family.startswith("gemma") and name.endswith("norm.weight"):
            result[name] = value + 1
        elif family == "gpt_oss" and ".experts.gate_up_proj" in name:
            bias = name.endswith("_bias")
            for part, half in (("gate", value[..., ::2]), ("up", value[..., 1::2])):
                called = re.sub(r"gate_up_proj(_bias)?", f"{part}_proj", name)
                result[f"{called}.{'bias' if bias else 'weight'}"] = half if bias else half.mT
        elif family == "gpt_oss" and ".experts.down_proj" in name:
            bias = name.endswith("_bias")
            called = name.removesuffix("_bias") + (".bias" if bias else ".weight")
            result[called] = value if bias else value.mT
        else:
            result[name] = value
    for name, parts in experts.items():
        result[name] = np.stack([parts[expert] for expert in sorted(parts)])
    return {name: np.ascontiguousarray(value) for name, value in result.items()}


def write_vocabulary(path: Path, **fields: Any) -> Path:
    """A GGUF file of a tokenizer and nothing else; None is not written.

    A key of ``fields`` is that after ``tokenizer.ggml.``, or ``chat_template``, or a whole one.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for key, value in fields.items():
        if "." not in key:
            key = f"tokenizer.{key}" if key.startswith("chat_") else f"tokenizer.ggml.{key}"
        _add(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
