"""A resumable run of hash training, from texts to a folder of hashes.

Intermediate results are stored in a folder next to the output: the queries and keys of each text,
layer by layer, then the hashes of each layer. So the host holds the pairs of one layer at a time,
and the device those and the cache of one text.
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

from jspec.config import LayerSpec
from jspec.models.errors import CheckpointError
from jspec.models.files import read_json
from jspec.models.hashes import save_hashes
from jspec.train.attention import QUERIES, learn_attention, views_of
from jspec.train.attention import Learned as LearnedAttention
from jspec.train.learn import Learned, learn
from jspec.train.loss import VARIANTS, HashTraining, first_weights
from jspec.train.recall import BUDGETS, Rivals, compare, principal_axes
from jspec.train.samples import PrefilledText, pairs_of, prefill, query_position
from jspec.typing import Array, Model

STORED_DTYPE = np.float16  # of queries and keys on disk
Loss = dict[str, np.ndarray]  # terms of each step, by name
Tokens = Sequence[int]
OnProgress = Callable[[str, int, int], None]  # name of the stage, units done, units in all


class Texts(NamedTuple):
    """Token ids of the texts to learn from, and of the held-out texts of the report."""

    learned: Sequence[Tokens]
    held_out: Sequence[Tokens]


class Layer(NamedTuple):
    """The trained hashes of a layer.

    Attributes:
        weights: float32 ``[K, H, R]`` by loss variant.
        loss: terms of each step by loss variant.
        axes: float32 ``[K, H, H]``, principal axes of the keys, for the report.
        center: float32 ``[K, H]``, mean of the keys, for the report.
    """

    weights: dict[str, np.ndarray]
    loss: dict[str, Loss]
    axes: np.ndarray
    center: np.ndarray


@dataclasses.dataclass(frozen=True)
class Job:
    """The settings of a training run.

    Attributes:
        model: the model whose keys are hashed.
        texts: each of ``texts.learned`` gives one query to the variants of the paper, and `QUERIES`
            queries to the variant ``attention``.
        out: the folder to write, which must not exist.
        settings: how hashes are learned.
        compares: whether to also learn by the other loss variants, for the report alone.
    """

    model: Model
    texts: Texts
    out: Path
    settings: HashTraining
    compares: bool = False

    @property
    def work(self) -> Path:
        """The folder of intermediate results, deleted at the end."""
        return self.out.with_name(f".{self.out.name}.partial")

    @property
    def variants(self) -> list[str]:
        """The loss variants to learn; the first one is written to ``out``."""
        return sorted(VARIANTS if self.compares else (self.settings.variant,), key=self._is_other)

    def _is_other(self, variant: str) -> bool:
        return variant != self.settings.variant

    @property
    def layers(self) -> list[int]:
        """Indices of the layers to hash: a layer with a sliding window is read whole."""
        specs = self.model.config.layers
        return [layer for layer, spec in enumerate(specs) if spec.window is None]

    @property
    def room(self) -> int:
        """Tokens of the longest text."""
        return max(len(text) for part in self.texts for text in part)

    def positions(self) -> list[np.ndarray]:
        """Positions int32 ``[QUERIES]`` of the queries of each learned text, in its second half.

        Positions repeat in short texts. The variants of the paper use the first one.
        """
        rng = np.random.default_rng((self.settings.seed, 1))
        return [
            np.array([query_position(len(text), rng) for _ in range(QUERIES)], np.int32)
            for text in self.texts.learned
        ]

    @property
    def pairs(self) -> int:
        """The number of pairs of a query and a key that a layer is learned from."""
        asked = QUERIES if self.settings.variant == "attention" else 1
        return sum(int((places[:asked] + 1).sum()) for places in self.positions())


def run(job: Job, on_progress: OnProgress = lambda what, done, total: None) -> dict[str, Any]:
    """Learn the hashes and write them to ``job.out``.

    A run that was stopped continues if settings, model and texts are the same.

    Args:
        job: the settings of the run.
        on_progress: called as ``on_progress(stage, done, total)``.

    Returns:
        The report, as in ``report.json``.

    Raises:
        CheckpointError: ``job.out`` exists or cannot be written, or the intermediate results are
            of a different run.
        ValueError: queries or keys of the model are not finite, or no layer needs hashes.
    """
    begin = time.perf_counter()
    if os.path.lexists(job.out):
        raise CheckpointError(f"{job.out} exists; choose another folder, none is overwritten")
    if not job.layers:
        raise ValueError("every layer of the model has a sliding window: none needs hashes")
    _claim(job)
    _collect(job, on_progress)
    collected = time.perf_counter()
    learned_layers = []
    for done, layer in enumerate(job.layers):
        on_progress("learn layers", done, len(job.layers))
        learned_layers.append(_layer(job, layer))
    on_progress("learn layers", len(job.layers), len(job.layers))
    learned = time.perf_counter()
    report = _report(job, learned_layers, on_progress)
    report["seconds"] = {"collect": collected - begin, "learn": learned - collected}
    _write(job, learned_layers, report)
    return report


def _claim(job: Job) -> None:
    """Create the folder of intermediate results, or check that it belongs to this run."""
    plan = _plan(job)
    path = job.work / "plan.json"
    try:
        job.work.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _write_whole(path, json.dumps(plan).encode())
    except OSError as error:
        raise CheckpointError(f"{job.work} cannot be written: {error.strerror}") from error
    stored_plan = read_json(path)
    for name, value in plan.items():
        if stored_plan.get(name) != value:
            raise CheckpointError(
                f"{job.work} keeps what a run with other {name} has done; run with those again, or "
                "delete that folder to start over"
            )


def _plan(job: Job) -> dict[str, Any]:
    """What must be equal for a run to continue a stopped one."""
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
    """Store the queries and the keys of each text, one file per layer."""
    positions = job.positions()
    total = sum(int(places.max()) + 1 for places in positions)
    before = 0
    for index, (text, places) in enumerate(zip(job.texts.learned, positions, strict=True)):
        place = job.work / f"text-{index}"
        if not place.exists():

            def on_piece(done: int, _: int, before: int = before) -> None:
                on_progress("read texts", before + done, total)

            prefilled = prefill(job.model, text, places.tolist(), room=job.room, on_piece=on_piece)
            partial = place.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            for layer in job.layers:
                queries = _to_stored(prefilled.queries[layer], layer)
                keys = _to_stored(np.asarray(prefilled.keys(layer))[: places.max() + 1], layer)
                np.savez(partial / f"{layer}.npz", queries=queries, keys=keys)
            os.rename(partial, place)
        before += int(places.max()) + 1
        on_progress("read texts", before, total)


def _to_stored(x: np.ndarray, layer: int) -> np.ndarray:
    with np.errstate(over="ignore"):  # checked below
        stored = x.astype(STORED_DTYPE)
    if not np.isfinite(stored).all():
        raise ValueError(
            f"queries or keys of layer {layer} are not finite, or beyond float16's 65504: the "
            "model gives no attention to learn from"
        )
    return stored


def _layer(job: Job, layer: int) -> Layer:
    """Learn a layer, or read its stored result."""
    path = job.work / f"layer-{layer}.npz"
    if not path.exists():
        samples = _samples(job, layer)
        spec = job.model.config.layers[layer]
        first = first_weights(spec.kv_heads, spec.key_size, job.settings, layer)
        keys = np.concatenate([keys for *_, keys in samples]).astype(np.float32)
        arrays: dict[str, Any] = {"axes": principal_axes(keys), "center": keys.mean(axis=0)}
        for variant in job.variants:
            settings = dataclasses.replace(job.settings, variant=variant)
            learned = _learned(first, samples, spec, settings)
            arrays[variant] = np.asarray(learned.weights)
            arrays |= {f"{variant}.{n}": np.asarray(x) for n, x in learned.loss._asdict().items()}
            if not np.isfinite(arrays[variant]).all():
                raise ValueError(
                    f"the hashes of layer {layer} diverged: lower rate={job.settings.rate}"
                )
        partial = path.with_suffix(".partial.npz")
        np.savez(partial, **arrays)
        os.rename(partial, path)
    with np.load(path) as stored:
        loss = {
            v: {n[len(v) + 1 :]: stored[n] for n in stored if n.startswith(f"{v}.")}
            for v in job.variants
        }
        weights = {v: stored[v] for v in job.variants}
        return Layer(weights, loss, stored["axes"], stored["center"])


Sample = tuple[np.ndarray, np.ndarray, np.ndarray]


def _samples(job: Job, layer: int) -> list[Sample]:
    """For each text, queries ``[M, N, H]``, their positions ``[M]`` and keys ``[n, K, H]``."""
    samples = []
    for index, places in enumerate(job.positions()):
        with np.load(job.work / f"text-{index}" / f"{layer}.npz") as stored:
            samples.append((stored["queries"], places, stored["keys"]))
    return samples


def _learned(
    first: Array, samples: list[Sample], spec: LayerSpec, settings: HashTraining
) -> Learned | LearnedAttention:
    """Learn a layer by the variant of ``settings``."""
    rng = np.random.default_rng((settings.seed, 2))
    if settings.variant == "attention":
        return learn_attention(first, views_of(samples, spec, rng), settings)
    # The paper takes one query of a text, with all keys up to its own.
    pairs = [(queries[0], keys[: places[0] + 1]) for queries, places, keys in samples]
    return learn(first, pairs_of(pairs, spec, rng), settings)


def _report(job: Job, learned_layers: list[Layer], on_progress: OnProgress) -> dict[str, Any]:
    """Recall and mass of the hashes over the held-out texts, with those of other methods."""
    rng = np.random.default_rng((job.settings.seed, 3))
    quality: dict[str, list[np.ndarray]] = {}  # of each method [texts, layers, budgets, 2]
    for done, text in enumerate(job.texts.held_out):
        on_progress("compare", done, len(job.texts.held_out))
        half = len(text) // 2
        positions = half + np.sort(rng.permutation(len(text) - half)[:QUERIES])
        prefilled = prefill(job.model, text, positions.tolist(), room=job.room)
        for name, values in _quality_of_text(job, learned_layers, prefilled).items():
            quality.setdefault(name, []).append(values)
    on_progress("compare", len(job.texts.held_out), len(job.texts.held_out))
    sizes = Rivals(job.settings.bits, job.model.config.layers[job.layers[0]].key_size)
    read = {"exact": 2.0 * sizes.key_size}
    means = {name: np.mean(values, axis=0) for name, values in quality.items()}
    return {
        "bits": job.settings.bits,
        "variant": job.settings.variant,
        "pairs": job.pairs,
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


def _quality_of_text(
    job: Job, learned_layers: list[Layer], prefilled: PrefilledText
) -> dict[str, np.ndarray]:
    """Recall and mass of each method, ``[layers, budgets, 2]`` by name."""
    rows: dict[str, list[Any]] = {}
    for layer, learned in zip(job.layers, learned_layers, strict=True):
        spec = job.model.config.layers[layer]
        first = first_weights(spec.kv_heads, spec.key_size, job.settings, layer)
        hashes = {f"hata-{name}": w for name, w in learned.weights.items()} | {"random": first}
        arrays = (
            prefilled.queries[layer],
            prefilled.positions,
            prefilled.keys(layer),
            hashes,
            learned.axes,
            learned.center,
        )
        for name, values in jax.device_get(compare(*arrays, spec)).items():
            rows.setdefault(name, []).append(values)
    return {name: np.asarray(values) for name, values in rows.items()}


def _write(job: Job, learned_layers: list[Layer], report: dict[str, Any]) -> None:
    """Write ``job.out``, and delete the intermediate results."""
    done = job.work / "done"
    shutil.rmtree(done, ignore_errors=True)
    hashes: list[Any] = [None] * len(job.model.config.layers)
    for layer, learned in zip(job.layers, learned_layers, strict=True):
        hashes[layer] = learned.weights[job.settings.variant]
    training = {"pairs": report["pairs"], "settings": job.settings.used}
    save_hashes(tuple(hashes), done, training, job.model)
    (done / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    curves = {v: [_curve(learned.loss[v]) for learned in learned_layers] for v in job.variants}
    (done / "curve.json").write_text(json.dumps(curves) + "\n")
    try:
        os.rename(done, job.out)
    except OSError as error:
        raise CheckpointError(f"{job.out} cannot be written: {error.strerror}") from error
    shutil.rmtree(job.work)


def _curve(loss: Loss) -> dict[str, list[float]]:
    """Loss terms to four digits."""
    return {name: [float(f"{x:.4g}") for x in values] for name, values in loss.items()}


def _write_whole(path: Path, content: bytes) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    os.rename(partial, path)
