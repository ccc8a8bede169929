"""Whole steps on a KVP x TPA mesh: Helix against tensor parallelism, plain and speculative.

Weights, keys and values are random. The first layers on a mesh are compared with one device by
`bench.helix.check` before anything is timed. Clock: *step* is the marginal wall time of a jitted
chunk of steps in a sequence of chunks, divided by its steps.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import point
from bench.cases import Case
from bench.decode.check import LAYERS
from bench.decode.running import Loop, device_bytes, memory_of, rewound, too_large
from bench.drafters import BACKENDS
from bench.helix import check, states
from bench.helix.mesh import too_few_devices
from bench.helix.states import filled, helix_of, model_of, shape_of, step_config
from bench.program import failure
from bench.settings import Settings
from bench.suite import Benchmark
from jspec.decode.state import DecodeState
from jspec.decode.step import decode_chunk
from jspec.dispatch import record_choices
from jspec.sharding import bytes_on_device


def rows(case: Case, settings: Settings) -> Iterator[point.Row]:
    """A step by the strategy of a case."""
    yield _row(case)
    gc.collect()  # a failure's traceback may refer to a cache


def _row(case: Case) -> point.Row:
    helix = helix_of(case)
    name = case["strategy"] if helix.devices > 1 else "one device"
    row = functools.partial(point.row, "step", case, name)
    if reason := too_few_devices(helix):
        return row(checked=None, reason=reason)
    try:
        reason, error = check.check(case)
        if reason:
            return row(checked=False, reason=reason, error=error)
        model, config = model_of(case), step_config(case)
        # Compiled while no cache takes the memory that compiling needs.
        shapes = states.shapes_of(filled(model, case, config))
        with record_choices() as choices:
            program = decode_chunk.lower(model, shapes, config, states.STEPS).compile()
        state = filled(model, case, config)
        checked = f"{min(LAYERS, shape_of(case).num_layers)} layers"
        about = {"backends": list(map(dataclasses.asdict, choices))} if choices else {}
        about |= measured(case, model, state, program)
        return row(checked=checked, error=error, **about)
    except Exception as error:
        return row(checked=False, reason=failure(name, error).reason)


def measured(case: Case, model: Any, state: DecodeState, program: Any) -> dict[str, Any]:
    """Times of a step, the tokens it commits, and the largest batch; or why it cannot run."""
    weights, cached = bytes_on_device(model), bytes_on_device(state.cache.columns)
    memory = memory_of(program) | {"weight_bytes": weights, "cache_bytes": cached}
    about: dict[str, Any] = {"memory": memory, "fit": largest_batch(case["B"], memory)}
    if reason := too_large(weights + cached, memory):
        return about | {"reason": reason}
    # After this chunk, a drafter has picks from this context.
    state, _ = program(model, rewound(state, case["S"]))
    start = case["S"], jax.tree.map(jnp.copy, state.draft)
    state, record = program(model, rewound(state, *start))
    about["committed"] = float(np.asarray(record.committed).mean())
    loop = Loop(program, model, state, *start)
    del state
    samples = loop.step_ns(states.STEPS)
    return about | {"step_ns": samples}


def largest_batch(batch: int, memory: dict[str, int]) -> int | None:
    """The largest batch that fits in memory, extrapolated from ``batch`` rows; None if unknown.

    Assumes that temporary memory grows with the batch.
    """
    limit = device_bytes("bytes_limit")
    row = (memory["cache_bytes"] + memory.get("temp_bytes", 0)) / batch
    return None if limit is None else max(int((limit - memory["weight_bytes"]) // row), 0)


# At a million tokens, layouts of more GPUs, and shapes of fewer KV heads than GPUs, whose cache
# tensor parallelism copies.
LONG = [
    f"shape={shape},S=1024K,{how}"
    for shape, layouts in (
        ("llama-3.1-8b", ("kvp={n}", "kvp={half},tpa=2", "tpa={n}")),
        ("qwen3-8b-2kv", ("kvp={n}", "kvp={half},tpa=2", "kvp={half},tpa=2,strategy=tp")),
        ("qwen3-8b-1kv", ("kvp={n}", "kvp={n},strategy=tp")),
    )
    for n in (4, 8)
    for how in (layout.format(n=n, half=n // 2) for layout in layouts)
]
LONG += [f"shape=qwen3-8b-1kv,S=1024K,{how}" for how in ("kvp=2", "kvp=2,strategy=tp")]


def defaults() -> list[str]:
    """The cases of two GPUs, and of four and eight where there are as many."""
    meshes, texts = ("kvp=2", "tpa=2"), []
    for draft in states.CHOICES["draft"]:
        texts += [f"{mesh},draft={draft}" for mesh in ("kvp=1", *meshes)]
        texts += [f"S=1024K,{mesh},draft={draft}" for mesh in meshes]
    texts += ["kvp=2,strategy=medha", "kvp=2,tpa=1,exchange=pallas"]
    texts += [f"kvp=2,draft=verify,backends={name}" for name in BACKENDS[1:]]
    return texts + [f"B=4,{how}" for how in (*meshes, "kvp=2,overlap=2")] + LONG


STEP = Benchmark(
    name="step",
    rows=rows,
    default=states.DEFAULT,
    choices=states.CHOICES,
    complete=states.checked,
    gpu=defaults(),
    quick=[f"{mesh},draft={draft}" for mesh in ("kvp=2", "tpa=2") for draft in ("plain", "vegas")],
    cpu=[
        f"shape=tiny,B=2,S=256,gamma=3,{mesh},draft={draft}"
        for mesh in ("kvp=2", "tpa=2")
        for draft in ("verify", "vegas")
    ],
)
