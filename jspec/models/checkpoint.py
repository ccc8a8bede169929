"""Models from and to disk: Hugging Face directories, and jspec's own checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jspec.config import ModelConfig
from jspec.models import mxfp4_experts, saved
from jspec.models.decoder import Decoder
from jspec.models.end_tokens import end_tokens, generation_end_tokens
from jspec.models.errors import CheckpointError
from jspec.models.families import family, model_config
from jspec.models.files import check_directory, read_json
from jspec.models.gguf_file import gguf_path
from jspec.models.gguf_weights import GGUFWeights
from jspec.models.joined import separate, separate_shapes
from jspec.models.progress import loading
from jspec.models.weights import Weights, quantization_of
from jspec.ops.quantized import MXFP4
from jspec.sharding import Placing, placed

SETTINGS = "config.json"
Read = Callable[[str, np.ndarray, Sequence[np.ndarray]], None]


def load_model(
    path: str | os.PathLike,
    *,
    dtype: Any = None,
    sharding: Placing = None,
    keep_mxfp4: bool | None = None,
) -> Decoder:
    """Load a model from a Hugging Face directory, a GGUF file, or a directory of `save_model`.

    A Hugging Face directory holds config.json, of a family in `jspec.models.families.FAMILIES`, and
    model.safetensors, whole or in shards with an index. The int8 weights of compressed-tensors, the
    FP8 weights of DeepSeek-V3 and the weights of a GGUF file are dequantised. Parameters are read
    one by one: the host holds at most one of them, in ``dtype``, that is not yet on its device.
    Where several processes load a model, each reads only what its devices hold.

    Args:
        path: a directory, or a file that ends in .gguf. A directory with one GGUF file and no
            config.json stands for that file.
        dtype: float32, bfloat16 or float16. None is float32 on a CPU and bfloat16 elsewhere.
        sharding: one sharding for all parameters, or a function of a parameter's name and shape,
            such as ``"layers.0.attention.qkv.kernel"`` and ``(in, K, columns)``. None is the
            default device.
        keep_mxfp4: whether experts stored in MXFP4, as in gpt-oss, stay so, at 4.25 bits a weight
            and with the same values. False dequantises them, for training; None dequantises those
            that ``sharding`` splits.

    Returns:
        The decoder.

    Raises:
        CheckpointError: files are missing, malformed or do not fit together.
        ValueError: the dtype is another one, the sharding does not divide a shape, or it splits
            experts with ``keep_mxfp4=True``.
    """
    path, dtype = Path(path), _dtype(dtype)
    if (file := gguf_path(path)) is not None:
        return _load_gguf(file, dtype, sharding)
    check_model(path)
    if (path / SETTINGS).is_file():
        return _load_hugging_face(path, dtype, sharding, keep_mxfp4)
    return _load_saved(path, dtype, sharding, keep_mxfp4)


def check_model(path: Path) -> None:
    """Raise `CheckpointError` where ``path`` holds no model, before its files are read."""
    if gguf_path(path) is not None:
        return
    check_directory(path)
    if (path / SETTINGS).is_file():
        return
    if not (path / saved.SETTINGS).is_file():
        raise CheckpointError(
            f"{path} is no model: it has neither {SETTINGS} (Hugging Face) nor {saved.SETTINGS} "
            "(jspec.save_model); pass a directory that has one, or a GGUF file"
        )


def save_model(model: Decoder, path: str | os.PathLike) -> None:
    """Write ``model``, bit for bit, to a new directory, which `load_model` reads.

    The directory appears complete or not at all.

    Args:
        model: the decoder.
        path: the directory, which must not exist; its parent must.

    Raises:
        CheckpointError: ``path`` exists or cannot be written.
        ValueError: ``model`` is a quantised copy.
    """
    path = Path(path)
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists; choose another path, save_model never overwrites")
    if not path.parent.is_dir():
        raise CheckpointError(f"{path.parent} is no directory; make it before saving {path.name}")
    arrays = {}
    for key, parameter in nnx.to_flat_state(nnx.state(model)):
        arrays |= mxfp4_experts.arrays_of(_name(key), parameter.get_value())
    saved.write(path, model.config, arrays)


def _load_hugging_face(
    path: Path, dtype: np.dtype, sharding: Placing, keep_mxfp4: bool | None
) -> Decoder:
    source = path / SETTINGS
    values = read_json(source)
    config = model_config(values, source=str(source))
    ends = end_tokens(path, config.stop_tokens, config.vocab_size)
    config = dataclasses.replace(config, stop_tokens=ends)
    stored = family(config.family)
    quantization = quantization_of(values, str(source))
    weights = Weights(path, stored, config, quantization=quantization)
    weights.check_counts()
    skeleton = _Skeleton(config, dtype)
    shapes = separate_shapes(config, skeleton.shapes, packed=stored.packed)
    weights.check(shapes, tied=config.tie_embeddings)
    in_mxfp4 = {n: shape for n, shape in skeleton.shapes.items() if weights.in_mxfp4(n)}
    stays = mxfp4_experts.chosen(in_mxfp4, skeleton.placings(sharding), keep_mxfp4)
    return _filled(
        *(skeleton, path, sharding, weights.read),
        packed=stored.packed,
        mxfp4={name: functools.partial(weights.read_mxfp4, name) for name in stays},
    )


def _load_gguf(path: Path, dtype: np.dtype, sharding: Placing) -> Decoder:
    weights = GGUFWeights(path)
    weights.check_counts()
    config = weights.config
    of_directory = generation_end_tokens(path.parent, config.vocab_size)
    ends = tuple(dict.fromkeys((*config.stop_tokens, *of_directory)))
    skeleton = _Skeleton(dataclasses.replace(config, stop_tokens=ends), dtype)
    weights.check(separate_shapes(config, skeleton.shapes))
    return _filled(skeleton, path, sharding, weights.read)


def _load_saved(path: Path, dtype: np.dtype, sharding: Placing, keep_mxfp4: bool | None) -> Decoder:
    config, version = saved.read_settings(path)
    stored = saved.read_shapes(path, config.num_layers)
    try:
        skeleton = _Skeleton(config, dtype)
    except ValueError as error:
        raise CheckpointError(f"{path / saved.SETTINGS}: {error}") from None
    if version < saved.JOINED:
        saved.check_shapes(path, stored, separate_shapes(config, skeleton.shapes))
        return _filled(skeleton, path, sharding, functools.partial(saved.read_into, path))
    in_mxfp4 = mxfp4_experts.stored_in(stored, skeleton.shapes)
    placings = skeleton.placings(sharding)
    stays = mxfp4_experts.chosen(in_mxfp4, placings, keep_mxfp4)
    # Left to itself, orbax would ask for the devices that the model was saved from.
    default = jnp.zeros(()).sharding
    templates: dict[str, jax.ShapeDtypeStruct] = {}
    for name, shape in skeleton.shapes.items():
        to = placings[name] or default
        if name in in_mxfp4:
            templates |= mxfp4_experts.templates_of(name, shape, to if name in stays else default)
        else:
            templates[name] = jax.ShapeDtypeStruct(shape, skeleton.dtypes[name], sharding=to)
    saved.check_shapes(path, stored, {name: array.shape for name, array in templates.items()})
    arrays: dict[str, Any] = dict(saved.read_arrays(path, templates))
    for name in in_mxfp4:
        kernel = mxfp4_experts.read_kernel(path, name, arrays)
        stays_mxfp4 = name in stays
        arrays[name] = (
            kernel if stays_mxfp4 else mxfp4_experts.widened(kernel, dtype, placings[name])
        )
    return skeleton.filled(arrays)


def _dtype(dtype: Any) -> np.dtype:
    if dtype is None:
        return np.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    chosen = np.dtype(dtype)
    if chosen not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"dtype={chosen.name} must be float32, bfloat16 or float16")
    return chosen


def _name(key: tuple) -> str:
    return ".".join(map(str, key))


class _Skeleton:
    """A decoder without arrays, with the shapes and dtypes of its parameters by name."""

    def __init__(self, config: ModelConfig, dtype: np.dtype):
        self.config = config
        self._graph, state = nnx.split(Decoder(config, dtype=dtype, rngs=None))
        self._flat = list(nnx.to_flat_state(state))
        arrays = {_name(key): value.get_value() for key, value in self._flat}
        self.shapes: dict[str, tuple[int, ...]] = {n: array.shape for n, array in arrays.items()}
        self.dtypes: dict[str, np.dtype] = {n: array.dtype for n, array in arrays.items()}

    def placings(self, sharding: Placing) -> dict[str, jax.sharding.Sharding | None]:
        """Where each parameter goes, None for the default device."""
        return {name: placed(name, shape, sharding) for name, shape in self.shapes.items()}

    def filled(self, arrays: Mapping[str, jax.Array | MXFP4]) -> Decoder:
        flat = [(key, value.replace(arrays[_name(key)])) for key, value in self._flat]
        return nnx.merge(self._graph, nnx.from_flat_state(flat))


def _filled(
    skeleton: _Skeleton,
    source: Path,
    sharding: Placing,
    read: Read,
    *,
    packed: bool = False,
    mxfp4: Mapping[str, Callable[[MXFP4], None]] = MappingProxyType({}),
) -> Decoder:
    """Fill ``skeleton`` with parameters, read to the host and placed one by one.

    Args:
        skeleton: the decoder to fill.
        source: path of the model, shown by the progress bar.
        sharding: as in `load_model`.
        read: ``read(name, out, axes)`` fills ``out`` with a parameter, or with one part of a joined
            parameter, as `Weights.read`.
        packed: whether the file stores all experts of a layer as one tensor.
        mxfp4: for each parameter that stays in MXFP4, the function that fills it.
    """

    def made(name: str, to: jax.sharding.Sharding | None) -> np.ndarray | MXFP4:
        shape = skeleton.shapes[name]
        if name in mxfp4:
            kernel = mxfp4_experts.room_for(shape)
            mxfp4[name](kernel)
            return kernel
        # What is never written takes no memory.
        out = np.empty(shape, skeleton.dtypes[name])
        arrays = (out, *_local_axes(shape, to))
        parts = [separate(skeleton.config, name, x, packed=packed) for x in arrays]
        for part, place in parts[0].items():
            axes = [_of_one_along_stride_0(axis[part]) for axis in parts[1:]]
            if all(axis.any() for axis in axes):
                read(part, place, axes)
        return out

    arrays = {}
    sizes = {n: math.prod(s) * skeleton.dtypes[n].itemsize for n, s in skeleton.shapes.items()}
    with loading(source.name, sum(sizes.values())) as advance:
        for name, to in skeleton.placings(sharding).items():
            arrays[name] = jax.tree.map(functools.partial(_place, sharding=to), made(name, to))
            advance(sizes[name])
    return skeleton.filled(arrays)


def _local_axes(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding | None
) -> Iterator[np.ndarray]:
    """For each axis, bools of ``shape`` that say which indices this process holds.

    Each is a broadcast view along its axis. Yields nothing where the process holds the whole array.
    """
    if sharding is None or sharding.is_fully_addressable:
        return
    shards = sharding.addressable_devices_indices_map(shape).values()
    for axis, size in enumerate(shape):
        is_local = np.zeros(size, bool)
        for index in filter(None, shards):
            is_local[index[axis]] = True
        others = [other for other in range(len(shape)) if other != axis]
        yield np.broadcast_to(np.expand_dims(is_local, others), shape)


def _of_one_along_stride_0(view: np.ndarray) -> np.ndarray:
    """``view`` with one element for each axis along which all are the same."""
    return view[tuple(slice(None if stride else 1) for stride in view.strides)]


def _place(array: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    if sharding is None:
        placed = jax.device_put(array)
    else:
        placed = jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    # A transfer keeps its host array alive: waiting keeps the host at one.
    return placed.block_until_ready()


__all__ = ["CheckpointError", "load_model", "save_model"]
