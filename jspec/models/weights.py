"""The tensors of a Hugging Face directory: their names, shapes, quantisation and dtype."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jspec.models.errors import CheckpointError, quoted
from jspec.models.families.family import Family
from jspec.models.files import (
    HEADER_LIMIT,
    TENSOR_LIMIT,
    Entry,
    Fields,
    TensorFile,
    read_json,
)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# File systems take names of 255 bytes.
_SHARD = re.compile(r"[\w.-]{1,240}\.safetensors", re.ASCII)
_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")
SHOWN = 4  # names listed in an error

_FLOATS = tuple(np.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16, np.float64))
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


def is_quantized(config: Mapping[str, Any], source: str) -> bool:
    """Whether a config.json says int8 weights, symmetric with one scale a channel.

    That is compressed-tensors' int-quantized format, whatever it does to activations: jspec
    computes with the dequantised weights. Raises `CheckpointError` for any other quantisation.
    """
    fields = Fields(config, source).object("quantization_config")
    if not fields.values:
        return False
    method, kind = fields.text("quant_method", "none"), fields.text("format", "none")
    if (method, kind) != ("compressed-tensors", "int-quantized"):
        raise fields.error(
            f"quant_method={quoted(method)} with format={quoted(kind)} is not supported; jspec "
            "reads compressed-tensors with int-quantized, and plain F32, F16 and BF16"
        )
    for key in ("kv_cache_scheme", "transform_config", "sparsity_config", "moe_sparsity_config"):
        values = fields.object(key).values
        if values and values.get("format") != "dense":
            raise fields.error(f"{key} is not supported; save the model without it")
    groups = fields.object("config_groups")
    for name in groups.values:
        kind = groups.object(name).text("format", kind)
        if kind != "int-quantized":
            raise groups.error(
                f"{quoted(name)} has format={quoted(kind)}; jspec reads int-quantized"
            )
        weights = groups.object(name).object("weights")
        found = {key: weights.values.get(key) for key in _INT8}
        if found != _INT8:
            raise weights.error(f"{quoted(found)} is not supported; jspec reads {_INT8}")
    return True


class Weights:
    """The tensors of ``directory``, found over all its shards by the names of ``family``."""

    def __init__(self, directory: Path, family: Family, *, quantized: bool):
        self.directory = directory
        self.family = family
        self.quantized = quantized
        self.files: dict[str, TensorFile] = {}
        for path in self._paths(directory):
            file = TensorFile(path)
            if len(self.files) + len(file.entries) > TENSOR_LIMIT:
                raise CheckpointError(f"{directory} has more than {TENSOR_LIMIT} tensors")
            for name in file.entries:
                if name in self.files:
                    raise CheckpointError(
                        f"{self.files[name].path} and {path} both have {quoted(name)}"
                    )
                self.files[name] = file

    def _paths(self, directory: Path) -> list[Path]:
        single, index = directory / SINGLE, directory / INDEX
        if single.is_file():
            return [single]
        if not index.is_file():
            raise CheckpointError(
                f"{directory} has neither {SINGLE} nor {INDEX}; jspec reads safetensors alone, "
                "never pickles: convert other files with transformers' save_pretrained"
            )
        weight_map = Fields(read_json(index, HEADER_LIMIT), str(index)).object("weight_map").values
        if not weight_map:
            raise CheckpointError(f"{index}: weight_map is missing or empty")
        for name, shard in weight_map.items():
            # A shard may be a link out of the directory, as in a hub cache, but is named within.
            if not (isinstance(shard, str) and _SHARD.fullmatch(shard)):
                raise CheckpointError(
                    f"{index}: {quoted(name)} is said to be in {quoted(shard)}, which is no file "
                    f"name in {directory}; shards are named as in {SINGLE}"
                )
        shards = {shard: name for name, shard in weight_map.items()}
        for shard, name in shards.items():
            if not (directory / shard).is_file():
                raise CheckpointError(
                    f"{directory / shard} is missing: {index} puts {quoted(name)} there"
                )
        return [directory / shard for shard in sorted(shards)]

    def entry(self, name: str) -> Entry:
        return self.files[name].entries[name]

    def check_layers(self, num_layers: int) -> None:
        """Compare the number of layers with the names of the tensors, before work on each.

        What a file of the family may hold of further layers is left out from here on.
        """
        if self.family.more_layers:
            self.files = {n: f for n, f in self.files.items() if _layer(n) < num_layers}
        stored = {layer for layer in map(_layer, self.files) if layer >= 0}
        if len(stored) != num_layers:
            raise CheckpointError(
                f"{self.directory} has tensors of {len(stored)} layers, but config.json asks for "
                f"num_hidden_layers={num_layers}; are they of one model?"
            )

    def check(self, wanted: Mapping[str, tuple[int, ...]], *, tied: bool) -> None:
        """Compare names and shapes with ``wanted``, parameters and their shapes in jspec."""
        stored = {self.family.stored_name(parameter): parameter for parameter in wanted}
        missing = [name for name in stored if name not in self.files]
        if missing:
            raise CheckpointError(
                f"{self.directory} lacks {_listed(missing)}, which config.json asks for with shape "
                f"{_stored_shape(stored[missing[0]], wanted[stored[missing[0]]])} of the first"
            )
        used = set(stored)
        for name, parameter in stored.items():
            self._check_tensor(name, _stored_shape(parameter, wanted[parameter]))
            if self.entry(name).dtype == np.int8:
                used.add(self._check_scale(name, parameter))
        extra = [name for name in self.files if name not in used and not _is_harmless(name)]
        head = self.family.stored_name("head.kernel")
        if tied and head in extra:
            extra.remove(head)
            self._check_tied(head, self.family.stored_name("embedding"))
        if extra:
            raise CheckpointError(
                f"{self.files[extra[0]].path} has {_listed(extra)} that config.json does not ask "
                f"for, the first with shape {self.entry(extra[0]).shape}; are they of one model?"
            )

    def _check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        entry, path = self.entry(name), self.files[name].path
        if entry.shape != shape:
            raise CheckpointError(
                f"{path}: tensor {quoted(name)} has shape {entry.shape}, but config.json asks for "
                f"{shape}; are they of one model?"
            )
        if entry.dtype not in (*_FLOATS, np.int8):
            raise CheckpointError(
                f"{path}: tensor {quoted(name)} has dtype {entry.dtype.name}, which is not "
                "supported; convert it to F32, F16 or BF16"
            )

    def _check_scale(self, name: str, parameter: str) -> str:
        scale, shape = f"{name}_scale", (self.entry(name).shape[0], 1)
        path = self.files[name].path
        if not self.quantized or not parameter.endswith(".kernel"):
            raise CheckpointError(
                f"{path}: tensor {quoted(name)} with shape {self.entry(name).shape} is int8, but "
                "config.json has no quantization_config that covers it"
            )
        if scale not in self.files:
            raise CheckpointError(
                f"{path}: tensor {quoted(name)} is int8, but {quoted(scale)} {shape} is missing"
            )
        self._check_tensor(scale, shape)
        if self.entry(scale).dtype not in _FLOATS:
            path = self.files[scale].path
            raise CheckpointError(f"{path}: tensor {quoted(scale)} must be of floats")
        return scale

    def _check_tied(self, head: str, embedding: str) -> None:
        if not self.files[head].same(head, self.files[embedding], embedding):
            raise CheckpointError(
                f"{self.files[head].path}: tensor {quoted(head)} {self.entry(head).shape} differs "
                f"from {quoted(embedding)} {self.entry(embedding).shape}, though config.json says "
                "tie_word_embeddings=true; set it to false to use both"
            )

    def read(self, parameter: str, out: np.ndarray) -> None:
        """Fill ``out``, in jspec's layout, with a block's worth of memory besides.

        ``out`` of a kernel is ``[in, out]``, or ``[in, rows, columns]`` with its outputs row by row
        where it is a part of a joined one.
        """
        name = self.family.stored_name(parameter)
        entry = self.entry(name)
        scale = self._scale(name) if entry.dtype == np.int8 else None
        target = np.moveaxis(out, 0, -1) if parameter.endswith(".kernel") else out
        target = target[None] if target.ndim == len(entry.shape) else target
        for rows, block in self.files[name].blocks(name):
            if scale is not None:
                block = block.astype(np.float32) * scale[rows]
            _write(target, rows.start, block)

    def _scale(self, name: str) -> np.ndarray:
        name = f"{name}_scale"
        scale = np.empty(self.entry(name).shape, np.float32)
        for rows, block in self.files[name].blocks(name):
            scale[rows] = block
        return scale


def _layer(name: str) -> int:
    """The number of the layer that a tensor is of; -1 for none."""
    match = _LAYER.match(name)
    return int(match[1]) if match else -1


def _stored_shape(parameter: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[::-1] if parameter.endswith(".kernel") else shape


def _write(target: np.ndarray, first: int, block: np.ndarray) -> None:
    """Put ``block`` into ``target [rows, columns, ...]``, row by row, from place ``first`` on."""
    columns = target.shape[1]
    while len(block):
        row, column = divmod(first, columns)
        run = block[: columns - column]
        target[row, column : column + len(run)] = run
        first, block = first + len(run), block[len(run) :]


def _is_harmless(name: str) -> bool:
    # Rotary frequencies follow from config.json; early Llama checkpoints stored them as well.
    return name.endswith("rotary_emb.inv_freq")


def _listed(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(map(quoted, names[:SHOWN])) + (f" and {more} more" if more > 0 else "")
