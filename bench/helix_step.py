"""Whole steps on a KVP x TPA mesh: Helix against tensor parallelism, plain and speculative.

Weights, keys and values are random. The first layers on a mesh are compared with one device by
`bench.helix_check` before anything is timed. Clock: *step* is the marginal wall time of
a jitted chunk of steps in a sequence of chunks, divided by its steps.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.markup import escape
from rich.table import Table

from bench import clocks, helix_check, helix_state, point
from bench.cases import Case, kilo
from bench.decode.check import LAYERS, counted
from bench.decode.running import CHUNKS, Loop, device_bytes, memory_of, too_large
from bench.decode.tables import compare
from bench.helix_programs import Programs
from bench.helix_state import (
    alone,
    case,
    filled,
    helix_of,
    model_of,
    rewound,
    shape_of,
    step_config,
)
from bench.program import failure
from bench.settings import Settings, bar, console
from bench.suite import Suite
from bench.table import times
from jspec.decode.state import DecodeState
from jspec.sharding import bytes_on_device

COLUMNS = ("shape", "B", "S", "draft", "kvp", "tpa")
REPEATS = 5


def grid(settings: Settings) -> list[Case]:
    """The requested cases, or those of two devices."""
    if settings.cases:
        return [case(text) for text in settings.cases]
    meshes, drafts = ("kvp=2", "tpa=2"), ("plain", "vegas", "verify")
    if jax.default_backend() != "gpu":
        pairs = itertools.product(meshes, drafts[:2])
        return [case(f"shape=tiny,B=2,S=256,gamma=3,{mesh},draft={x}") for mesh, x in pairs]
    texts = []
    for draft in drafts:
        texts += [f"{mesh},draft={draft}" for mesh in ("kvp=1", *meshes)]
        if not settings.quick:
            texts += [f"S=1024K,{mesh},draft={draft}" for mesh in meshes]
    if not settings.quick:
        texts += ["kvp=2,strategy=medha", *(f"B=4,{how}" for how in (*meshes, "kvp=2,overlap=2"))]
    return [case(text) for text in texts]


def run(settings: Settings) -> dict[str, Any]:
    return {"steps": helix_state.STEPS, "rows": _rows(settings)}


def _rows(settings: Settings) -> Iterator[point.Row]:
    cases = grid(settings)
    with ThreadPoolExecutor() as pool:
        programs = Programs(pool)
        if settings.check:
            programs.prepare([x for x in cases if helix_of(x).devices <= jax.device_count()])
        with bar("helix-step", len(cases)) as advance:
            for case in cases:
                yield _row(case, settings, programs)
                gc.collect()  # a failure's traceback may hold a cache
                advance()


def check(case: Case, programs: Programs) -> tuple[str | None, dict[str, Any]]:
    """Why the first layers are wrong, or None, and the error of their logits."""
    one, right = programs.reference(case)
    mesh = one if case == alone(case) else programs.computed(case, one)
    reason, error = helix_check.judged(mesh, one, right)
    return reason, {"error": error}


def _row(case: Case, settings: Settings, programs: Programs) -> point.Row:
    helix = helix_of(case)
    name = case["strategy"] if helix.devices > 1 else "alone"
    name += f", {case['overlap']} chunks" if case["overlap"] > 1 else ""
    name += "" if case["exchange"] == "xla" else f", by {case['exchange']}"
    row = functools.partial(point.row, "step", case, name)
    if jax.device_count() < helix.devices:
        reason = f"it needs {helix.devices} devices, and {jax.device_count()} are here"
        return row(checked=None, reason=reason)
    if not settings.check:
        return row(checked=None, reason="not checked, so not timed")
    try:
        reason, about = check(case, programs)
        if reason:
            return row(checked=False, reason=reason, **about)
        model = model_of(case)
        state = filled(model, case, step_config(case))
        checked = counted(slice(min(LAYERS, shape_of(case).num_layers)))
        return row(checked=checked, **about, **measured(case, model, state, programs.chunk(case)))
    except Exception as error:
        return row(checked=False, reason=failure(name, error).reason)


def measured(case: Case, model: Any, state: DecodeState, program: Any) -> dict[str, Any]:
    """Times of a step, the tokens it commits, and the largest batch; or why it cannot run."""
    weights, cached = bytes_on_device(model), bytes_on_device(state.cache.columns)
    memory = memory_of(program) | {"weight_bytes": weights, "cache_bytes": cached}
    about = memory | {"largest_batch": largest_batch(case["B"], memory)}
    if reason := too_large(weights + cached, memory):
        return about | {"reason": reason}
    # After this chunk, a drafter has picks from this context.
    state, _ = program(model, rewound(case, state))
    draft_state = jax.tree.map(jnp.copy, state.draft)
    state, record = program(model, rewound(case, state))
    about["committed"] = float(np.asarray(record.committed).mean())

    def restarted(state: DecodeState) -> DecodeState:
        # A chunk consumes its state.
        return dataclasses.replace(rewound(case, state), draft=jax.tree.map(jnp.copy, draft_state))

    loop = Loop(model, restarted, state)
    del state
    short, long = (functools.partial(loop.run, program, count) for count in CHUNKS)
    samples = clocks.step(short, long, 0.0, REPEATS, lengths=CHUNKS, warmups=1)
    return about | {"step_ns": [round(ns / helix_state.STEPS) for ns in samples]}


def largest_batch(batch: int, memory: dict[str, int]) -> int | None:
    """The largest batch that fits in memory, extrapolated from ``batch`` rows; None if unknown.

    Assumes that temporary memory grows with the batch.
    """
    limit = device_bytes("bytes_limit")
    row = (memory["cache_bytes"] + memory.get("temp_bytes", 0)) / batch
    return None if limit is None else max(int((limit - memory["weight_bytes"]) // row), 0)


def cells(row: point.Row) -> tuple[str, ...]:
    """A row under `HEADINGS`."""
    case = row["case"] | {"S": kilo(row["case"]["S"])}
    case["draft"] += "" if case["draft"] == "plain" else f" {case['gamma']}"
    place = *(str(case[name]) for name in COLUMNS), row["name"]
    step = point.spread(row, "step")
    # Earlier results have no error: they compared tokens.
    error = f"{max(row['error'].values()):.1%}" if "error" in row else ""
    if step is None:
        return *place, row.get("reason") or "not timed", "", "", error, ""
    largest = row["largest_batch"]
    committed = row["committed"]
    token = step.median / committed / 1e3
    shown = f"{step.median / 1e3:,.3f}", f"{committed:.2f}", f"{token:,.3f}"
    return *place, *shown, error, "" if largest is None else f"{largest}"


HEADINGS = (*COLUMNS, "name", "step ms", "tokens", "ms/token", "error", "fit")
FOOT = (
    "step: ms of a step, the median; tokens: committed by a step in each row, of random weights, "
    "which accept little; error: of the logits of given tokens in the first layers at the worst "
    "position, against one device's, and of one device against float32; earlier results, which "
    "compared tokens, have none; fit: rows in the memory of a device by the program's plan"
)


def show(result: dict[str, Any]) -> None:
    table = Table(title=result["machine"]["device"], padding=(0, 1, 0, 0), box=None)
    has_ratios = any("ratio" in row for row in result["rows"])
    for heading in (*HEADINGS, *(["vs before"] if has_ratios else [])):
        table.add_column(heading, justify="left" if heading == "name" else "right")
    reasons: list[str] = []
    for row in result["rows"]:
        if (reason := row.get("reason")) and reason not in reasons:
            reasons.append(reason)
        mark = f"[{reasons.index(reason) + 1}]" if reason else None
        ratio = [times(row["ratio"])] if "ratio" in row else []
        table.add_row(*map(escape, (*cells(row | {"reason": mark}), *ratio)))
    console().print(table)
    for index, reason in enumerate(reasons, 1):
        console().print(f"[{index}] {reason}", markup=False)
    console().print(FOOT, markup=False)


SUITE = Suite(
    "helix-step",
    "whole steps by KVP x TPA devices, Helix against tensor parallelism, plain and speculative",
    run,
    show,
    compare=compare,
    custom_clocks=True,
    case=case,
)
