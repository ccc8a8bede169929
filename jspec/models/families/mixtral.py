"""Mixtral: Mistral's attention, and a mixture of experts in every layer."""

from __future__ import annotations

from jspec.config import ModelConfig
from jspec.models.families.llama import MODULES
from jspec.models.families.shared.family import Family
from jspec.models.families.shared.layers import read_layers, read_window
from jspec.models.families.shared.rope_fields import read_rope
from jspec.models.files import Fields
from jspec.parts import Experts


def read(fields: Fields) -> ModelConfig:
    fields.integer("num_key_value_heads")  # transformers fills it with the size of one model
    experts = Experts(
        routed=fields.integer("num_local_experts"),
        chosen=fields.integer("num_experts_per_tok"),
        size=fields.integer("intermediate_size"),
        normalized=True,
    )
    ropes = (read_rope(fields, 1e6),)
    return read_layers(fields, ropes=ropes, experts=experts, **read_window(fields, None))


EXPERTS = {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.gate": "block_sparse_moe.experts.{}.w1",
    "mlp.experts.up": "block_sparse_moe.experts.{}.w3",
    "mlp.experts.down": "block_sparse_moe.experts.{}.w2",
}
FAMILY = Family(read, {**MODULES, **EXPERTS})
