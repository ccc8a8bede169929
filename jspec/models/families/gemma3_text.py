"""Gemma 3 as a language model: one layer in six sees all, by a rope of its own."""

from __future__ import annotations

import dataclasses

from jspec.config import ModelConfig
from jspec.models.families.qwen3 import NORMS
from jspec.models.families.shared.family import Family
from jspec.models.families.shared.gemma_layers import MODULES as GEMMA
from jspec.models.families.shared.gemma_layers import read_gemma
from jspec.models.families.shared.layers import sliding_layers
from jspec.models.families.shared.rope_fields import read_layer_ropes
from jspec.models.files import Fields


def read(fields: Fields) -> ModelConfig:
    every = fields.integer("sliding_window_pattern", 6)
    every = fields.integer("_sliding_window_pattern", every)
    windows = sliding_layers(fields, lambda layer: (layer + 1) % every > 0)
    config = read_gemma(
        fields,
        windows=windows,
        ropes=read_layer_ropes(fields, 1e6, fields.number("rope_local_base_freq", 1e4)),
        layer_ropes=tuple(map(int, windows)),
        qk_norm=True,
    )
    # The released files have the whole context here, and the factor that it was stretched by.
    context = fields.integer("max_position_embeddings")
    return dataclasses.replace(config, max_context=context)


MODULES = {**GEMMA, **NORMS}
FAMILY = Family(read, MODULES)
