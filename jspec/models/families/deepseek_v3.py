"""DeepSeek-V3 and R1: experts by sigmoid, chosen with a correction, within the best groups."""

from __future__ import annotations

from jspec.config import ModelConfig
from jspec.models.families.shared.family import Family
from jspec.models.families.shared.latent_layers import (
    MODULES,
    read_experts,
    read_latent_layers,
    refuse_other,
)
from jspec.models.files import Fields


def read(fields: Fields) -> ModelConfig:
    refuse_other(fields, scoring_func="sigmoid", topk_method="noaux_tc")
    experts = read_experts(
        fields,
        score="sigmoid",
        groups=fields.integer("n_group"),
        chosen_groups=fields.integer("topk_group"),
        group_score="two_highest",
        corrected=True,
        normalized=fields.boolean("norm_topk_prob", True),
    )
    return read_latent_layers(fields, experts)


CORRECTION = {"mlp.router.correction": "mlp.gate.e_score_correction_bias"}
# The layers that predict a further token come after the others.
FAMILY = Family(read, {**MODULES, **CORRECTION}, more_layers=True)
