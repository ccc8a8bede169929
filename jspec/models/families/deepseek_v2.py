"""DeepSeek-V2 and V2-Lite: experts by softmax, in groups where the model is large."""

from __future__ import annotations

from typing import Any

from jspec.checks import shown
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
    refuse_other(fields, scoring_func="softmax")
    if fields.boolean("norm_topk_prob", False):
        raise fields.error("norm_topk_prob=true is not supported; DeepSeek-V2 has false")
    method, groups = fields.text("topk_method", "greedy"), {}
    if method == "group_limited_greedy":
        groups: dict[str, Any] = {
            "groups": fields.integer("n_group"),
            "chosen_groups": fields.integer("topk_group"),
        }
    elif method != "greedy":
        raise fields.error(
            f"topk_method={shown(method)} is not supported; jspec has greedy and "
            "group_limited_greedy"
        )
    return read_latent_layers(fields, read_experts(fields, **groups))


FAMILY = Family(read, MODULES)
