"""Gemma 1: Llama with GeGLU, scaled embeddings and norms that scale by 1 + their parameter."""

from __future__ import annotations

import math

from jspec.config import ModelConfig
from jspec.models.families.llama import MODULES
from jspec.models.families.shared.family import Family
from jspec.models.families.shared.gemma_layers import check_causal_gelu
from jspec.models.families.shared.layers import read_layers
from jspec.models.files import Fields


def read(fields: Fields) -> ModelConfig:
    for key in ("num_key_value_heads", "head_dim"):
        fields.integer(key)  # transformers fills them with the sizes of one model
    if fields.get("hidden_act") == "gelu":  # the first files say so and mean the approximation
        values = {**fields.values, "hidden_act": None}
        fields = Fields(values, fields.source, fields.read)
    check_causal_gelu(fields)
    bias = fields.boolean("attention_bias", False)
    return read_layers(
        fields,
        activation="gelu_tanh",
        tied=True,
        qkv_bias=bias,
        out_bias=bias,
        centered_norms=True,
        embedding_scale=math.sqrt(fields.integer("hidden_size")),
    )


FAMILY = Family(read, MODULES)
