"""ERNIE 4.5 (dense): Llama with rotation of neighbouring channels."""

from __future__ import annotations

from jspec.config import ModelConfig
from jspec.models.families.llama import MODULES
from jspec.models.families.shared.family import Family
from jspec.models.families.shared.layers import read_layers
from jspec.models.families.shared.rope_fields import read_rope
from jspec.models.files import Fields


def read(fields: Fields) -> ModelConfig:
    for key in ("num_key_value_heads", "head_dim"):
        fields.integer(key)  # transformers fills them with the sizes of one model
    bias = fields.boolean("use_bias", False)
    return read_layers(
        fields,
        ropes=(read_rope(fields, 5e5),),
        tied=True,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
    )


FAMILY = Family(read, MODULES, interleaved=True)
