"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, and experts next to a shared one with a gate."""

from __future__ import annotations

from jspec.config import ModelConfig
from jspec.models.families.llama import MODULES
from jspec.models.families.shared.family import Family
from jspec.models.families.shared.latent_layers import EXPERTS
from jspec.models.families.shared.qwen import dense_layers, read_qwen
from jspec.models.files import Fields
from jspec.parts import Experts


def read(fields: Fields) -> ModelConfig:
    experts = Experts(
        routed=fields.integer("num_experts"),
        chosen=fields.integer("num_experts_per_tok"),
        size=fields.integer("moe_intermediate_size"),
        shared_size=fields.integer("shared_expert_intermediate_size"),
        shared_gated=True,
        dense_layers=dense_layers(fields),
        normalized=fields.boolean("norm_topk_prob", False),
    )
    return read_qwen(
        fields,
        has_window=lambda layer, limit: layer % 2 == 0 and layer < limit,
        qkv_bias=fields.boolean("qkv_bias", True),
        experts=experts,
    )


SHARED = {
    "mlp.shared.gate": "mlp.shared_expert.gate_proj",
    "mlp.shared.up": "mlp.shared_expert.up_proj",
    "mlp.shared.down": "mlp.shared_expert.down_proj",
    "mlp.shared_gate": "mlp.shared_expert_gate",
}
FAMILY = Family(read, {**MODULES, **EXPERTS, **SHARED})
