"""Hash matrices that the authors of HATA released, read from a safetensors file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jspec.checks import shown
from jspec.config import LayerSpec
from jspec.models.errors import CheckpointError
from jspec.models.hashes import STORED, Hashes
from jspec.models.safetensors_file import StoredTensor, stored_tensors
from jspec.ops.hash import BITS

_NAME = re.compile(r"hash_weight_layer_([0-9]{2,4})")
_PICKLE = (".pt", ".pth", ".bin")


def read_hata_weights(
    path: Path, specs: Sequence[LayerSpec], seed: int = 0
) -> tuple[Hashes, list[int]]:
    """The matrices of each layer of ``specs`` in the file ``path``.

    Its tensors are named as the authors name their files, ``hash_weight_layer_02``: ``[K, H, R]``,
    or ``[H, R]`` for all KV heads. Bit j of a code is whether column j of x W is above 0, as in
    `jspec.ops.hash_encode`. They have no matrices for the first layers, which they read whole.

    Args:
        path: A safetensors file.
        specs: The model's layers.
        seed: Of the random matrices of the first layers.

    Returns:
        The matrices, None for layers with a sliding window, and the layers with random ones.

    Raises:
        CheckpointError: The file cannot be read, or does not fit the model.
    """
    if path.is_dir() or path.suffix in _PICKLE:
        raise CheckpointError(
            f"{path} must be one safetensors file, as a pickle runs code; docs/hashes.md has the "
            "line of Python that converts the authors' files"
        )
    tensors = _by_layer(path, len(specs))
    bits = next(iter(tensors.values())).shape[-1]
    rng, random_layers = np.random.default_rng(seed), []
    hashes: list[np.ndarray | None] = []
    for layer, spec in enumerate(specs):
        if spec.window is not None:
            hashes.append(None)
        elif layer in tensors:
            hashes.append(_matrices(tensors[layer], spec, bits))
        elif layer < min(tensors):
            shape = (spec.kv_heads, spec.key_size, bits)
            hashes.append(rng.standard_normal(shape, np.float32))
            random_layers.append(layer)
        else:
            raise CheckpointError(
                f"{path} has no tensor hash_weight_layer_{layer:02d}; only layers before the first "
                f"one, {min(tensors)}, may lack theirs: convert all of the authors' files"
            )
    return tuple(None if w is None else jnp.asarray(w) for w in hashes), random_layers


def _by_layer(path: Path, num_layers: int) -> dict[int, StoredTensor]:
    """The tensors of a file by layer."""
    tensors: dict[int, StoredTensor] = {}
    for tensor in stored_tensors(path):
        match = _NAME.fullmatch(tensor.name)
        if match is None:
            raise tensor.error("is no hash_weight_layer_LL, as the authors' files are named")
        layer = int(match[1])
        if layer >= num_layers or layer in tensors:
            raise tensor.error(
                f"is of layer {layer}, but the model has {num_layers} layers, one tensor each; "
                "name the model that the hashes were learned for by --model"
            )
        tensors[layer] = tensor
    if not tensors:
        raise CheckpointError(f"{path} has no tensors; convert the authors' files again")
    return tensors


def _matrices(tensor: StoredTensor, spec: LayerSpec, bits: int) -> np.ndarray:
    """Float32 ``[K, H, R]`` of a layer."""
    shape = (spec.kv_heads, spec.key_size, bits)
    if bits not in BITS or tensor.shape not in (shape, shape[1:]):
        raise tensor.error(
            f"has shape {shown(list(tensor.shape))}, but must have [K, H, R] = {list(shape[:2])} "
            f"and R, or H and R alone, with one R of {', '.join(map(str, BITS))} in all layers; "
            "name the model that the hashes were learned for by --model"
        )
    if not jnp.issubdtype(tensor.dtype, jnp.floating):
        raise tensor.error(f"has dtype {tensor.dtype}; convert it to float32, float16 or bfloat16")
    values = np.concatenate([np.array(x, np.float32) for _, x in tensor.blocks()])
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(values.astype(STORED)).all()
    if not is_finite:
        raise tensor.error(f"has values that are not finite in {np.dtype(STORED)}; divide it first")
    return np.broadcast_to(values, shape)
