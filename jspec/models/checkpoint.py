"""Models from and to disk: Hugging Face directories, and jspec's own checkpoints."""

from __future__ import annotations

import dataclasses
import functools
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
from jspec.models.decoder import Decoder
from jspec.models.errors import CheckpointError
from jspec.models.families import family, model_config
from jspec.models.files import GGUF_SUFFIX, Fields, read_json
from jspec.models.joined import separate, separate_shapes
from jspec.models.packed import check_scales, empty, is_kernel, kept_names, kept_shapes
from jspec.models.weights import Weights, quantization_of
from jspec.ops.quantized import MXFP4, Quantized, dequantized
from jspec.sharding import Placing, placed, put

SETTINGS = "config.json"
GENERATION = "generation_config.json"
Read = Callable[[str, np.ndarray, Sequence[np.ndarray]], None]


def load_model(
    path: str | os.PathLike,
    *,
    dtype: Any = None,
    sharding: Placing = None,
    keep_mxfp4: bool | None = None,
) -> Decoder:
    """A decoder from a local Hugging Face directory, a GGUF file, or what `save_model` wrote.

    The directory holds config.json (of a family in `jspec.models.families.FAMILIES`) and
    model.safetensors, whole or in shards with an index; int8 weights of compressed-tensors and FP8
    weights of DeepSeek-V3 are dequantised. A GGUF file, which ends in .gguf, is dequantised too and
    needs the extra ``gguf``. ``keep_mxfp4``: whether the experts of a gpt-oss stay in MXFP4 where
    the directory has them so, of which each weight is the same and takes 4.25 bits; False
    dequantises them, as a model that is trained needs them, and so does None those that
    ``sharding`` splits. ``dtype`` is float32, bfloat16 or
    float16; None is float32 on a CPU and bfloat16 elsewhere. ``sharding`` is one for every
    parameter, or a function of a parameter's name and shape, such as
    ``"layers.0.attention.qkv.kernel"`` and ``(in, K, columns)``; None is the default device.
    Parameters are read one by one: the host holds one in ``dtype`` besides what is placed. Of
    several processes each skips what its devices have no part of.

    Raises `CheckpointError` for files that are missing, malformed or do not fit together, and
    `ValueError` for another dtype, a sharding that a shape does not divide into, or one that splits
    what is kept in MXFP4.
    """
    path, dtype = Path(path), _dtype(dtype)
    if path.suffix == GGUF_SUFFIX and path.is_file():
        return _load_gguf(path, dtype, sharding)
    check_model(path)
    if (path / SETTINGS).is_file():
        return _load_hugging_face(path, dtype, sharding, keep_mxfp4)
    return _load_saved(path, dtype, sharding, keep_mxfp4)


def check_model(path: Path) -> None:
    """Raise `CheckpointError` where ``path`` holds no model, before its files are read."""
    if path.suffix == GGUF_SUFFIX and path.is_file():
        return
    if not path.is_dir():
        state = "is no directory" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {state}; pass a local model directory, jspec downloads none")
    if (path / SETTINGS).is_file():
        return
    # orbax takes a second to import, which only its own checkpoints should cost.
    from jspec.models import saved

    if not (path / saved.SETTINGS).is_file():
        raise CheckpointError(
            f"{path} is no model: it has neither {SETTINGS} (Hugging Face) nor {saved.SETTINGS} "
            "(jspec.save_model)"
        )


def save_model(model: Decoder, path: str | os.PathLike) -> None:
    """Write ``model`` to a new directory at ``path``, bit for bit, for `load_model` to read.

    It appears whole or not at all. Raises `CheckpointError` where ``path`` exists or cannot be
    written, and `ValueError` for a quantised copy.
    """
    from jspec.models import saved

    path = Path(path)
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists; choose another path, save_model never overwrites")
    if not path.parent.is_dir():
        raise CheckpointError(f"{path.parent} is no directory; make it before saving {path.name}")
    arrays = {}
    for key, parameter in nnx.to_flat_state(nnx.state(model)):
        arrays |= _arrays_of(_name(key), parameter.get_value())
    saved.write(path, model.config, arrays)


def _arrays_of(name: str, value: jax.Array | MXFP4 | Quantized) -> dict[str, jax.Array]:
    """The arrays of a parameter by their names in a checkpoint of jspec's own."""
    if isinstance(value, MXFP4) and is_kernel(name):
        codes, scales = kept_names(name)
        return {codes: value.codes, scales: value.scales}
    if isinstance(value, (MXFP4, Quantized)):
        raise ValueError(
            f"{name} {value.shape} is quantised; save the model that it was quantised from, of "
            "which a drafter makes a copy anew"
        )
    return {name: value}


def _load_hugging_face(
    path: Path, dtype: np.dtype, sharding: Placing, keep_mxfp4: bool | None
) -> Decoder:
    source = path / SETTINGS
    values = read_json(source)
    config = model_config(values, source=str(source))
    if (path / GENERATION).is_file():
        # transformers stops generation at these, and instruct models list theirs only here.
        generation = Fields(read_json(path / GENERATION), str(path / GENERATION))
        stops = generation.tokens("eos_token_id", config.vocab_size)
        config = dataclasses.replace(config, stop_tokens=stops or config.stop_tokens)
    stored = family(config.family)
    quantization = quantization_of(values, str(source))
    weights = Weights(path, stored, quantization=quantization)
    weights.check_layers(config.num_layers)
    skeleton = _Skeleton(config, dtype)
    shapes = separate_shapes(config, skeleton.shapes, packed=stored.packed)
    weights.check(shapes, tied=config.tie_embeddings)
    in_mxfp4 = list(filter(weights.in_mxfp4, skeleton.shapes))
    kept = _kept(in_mxfp4, skeleton, sharding, keep_mxfp4)
    return _filled(
        *(skeleton, sharding, weights.read),
        packed=stored.packed,
        kept={name: functools.partial(weights.read_mxfp4, name) for name in kept},
    )


def _load_gguf(path: Path, dtype: np.dtype, sharding: Placing) -> Decoder:
    from jspec.models.gguf_weights import GGUFWeights

    weights = GGUFWeights(path)
    skeleton = _Skeleton(weights.config, dtype)
    weights.check(separate_shapes(weights.config, skeleton.shapes))
    return _filled(skeleton, sharding, weights.read)


def _load_saved(path: Path, dtype: np.dtype, sharding: Placing, keep_mxfp4: bool | None) -> Decoder:
    from jspec.models import saved

    config, version = saved.read_settings(path)
    stored = saved.read_shapes(path, config.num_layers)
    try:
        skeleton = _Skeleton(config, dtype)
    except ValueError as error:
        raise CheckpointError(f"{path / saved.SETTINGS}: {error}") from None
    if version < saved.JOINED:
        saved.check_shapes(path, stored, separate_shapes(config, skeleton.shapes))
        return _filled(skeleton, sharding, functools.partial(saved.read_into, path))
    in_mxfp4 = [n for n in skeleton.shapes if is_kernel(n) and stored.keys() & kept_names(n)]
    kept = _kept(in_mxfp4, skeleton, sharding, keep_mxfp4)
    # Left to itself, orbax would ask for the devices that the model was saved from.
    default = jnp.zeros(()).sharding
    wanted, placings = {}, skeleton.placings(sharding)
    for name, shape in skeleton.shapes.items():
        to = placings[name] or default
        if name in in_mxfp4:
            to = to if name in kept else default
            for own, size in zip(kept_names(name), kept_shapes(shape), strict=True):
                wanted[own] = jax.ShapeDtypeStruct(size, jnp.uint8, sharding=to)
        else:
            wanted[name] = jax.ShapeDtypeStruct(shape, skeleton.dtypes[name], sharding=to)
    saved.check_shapes(path, stored, {name: array.shape for name, array in wanted.items()})
    arrays: dict[str, Any] = dict(saved.read_arrays(path, wanted))
    for name in in_mxfp4:
        codes, scales = map(arrays.pop, kept_names(name))
        try:
            check_scales(scales)
        except ValueError as error:
            raise CheckpointError(f"{path}: {name}: {error}") from None
        kernel = MXFP4(codes, scales, leading=1)
        if name not in kept:
            wide, to = _dequantized(kernel, dtype), placings[name]
            kernel = wide if to is None else put(wide, to)
        arrays[name] = kernel
    return skeleton.filled(arrays)


_dequantized = jax.jit(dequantized, static_argnames="dtype")


def _kept(
    in_mxfp4: Sequence[str], skeleton: _Skeleton, sharding: Placing, keep: bool | None
) -> Sequence[str]:
    """Which parameters of a checkpoint that are ``in_mxfp4`` stay so.

    Where each device has all of them: the inputs of a split kernel need not divide into blocks.
    """
    if keep is False:
        return ()
    placings = skeleton.placings(sharding)
    split = [n for n in in_mxfp4 if (to := placings[n]) and not to.is_fully_replicated]
    if keep and split:
        raise ValueError(
            f"keep_mxfp4=True: {placings[split[0]]} splits {split[0]} "
            f"{skeleton.shapes[split[0]]}, which jspec has in MXFP4 on one device alone; leave "
            "keep_mxfp4 out, or the sharding"
        )
    return [name for name in in_mxfp4 if name not in split]


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
    """A decoder without arrays: ``shapes`` and ``dtypes`` of its parameters by name, to be
    filled."""

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
    sharding: Placing,
    read: Read,
    *,
    packed: bool = False,
    kept: Mapping[str, Callable[[MXFP4], None]] = MappingProxyType({}),
) -> Decoder:
    """``skeleton`` with parameters made on the host, one by one, of what ``read`` puts in.

    ``read(name, out, axes)`` fills ``out`` with a parameter, or with a part of one that is joined,
    as `Weights.read` does. ``kept``: what fills those that stay in MXFP4.
    """

    def made(name: str, to: jax.sharding.Sharding | None) -> np.ndarray | MXFP4:
        shape = skeleton.shapes[name]
        if name in kept:
            kernel = empty(shape)
            kept[name](kernel)
            return kernel
        # What is never written takes no memory.
        out = np.empty(shape, skeleton.dtypes[name])
        arrays = (out, *_own_axes(shape, to))
        parts = [separate(skeleton.config, name, x, packed=packed) for x in arrays]
        for part, place in parts[0].items():
            axes = [_of_one_along_stride_0(axis[part]) for axis in parts[1:]]
            if all(axis.any() for axis in axes):
                read(part, place, axes)
        return out

    return skeleton.filled(
        {
            name: jax.tree.map(functools.partial(_place, sharding=to), made(name, to))
            for name, to in skeleton.placings(sharding).items()
        }
    )


def _own_axes(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding | None
) -> Iterator[np.ndarray]:
    """Which places this process has along each axis: bools of ``shape``, views of one axis.

    None where it has all of the array.
    """
    if sharding is None or sharding.is_fully_addressable:
        return
    shards = sharding.addressable_devices_indices_map(shape).values()
    for axis, size in enumerate(shape):
        own = np.zeros(size, bool)
        for index in filter(None, shards):
            own[index[axis]] = True
        others = [other for other in range(len(shape)) if other != axis]
        yield np.broadcast_to(np.expand_dims(own, others), shape)


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
