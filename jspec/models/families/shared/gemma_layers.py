"""Settings that Gemma 2 and 3 share: norms before and after, GeGLU, and soft caps."""

from __future__ import annotations

import math
from typing import Any

from jspec.config import ModelConfig
from jspec.models.families.llama import MODULES as LLAMA
from jspec.models.families.shared.layers import check_activation, read_layers
from jspec.models.files import Fields

MODULES = {
    **LLAMA,
    "attention.post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp.post_norm": "post_feedforward_layernorm",
}


def read_gemma(
    fields: Fields,
    *,
    softcap: float | None = None,
    logit_softcap: float | None = None,
    **special: Any,
) -> ModelConfig:
    """The fields that the families share; ``special`` are settings that one knows itself.

    ``softcap`` and ``logit_softcap`` are the defaults of a family.
    """
    check_causal_gelu(fields)
    bias = fields.boolean("attention_bias", False)
    return read_layers(
        fields,
        scale=float(fields.number("query_pre_attn_scalar", 256)) ** -0.5,
        softcap=_softcap(fields, "attn_logit_softcapping", softcap),
        tied=True,
        qkv_bias=bias,
        out_bias=bias,
        post_norms=True,
        centered_norms=True,
        activation="gelu_tanh",
        embedding_scale=math.sqrt(fields.integer("hidden_size")),
        logit_softcap=_softcap(fields, "final_logit_softcapping", logit_softcap),
        **special,
    )


def check_causal_gelu(fields: Fields) -> None:
    """Raise `CheckpointError` for another activation or bidirectional attention."""
    check_activation(fields, "hidden_activation", "gelu_tanh")
    if fields.boolean("use_bidirectional_attention", False):
        raise fields.error(
            "use_bidirectional_attention=true is not supported: jspec decodes causal models"
        )


def _softcap(fields: Fields, key: str, default: float | None) -> float | None:
    """A soft cap; null is none, whatever the default of the family."""
    if key in fields.values and not fields.has(key):
        return None
    value = fields.number(key, default)
    return None if value is None else float(value)
