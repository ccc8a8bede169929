"""A run of hash training, from texts to a folder of hashes, which goes on where it was stopped.

What is done is kept in a folder beside the one to be written: the queries and keys of each text,
layer by layer, then each layer's hashes. So the host holds the pairs of one layer at a time, and
the device those and the cache of one text.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jspec.models.errors import CheckpointError
from jspec.models.files import read_json
from jspec.models.hashes import save_hashes
from jspec.train.learn import learn
from jspec.train.loss import VARIANTS, HashTraining, Terms, first_weights
from jspec.train.recall import BUDGETS, Rivals, compare, principal_axes
from jspec.train.samples import Pairs, Seen, pairs_of, prefill, query_position
from jspec.typing import Model

KEPT = np.float16  # of queries and keys on disk
QUERIES = 16  # of a held-out text, in its second half
Tokens = Sequence[int]
OnProgress = Callable[[str, int, int], None]  # what is being done, how much of how much


class Texts(NamedTuple):
    """Token ids of the texts to learn from, and of those that the report is about."""

    learned: Sequence[Tokens]
    held_out: Sequence[Tokens]


class Layer(NamedTuple):
    """What was learned of a layer: ``weights [K, H, R]`` and loss terms of each step by variant.

    ``axes [K, H, H]``: the principal axes of its keys, for the report.
    """

    weights: dict[str, np.ndarray]
    loss: dict[str, Terms]
    axes: np.ndarray


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to be done; ``both`` also learns the loss's other variant, for the report alone.

    ``out``: the folder to write, which must not exist. Each of ``texts.learned`` gives one query.
    """

    model: Model
    texts: Texts
    out: Path
    settings: HashTraining
    both: bool = False

    @property
    def work(self) -> Path:
        """Where what is done is kept until all is done."""
        return self.out.with_name(f".{self.out.name}.partial")

    @property
    def variants(self) -> list[str]:
        """The loss variants to learn, the one to be written first."""
        return sorted(VARIANTS if self.both else (self.settings.variant,), key=self._is_other)

    def _is_other(self, variant: str) -> bool:
        return variant != self.settings.variant

    @property
    def layers(self) -> list[int]:
        """Those without a sliding window, which is read whole and needs no hashes."""
        specs = self.model.config.layers
        return [layer for layer, spec in enumerate(specs) if spec.window is None]

    @property
    def room(self) -> int:
        """Tokens of the longest text."""
        return max(len(text) for part in self.texts for text in part)

    def positions(self) -> list[int]:
        """Where each learned text is asked: one position in its second half."""
        rng = np.random.default_rng((self.settings.seed, 1))
        return [query_position(len(text), rng) for text in self.texts.learned]


def run(job: Job, on_progress: OnProgress = lambda what, done, total: None) -> dict[str, Any]:
    """Learn the hashes, write them to ``job.out`` and return the report.

    A run that was stopped is gone on with where settings, model and texts are the same. Raises
    `CheckpointError` where ``job.out`` exists or cannot be written, or what is kept is of another
    run; `ValueError` where the model's keys are not finite.
    """
    begin = time.perf_counter()
    if os.path.lexists(job.out):
        raise CheckpointError(f"{job.out} exists; choose another folder, none is overwritten")
    if not job.layers:
        raise ValueError("every layer of the model has a sliding window: none needs hashes")
    _claim(job)
    _collect(job, on_progress)
    collected = time.perf_counter()
    found = []
    for done, layer in enumerate(job.layers):
        on_progress("learn layers", done, len(job.layers))
        found.append(_layer(job, layer))
    on_progress("learn layers", len(job.layers), len(job.layers))
    learned = time.perf_counter()
    report = _report(job, found, on_progress)
    report["seconds"] = {"collect": collected - begin, "learn": learned - collected}
    _write(job, found, report)
    return report


def _claim(job: Job) -> None:
    """Make the folder of what is done, or make sure that it is of this very run."""
    wanted = _plan(job)
    path = job.work / "plan.json"
    try:
        job.work.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _write_whole(path, json.dumps(wanted).encode())
    except OSError as error:
        raise CheckpointError(f"{job.work} cannot be written: {error.strerror}") from error
    kept = read_json(path)
    for name, value in wanted.items():
        if kept.get(name) != value:
            raise CheckpointError(
                f"{job.work} keeps what a run with other {name} has done; go on with those, or "
                "delete that folder to begin anew"
            )


def _plan(job: Job) -> dict[str, Any]:
    """What a stopped run and the one that goes on with it must share."""
    digest = hashlib.sha256(repr(job.model.config).encode())
    for leaf in jax.tree.leaves(job.model):
        digest.update(np.asarray(leaf[(0,) * (leaf.ndim - 1)]).tobytes())  # its first row
    texts = hashlib.sha256(repr([list(map(len, part)) for part in job.texts]).encode())
    for part in job.texts:
        for text in part:
            texts.update(np.asarray(text, np.int32).tobytes())
    return {
        "settings": dataclasses.asdict(job.settings) | {"variants": job.variants},
        "model": digest.hexdigest(),
        "texts": texts.hexdigest(),
    }


def _collect(job: Job, on_progress: OnProgress) -> None:
    """Keep the query and the keys of each text, a file for each layer."""
    positions = job.positions()
    total = sum(positions) + len(positions)
    before = 0
    for index, (text, position) in enumerate(zip(job.texts.learned, positions, strict=True)):
        place = job.work / f"text-{index}"
        if not place.exists():

            def on_piece(done: int, _: int, before: int = before) -> None:
                on_progress("read texts", before + done, total)

            seen = prefill(job.model, text, [position], room=job.room, on_piece=on_piece)
            partial = place.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            for layer in job.layers:
                query = _kept(seen.queries[layer][0], layer)
                keys = _kept(np.asarray(seen.keys(layer))[: position + 1], layer)
                np.savez(partial / f"{layer}.npz", query=query, keys=keys)
            os.rename(partial, place)
        before += position + 1
        on_progress("read texts", before, total)


def _kept(x: np.ndarray, layer: int) -> np.ndarray:
    with np.errstate(over="ignore"):  # looked at below
        found = x.astype(KEPT)
    if not np.isfinite(found).all():
        raise ValueError(
            f"queries or keys of layer {layer} are not finite, or beyond float16's 65504: the "
            "model gives no attention to learn from"
        )
    return found


def _layer(job: Job, layer: int) -> Layer:
    """Learn a layer, unless that is done."""
    path = job.work / f"layer-{layer}.npz"
    if not path.exists():
        pairs, axes = _pairs(job, layer)
        spec = job.model.config.layers[layer]
        first = first_weights(spec.kv_heads, spec.key_size, job.settings, layer)
        arrays: dict[str, Any] = {"axes": axes}
        for variant in job.variants:
            settings = dataclasses.replace(job.settings, variant=variant)
            found = learn(first, pairs, settings)
            arrays[variant] = np.asarray(found.weights)
            arrays |= {f"{variant}.{n}": np.asarray(x) for n, x in found.loss._asdict().items()}
            if not np.isfinite(arrays[variant]).all():
                raise ValueError(
                    f"the hashes of layer {layer} diverged: lower rate={job.settings.rate}"
                )
        partial = path.with_suffix(".partial.npz")
        np.savez(partial, **arrays)
        os.rename(partial, path)
    with np.load(path) as kept:
        loss = {v: Terms(*(kept[f"{v}.{n}"] for n in Terms._fields)) for v in job.variants}
        return Layer({v: kept[v] for v in job.variants}, loss, kept["axes"])


def _pairs(job: Job, layer: int) -> tuple[Pairs, np.ndarray]:
    """The labelled pairs of a layer, and the principal axes of its keys."""
    samples = []
    for index in range(len(job.texts.learned)):
        with np.load(job.work / f"text-{index}" / f"{layer}.npz") as kept:
            samples.append((kept["query"], kept["keys"]))
    rng = np.random.default_rng((job.settings.seed, 2))
    axes = principal_axes(np.concatenate([keys for _, keys in samples]))
    return pairs_of(samples, job.model.config.layers[layer], rng), axes


def _report(job: Job, found: list[Layer], on_progress: OnProgress) -> dict[str, Any]:
    """What the hashes keep of attention over the held-out texts, beside other methods."""
    rng = np.random.default_rng((job.settings.seed, 3))
    kept: dict[str, list[np.ndarray]] = {}  # of each method [texts, layers, budgets, 2]
    for done, text in enumerate(job.texts.held_out):
        on_progress("compare", done, len(job.texts.held_out))
        half = len(text) // 2
        positions = half + np.sort(rng.permutation(len(text) - half)[:QUERIES])
        seen = prefill(job.model, text, positions.tolist(), room=job.room)
        for name, values in _kept_of_text(job, found, seen).items():
            kept.setdefault(name, []).append(values)
    on_progress("compare", len(job.texts.held_out), len(job.texts.held_out))
    sizes = Rivals(job.settings.bits, job.model.config.layers[job.layers[0]].key_size)
    read = {"exact": 2.0 * sizes.key_size}
    means = {name: np.mean(values, axis=0) for name, values in kept.items()}
    return {
        "bits": job.settings.bits,
        "variant": job.settings.variant,
        "pairs": sum(job.positions()) + len(job.texts.learned),
        "texts": len(job.texts.learned),
        "held_out": len(job.texts.held_out),
        "budgets": [1 / one_in for one_in in BUDGETS],
        "methods": [
            {
                "name": name,
                "bytes": read.get(name, sizes.nbytes),
                "recall": values.mean(axis=0)[:, 0].tolist(),
                "mass": values.mean(axis=0)[:, 1].tolist(),
            }
            for name, values in means.items()
        ],
        "layers": [
            {"layer": layer, "recall": {name: means[name][at, :, 0].tolist() for name in means}}
            for at, layer in enumerate(job.layers)
        ],
    }


def _kept_of_text(job: Job, found: list[Layer], seen: Seen) -> dict[str, np.ndarray]:
    """Recall and mass of each method, ``[layers, budgets, 2]`` by name."""
    rows: dict[str, list[Any]] = {}
    for layer, own in zip(job.layers, found, strict=True):
        spec = job.model.config.layers[layer]
        first = first_weights(spec.kv_heads, spec.key_size, job.settings, layer)
        hashes = {f"hata-{name}": w for name, w in own.weights.items()} | {"random": first}
        arrays = (seen.queries[layer], seen.positions, seen.keys(layer), hashes, own.axes)
        for name, values in jax.device_get(compare(*arrays, spec)).items():
            rows.setdefault(name, []).append(values)
    return {name: np.asarray(values) for name, values in rows.items()}


def _write(job: Job, found: list[Layer], report: dict[str, Any]) -> None:
    """The folder to be written, and what was kept until then goes."""
    done = job.work / "done"
    shutil.rmtree(done, ignore_errors=True)
    hashes: list[Any] = [None] * len(job.model.config.layers)
    for layer, own in zip(job.layers, found, strict=True):
        hashes[layer] = own.weights[job.settings.variant]
    made = {"pairs": report["pairs"], "settings": dataclasses.asdict(job.settings)}
    save_hashes(tuple(hashes), done, made)
    (done / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    curves = {v: [_curve(own.loss[v]) for own in found] for v in job.variants}
    (done / "curve.json").write_text(json.dumps(curves) + "\n")
    try:
        os.rename(done, job.out)
    except OSError as error:
        raise CheckpointError(f"{job.out} cannot be written: {error.strerror}") from error
    shutil.rmtree(job.work)


def _curve(loss: Terms) -> dict[str, list[float]]:
    """Loss terms to four digits."""
    return {name: [float(f"{x:.4g}") for x in values] for name, values in loss._asdict().items()}


def _write_whole(path: Path, content: bytes) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    os.rename(partial, path)
