"""Mistral: Llama with a window in all layers or in none."""

from __future__ import annotations

from jspec.config import ModelConfig
from jspec.models.families.llama import MODULES
from jspec.models.families.shared.family import Family
from jspec.models.families.shared.layers import read_layers, read_window
from jspec.models.files import Fields


def read(fields: Fields) -> ModelConfig:
    fields.integer("num_key_value_heads")  # transformers fills it with the size of one model
    return read_layers(fields, **read_window(fields, 4096))


FAMILY = Family(read, MODULES)
