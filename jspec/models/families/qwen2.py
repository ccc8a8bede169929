"""Qwen2 and Qwen2.5: queries, keys and values always have a bias; the tensor names are Llama's."""

from __future__ import annotations

from jspec.config import ModelConfig
from jspec.models.families.llama import MODULES
from jspec.models.families.shared.equal_layers import read_equal_layers
from jspec.models.families.shared.family import Family
from jspec.models.files import Fields


def read(fields: Fields) -> ModelConfig:
    # transformers fills it with the size of one certain model.
    fields.integer("num_key_value_heads")
    return read_equal_layers(fields, qkv_bias=True)


FAMILY = Family(read, MODULES)
