"""Qwen3-MoE: Qwen3's attention, and a mixture of experts in most or all layers."""

from __future__ import annotations

from jspec.config import ModelConfig
from jspec.models.families.qwen3 import MODULES
from jspec.models.families.shared.family import Family
from jspec.models.families.shared.latent_layers import EXPERTS
from jspec.models.families.shared.qwen import dense_layers, read_qwen
from jspec.models.files import Fields
from jspec.parts import Experts


def read(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    # transformers 5 writes it under the name that other families have.
    routed = fields.integer("num_experts", None) or fields.integer("num_local_experts")
    experts = Experts(
        routed=routed,
        chosen=fields.integer("num_experts_per_tok"),
        size=fields.integer("moe_intermediate_size"),
        dense_layers=dense_layers(fields),
        normalized=fields.boolean("norm_topk_prob", False),
    )
    # transformers has no such field here, and windows in all layers: it agrees where it is absent.
    return read_qwen(
        fields,
        first_window=0,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        experts=experts,
    )


FAMILY = Family(read, {**MODULES, **EXPERTS})
