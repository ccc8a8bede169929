"""Trained hashes on disk: a matrix for each KV head of a layer, by orbax, and settings as JSON."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.checks import shown
from jspec.config import LAYER_LIMIT, LayerSpec
from jspec.models import saved
from jspec.models.bundled import bundled_path
from jspec.models.errors import CheckpointError
from jspec.models.files import INTEGER_LIMIT, Fields, read_json
from jspec.ops.hash import BITS
from jspec.typing import Array

SETTINGS = "hashes.json"
FORMAT = 1
STORED = np.float16
FOLDER = "hashes"  # of a model's directory
SAMPLE = 256  # numbers of an embedding that tell models apart
# The least cosine of two samples of one model: a copy in 4 bits has 0.99, a fine-tuned model too.
SAME_MODEL = 0.9
FLOAT32_LIMIT = 2.0**128

Hashes = tuple[Array | None, ...]


def check_hashes(hashes: Hashes, specs: Sequence[LayerSpec]) -> None:
    """Raise `ValueError` unless the shapes of ``hashes`` fit the layers ``specs``."""
    way_out = "train hashes of this model by `jspec train-hash`"
    if len(hashes) != len(specs):
        raise ValueError(
            f"hashes of {len(hashes)} layers do not fit a model of {len(specs)}; {way_out}"
        )
    for layer, (w, spec) in enumerate(zip(hashes, specs, strict=True)):
        if w is None and spec.window is None:
            raise ValueError(f"layer {layer} has no hashes and no sliding window; {way_out}")
        if w is not None and w.shape[:2] != (spec.kv_heads, spec.key_size):
            raise ValueError(
                f"hashes of layer {layer} are for {w.shape[0]} KV heads of size {w.shape[1]}, but "
                f"the model has {spec.kv_heads} of size {spec.key_size}; {way_out}"
            )


def embedding_sample(model: Any) -> list[float] | None:
    """Numbers that tell a model apart from others: one channel each of its first tokens.

    None for a model without an attribute ``embedding [V, H]``, and for one whose arrays are spread
    over several processes.
    """
    embedding = getattr(model, "embedding", None)
    if embedding is None:
        return None
    table = embedding.get_value() if hasattr(embedding, "get_value") else embedding
    if not getattr(table, "is_fully_addressable", True):
        return None
    tokens = np.arange(min(SAMPLE, table.shape[0]))
    values = np.asarray(table[tokens, tokens * 7 % table.shape[1]], np.float32)
    return [float(f"{x:.4g}") for x in values]


def check_model(path: str | os.PathLike, model: Any) -> None:
    """Raise `ValueError` where the hashes in the directory ``path`` are of another model.

    Hashes that were stored without a sample of their model are not checked.
    """
    stored, sample = _read_settings(Path(path) / SETTINGS).embedding, embedding_sample(model)
    if stored is None or sample is None:
        return
    cosine = 0.0
    if len(stored) == len(sample):
        norms = math.hypot(*stored) * math.hypot(*sample)
        dot = sum(x * y for x, y in zip(stored, sample, strict=True))
        cosine = dot / norms if norms else 1.0
    if not cosine >= SAME_MODEL:
        raise ValueError(
            f"hashes in {path} are of another model: the cosine of its embedding and this model's "
            f"is {cosine:.2f}, below {SAME_MODEL}; train hashes of this model by `jspec train-hash`"
        )


def save_hashes(
    hashes: Hashes, path: str | os.PathLike, training: Mapping[str, Any], model: Any = None
) -> None:
    """Write ``hashes`` as float16 to a new directory, which appears complete or not at all.

    Args:
        hashes: ``[K, H, R]`` of each layer, None for a layer without hashes.
        path: the directory, which must not exist.
        training: how they were learned, stored as JSON.
        model: the model that they are of, whose `embedding_sample` is stored; None stores none.

    Raises:
        CheckpointError: ``path`` exists or cannot be written.
        ValueError: the layers have different numbers of bits, or none has hashes.
    """
    path = Path(path)
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists; choose another path, hashes are never overwritten")
    bits = {w.shape[2] for w in hashes if w is not None}
    if len(bits) != 1:
        raise ValueError(f"hashes of {sorted(bits)} bits must all have as many, and be some")
    layers = [None if w is None else list(w.shape[:2]) for w in hashes]
    settings = {"format": FORMAT, "bits": bits.pop(), "layers": layers, "made": dict(training)}
    if (sample := embedding_sample(model)) is not None:
        settings["embedding"] = sample
    arrays = {
        _name(layer): np.asarray(w).astype(STORED)
        for layer, w in enumerate(hashes)
        if w is not None
    }
    saved.write_folder(path, arrays, SETTINGS, settings)


def load_hashes(path: str | os.PathLike | None = None) -> Hashes:
    """Load hashes that `jspec train-hash` wrote.

    Args:
        path: the directory; None for the hashes of the bundled model.

    Returns:
        One entry per layer: float32 ``[K, H, R]``, as `jspec.ops.hash_encode` takes them, or None
        for a layer with a sliding window, which is read whole.

    Raises:
        CheckpointError: files are missing, malformed or do not fit together.
    """
    path = bundled_path() / FOLDER if path is None else Path(path)
    bits, sizes, _ = _read_settings(path / SETTINGS)
    expected = {_name(layer): (*size, bits) for layer, size in enumerate(sizes) if size is not None}
    saved.check_shapes(path, saved.read_all_shapes(path), expected, SETTINGS)
    where = jnp.zeros(()).sharding
    kinds = {
        name: jax.ShapeDtypeStruct(shape, np.float32, sharding=where)
        for name, shape in expected.items()
    }
    arrays = saved.read_arrays(path, kinds)
    return tuple(arrays.get(_name(layer)) for layer in range(len(sizes)))


def bits_of(path: str | os.PathLike) -> int:
    """Bits of a code by the hashes in the directory ``path``; raises as `load_hashes` does."""
    return _read_settings(Path(path) / SETTINGS).bits


def _name(layer: int) -> str:
    return f"layers.{layer}"


class _Settings(NamedTuple):
    """``bits`` of a code; KV heads and key size of each layer; `embedding_sample`, if stored."""

    bits: int
    sizes: list[tuple[int, int] | None]
    embedding: list[float] | None


def _read_settings(path: Path) -> _Settings:
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing: the folder has no hashes; `jspec train-hash --out` writes one"
        )
    fields = Fields(read_json(path), str(path))
    version = fields.values.get("format")
    if version != FORMAT or type(version) is not int:
        raise fields.error(f"format={shown(version)} is unknown; jspec has {FORMAT}")
    unknown = sorted(set(fields.values) - {"format", "bits", "layers", "made", "embedding"})
    if unknown:
        raise fields.error(f"fields {shown(unknown)} are unknown; the file is of a newer jspec")
    bits = fields.integer("bits")
    if bits not in BITS:
        raise fields.error(f"bits={bits} must be one of {', '.join(map(str, BITS))}")
    layers = fields.values.get("layers")
    if not isinstance(layers, list) or not 1 <= len(layers) <= LAYER_LIMIT:
        raise fields.error(f"layers={shown(layers)} must be a list of 1 to {LAYER_LIMIT} layers")
    if not all(layer is None or _is_size(layer) for layer in layers) or not any(layers):
        raise fields.error(
            f"layers={shown(layers)} must hold [KV heads, key size] or null, not null alone"
        )
    embedding = fields.values.get("embedding")
    if embedding is not None and not _is_sample(embedding):
        raise fields.error(f"embedding={shown(embedding)} must be at most {SAMPLE} finite numbers")
    return _Settings(
        bits, [None if layer is None else (layer[0], layer[1]) for layer in layers], embedding
    )


def _is_sample(value: Any) -> bool:
    if not isinstance(value, list) or not 1 <= len(value) <= SAMPLE:
        return False
    return all(type(x) in (int, float) and abs(x) < FLOAT32_LIMIT for x in value)


def _is_size(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return all(type(x) is int and 1 <= x <= INTEGER_LIMIT for x in value)
