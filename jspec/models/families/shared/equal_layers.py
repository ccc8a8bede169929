"""Settings of a model whose layers are all alike, in the fields that Llama and Qwen share."""

from __future__ import annotations

from typing import Any

from jspec.config import LAYER_LIMIT, ModelConfig, RopeScaling
from jspec.models.errors import quoted
from jspec.models.families.shared.rope_fields import read_rope
from jspec.models.files import INTEGER_LIMIT, Fields

_FULL = "full_attention"


def read_equal_layers(fields: Fields, **special: Any) -> ModelConfig:
    """The fields shared by families; ``special`` are settings that the family knows itself."""
    refuse_variants(fields)
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    vocab = fields.integer("vocab_size")
    rope = read_rope(fields)
    return ModelConfig.uniform(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=layer_count(fields),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_size=head_size(fields, hidden, heads),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        norm_eps=float(fields.number("rms_norm_eps")),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        max_context=max_context(fields, rope.scaling),
        stop_tokens=fields.tokens("eos_token_id", vocab),
        **special,
    )


def refuse_variants(fields: Fields) -> None:
    """Raise `CheckpointError` for another activation, and for layers with windows."""
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.error(f"hidden_act={quoted(activation)} is not supported; jspec has silu")
    kinds = fields.get("layer_types")
    if kinds is not None:
        other = kinds if not isinstance(kinds, list) else [k for k in kinds if k != _FULL]
        if other or not isinstance(kinds, list):
            raise fields.error(
                f"layer_types has {quoted(other)}, but jspec has {_FULL} alone; use a model "
                "without sliding windows"
            )
    used = fields.boolean("use_sliding_window", False)
    window, first = fields.get("sliding_window"), fields.get("max_window_layers")
    whole = window is None or (type(first) is int and first >= layer_count(fields))
    if kinds is None and used and not whole:
        raise fields.error(
            f"use_sliding_window=true with sliding_window={quoted(window)} and "
            f"max_window_layers={quoted(first)}: jspec attends to the whole context; set "
            "use_sliding_window to false if the model was trained that way"
        )


def layer_count(fields: Fields) -> int:
    """The number of layers, within the limit of a sound file."""
    layers = fields.integer("num_hidden_layers")
    if layers > LAYER_LIMIT:
        raise fields.error(f"num_hidden_layers={layers} must be at most {LAYER_LIMIT}")
    return layers


def head_size(fields: Fields, hidden: int, heads: int) -> int:
    if fields.has("head_dim"):
        return fields.integer("head_dim")
    if hidden % heads:
        raise fields.error(
            f"hidden_size={hidden} is no multiple of num_attention_heads={heads}; give head_dim"
        )
    return hidden // heads


def max_context(fields: Fields, scaling: RopeScaling | None) -> int:
    """The most tokens of a row."""
    # Qwen's advice for long inputs adds YaRN and leaves max_position_embeddings as it was.
    context = fields.integer("max_position_embeddings")
    if scaling is None or scaling.kind != "yarn":
        return context
    stretched = int(scaling.factor * scaling.original_context)
    if stretched > INTEGER_LIMIT:
        raise fields.error(
            f"a rope of factor={scaling.factor:g} over {scaling.original_context} tokens gives a "
            f"context of {stretched} tokens; it must be at most {INTEGER_LIMIT}"
        )
    return max(context, stretched)
