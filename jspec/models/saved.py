"""jspec's own checkpoints: the arrays by orbax, the settings as JSON beside them."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jspec.config import ModelConfig, RopeScaling
from jspec.models.errors import CheckpointError
from jspec.models.families import LAYER_LIMIT
from jspec.models.files import Fields, read_json

SETTINGS = "jspec.json"
ARRAYS = "arrays"
FORMAT = 1


def write(path: Path, config: ModelConfig, arrays: Mapping[str, jax.Array]) -> None:
    """Write a checkpoint that appears at ``path`` whole or not at all."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.mkdir()
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(partial.absolute() / ARRAYS, dict(arrays))
        settings = {"format": FORMAT, "config": dataclasses.asdict(config)}
        (partial / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
        os.rename(partial, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_config(path: Path) -> ModelConfig:
    """The settings beside the arrays; `CheckpointError` where they are malformed."""
    source = str(path / SETTINGS)
    fields = Fields(read_json(path / SETTINGS), source)
    if fields.values.get("format") != FORMAT:
        raise fields.error(f"format={fields.values.get('format')!r} is unknown; jspec has {FORMAT}")
    config = fields.object("config")
    scaling = config.object("rope_scaling")
    values: dict[str, Any] = _typed(ModelConfig, config)
    if values.get("num_layers", 0) > LAYER_LIMIT:
        raise config.error(f"num_layers={values['num_layers']} must be at most {LAYER_LIMIT}")
    try:
        if scaling.values:
            values["rope_scaling"] = RopeScaling(**_typed(RopeScaling, scaling))
        return ModelConfig(**values)
    except CheckpointError:
        raise
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: {error}") from None


def _typed(kind: type, fields: Fields) -> dict[str, Any]:
    """The fields of dataclass ``kind``, each checked against its annotation."""
    known = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    unknown = sorted(set(fields.values) - set(known))
    if unknown:
        raise fields.error(f"fields {unknown} are unknown; the file is of a newer jspec")
    readers = {
        "int": fields.integer,
        "float": fields.number,
        "float | None": fields.number,
        "bool": fields.boolean,
        "str": fields.text,
    }
    values: dict[str, Any] = {
        name: readers[known[name]](name)
        for name, value in fields.values.items()
        if known[name] in readers and value is not None and value != defaults[name]
    }
    if "kind" in known:
        values["kind"] = fields.text("kind")
    if "stop_tokens" in known:
        values["stop_tokens"] = fields.tokens("stop_tokens", fields.integer("vocab_size"))
    return values


def read_arrays(path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Mapping[str, jax.Array]:
    """The arrays named in ``wanted``, each of its shape, dtype and sharding."""
    directory = path.absolute() / ARRAYS
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            item = checkpointer.metadata(directory).item_metadata
            if item is None:
                raise CheckpointError(f"{directory} has no array metadata; save the model again")
            _check(directory, {k: tuple(v.shape) for k, v in item.tree.items()}, wanted)
            return checkpointer.restore(directory, dict(wanted))
    except CheckpointError:
        raise
    except Exception as error:  # orbax has no one type for what it cannot read
        raise CheckpointError(f"{directory} cannot be read: {error}") from error


def _check(
    directory: Path,
    stored: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, jax.ShapeDtypeStruct],
) -> None:
    for name in sorted({*stored, *wanted}):
        have, want = stored.get(name), wanted.get(name)
        if want is None or have != want.shape:
            raise CheckpointError(
                f"{directory}: array {name} has shape {have or 'none (it is missing)'}, but "
                f"{SETTINGS} asks for {'no such array' if want is None else want.shape}"
            )
