"""The tensors of a Hugging Face directory: their names, shapes, quantisation and dtype."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jspec.checks import shown
from jspec.config import ModelConfig
from jspec.models import packed
from jspec.models.block_scales import DTYPE, SUFFIX, BlockScales, read_block_scales
from jspec.models.errors import CheckpointError
from jspec.models.families.shared.family import Family
from jspec.models.files import Fields, read_json
from jspec.models.rope import channel_order
from jspec.models.safetensors_file import StoredTensor, stored_tensors
from jspec.ops.quantized import BLOCK, MXFP4

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
INDEX_LIMIT = 16 << 20  # bytes
# File systems take names of 255 bytes.
_SHARD = re.compile(r"[\w.-]{1,240}\.safetensors", re.ASCII)
_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")
SHOWN = 4  # names listed in an error

_FLOATS = tuple(np.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16, np.float64))
_QUANTIZED = (np.dtype(np.int8), DTYPE)
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


Quantization = Literal["int8", "mxfp4"] | BlockScales


def quantization_of(config: Mapping[str, Any], source: str) -> Quantization | None:
    """The quantisation of weights by a config.json; all but MXFP4 are dequantised on loading.

    ``int8``: symmetric with one scale a channel, compressed-tensors' int-quantized format, whatever
    it does to activations. ``mxfp4``: that of gpt-oss's experts. `BlockScales`: FP8 as in
    DeepSeek-V3. Raises `CheckpointError` for any other quantisation.
    """
    fields = Fields(config, source).object("quantization_config")
    if not fields.values:
        return None
    method, kind = fields.text("quant_method", "none"), fields.text("format", "none")
    if method == "mxfp4":
        return "mxfp4"
    if method == "fp8":
        return read_block_scales(fields)
    if (method, kind) != ("compressed-tensors", "int-quantized"):
        raise fields.error(
            f"quant_method={shown(method)} with format={shown(kind)} is not supported; jspec "
            "reads compressed-tensors with int-quantized, fp8, mxfp4, and plain F32, F16 and BF16"
        )
    for key in ("kv_cache_scheme", "transform_config", "sparsity_config", "moe_sparsity_config"):
        values = fields.object(key).values
        if values and values.get("format") != "dense":
            raise fields.error(f"{key} is not supported; save the model without it")
    groups = fields.object("config_groups")
    for name in groups.values:
        kind = groups.object(name).text("format", kind)
        if kind != "int-quantized":
            raise groups.error(f"{shown(name)} has format={shown(kind)}; jspec reads int-quantized")
        weights = groups.object(name).object("weights")
        values = {key: weights.values.get(key) for key in _INT8}
        if values != _INT8:
            raise weights.error(f"{shown(values)} is not supported; jspec reads {_INT8}")
    return "int8"


class Weights:
    """The tensors of a model directory, over all its shards, by the names of ``family``.

    Args:
        directory: the model directory.
        family: names of tensors and their parameters.
        config: settings of the model.
        quantization: how weights are stored, as `quantization_of` says.

    Raises:
        CheckpointError: files are missing or malformed, or a tensor is stored twice.
    """

    def __init__(
        self,
        directory: Path,
        family: Family,
        config: ModelConfig,
        *,
        quantization: Quantization | None,
    ):
        self.directory = directory
        self.family = family
        self.config = config
        self.quantization = quantization
        self.tensors: dict[str, StoredTensor] = {}
        for path in self._paths(directory):
            for tensor in stored_tensors(path):
                name = family.tensor_name(tensor.name)
                if name in self.tensors:
                    other = self.tensors[name]
                    raise tensor.error(
                        f"is {shown(other.name)} of {other.path} a second time; remove one"
                    )
                if name is not None:
                    self.tensors[name] = tensor

    def _paths(self, directory: Path) -> list[Path]:
        single, index = directory / SINGLE, directory / INDEX
        if single.is_file():
            return [single]
        if not index.is_file():
            raise CheckpointError(
                f"{directory} has neither {SINGLE} nor {INDEX}; jspec reads safetensors alone, "
                "never pickles: convert other files with transformers' save_pretrained"
            )
        weight_map = Fields(read_json(index, INDEX_LIMIT), str(index)).object("weight_map").values
        if not weight_map:
            raise CheckpointError(f"{index}: weight_map is missing or empty")
        for name, shard in weight_map.items():
            # A shard may be a link out of the directory, as in a hub cache, but is named within.
            if not (isinstance(shard, str) and _SHARD.fullmatch(shard)):
                raise CheckpointError(
                    f"{index}: {shown(name)} is said to be in {shown(shard)}, which is no file "
                    f"name in {directory}; shards are named as in {SINGLE}"
                )
        shards = {shard: name for name, shard in weight_map.items()}
        for shard, name in shards.items():
            if not (directory / shard).is_file():
                raise CheckpointError(
                    f"{directory / shard} is missing: {index} puts {shown(name)} there"
                )
        return [directory / shard for shard in sorted(shards)]

    def check_counts(self) -> None:
        """Compare the numbers of layers and experts with the tensors, before work on each.

        Further layers that files of the family may hold are ignored after this call.
        """
        num_layers, experts = self.config.num_layers, self.config.experts
        if self.family.more_layers:
            self.tensors = {n: t for n, t in self.tensors.items() if _layer(n) < num_layers}
        stored = {layer for layer in map(_layer, self.tensors) if layer >= 0}
        if len(stored) != num_layers:
            raise CheckpointError(
                f"{self.directory} has tensors of {len(stored)} layers, but config.json asks for "
                f"num_hidden_layers={num_layers}; are they of one model?"
            )
        if experts is not None and not self.family.packed:
            sparse = num_layers - len({n for n in experts.dense_layers if n < num_layers})
            if experts.routed * sparse > len(self.tensors):
                raise CheckpointError(
                    f"{self.directory} has {len(self.tensors)} tensors, too few for the "
                    f"{experts.routed} experts in {sparse} layers that config.json asks for"
                )

    def check(self, expected: Mapping[str, tuple[int, ...]], *, tied: bool) -> None:
        """Compare names and shapes with ``expected``, parameters and their shapes in jspec."""
        shapes = {p: self._stored(p, shape) for p, shape in expected.items()}
        stored = {
            name: (p, shape)
            for p, stored_shapes in shapes.items()
            for name, shape in stored_shapes.items()
        }
        for joined, parts in self.family.split.items():
            self._split(joined, parts, {name: shape for name, (_, shape) in stored.items()})
        missing = [name for name in stored if name not in self.tensors]
        if missing:
            raise CheckpointError(
                f"{self.directory} lacks {listed(missing)}, which config.json asks for with shape "
                f"{stored[missing[0]][1]} of the first"
            )
        used = set(stored)
        for name, (parameter, shape) in stored.items():
            self._check_tensor(name, shape, bytes_of_mxfp4=len(shapes[parameter]) > 1)
            if self.tensors[name].dtype in _QUANTIZED:
                used.add(self._check_scale(name, parameter))
        extra = [name for name in self.tensors if name not in used and not _is_harmless(name)]
        head = self.family.stored_name("head.kernel")
        if tied and head in extra:
            extra.remove(head)
            self._check_tied(head, self.family.stored_name("embedding"))
        if extra:
            first = self.tensors[extra[0]]
            raise CheckpointError(
                f"{first.path} has {listed(extra)} that config.json does not ask for, the first "
                f"with shape {shown(first.shape)}; are they of one model?"
            )

    def _split(
        self, joined: str, parts: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Replace each tensor of the module ``joined`` by those of ``parts``, rows of it."""
        for name in [name for name in self.tensors if f".{joined}." in name]:
            tensor, names = self.tensors[name], [name.replace(joined, part) for part in parts]
            sizes = [shapes[part][0] for part in names if part in shapes]
            if len(sizes) != len(parts):
                continue
            if tensor.shape[:1] != (sum(sizes),):
                raise tensor.error(
                    f"has shape {shown(tensor.shape)}, but config.json asks for {sum(sizes)} "
                    f"rows, {sizes} of {', '.join(parts)}"
                )
            del self.tensors[name]
            row, first = tensor.nbytes // sum(sizes), 0
            for part, size in zip(names, sizes, strict=True):
                shape, start = (size, *tensor.shape[1:]), tensor.start + first * row
                self.tensors[part] = dataclasses.replace(tensor, shape=shape, start=start)
                first += size

    def _stored(self, parameter: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The shapes, by name, of the tensors that a parameter of ``shape`` is made of."""
        name = self.family.stored_name(parameter)
        if not packed.is_packed(parameter):
            return {name: stored_shape(parameter, shape)}
        plain = packed.stored_shape(parameter, shape)
        if self.in_mxfp4(parameter):
            if plain[1] % BLOCK:
                raise CheckpointError(
                    f"{self.directory}: config.json asks for {shown(name)} {plain} in MXFP4, "
                    f"whose {plain[1]} inputs are no multiple of {BLOCK}"
                )
            return packed.mxfp4_shapes(name, plain)
        return {name: plain}

    def _check_tensor(
        self, name: str, shape: tuple[int, ...], *, bytes_of_mxfp4: bool = False
    ) -> None:
        tensor = self.tensors[name]
        if tensor.shape != shape:
            raise tensor.error(
                f"has shape {shown(tensor.shape)}, but config.json asks for {shape}; are they of "
                "one model?"
            )
        if bytes_of_mxfp4 and tensor.dtype != np.uint8:
            raise tensor.error(f"has dtype {tensor.dtype.name}; MXFP4 is in U8")
        if not bytes_of_mxfp4 and tensor.dtype not in (*_FLOATS, *_QUANTIZED):
            raise tensor.error(
                f"has dtype {tensor.dtype.name}, which is not supported; convert it to F32, F16 or "
                "BF16"
            )

    def _check_scale(self, name: str, parameter: str) -> str:
        tensor = self.tensors[name]
        kind, blocks = tensor.dtype.name, self.quantization
        is_int8, is_fp8 = blocks == "int8", isinstance(blocks, BlockScales)
        fits = is_int8 if tensor.dtype == np.int8 else is_fp8
        if not fits or not parameter.endswith(".kernel"):
            raise tensor.error(
                f"with shape {tensor.shape} is {kind}, but config.json has no quantization_config "
                "that covers it"
            )
        scale, shape = f"{name}_scale", (tensor.shape[0], 1)
        if isinstance(blocks, BlockScales):
            scale, shape = f"{name}{SUFFIX}", blocks.shape(tensor.shape)
        if scale not in self.tensors:
            raise tensor.error(f"is {kind}, but {shown(scale)} {shape} is missing")
        self._check_tensor(scale, shape)
        if self.tensors[scale].dtype not in _FLOATS:
            raise self.tensors[scale].error("must be of floats")
        return scale

    def _check_tied(self, head: str, embedding: str) -> None:
        tensor, other = self.tensors[head], self.tensors[embedding]
        if not tensor.equals(other):
            raise tensor.error(
                f"{shown(tensor.shape)} differs from {shown(embedding)} {other.shape}, though "
                "config.json says tie_word_embeddings=true; set it to false to use both"
            )

    def in_mxfp4(self, parameter: str) -> bool:
        """Whether a parameter is stored in MXFP4."""
        return self.quantization == "mxfp4" and packed.is_kernel(parameter)

    def read_mxfp4(self, parameter: str, out: MXFP4) -> None:
        """Fill the host's arrays of ``out`` with a kernel of experts that is stored in MXFP4."""
        pairs = self._mxfp4(self.family.stored_name(parameter))
        for expert, (blocks, scales) in enumerate(pairs):
            packed.fill_packed(np.asarray(out.codes[expert]), blocks)
            packed.fill_packed(np.asarray(out.scales[expert]), scales)

    def read(self, parameter: str, out: np.ndarray, axes: Sequence[np.ndarray] = ()) -> None:
        """Fill ``out``, in jspec's layout, with the extra memory of one block.

        ``out`` of a kernel is ``[in, out]``, or ``[in, rows, columns]`` with its outputs row by row
        where it is a part of a joined one. ``axes``: bools that broadcast to the shape of
        ``out``; where one of them is false, ``out`` may be left as it is.
        """
        name = self.family.stored_name(parameter)
        if packed.is_packed(parameter):
            for expert, stored in enumerate(self._experts(name)):
                packed.fill(out[expert], stored)
            return
        tensor = self.tensors[name]
        scales = self._scales(name) if tensor.dtype in _QUANTIZED else None

        def in_rows(array: np.ndarray) -> np.ndarray:
            array = np.moveaxis(array, 0, -1) if parameter.endswith(".kernel") else array
            return array[None] if array.ndim == len(tensor.shape) else array

        target, places = in_rows(out), self._places(parameter, tensor.shape[0])
        row_mask = np.ones(target.shape[:2], bool)
        for mask in map(in_rows, axes):
            row_mask &= mask.any(axis=tuple(range(2, mask.ndim)))
        row_mask = row_mask.reshape(-1)
        for rows, block in tensor.blocks(row_mask=row_mask if places is None else row_mask[places]):
            if scales is not None and isinstance(self.quantization, BlockScales):
                block = self.quantization.dequantized(block, rows.start, scales)
            elif scales is not None:
                block = block.astype(np.float32) * scales[rows]
            if places is None:
                write_rows(target, rows.start, block)
            else:
                target[np.divmod(places[rows], target.shape[1])] = block

    def _places(self, parameter: str, num_rows: int) -> np.ndarray | None:
        """Where each row of a tensor is put; None is in the order of the file."""
        match parameter.split("."):
            case ["layers", layer, "attention", "q" | "k" | "q_norm" | "k_norm", _]:
                spec = self.config.layers[int(layer)]
            case _:
                return None
        if self.config.latent is not None:  # it pairs neighbouring channels
            return None
        rope, size = self.config.ropes[spec.rope], spec.key_size
        order = channel_order(size, rope, interleaved=self.family.interleaved)
        if (order == np.arange(size)).all():
            return None
        return (np.arange(0, num_rows, size)[:, None] + np.argsort(order)).reshape(-1)

    def _experts(self, name: str) -> Iterator[np.ndarray]:
        """Yield the dequantised weights of each expert of a packed tensor."""
        if name in self.tensors:
            for _, block in self.tensors[name].blocks(nbytes=1):
                yield block[0]
            return
        for blocks, scales in self._mxfp4(name):
            yield packed.dequantized(blocks, scales).T

    def _mxfp4(self, name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Blocks ``[out, in / 32, 16]`` and scales ``[out, in / 32]`` of each packed expert."""
        blocks, scales = packed.mxfp4_names(name)
        both = (self.tensors[part].blocks(nbytes=1) for part in (blocks, scales))
        for (_, block), (_, scale) in zip(*both, strict=True):
            try:
                packed.check_scales(scale)
            except ValueError as error:
                raise self.tensors[scales].error(f"cannot be read: {error}") from None
            yield block[0], scale[0]

    def _scales(self, name: str) -> np.ndarray:
        name += SUFFIX if isinstance(self.quantization, BlockScales) else "_scale"
        scale = np.empty(self.tensors[name].shape, np.float32)
        for rows, block in self.tensors[name].blocks():
            scale[rows] = block
        return scale


def _layer(name: str) -> int:
    """The number of the layer that a tensor is of; -1 for none."""
    match = _LAYER.match(name)
    return int(match[1]) if match else -1


def stored_shape(parameter: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in a file of a parameter that has ``shape``: outputs come before inputs."""
    return shape[::-1] if parameter.endswith(".kernel") else shape


def write_rows(target: np.ndarray, first: int, block: np.ndarray) -> None:
    """Put ``block`` into ``target [rows, columns, ...]``, row by row, from place ``first`` on."""
    columns = target.shape[1]
    # Numpy casts along memory four times as fast as across it.
    block = block.astype(target.dtype, copy=False)
    while len(block):
        row, column = divmod(first, columns)
        run = block[: columns - column]
        target[row, column : column + len(run)] = run
        first, block = first + len(run), block[len(run) :]


def _is_harmless(name: str) -> bool:
    # Rotary frequencies follow from config.json; early Llama checkpoints stored them as well.
    return name.endswith("rotary_emb.inv_freq")


def listed(names: list[str]) -> str:
    """The first of ``names``, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(map(shown, names[:SHOWN])) + (f" and {more} more" if more > 0 else "")
