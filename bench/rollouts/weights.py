"""The time of `jspec.Engine.update`, against a copy of the same weights.

*taken*: new weights of the engine's dtype, which it takes as they are. *cast*: float32 ones, as a
trainer has them. *copy*: all weights read and written by one program.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jspec
from bench.cases import Case
from bench.decode.catalogue import MODELS
from bench.decode.shapes import drawn, weight_bytes
from bench.point import Row, row
from bench.settings import Settings
from bench.suite import Benchmark

TAKEN, CAST, COPY = "taken", "cast", "copy"
REPEATS = 5
# layers: how many of the model's first ones; 0: all.
DEFAULT: Case = {"model": "smollm2-135m", "layers": 0}


def seconds_of(call: Callable[[], Any]) -> list[float]:
    """Of calls, until the device has ended, after two that may compile."""
    samples = []
    for _ in range(2 + REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        samples.append(time.perf_counter() - begin)
    return samples[2:]


def rows(case: Case, settings: Settings) -> Iterator[Row]:
    """A row for each kind of new weights, and for the copy."""
    model = drawn(case["model"], case["layers"])
    engine = jspec.Engine(model, slots=4, capacity=256, draft=None)
    size, count = weight_bytes(model), len(jax.tree.leaves(nnx.state(model)))
    copy = jax.jit(lambda weights: jax.tree.map(jnp.copy, weights))
    first = nnx.state(model)

    def updated(weights: Any) -> Any:
        engine.update(weights)
        return engine.model

    for name in (COPY, TAKEN, CAST):
        if not settings.wants(name):
            continue
        # One and the same would be no change.
        new = jax.tree.map(lambda x: x + 1, first) if name != COPY else first
        expected, moved = new, {TAKEN: 0}.get(name, 2 * size)
        if name == CAST:
            new = jax.tree.map(lambda x: x.astype(jnp.float32), new)
            moved = size + weight_bytes(new)
        call = (lambda: copy(first)) if name == COPY else (lambda new=new: updated(new))
        seconds = seconds_of(call)
        result = first if name == COPY else nnx.state(engine.model)
        same = map(jnp.array_equal, jax.tree.leaves(result), jax.tree.leaves(expected))
        checked = all(bool(x) for x in same)
        measured = {"arrays": count, "ms": 1e3 * statistics.median(seconds), "seconds": seconds}
        measured["GB_per_s"] = moved / statistics.median(seconds) / 1e9
        yield row("update", case, name, checked=checked, **measured)
        del new, expected, result


UPDATE = Benchmark(
    name="update",
    names=(TAKEN, CAST, COPY),
    rows=rows,
    default=DEFAULT,
    choices={"model": tuple(MODELS)},
    gpu=["", "model=qwen3-8b"],
    quick=[""],
    cpu=["layers=2"],
)
