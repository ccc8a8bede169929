"""Verification fused with packing, against every pipeline of two steps.

Every backend of verification may be followed by every backend of packing. All are timed alone at
each shape; the `PAIRS` whose parts add up to the least then run as one jitted program and are what
a fused backend has to beat.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from bench import ceilings, pack, point, regret, table, workload
from bench.program import (
    Absent,
    Program,
    Source,
    bound,
    chosen,
    compile_all,
    shapes,
    sources,
)
from bench.rivals import fused as rivals
from bench.settings import Settings, bar
from bench.suite import Suite
from bench.verify import checks, compiled_verifies
from jspec.ops.fused import VERIFY_AND_PACK
from jspec.ops.packing import PACK
from jspec.ops.verify import VERIFY_GREEDY

COLUMNS = pack.COLUMNS
PAIRS = 2
PAPERS_BATCHES = (4, 32)  # batches that the paper also times at alpha 0.3
Shape = pack.Shape


def grid(settings: Settings) -> list[Shape]:
    if settings.quick:
        return list(itertools.product((32,), (8, 128), (128, 2048)))
    whole = itertools.product((1, 4, 32, 256, 1024), (8, 128), (128, 512, 1024, 2048))
    between = itertools.product((32,), (4, 16, 32, 64), (1024,))
    return [shape for shape in (*whole, *between) if pack.fits(shape)]


def run(settings: Settings) -> dict[str, Any]:
    return {"ceilings": ceilings.rows(settings), "rows": _packing(settings)}


def _inputs(shape: Shape, alpha: float) -> tuple[workload.Tokens, np.ndarray]:
    return workload.make_tokens(*shape[:2], alpha), workload.make_kv(*shape)


def _shapes(shape: Shape) -> tuple[Any, ...]:
    """Of the arguments of `jspec.ops.verify_and_pack`."""
    tokens = workload.make_tokens(*shape[:2], 0.5)
    return *shapes(tokens.inputs), jax.ShapeDtypeStruct(shape, np.float16)


def _packing(settings: Settings) -> Iterator[point.Row]:
    grid_shapes = grid(settings)
    sources_by_key: dict[tuple[Shape, str], Source | Absent] = {}
    for shape in grid_shapes:
        for name, source in sources(VERIFY_AND_PACK, _shapes(shape), settings).items():
            sources_by_key[shape, name] = source
    programs = compile_all("fused", sources_by_key)
    verifies = compiled_verifies(sorted({shape[:2] for shape in grid_shapes}), settings)
    programs |= compile_all("pairs", _pairs(grid_shapes, verifies, settings))

    cases = list(itertools.product(grid_shapes, pack.alphas(settings)))
    with bar("fused", len(cases)) as advance:
        for shape, alpha in cases:
            tokens, kv = _inputs(shape, alpha)
            expected = workload.expected_packed(kv, tokens.accepted)
            arguments = tuple(map(jax.device_put, (*tokens.inputs, kv)))
            best = chosen(VERIFY_AND_PACK, arguments)
            check = _both(checks(tokens), pack.checks(expected))
            bounds = [
                bound(name, program, arguments, check, chosen=name == best)
                for (where, name), program in programs.items()
                if where == shape
            ]
            if alpha == pack.RIVALS_ALPHA or (shape[0] in PAPERS_BATCHES and alpha == 0.3):
                ready = verifies.get((*shape[:2], "cuda"))
                start = partial(ready, *arguments[:4]) if callable(ready) else None
                bounds += rivals.two_step(tokens, kv, expected[0], start, settings)
            yield from point.measure(
                "verify_and_pack",
                _case(shape, alpha),
                bounds,
                settings,
                states=pack.STATES,
                clocks=pack.clocks(alpha),
                moved=2 * expected[0].nbytes,
            )
            advance()


def _case(shape: Shape, alpha: float) -> dict[str, Any]:
    return dict(zip(("B", "gamma", "alpha", "D"), (*shape[:2], alpha, shape[2]), strict=True))


def _both(*parts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda outputs: all(part(outputs) for part in parts)


def _pairs(
    grid_shapes: list[Shape],
    verifies: dict[tuple[int, int, str], Any],
    settings: Settings,
) -> dict[tuple[Shape, str], Source | Absent]:
    """The pipelines whose parts, each timed alone at alpha 0.6, take the least time."""
    packs = pack.compiled_packs(grid_shapes, settings)
    quickly = Settings(quick=True, check=settings.check)
    sources_by_key: dict[tuple[Shape, str], Source | Absent] = {}
    verify_times: dict[tuple[int, int], dict[str, float]] = {}
    with bar("time parts", len(grid_shapes)) as advance:
        for shape in grid_shapes:
            tokens, kv = _inputs(shape, 0.6)
            arguments = tuple(map(jax.device_put, tokens.inputs))
            if shape[:2] not in verify_times:
                bounds = [
                    bound(name, program, arguments, checks(tokens))
                    for (*where, name), program in verifies.items()
                    if tuple(where) == shape[:2]
                ]
                verify_times[shape[:2]] = _medians(bounds, quickly)
            expected = workload.expected_packed(kv, tokens.accepted)
            kv_and_counts = (jax.device_put(kv), jax.device_put(tokens.accepted))
            bounds = [
                bound(name, program, kv_and_counts, pack.checks(expected))
                for (where, name), program in packs.items()
                if where == shape
            ]
            pack_times = _medians(bounds, quickly)
            product = itertools.product(verify_times[shape[:2]].items(), pack_times.items())
            ranked = sorted((a[1] + b[1], a[0], b[0]) for a, b in product)
            for _, first, second in ranked[:PAIRS]:
                name = f"{first}+{second}"
                sources_by_key[shape, name] = Source(_pipeline(first, second), _shapes(shape))
            advance()
    return sources_by_key


def _medians(programs: list[Program | Absent], settings: Settings) -> dict[str, float]:
    """Microseconds of each program that ran and was right."""
    clocks = ("device",) if point.DEVICE.reason is None else ("wall",)
    rows = point.measure("part", {}, programs, settings, clocks=clocks)
    times = {r["name"]: point.best_clock(r) for r in rows if r["checked"]}
    return {name: time.median for name, time in times.items() if time is not None}


def _pipeline(first: str, second: str) -> Callable[..., Any]:
    def run(*arguments: Any) -> tuple[Any, ...]:
        verified = VERIFY_GREEDY.backend(first).run(*arguments[:4])
        return *verified, *PACK.backend(second).run(arguments[4], verified[0])

    return run


def show(result: dict[str, Any]) -> None:
    table.show(result, COLUMNS)
    regret.show(result["rows"])


SUITE = Suite(
    "fused",
    "verification fused with packing, against every pipeline of two steps",
    run,
    show,
    (VERIFY_AND_PACK, VERIFY_GREEDY, PACK),
    rivals.NAMES,
)
