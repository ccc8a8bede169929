"""Granite 3: Llama with factors on embeddings, scores, residuals and logits."""

from __future__ import annotations

from jspec.config import ModelConfig
from jspec.models.families.llama import MODULES
from jspec.models.families.shared.family import Family
from jspec.models.families.shared.layers import read_layers
from jspec.models.files import Fields


def read(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    embedding, residual = (
        float(fields.number(f"{name}_multiplier", 1.0)) for name in ("embedding", "residual")
    )
    return read_layers(
        fields,
        scale=float(fields.number("attention_multiplier", 1.0)),
        embedding_scale=None if embedding == 1 else embedding,
        residual_scale=None if residual == 1 else residual,
        logit_scale=1 / fields.number("logits_scaling", 1.0),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
    )


FAMILY = Family(read, MODULES)
