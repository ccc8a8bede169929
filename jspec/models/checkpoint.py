"""Models from and to disk: Hugging Face directories, and jspec's own checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jspec.config import ModelConfig
from jspec.models.decoder import Decoder
from jspec.models.errors import CheckpointError
from jspec.models.families import family, model_config
from jspec.models.files import Fields, read_json
from jspec.models.joined import separate, separate_shapes
from jspec.models.weights import Weights, is_quantized
from jspec.sharding import Placing, placed

SETTINGS = "config.json"
GENERATION = "generation_config.json"


def load_model(path: str | os.PathLike, *, dtype: Any = None, sharding: Placing = None) -> Decoder:
    """A decoder from a local Hugging Face directory or from what `save_model` wrote.

    The directory holds config.json (families llama, qwen2, qwen3, deepseek_v2 and
    deepseek_v3) and model.safetensors, whole
    or in shards with an index; int8 weights of compressed-tensors are dequantised. ``dtype`` is
    float32, bfloat16 or float16; None is float32 on a CPU and bfloat16 elsewhere. ``sharding`` is
    one for every parameter, or a function of a parameter's name and shape, such as
    ``"layers.0.attention.qkv.kernel"`` and ``(in, K, columns)``; None is the default device.
    Parameters are read one by one: the host holds one in ``dtype`` besides what is placed.

    Raises `CheckpointError` for files that are missing, malformed or do not fit together, and
    `ValueError` for another dtype or a sharding that a shape does not divide into.
    """
    path, dtype = Path(path), _dtype(dtype)
    if not path.is_dir():
        state = "is no directory" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {state}; pass a local model directory, jspec downloads none")
    if (path / SETTINGS).is_file():
        return _load_hugging_face(path, dtype, sharding)
    # orbax takes a second to import, which only its own checkpoints should cost.
    from jspec.models import saved

    if not (path / saved.SETTINGS).is_file():
        raise CheckpointError(
            f"{path} is no model: it has neither {SETTINGS} (Hugging Face) nor {saved.SETTINGS} "
            "(jspec.save_model)"
        )
    return _load_saved(path, dtype, sharding)


def save_model(model: Decoder, path: str | os.PathLike) -> None:
    """Write ``model`` to a new directory at ``path``, bit for bit, for `load_model` to read.

    It appears whole or not at all. Raises `CheckpointError` where ``path`` exists or cannot be
    written.
    """
    from jspec.models import saved

    path = Path(path)
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists; choose another path, save_model never overwrites")
    if not path.parent.is_dir():
        raise CheckpointError(f"{path.parent} is no directory; make it before saving {path.name}")
    flat = nnx.to_flat_state(nnx.state(model))
    saved.write(path, model.config, {_name(key): value.get_value() for key, value in flat})


def _load_hugging_face(path: Path, dtype: np.dtype, sharding: Placing) -> Decoder:
    source = path / SETTINGS
    values = read_json(source)
    config = model_config(values, source=str(source))
    if (path / GENERATION).is_file():
        # transformers stops generation at these, and instruct models list theirs only here.
        generation = Fields(read_json(path / GENERATION), str(path / GENERATION))
        stops = generation.tokens("eos_token_id", config.vocab_size)
        config = dataclasses.replace(config, stop_tokens=stops or config.stop_tokens)
    weights = Weights(path, family(config.family), quantized=is_quantized(values, str(source)))
    weights.check_layers(config.num_layers)
    skeleton = _Skeleton(config, dtype)
    weights.check(separate_shapes(config, skeleton.shapes), tied=config.tie_embeddings)
    return _filled(skeleton, sharding, weights.read)


def _load_saved(path: Path, dtype: np.dtype, sharding: Placing) -> Decoder:
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
    saved.check_shapes(path, stored, skeleton.shapes)
    # Left to itself, orbax would ask for the devices that the model was saved from.
    default = jnp.zeros(()).sharding
    wanted = {
        name: jax.ShapeDtypeStruct(
            shape, skeleton.dtypes[name], sharding=placed(name, shape, sharding) or default
        )
        for name, shape in skeleton.shapes.items()
    }
    return skeleton.filled(saved.read_arrays(path, wanted))


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

    def filled(self, arrays: Mapping[str, jax.Array]) -> Decoder:
        flat = [(key, value.replace(arrays[_name(key)])) for key, value in self._flat]
        return nnx.merge(self._graph, nnx.from_flat_state(flat))


def _filled(
    skeleton: _Skeleton, sharding: Placing, read: Callable[[str, np.ndarray], None]
) -> Decoder:
    """``skeleton`` with parameters made on the host, one by one, of what ``read`` puts in.

    ``read(name, out)`` fills ``out`` with a parameter, or with a part of one that is joined.
    """

    def made(name: str) -> np.ndarray:
        out = np.empty(skeleton.shapes[name], skeleton.dtypes[name])
        for part, place in separate(skeleton.config, name, out).items():
            read(part, place)
        return out

    placings = {name: placed(name, shape, sharding) for name, shape in skeleton.shapes.items()}
    return skeleton.filled({name: _place(made(name), to) for name, to in placings.items()})


def _place(array: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    if sharding is None:
        placed = jax.device_put(array)
    else:
        placed = jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    # A transfer keeps its host array alive: waiting keeps the host at one.
    return placed.block_until_ready()


__all__ = ["CheckpointError", "load_model", "save_model"]
