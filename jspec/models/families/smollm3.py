"""SmolLM3: Llama without rotation in one layer of four."""

from __future__ import annotations

from jspec.checks import shown
from jspec.config import ModelConfig
from jspec.models.families.llama import MODULES
from jspec.models.families.shared.family import Family
from jspec.models.families.shared.layers import layer_count, read_layers, sliding_layers
from jspec.models.families.shared.rope_fields import read_rope
from jspec.models.files import Fields
from jspec.parts import Rope


def read(fields: Fields) -> ModelConfig:
    fields.integer("num_key_value_heads")  # transformers fills it with the size of one model
    rotates = _rotated_layers(fields)
    used = fields.boolean("use_sliding_window", False) and fields.has("sliding_window")
    windows = sliding_layers(fields, lambda layer: used and not rotates[layer])
    bias = fields.boolean("attention_bias", False)
    return read_layers(
        fields,
        windows=[used and window for window in windows],
        ropes=(read_rope(fields, 2e6), Rope(rotated=0)),
        layer_ropes=[0 if rotated else 1 for rotated in rotates],
        tied=True,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
    )


def _rotated_layers(fields: Fields) -> list[bool]:
    """Whether each layer rotates queries and keys; no_rope_layers has 1 for those that do."""
    count, every = layer_count(fields), fields.integer("no_rope_layer_interval", 4)
    listed = fields.get("no_rope_layers")
    if listed is None:
        return [(layer + 1) % every != 0 for layer in range(count)]
    known = isinstance(listed, list) and all(type(x) is int and x in (0, 1) for x in listed)
    if not known or len(listed) < count:
        raise fields.error(
            f"no_rope_layers={shown(listed)} must be 0 or 1 for each of {count} layers"
        )
    return [x == 1 for x in listed[:count]]


FAMILY = Family(read, MODULES)
