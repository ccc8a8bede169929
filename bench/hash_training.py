"""Learning the hashes of a model: labels, draws and SGD of every layer, end to end.

The queries and keys are random, with a common part for each text, so that there is something to
learn; how fast learning is does not depend on them. Times are wall time of a layer, from the
queries and keys of its texts in the host's memory to its hashes there.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from bench.settings import Settings, bar, console
from bench.suite import Suite
from jspec.config import LayerSpec
from jspec.train.loss import HashTraining, first_weights
from jspec.train.recall import compare, principal_axes
from jspec.train.samples import pairs_of

LAYERS = 32
GROUP = 4  # query heads of a KV head
TEXTS = 12
QUERIES = 16  # of a text, for the recall of learned hashes


def run(settings: Settings) -> dict[str, Any]:
    """Learn hashes for the shape of Llama-3.1-8B."""
    small = settings.quick or jax.default_backend() == "cpu"
    spec = LayerSpec(2, 32, 32) if small else LayerSpec(8, 128, 128)
    layers, pairs = (2, 1200) if small else (LAYERS, 200_000)
    asked = HashTraining(bits=32 if small else 128)
    return {"rows": [_row(spec, _samples(spec, pairs), asked, layers, settings)]}


def _samples(spec: LayerSpec, pairs: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """A query ``[N, H]`` and keys ``[n, K, H]`` of each text."""
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(TEXTS):
        shape = (pairs // TEXTS, spec.kv_heads, spec.key_size)
        common = rng.standard_normal((spec.key_size,), np.float32)
        keys = rng.standard_normal(shape, np.float32) + common
        query = rng.standard_normal((GROUP * spec.kv_heads, spec.key_size), np.float32) + common
        samples.append((query.astype(np.float16), keys.astype(np.float16)))
    return samples


def _row(
    spec: LayerSpec,
    samples: list[tuple[np.ndarray, np.ndarray]],
    asked: HashTraining,
    layers: int,
    settings: Settings,
) -> dict[str, Any]:
    """Seconds of labelling and learning for each layer, after one run that only compiles."""
    from jspec.train.learn import learn

    case = {"layers": layers, "pairs": sum(len(keys) for _, keys in samples)}
    case |= {"K": spec.kv_heads, "H": spec.key_size, "R": asked.bits}
    row: dict[str, Any] = {"operation": "hash-training", "case": case, "name": "jspec"}
    if not settings.check:
        return row | {"checked": None, "reason": "not checked, so not timed"}
    label_s, learn_s = [], []
    weights = None
    with bar("hash-training", layers) as advance:
        for layer in range(-1, layers):
            begin = time.perf_counter()
            pairs = jax.block_until_ready(pairs_of(samples, spec, np.random.default_rng(0)))
            between = time.perf_counter()
            first = first_weights(spec.kv_heads, spec.key_size, asked, layer + 1)
            weights = np.asarray(learn(first, pairs, asked).weights)
            del pairs
            if layer >= 0:
                label_s.append(between - begin)
                learn_s.append(time.perf_counter() - between)
                advance()
    if not _check(spec, samples, weights, asked, layers):
        return row | {"checked": False, "reason": "learned hashes find no more than random ones"}
    total = sum(label_s) + sum(learn_s)
    return row | {"checked": True, "label_s": label_s, "learn_s": learn_s, "total_s": total}


def _check(
    spec: LayerSpec,
    samples: list[tuple[np.ndarray, np.ndarray]],
    weights: Any,
    asked: HashTraining,
    layer: int,
) -> bool:
    """Whether learned hashes have a higher recall on new queries than the initial ones."""
    hashes = {
        "first": first_weights(spec.kv_heads, spec.key_size, asked, layer),
        "learned": jnp.asarray(weights),
    }
    rng = np.random.default_rng(1)
    recall = dict.fromkeys(hashes, 0.0)
    for query, keys in samples:
        shape, common = (QUERIES, *query.shape), keys.mean(axis=(0, 1), dtype=np.float32)
        queries = rng.standard_normal(shape, np.float32) + common
        last = np.full(QUERIES, len(keys) - 1)
        recalls = compare(queries, last, keys, hashes, principal_axes(keys), spec)
        for name in hashes:
            recall[name] += float(recalls[name][-1].recall)
    return recall["learned"] > recall["first"]


def compare_rows(result: dict[str, Any], earlier: dict[str, Any]) -> int:
    """Write into each row its speedup over the earlier result; returns how many had one."""
    before = {str(row["case"]): row["total_s"] for row in earlier["rows"]}
    met = 0
    for row in result["rows"]:
        if str(row["case"]) in before and row["checked"]:
            row["vs_before"] = before[str(row["case"])] / row["total_s"]
            met += 1
    return met


def show(result: dict[str, Any]) -> None:
    """Print seconds of a layer and of all layers."""
    table = Table(title=f"hash-training: {result['machine']['device']}; seconds", box=None)
    for name in HEADINGS:
        table.add_column(name, justify="right")
    for row in result["rows"]:
        table.add_row(*cells(row))
    console().print(table)
    for row in result["rows"]:
        if "reason" in row:
            console().print(f"{row['name']}: {row['reason']}", markup=False)
        if "vs_before" in row:
            console().print(f"{row['vs_before']:.2f}x as fast as before")


HEADINGS = ("layers", "pairs", "K", "H", "R", "label", "learn", "all layers")


def cells(row: dict[str, Any]) -> list[str]:
    """A row under `HEADINGS`: medians of a layer, and the total."""
    case = [f"{row['case'][name]:,}" for name in HEADINGS[:5]]
    if not row["checked"]:
        return [*case, "", "", ""]
    medians = [f"{statistics.median(row[name]):.3f}" for name in ("label_s", "learn_s")]
    return [*case, *medians, f"{row['total_s']:.1f}"]


SUITE = Suite(
    "hash-training",
    "learning the hashes of a model of 32 layers from 200,000 pairs a layer",
    run,
    show,
    compare=compare_rows,
    custom_clocks=True,
)
