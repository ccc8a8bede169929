"""Gemma 2: every other layer has a window; scores and logits are capped."""

from __future__ import annotations

from jspec.config import ModelConfig
from jspec.models.families.shared.family import Family
from jspec.models.families.shared.gemma_layers import MODULES, read_gemma
from jspec.models.families.shared.layers import sliding_layers
from jspec.models.files import Fields


def read(fields: Fields) -> ModelConfig:
    return read_gemma(
        fields,
        windows=sliding_layers(fields, lambda layer: layer % 2 == 0),
        softcap=50.0,
        logit_softcap=30.0,
    )


FAMILY = Family(read, MODULES)
