"""Agreement between processes that decode together with one model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jspec.config import SamplingParams
from jspec.decode.checks import one_each
from jspec.decode.on_mesh import mesh_model
from jspec.decode.state import Models
from jspec.processes import check_same, digest, from_first, in_time, versions
from jspec.typing import Model


def is_shared(model: Model) -> bool:
    """Whether ``model`` is on devices of several processes."""
    on_mesh = mesh_model(model)
    return on_mesh is not None and on_mesh.processes > 1


def agreed(value: Any) -> Any:
    """The ``value`` of process 0, on all processes that share a model."""
    with in_time():
        return from_first(value)


def rows_of(
    models: Models,
    prompts: Sequence[np.ndarray],
    params: SamplingParams | Sequence[SamplingParams],
    settings: Any,
) -> tuple[SamplingParams, ...]:
    """`one_each`, with the same seeds on all processes that share the model.

    ``settings``: what else they decode with. Raises `ValueError` on all of them where they made
    different calls.
    """
    rows = one_each(params, len(prompts))
    if not is_shared(models.target):
        return rows
    check_same(
        {
            **versions(),
            "models": digest([model and model.config for model in (models.target, models.draft)]),
            "prompts": digest([prompt.tolist() for prompt in prompts]),
            "sampling params": digest(params),
            "settings": digest(settings),
        }
    )
    seeds = from_first([row.seed for row in rows])
    return tuple(dataclasses.replace(row, seed=s) for row, s in zip(rows, seeds, strict=True))
