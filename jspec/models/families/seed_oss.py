"""Seed-OSS: Llama whose queries, keys and values have biases of their own setting."""

from __future__ import annotations

from jspec.config import ModelConfig
from jspec.models.families.llama import MODULES
from jspec.models.families.shared.family import Family
from jspec.models.families.shared.layers import read_layers
from jspec.models.files import Fields


def read(fields: Fields) -> ModelConfig:
    for key in ("num_key_value_heads", "head_dim"):
        fields.integer(key)  # transformers fills them with the sizes of one model
    return read_layers(
        fields,
        qkv_bias=fields.boolean("attention_bias", True),
        out_bias=fields.boolean("attention_out_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
    )


FAMILY = Family(read, MODULES)
