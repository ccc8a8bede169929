"""OLMo 2: norms after attention and feed-forward alone, and of all heads' queries and keys."""

from __future__ import annotations

from typing import Any

from jspec.config import ModelConfig
from jspec.models.families.llama import MODULES as LLAMA
from jspec.models.families.qwen3 import NORMS
from jspec.models.families.shared.family import Family
from jspec.models.families.shared.layers import read_layers
from jspec.models.files import Fields


def read(fields: Fields, **special: Any) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    return read_layers(
        fields,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        joint_qk_norm=True,
        pre_norms=False,
        post_norms=True,
        **special,
    )


MODULES = {
    **LLAMA,
    **NORMS,
    "attention.post_norm": "post_attention_layernorm",
    "mlp.post_norm": "post_feedforward_layernorm",
}
FAMILY = Family(read, MODULES)
