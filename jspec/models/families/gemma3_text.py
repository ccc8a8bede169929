"""Gemma 3 as a language model: one layer in six sees all, by a rope of its own."""

from __future__ import annotations

import dataclasses

from jspec.config import ModelConfig, Rope
from jspec.models.errors import quoted
from jspec.models.families.qwen3 import NORMS
from jspec.models.families.shared.family import Family
from jspec.models.families.shared.gemma_layers import MODULES as GEMMA
from jspec.models.families.shared.gemma_layers import read_gemma
from jspec.models.families.shared.layers import sliding_layers
from jspec.models.families.shared.rope_fields import read_rope, rope_of
from jspec.models.files import Fields

_THETA, _LOCAL_THETA = 1e6, 1e4


def read(fields: Fields) -> ModelConfig:
    every = fields.integer("sliding_window_pattern", 6)
    every = fields.integer("_sliding_window_pattern", every)
    windows = sliding_layers(fields, lambda layer: (layer + 1) % every > 0)
    config = read_gemma(
        fields,
        windows=windows,
        ropes=_ropes(fields),
        layer_ropes=tuple(map(int, windows)),
        qk_norm=True,
    )
    # The released files have the whole context here, and the factor that it was stretched by.
    context = fields.integer("max_position_embeddings")
    return dataclasses.replace(config, max_context=context)


def _ropes(fields: Fields) -> tuple[Rope, Rope]:
    """The rope of layers that see all, which alone is scaled, and that of those with a window."""
    local_theta = fields.number("rope_local_base_freq", _LOCAL_THETA)
    both = fields.object("rope_parameters")
    full, sliding = (both.object(key) for key in ("full_attention", "sliding_attention"))
    if not (full.values or sliding.values):
        return read_rope(fields, _THETA), Rope(float(local_theta))
    if other := sorted(set(both.values) - both.read):
        raise both.error(f"fields {quoted(other)} are unknown; jspec reads those of layer types")
    theta = fields.number("rope_theta", _THETA)
    return rope_of(fields, full, theta), rope_of(fields, sliding, local_theta)


MODULES = {**GEMMA, **NORMS}
FAMILY = Family(read, MODULES)
