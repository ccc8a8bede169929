"""gpt-oss: attention sinks, windows in every other layer, and experts that are packed."""

from __future__ import annotations

from jspec.config import ModelConfig
from jspec.models.families.llama import MODULES
from jspec.models.families.shared.family import Family
from jspec.models.families.shared.layers import read_layers, sliding_layers
from jspec.models.families.shared.rope_fields import read_rope
from jspec.models.files import Fields
from jspec.parts import ClampedSwiGLU, Experts


def read(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", True)
    chosen = fields.integer("num_experts_per_tok")
    _refuse_other(fields, "experts_per_token", chosen)
    experts = Experts(
        routed=fields.integer("num_local_experts"),
        chosen=chosen,
        size=fields.integer("intermediate_size"),
        normalized=True,  # a softmax over the chosen ones
        bias=True,
        clamped=ClampedSwiGLU(
            float(fields.number("swiglu_limit", 7.0)), float(fields.number("swiglu_alpha", 1.702))
        ),
    )
    rope = read_rope(fields)
    if rope.scaling is not None:
        _refuse_other(fields, "initial_context_length", rope.scaling.original_context)
    return read_layers(
        fields,
        windows=sliding_layers(fields, lambda layer: layer % 2 == 0),
        ropes=(rope,),
        qkv_bias=bias,
        out_bias=bias,
        sinks=True,
        experts=experts,
    )


def _refuse_other(fields: Fields, key: str, expected: int) -> None:
    """Raise `CheckpointError` where a field repeats another one and differs."""
    value = fields.integer(key, expected)
    if value != expected:
        raise fields.error(f"{key}={value} disagrees with {expected}, which other fields say")


EXPERTS = {
    "mlp.router": "mlp.router",
    "mlp.experts.gate_up.kernel": "mlp.experts.gate_up_proj",
    "mlp.experts.gate_up.bias": "mlp.experts.gate_up_proj_bias",
    "mlp.experts.down.kernel": "mlp.experts.down_proj",
    "mlp.experts.down.bias": "mlp.experts.down_proj_bias",
}
SINKS = {"attention.sinks": "self_attn.sinks"}
FAMILY = Family(read, {**MODULES, **SINKS, **EXPERTS}, packed=True)
