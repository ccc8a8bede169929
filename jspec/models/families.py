"""Hugging Face settings (config.json) of the Llama, Qwen2 and Qwen3 families as a `ModelConfig`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jspec.config import ModelConfig, RopeScaling
from jspec.models.errors import CheckpointError
from jspec.models.files import Fields

LAYER_LIMIT = 1024
_FULL = "full_attention"


@dataclasses.dataclass(frozen=True)
class Family:
    """What a family's code fixes and its config.json does not say.

    ``qkv_bias=None`` and ``mlp_bias=None`` leave it to attention_bias and mlp_bias.
    ``required`` are fields that transformers would fill with the sizes of another model.
    """

    qkv_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool = False
    required: tuple[str, ...] = ()


FAMILIES = {
    "llama": Family(mlp_bias=None),
    "qwen2": Family(qkv_bias=True, required=("num_key_value_heads",)),
    "qwen3": Family(qk_norm=True, required=("num_key_value_heads", "head_dim")),
}

_ROPE_KEYS = frozenset(
    "type rope_type rope_theta factor original_max_position_embeddings attention_factor beta_fast "
    "beta_slow mscale mscale_all_dim truncate low_freq_factor high_freq_factor "
    "partial_rotary_factor finetuned".split()
)


def model_config(values: Mapping[str, Any], *, source: str = "config.json") -> ModelConfig:
    """The settings of ``values``, the object in a config.json; ``source`` names it in errors.

    Defaults are those of transformers, save for sizes, which must be there. Raises
    `CheckpointError` for what is missing, of a wrong type, or asks for what jspec does not have.
    """
    fields = Fields(values, source)
    name = fields.text("model_type")
    if name not in FAMILIES:
        raise fields.error(f"model_type={name!r} is unknown; jspec has {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    for key in family.required:
        fields.integer(key)
    _refuse_variants(fields)

    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    vocab = fields.integer("vocab_size")
    bias = fields.boolean("attention_bias", False) if family.qkv_bias is None else None
    mlp_bias = fields.boolean("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias
    theta, scaling = _rope(fields)
    try:
        return ModelConfig.uniform(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=_layers(fields),
            num_heads=heads,
            num_kv_heads=fields.integer("num_key_value_heads", heads),
            head_size=_head_size(fields, hidden, heads),
            family=name,
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=float(fields.number("rms_norm_eps")),
            tie_embeddings=fields.boolean("tie_word_embeddings", False),
            qkv_bias=bool(bias if family.qkv_bias is None else family.qkv_bias),
            out_bias=bool(bias),
            mlp_bias=mlp_bias,
            qk_norm=family.qk_norm,
            max_context=_max_context(fields, scaling),
            stop_tokens=fields.tokens("eos_token_id", vocab),
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise fields.error(str(error)) from None


def _refuse_variants(fields: Fields) -> None:
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.error(f"hidden_act={activation!r} is not supported; jspec has silu")
    kinds = fields.values.get("layer_types")
    if kinds is not None:
        other = kinds if not isinstance(kinds, list) else [k for k in kinds if k != _FULL]
        if other or not isinstance(kinds, list):
            raise fields.error(
                f"layer_types has {str(other)[:80]}, but jspec has {_FULL} alone; use a model "
                "without sliding windows"
            )
    if not fields.has("layer_types") and fields.boolean("use_sliding_window", False):
        window = fields.values.get("sliding_window")
        first = fields.values.get("max_window_layers", 0)
        if window is not None and not (type(first) is int and first >= _layers(fields)):
            raise fields.error(
                f"use_sliding_window=true with sliding_window={window} and "
                f"max_window_layers={first}: jspec attends to the whole context; set "
                "use_sliding_window to false if the model was trained that way"
            )


def _layers(fields: Fields) -> int:
    layers = fields.integer("num_hidden_layers")
    if layers > LAYER_LIMIT:
        raise fields.error(f"num_hidden_layers={layers} must be at most {LAYER_LIMIT}")
    return layers


def _head_size(fields: Fields, hidden: int, heads: int) -> int:
    if fields.has("head_dim"):
        return fields.integer("head_dim")
    if hidden % heads:
        raise fields.error(
            f"hidden_size={hidden} is no multiple of num_attention_heads={heads}; give head_dim"
        )
    return hidden // heads


def _max_context(fields: Fields, scaling: RopeScaling | None) -> int:
    # Qwen's advice for long inputs adds YaRN and leaves max_position_embeddings as it was.
    context = fields.integer("max_position_embeddings")
    if scaling is not None and scaling.kind == "yarn":
        context = max(context, int(scaling.factor * scaling.original_context))
    return context


def _rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Base and scaling from ``rope_scaling`` or, as transformers 5 writes it, rope_parameters."""
    old, new = fields.object("rope_scaling"), fields.object("rope_parameters")
    if old.values and new.values and old.values != new.values:
        raise fields.error(
            f"rope_scaling={dict(old.values)} and rope_parameters={dict(new.values)} disagree; "
            "keep the one that the model was trained with"
        )
    rope = old if old.values else new
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in _SCALINGS:
        raise rope.error(f"rope_type={kind!r} is not supported; jspec has {', '.join(_SCALINGS)}")
    unknown = sorted(set(rope.values) - _ROPE_KEYS)
    if unknown:
        raise rope.error(f"fields {unknown} are unknown to jspec; it cannot tell what they change")
    for place in (fields, rope):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            value = place.values["partial_rotary_factor"]
            raise place.error(f"partial_rotary_factor={value} is not supported; jspec rotates all")
    theta = float(rope.number("rope_theta", fields.number("rope_theta", 10000.0)))
    if theta <= 1:
        raise fields.error(f"rope_theta={theta} must be above 1")
    try:
        return theta, _SCALINGS[kind](fields, rope)
    except CheckpointError:
        raise
    except ValueError as error:
        raise rope.error(str(error)) from None


def _default(fields: Fields, rope: Fields) -> None:
    return None


def _linear(fields: Fields, rope: Fields) -> RopeScaling:
    return RopeScaling("linear", float(rope.number("factor")))


def _original_context(fields: Fields, rope: Fields) -> int:
    key = "original_max_position_embeddings"
    whole = fields.integer("max_position_embeddings")
    return fields.integer(key, rope.integer(key, whole))


def _llama3(fields: Fields, rope: Fields) -> RopeScaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if not low < high:
        raise rope.error(f"high_freq_factor={high} must be above low_freq_factor={low}")
    return RopeScaling(
        "llama3",
        float(rope.number("factor")),
        original_context=_original_context(fields, rope),
        low_frequency_factor=float(low),
        high_frequency_factor=float(high),
    )


def _yarn(fields: Fields, rope: Fields) -> RopeScaling:
    original = _original_context(fields, rope)
    whole = fields.integer("max_position_embeddings")
    factor = float(rope.number("factor", whole / original))
    fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    if fast < slow:
        raise rope.error(f"beta_fast={fast} must be at least beta_slow={slow}")
    attention = rope.number("attention_factor", None)
    if attention is None and rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        scale, scale_all = rope.number("mscale"), rope.number("mscale_all_dim")
        growth = 0.1 * math.log(max(factor, 1.0))
        attention = (growth * scale + 1) / (growth * scale_all + 1)
    return RopeScaling(
        "yarn",
        factor,
        original_context=original,
        beta_fast=float(fast),
        beta_slow=float(slow),
        attention_factor=None if attention is None else float(attention),
        truncate=rope.boolean("truncate", True),
    )


_SCALINGS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
