"""Families of Hugging Face checkpoints: one file each, with its settings and its tensor names.

A file is named as the model_type that it reads, and holds a `Family` called FAMILY.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from jspec.checks import shown
from jspec.config import ModelConfig
from jspec.models.errors import CheckpointError
from jspec.models.families.shared.family import Family, refuse_unknown
from jspec.models.files import Fields

FAMILIES = tuple(file.name for file in pkgutil.iter_modules(__path__) if not file.ispkg)


def family(name: str) -> Family:
    """The family called ``name`` in `FAMILIES`."""
    return import_module(f"{__name__}.{name}").FAMILY


def model_config(values: Mapping[str, Any], *, source: str = "config.json") -> ModelConfig:
    """The settings of ``values``, the object in a config.json; ``source`` names it in errors.

    Defaults are those of transformers, save for sizes, which must be there. Raises
    `CheckpointError` for what is missing, of a wrong type, asks for what jspec does not have, or is
    unknown and may change a token.
    """
    fields = Fields(values, source)
    name = fields.text("model_type")
    if name not in FAMILIES:
        raise fields.error(f"model_type={shown(name)} is unknown; jspec has {', '.join(FAMILIES)}")
    try:
        config = dataclasses.replace(family(name).read(fields), family=name)
    except CheckpointError:
        raise
    except ValueError as error:
        raise fields.error(str(error)) from None
    refuse_unknown(fields)
    return config
