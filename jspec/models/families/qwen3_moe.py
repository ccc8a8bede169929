"""Qwen3-MoE: Qwen3's attention, and a mixture of experts in most or all layers."""

from __future__ import annotations

from jspec.config import ModelConfig
from jspec.models.families.qwen3 import MODULES
from jspec.models.families.shared.equal_layers import layer_count, read_equal_layers
from jspec.models.families.shared.family import Family, refuse_unknown
from jspec.models.families.shared.latent_layers import EXPERTS
from jspec.models.files import Fields
from jspec.parts import Experts


def read(fields: Fields) -> ModelConfig:
    # transformers fills it with the size of one certain model.
    fields.integer("num_key_value_heads")
    bias = fields.boolean("attention_bias", False)
    # transformers 5 writes it under the name that other families have.
    routed = fields.integer("num_experts", None) or fields.integer("num_local_experts")
    experts = Experts(
        routed=routed,
        chosen=fields.integer("num_experts_per_tok"),
        size=fields.integer("moe_intermediate_size"),
        dense_layers=_dense_layers(fields),
        normalized=fields.boolean("norm_topk_prob", False),
    )
    config = read_equal_layers(fields, qkv_bias=bias, out_bias=bias, qk_norm=True, experts=experts)
    refuse_unknown(fields)
    return config


def _dense_layers(fields: Fields) -> tuple[int, ...]:
    layers = layer_count(fields)
    step = fields.integer("decoder_sparse_step", 1)
    listed = fields.numbers("mlp_only_layers", layers)
    return tuple(n for n in range(layers) if n in listed or (n + 1) % step)


FAMILY = Family(read, {**MODULES, **EXPERTS})
