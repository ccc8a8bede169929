"""Qwen3 (dense): an RMSNorm on each head's query and key."""

from __future__ import annotations

from jspec.config import ModelConfig
from jspec.models.families.llama import MODULES as LLAMA
from jspec.models.families.shared.family import Family
from jspec.models.families.shared.qwen import read_qwen
from jspec.models.files import Fields


def read(fields: Fields) -> ModelConfig:
    fields.integer("head_dim")  # transformers fills it with the size of one certain model
    bias = fields.boolean("attention_bias", False)
    return read_qwen(fields, qkv_bias=bias, out_bias=bias, qk_norm=True)


NORMS = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
MODULES = {**LLAMA, **NORMS}
FAMILY = Family(read, MODULES)
