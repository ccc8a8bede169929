"""OLMo 3: OLMo 2 with a window in three layers of four, whose rope is not scaled."""

from __future__ import annotations

from jspec.config import ModelConfig
from jspec.models.families import olmo2
from jspec.models.families.shared.family import Family
from jspec.models.families.shared.layers import sliding_layers
from jspec.models.families.shared.rope_fields import read_layer_ropes
from jspec.models.files import Fields


def read(fields: Fields) -> ModelConfig:
    windows = sliding_layers(fields, lambda layer: (layer + 1) % 4 > 0)
    theta = fields.number("rope_theta", 5e5)
    return olmo2.read(
        fields,
        windows=windows,
        ropes=read_layer_ropes(fields, theta, theta),
        layer_ropes=tuple(map(int, windows)),
    )


FAMILY = Family(read, olmo2.MODULES)
