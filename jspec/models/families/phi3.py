"""Phi-3, Phi-3.5 and Phi-4: Llama with joined projections, and rotation of a part of a head."""

from __future__ import annotations

from jspec.config import ModelConfig
from jspec.models.families.llama import MODULES
from jspec.models.families.shared.family import Family
from jspec.models.families.shared.layers import head_size, read_layers, read_window
from jspec.models.families.shared.rope_fields import read_rope
from jspec.models.files import Fields


def read(fields: Fields) -> ModelConfig:
    fields.integer("original_max_position_embeddings", None)  # of LongRoPE alone
    size = head_size(fields, fields.integer("hidden_size"), fields.integer("num_attention_heads"))
    ropes = (read_rope(fields, size=size),)
    return read_layers(fields, ropes=ropes, **read_window(fields, None))


SPLIT = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
FAMILY = Family(read, MODULES, split=SPLIT)
