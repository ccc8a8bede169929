"""Settings that Gemma 2 and 3 share: norms before and after, GeGLU, and soft caps."""

from __future__ import annotations

import math
from typing import Any

from jspec.config import ModelConfig
from jspec.models.errors import quoted
from jspec.models.families.llama import MODULES as LLAMA
from jspec.models.families.shared.family import refuse_unknown
from jspec.models.families.shared.window_layers import read_window_layers
from jspec.models.files import Fields

_ACTIVATION = "gelu_pytorch_tanh"
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
    for key in ("hidden_activation", "hidden_act"):
        activation = fields.text(key, _ACTIVATION)
        if activation != _ACTIVATION:
            raise fields.error(
                f"{key}={quoted(activation)} is not supported; jspec has {_ACTIVATION}"
            )
    if fields.boolean("use_bidirectional_attention", False):
        raise fields.error(
            "use_bidirectional_attention=true is not supported: jspec decodes causal models"
        )
    bias = fields.boolean("attention_bias", False)
    config = read_window_layers(
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
    refuse_unknown(fields)
    return config


def _softcap(fields: Fields, key: str, default: float | None) -> float | None:
    """A soft cap; null is none, whatever the default of the family."""
    if key in fields.values and not fields.has(key):
        return None
    value = fields.number(key, default)
    return None if value is None else float(value)
