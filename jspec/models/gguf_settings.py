"""The metadata of a GGUF file as the fields of a config.json, which a family reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jspec.checks import shown
from jspec.config import ModelConfig
from jspec.models.families import model_config
from jspec.models.files import Fields
from jspec.models.gguf_vocabulary import NO_TOKEN
from jspec.models.rope import rope_frequencies
from jspec.parts import Rope, RopeScaling

# The architecture that a file says, and the family that reads its fields.
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gpt-oss": "gpt_oss",
}
# Fields that say nothing of the model that the tensors do not say.
_WITHOUT_EFFECT = frozenset(("vocab_size", "rope.scaling.finetuned"))
_LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models


def config_of(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    source: str,
    factors: Callable[[], np.ndarray],
    stop_tokens: Sequence[int] = (),
) -> ModelConfig:
    """The settings of a file with these tensors; ``shapes`` are as in a Hugging Face file.

    ``factors`` reads the tensor of Llama 3's rotary factors, where the file has one.
    ``stop_tokens``: those of its vocabulary; of a file without one those that its fields name.
    Raises `CheckpointError` for what is missing, of a wrong type, unknown, or what jspec does not
    have.
    """
    general = Fields(metadata, source)
    architecture = general.text("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise general.error(f"architecture {shown(architecture)} is unknown; jspec has {known}")
    prefix = f"{architecture}."
    settings = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    fields = Fields(settings, f"{source}: {architecture}")
    heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
    size = fields.integer("attention.key_length", max(hidden // heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, size) != size:
            raise fields.error(f"{key}={fields.get(key)} must be that of keys, {size}")
    if "token_embd.weight" not in shapes:
        raise general.error("tensor token_embd.weight is missing")
    biased = "blk.0.attn_q.bias" in shapes
    values = {
        "model_type": ARCHITECTURES[architecture],
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": size,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "eos_token_id": list(stop_tokens) or _stops(general),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
        "rope_scaling": _scaling(fields),
    }
    if architecture != "qwen2":
        values["attention_bias"] = biased
    if architecture != "gpt-oss":
        values["intermediate_size"] = fields.integer("feed_forward_length")
    values |= _SPECIAL[architecture](fields)
    if architecture == "llama":
        values["mlp_bias"] = "blk.0.ffn_up.bias" in shapes
        if "rope_freqs.weight" in shapes:
            values["rope_scaling"] = _llama3(general, size, values["rope_theta"], factors())
    if unknown := sorted(set(settings) - fields.read - _WITHOUT_EFFECT):
        raise fields.error(f"fields {shown(unknown)} are unknown to jspec")
    return model_config(values, source=source)


def _stops(general: Fields) -> list[int]:
    """The ends of a text, of a turn and of a message to a tool."""
    keys = [f"tokenizer.ggml.{role}_token_id" for role in ("eos", "eot", "eom")]
    return [general.count(key) for key in keys if general.get(key) not in NO_TOKEN]


def _scaling(fields: Fields) -> dict[str, Any] | None:
    # As llama.cpp takes a factor alone.
    usual = "linear" if fields.has("rope.scaling.factor") else "none"
    kind = fields.text("rope.scaling.type", usual)
    factor = fields.number("rope.scaling.factor", 1.0)
    original = fields.integer("rope.scaling.original_context_length", None)
    fast = fields.number("rope.scaling.yarn_beta_fast", 32.0)
    slow = fields.number("rope.scaling.yarn_beta_slow", 1.0)
    attention = fields.number("rope.scaling.attn_factor", 1.0)
    attention *= fields.number("rope.scaling.yarn_attn_factor", 1.0)
    if kind not in ("none", "linear", "yarn"):
        raise fields.error(
            f"rope.scaling.type={shown(kind)} is not supported; jspec has none, linear and yarn"
        )
    if kind == "none":
        return None if attention == 1 else {"rope_type": "default", "attn_factor": attention}
    values: dict[str, Any] = {"rope_type": kind, "factor": factor, "attn_factor": attention}
    if kind == "yarn":
        values |= {"original_max_position_embeddings": original}
        values |= {"beta_fast": fast, "beta_slow": slow}
    return values


def _llama3(general: Fields, size: int, theta: float, factors: np.ndarray) -> dict[str, Any]:
    """Llama 3's scaling, of which a file has the factor of each wave alone."""
    factor = float(factors.max(initial=1.0))
    scaling = RopeScaling("llama3", factor, original_context=8192)
    scaled, plain = (rope_frequencies(size, Rope(theta, s))[0] for s in (scaling, None))
    if factors.shape != plain.shape or not np.allclose(plain / scaled, factors, rtol=1e-4):
        raise general.error(
            "rope_freqs.weight has factors that are not Llama 3's over a context of 8192; load the "
            "safetensors of the model"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _plain(fields: Fields) -> dict[str, Any]:
    return {}


def _experts(fields: Fields) -> dict[str, Any]:
    """Qwen3's experts, whose weights always sum to 1."""
    return {
        "num_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gemma2(fields: Fields) -> dict[str, Any]:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    softcaps = {key: fields.number(key) for key in caps if fields.has(key)}
    return {
        "sliding_window": fields.integer("attention.sliding_window"),
        "query_pre_attn_scalar": _query_scalar(fields, "gemma2"),
        **softcaps,
    }


def _gemma3(fields: Fields) -> dict[str, Any]:
    """A file does not say the pattern of windows; later ones have the base of their rope."""
    cap = fields.number("final_logit_softcapping", None)
    return {
        "sliding_window": fields.integer("attention.sliding_window"),
        "rope_theta": fields.number("rope.freq_base", 1e6),
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": _query_scalar(fields, "gemma3"),
        "final_logit_softcapping": cap,
    }


def _query_scalar(fields: Fields, architecture: str) -> float:
    """A file does not say it: it is the head size, and in the largest models the width of a head's
    share of the model."""
    heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
    if fields.integer("block_count") == _LARGEST_GEMMAS[architecture]:
        return hidden / heads
    return fields.integer("attention.key_length", hidden // heads)


def _gpt_oss(fields: Fields) -> dict[str, Any]:
    """YaRN without truncation, as the model has it, which a file does not say."""
    fields.get("feed_forward_length")  # counted as read: experts have a width of their own
    scaling = _scaling(fields)
    return {
        "num_local_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "intermediate_size": fields.integer("expert_feed_forward_length"),
        "sliding_window": fields.integer("attention.sliding_window"),
        "rope_scaling": None if scaling is None else {**scaling, "truncate": False},
    }


_SPECIAL: Mapping[str, Callable[[Fields], dict[str, Any]]] = {
    "llama": _plain,
    "qwen2": _plain,
    "qwen3": _plain,
    "qwen3moe": _experts,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
}
