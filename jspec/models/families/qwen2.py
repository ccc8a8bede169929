"""Qwen2 and Qwen2.5: queries, keys and values always have a bias; the tensor names are Llama's."""

from __future__ import annotations

from jspec.config import ModelConfig
from jspec.models.families.llama import MODULES
from jspec.models.families.shared.family import Family
from jspec.models.families.shared.qwen import read_qwen
from jspec.models.files import Fields


def read(fields: Fields) -> ModelConfig:
    fields.ignore("attention_bias")  # whatever it says, as in transformers
    return read_qwen(fields, qkv_bias=True)


FAMILY = Family(read, MODULES)
