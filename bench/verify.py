"""Greedy verification: every backend and PyTorch, over the paper's grid and beyond."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from bench import clocks, point, rivals, table, workload
from bench.program import Absent, Source, bound, chosen, compile_all, shapes, sources
from bench.settings import Settings, bar
from jspec.ops.verify import VERIFY_GREEDY

TITLE = "greedy verification: every backend, and PyTorch eager and as a CUDA graph"
COLUMNS = ("B", "gamma", "alpha", "l2")
LOOPED = tuple(itertools.product((1, 32), (8, 128), (0.6,)))  # where the step clock runs too


def grid(settings: Settings) -> list[tuple[int, int, float]]:
    """Batch, gamma, alpha."""
    if settings.quick:
        return list(itertools.product((1, 32), (8, 128), (0.3, 0.6, 0.9)))
    batches, gammas = (1, 4, 16, 32, 128, 1024), (4, 8, 16, 32, 64, 128)
    return list(itertools.product(batches, gammas, (0.3, 0.6, 0.9)))


def run(settings: Settings) -> dict[str, Any]:
    return {"rows": _rows(settings)}


def _rows(settings: Settings) -> Iterator[point.Row]:
    cases = grid(settings)
    programs = compiled_verifies(sorted({case[:2] for case in cases}), settings)
    steps = _Steps(settings)
    with bar("verify", len(cases)) as advance:
        for batch, gamma, alpha in cases:
            tokens = workload.make_tokens(batch, gamma, alpha)
            arguments = tuple(map(jax.device_put, tokens.inputs))
            case = {"B": batch, "gamma": gamma, "alpha": alpha}
            best = chosen(VERIFY_GREEDY, arguments)
            here = [
                bound(name, program, arguments, checks(tokens), chosen=name == best)
                for (*shape, name), program in programs.items()
                if tuple(shape) == (batch, gamma)
            ]
            here += rivals.verify(tokens, settings)
            rows = point.measure("verify_greedy", case, here, settings)
            if (batch, gamma, alpha) in LOOPED and settings.check:
                steps.add(rows, arguments)
            yield from rows
            advance()


def compiled_verifies(
    batches_gammas: list[tuple[int, int]], settings: Settings
) -> dict[tuple[int, int, str], jax.stages.Compiled | Absent]:
    """Each backend of greedy verification for each ``(batch, gamma)``."""
    wanted = {}
    for batch, gamma in batches_gammas:
        arguments = shapes(workload.make_tokens(batch, gamma, 0.5).inputs)
        for name, source in sources(VERIFY_GREEDY, arguments, settings).items():
            wanted[batch, gamma, name] = source
    return compile_all("verify", wanted)


def checks(tokens: workload.Tokens) -> Callable[[Any], bool]:
    """Whether the first six outputs are the fields of `Verified`."""
    expected = workload.expected_verified(tokens)
    return lambda outputs: all(map(np.array_equal, outputs, expected))


class _Steps:
    """The step clock: the marginal time of verification inside a jitted loop."""

    def __init__(self, settings: Settings):
        self._settings = settings
        self._empty: float | None = None

    def add(self, rows: list[point.Row], arguments: tuple[Any, ...]) -> None:
        """Give the rows of backends that were right with these arguments their step samples."""
        here = {row["name"]: row for row in rows if row["checked"]}
        wanted = {}
        for name, source in sources(VERIFY_GREEDY, shapes(arguments), self._settings).items():
            if name in here and isinstance(source, Source):
                short, long = clocks.loops(source)
                wanted |= {(name, "short"): short, (name, "long"): long}
        empty = self._empty_step()
        compiled = compile_all("loops", wanted)
        for name in {name for name, _ in wanted}:
            calls = [
                partial(loop, *arguments)
                for which in ("short", "long")
                if not isinstance(loop := compiled[name, which], Absent)
            ]
            if len(calls) == 2:
                samples = clocks.step(*calls, empty=empty, repeats=self._settings.repeats)
                here[name]["step_ns"] = samples

    def _empty_step(self) -> float:
        if self._empty is None:
            one = jax.device_put(np.int32(0))
            calls = [partial(jax.jit(s.function), one) for s in clocks.counting_loops()]
            self._empty = clocks.empty_step(*calls, repeats=self._settings.repeats)
        return self._empty


def show(result: dict[str, Any]) -> None:
    table.show(result, COLUMNS)
