"""Models from and to disk: Hugging Face directories, and jspec's own checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jspec.config import ModelConfig
from jspec.models.decoder import Decoder
from jspec.models.errors import CheckpointError
from jspec.models.families import model_config
from jspec.models.files import read_json
from jspec.models.weights import Weights, is_quantized

Placing = jax.sharding.Sharding | Callable[[str, tuple[int, ...]], jax.sharding.Sharding] | None

SETTINGS = "config.json"
GENERATION = "generation_config.json"


def load_model(path: str | os.PathLike, *, dtype: Any = None, sharding: Placing = None) -> Decoder:
    """A decoder from a local Hugging Face directory or from what `save_model` wrote.

    The directory holds config.json (families llama, qwen2 and qwen3) and model.safetensors, whole
    or in shards with an index; int8 weights of compressed-tensors are dequantised. ``dtype`` is
    float32, bfloat16 or float16; None is float32 on a CPU and bfloat16 elsewhere. ``sharding`` is
    one for every parameter, or a function of a parameter's name and shape, such as
    ``"layers.0.attention.q.kernel"`` and ``(in, out)``; None is the default device. Tensors are
    read one by one: the host holds one in ``dtype`` besides what is placed.

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
    config = saved.read_config(path)
    graph, shapes = _abstract(config, dtype)
    wanted = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=_sharding(name, shape, sharding))
        for name, shape in shapes.items()
    }
    return _assembled(graph, saved.read_arrays(path, wanted))


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
    if (path / GENERATION).is_file():
        # transformers stops generation at these, and instruct models list theirs only here.
        stops = read_json(path / GENERATION).get("eos_token_id")
        values = values if stops is None else {**values, "eos_token_id": stops}
    config = model_config(values, source=str(source))
    weights = Weights(path, quantized=is_quantized(values, str(source)))
    graph, shapes = _abstract(config, dtype)
    weights.check(shapes, tied=config.tie_embeddings)
    placings = {name: _sharding(name, shape, sharding) for name, shape in shapes.items()}
    return _assembled(
        graph, {name: _place(weights.read(name, dtype), placings[name]) for name in shapes}
    )


def _dtype(dtype: Any) -> np.dtype:
    if dtype is None:
        return np.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    chosen = np.dtype(dtype)
    if chosen not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"dtype={chosen.name} must be float32, bfloat16 or float16")
    return chosen


def _name(key: tuple) -> str:
    return ".".join(map(str, key))


def _abstract(config: ModelConfig, dtype: np.dtype) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """A decoder without arrays (its graph and abstract state) and its parameters' shapes."""
    model = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    shapes = {_name(key): value.get_value().shape for key, value in nnx.to_flat_state(state)}
    return (graph, state), shapes


def _assembled(abstract: Any, arrays) -> Decoder:
    graph, state = abstract
    flat = [(key, value.replace(arrays[_name(key)])) for key, value in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def _sharding(name: str, shape: tuple[int, ...], sharding: Placing) -> jax.sharding.Sharding | None:
    chosen = sharding(name, shape) if callable(sharding) else sharding
    if chosen is not None:
        try:
            chosen.shard_shape(shape)
        except ValueError as error:
            raise ValueError(f"{name} {shape} cannot be placed as asked: {error}") from None
    return chosen


def _place(array: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    if sharding is None:
        placed = jax.device_put(array)
    else:
        placed = jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    # A transfer keeps its host array alive: waiting keeps the host at one.
    return placed.block_until_ready()


__all__ = ["CheckpointError", "load_model", "save_model"]
