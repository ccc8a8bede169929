"""jspec's own checkpoints: arrays by orbax, settings as JSON next to them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import jax
import numpy as np

from jspec.checks import shown
from jspec.config import ModelConfig
from jspec.models.errors import CheckpointError, on_one_line
from jspec.models.files import Fields, read_json

SETTINGS = "jspec.json"
ARRAYS = "arrays"
FORMAT = 3  # 1 described all layers at once
JOINED = 3  # the first to store projections as the decoder has them; before, each was an array
LIST_LIMIT = 4096  # items of a list in a file: layers, ropes or stop tokens


def write(path: Path, config: ModelConfig, arrays: Mapping[str, jax.Array]) -> None:
    """Write a checkpoint of a model to ``path``, complete or not at all."""
    write_folder(path, arrays, SETTINGS, {"format": FORMAT, "config": dataclasses.asdict(config)})


def write_folder(path: Path, arrays: Mapping[str, Any], name: str, settings: Any) -> None:
    """Write a folder of arrays and settings, complete or not at all.

    Args:
        path: the folder, which must not exist.
        arrays: arrays by name, written by orbax.
        name: name of the file of settings.
        settings: a JSON value.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.mkdir()
        with _quiet(), _orbax().StandardCheckpointer() as checkpointer:
            checkpointer.save(partial.absolute() / ARRAYS, dict(arrays))
        _write_json(partial / name, settings)
        os.rename(partial, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_settings(path: Path, config: ModelConfig) -> None:
    """Write ``config`` into the directory ``path``, for `read_settings`."""
    _write_json(path / SETTINGS, {"format": FORMAT, "config": dataclasses.asdict(config)})


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def read_settings(path: Path) -> tuple[ModelConfig, int]:
    """The settings stored next to the arrays, and the format; `CheckpointError` where malformed."""
    source = str(path / SETTINGS)
    fields = Fields(read_json(path / SETTINGS), source)
    version = fields.values.get("format")
    if type(version) is not int or not 1 <= version <= FORMAT:
        raise fields.error(f"format={shown(version)} is unknown; jspec has 1 to {FORMAT}")
    _refuse_unknown(fields.values, {"format", "config"}, source)
    config, source = fields.values.get("config"), f"{source}: config"
    if version == 1:
        return _make(ModelConfig.uniform, _hints_of_format_1(), config, source), version
    return _make(ModelConfig, get_type_hints(ModelConfig), config, source), version


def _hints_of_format_1() -> dict[str, Any]:
    """Types of the fields of format 1, which are the arguments of `ModelConfig.uniform`."""
    hints = get_type_hints(ModelConfig) | get_type_hints(ModelConfig.uniform)
    return {n: h for n, h in hints.items() if n not in ("layers", "ropes", "settings", "return")}


def _make(make: Callable, hints: Mapping[str, Any], values: Any, source: str) -> Any:
    """Call ``make`` with the fields of the JSON object ``values``, of types ``hints``."""
    if not isinstance(values, dict):
        raise CheckpointError(f"{source}={shown(values)} must be an object")
    _refuse_unknown(values, hints, source)
    settings = {n: _setting(hints[n], value, f"{source}: {n}") for n, value in values.items()}
    try:
        return make(**settings)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: {on_one_line(error)}") from None


def _setting(hint: Any, value: Any, source: str) -> Any:
    """Convert a field to type ``hint``: lists to tuples, and objects to dataclasses.

    Other values are returned unchanged: the dataclass checks them.
    """
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    if get_origin(hint) is UnionType and len(kinds) == 1:
        return None if value is None else _setting(kinds[0], value, source)
    if get_origin(hint) is tuple and isinstance(value, list):
        if len(value) > LIST_LIMIT:
            raise CheckpointError(f"{source} has {len(value)} items, more than {LIST_LIMIT}")
        return tuple(_setting(kinds[0], x, f"{source}[{i}]") for i, x in enumerate(value))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _make(hint, get_type_hints(hint), value, source)
    return value


def _refuse_unknown(values: Mapping[str, Any], known: Collection[str], source: str) -> None:
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise CheckpointError(
            f"{source}: fields {shown(unknown)} are unknown; the file is of a newer jspec"
        )


def read_shapes(path: Path, num_layers: int) -> Mapping[str, tuple[int, ...]]:
    """Shapes of the stored arrays by name; `CheckpointError` unless of ``num_layers`` layers."""
    shapes = read_all_shapes(path)
    stored = {name.split(".")[1] for name in shapes if name.startswith("layers.")}
    if len(stored) != num_layers:
        raise CheckpointError(
            f"{path.absolute() / ARRAYS} has arrays of {len(stored)} layers, but {SETTINGS} asks "
            f"for {num_layers}"
        )
    return shapes


def read_all_shapes(path: Path) -> Mapping[str, tuple[int, ...]]:
    """Shapes of all stored arrays by name."""
    with _reading(path) as (directory, checkpointer):
        item = checkpointer.metadata(directory).item_metadata
        if item is None:
            raise CheckpointError(f"{directory} has no array metadata; save them again")
        return {name: tuple(value.shape) for name, value in item.tree.items()}


def check_shapes(
    path: Path,
    stored: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    settings: str = SETTINGS,
) -> None:
    """Compare the shapes of the stored arrays with those that the file ``settings`` asks for."""
    for name in sorted({*stored, *expected}):
        have, want = stored.get(name), expected.get(name)
        if have != want:
            raise CheckpointError(
                f"{path.absolute() / ARRAYS}: array {shown(name)} has shape "
                f"{have or 'none (it is missing)'}, but {settings} asks for "
                f"{want or 'no such array'}"
            )


def read_arrays(
    path: Path, templates: Mapping[str, jax.ShapeDtypeStruct]
) -> Mapping[str, jax.Array]:
    """All arrays of the checkpoint, each of its dtype and sharding in ``templates``."""
    with _reading(path) as (directory, checkpointer):
        return checkpointer.restore(directory, dict(templates))


def read_into(path: Path, name: str, out: np.ndarray, axes: Sequence[np.ndarray]) -> None:
    """Fill ``out`` with the array ``name``, which has as many elements, in the dtype of ``out``.

    ``axes`` is ignored: the whole array is read.
    """
    template = {name: jax.ShapeDtypeStruct(out.shape, out.dtype)}
    arguments = {name: _orbax().RestoreArgs(restore_type=np.ndarray, dtype=out.dtype)}
    with _reading(path, "PyTreeCheckpointer") as (directory, checkpointer):
        restored = checkpointer.restore(
            directory, item=template, restore_args=arguments, partial_restore=True
        )
        out[...] = restored[name].reshape(out.shape)


@contextlib.contextmanager
def _reading(path: Path, kind: str = "StandardCheckpointer") -> Iterator[tuple[Path, Any]]:
    directory = path.absolute() / ARRAYS
    try:
        with _quiet(), getattr(_orbax(), kind)() as checkpointer:
            yield directory, checkpointer
    except CheckpointError:
        raise
    except Exception as error:  # orbax has no one type for what it cannot read
        raise CheckpointError(f"{directory} cannot be read: {on_one_line(error)}") from error


def _orbax() -> Any:
    """The package orbax.checkpoint, which takes a second to import."""
    with _quiet():
        import orbax.checkpoint
    return orbax.checkpoint


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep orbax's log lines from the user: what goes wrong is raised.

    absl gives the root logger a handler with its first line, when orbax is imported or later, which
    would print other libraries' lines a second time; it is removed.
    """

    def nothing(record: logging.LogRecord) -> bool:
        return False

    logger, handlers = logging.getLogger("absl"), logging.root.handlers[:]
    logger.addFilter(nothing)
    try:
        yield
    finally:
        logger.removeFilter(nothing)
        logging.root.handlers[:] = handlers
