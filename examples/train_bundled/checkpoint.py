"""What one invocation leaves for the next: the full state on disk, or weights alone in two."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from examples.train_bundled.model import TrainState

STATE_FILE = "state.safetensors"
WEIGHT_FILES = ("resume-1.safetensors", "resume-2.safetensors")


@dataclasses.dataclass
class Journal:
    """How far the training is, over all invocations; stored next to the weights as JSON.

    ``share`` is the part of the planned schedule that is done, in [0, 1]. A point of ``curve`` has
    the fields of `CURVE_FIELDS`. ``invocations`` says what each run was and ran on.
    """

    share: float = 0.0
    step: int = 0
    bytes: int = 0
    seconds: float = 0.0
    curve: list[list[float]] = dataclasses.field(default_factory=list)
    invocations: list[dict[str, Any]] = dataclasses.field(default_factory=list)


CURVE_FIELDS = ("step", "share", "length", "loss", "text_bits", "answer_accuracy", "bytes_per_s")


def save_state(folder: Path, state: TrainState, journal: Journal) -> None:
    """Parameters and optimiser state in float32, in one file that appears only when complete."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / (STATE_FILE + ".partial")
    save_file(named(state), partial, metadata=_metadata(journal))
    os.replace(partial, folder / STATE_FILE)


def save_weights(folder: Path, parameters: Any, journal: Journal) -> None:
    """Parameters in bfloat16, in two files of about half the bytes each."""
    # The prefix is that of the parameters in the pair that `save_state` writes.
    flat = {
        f"0/{name}": leaf.astype(ml_dtypes.bfloat16) for name, leaf in named(parameters).items()
    }
    parts: tuple[dict, dict] = ({}, {})
    for name, leaf in sorted(flat.items(), key=lambda item: -item[1].nbytes):
        smaller = min(parts, key=lambda part: sum(leaf.nbytes for leaf in part.values()))
        smaller[name] = leaf
    for file, part in zip(WEIGHT_FILES, parts, strict=True):
        save_file(part, folder / file, metadata=_metadata(journal))


def restore(folder: Path, fresh: TrainState) -> tuple[TrainState, Journal, bool]:
    """``(state, journal, complete)`` from either form; ``fresh`` has the structure and fills gaps.

    ``complete`` is False where there are only weights: the optimiser is then reset.
    """
    complete = (folder / STATE_FILE).exists()
    tensors: dict[str, np.ndarray] = {}
    metadata: dict[str, str] = {}
    for file in (STATE_FILE,) if complete else WEIGHT_FILES:
        if not (folder / file).exists():
            raise FileNotFoundError(f"{folder} has neither {STATE_FILE} nor all of {WEIGHT_FILES}")
        with safe_open(folder / file, framework="numpy") as stored:
            tensors |= {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            metadata = stored.metadata()
    paths, structure = jax.tree_util.tree_flatten_with_path(fresh)
    leaves = [_take(tensors, _name(path), leaf, complete) for path, leaf in paths]
    if tensors:
        raise ValueError(f"{folder} has tensors of another model: {sorted(tensors)[:3]}")
    journal = Journal(**json.loads(metadata["journal"]))
    return jax.tree_util.tree_unflatten(structure, leaves), journal, complete


def _take(tensors: dict[str, np.ndarray], name: str, leaf, complete: bool):
    if name not in tensors and not complete and not name.startswith("0/"):
        return leaf
    stored = tensors.pop(name)
    if stored.shape != leaf.shape:
        raise ValueError(f"{name} has shape {stored.shape}; this model needs {leaf.shape}")
    return stored.astype(leaf.dtype)


def named(tree: Any) -> dict[str, np.ndarray]:
    """Host arrays of the leaves by path, in the tree's order."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {_name(path): np.asarray(leaf, order="C") for path, leaf in paths}


def _name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")


def _metadata(journal: Journal) -> dict[str, str]:
    return {"journal": json.dumps(dataclasses.asdict(journal))}
