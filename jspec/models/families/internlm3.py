"""InternLM3: Llama with the setting of its biases under other names."""

from __future__ import annotations

from jspec.config import ModelConfig
from jspec.models.families.llama import MODULES
from jspec.models.families.shared.family import Family
from jspec.models.families.shared.layers import read_layers
from jspec.models.files import Fields


def read(fields: Fields) -> ModelConfig:
    for key in ("num_key_value_heads", "head_dim"):
        fields.integer(key)  # transformers fills them with the sizes of one model
    # transformers writes Llama's names.
    qkv_bias = fields.boolean("qkv_bias", fields.boolean("attention_bias", False))
    bias = fields.boolean("bias", fields.boolean("mlp_bias", False))
    return read_layers(fields, qkv_bias=qkv_bias, out_bias=bias, mlp_bias=bias)


FAMILY = Family(read, MODULES)
