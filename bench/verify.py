"""Greedy verification: every backend and PyTorch, over the paper's grid and beyond."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from bench import point, table, workload
from bench.clocks import StepClock
from bench.program import Absent, bound, chosen, compile_all, shapes, sources
from bench.rivals import verify as rivals
from bench.settings import Settings, bar
from bench.suite import Suite
from jspec.ops.verify import VERIFY_GREEDY

COLUMNS = ("B", "gamma", "alpha", "l2")
LOOPED = tuple(itertools.product((1, 32), (8, 128), (0.6,)))  # where the step clock runs too
FEED = (0, 2)  # accepted counts become the next draft lengths


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
    clock = StepClock(settings)
    with bar("verify", len(cases)) as advance:
        for batch, gamma, alpha in cases:
            tokens = workload.make_tokens(batch, gamma, alpha)
            arguments = tuple(map(jax.device_put, tokens.inputs))
            case = {"B": batch, "gamma": gamma, "alpha": alpha}
            best = chosen(VERIFY_GREEDY, arguments)
            bounds = [
                bound(name, program, arguments, checks(tokens), chosen=name == best)
                for (*shape, name), program in programs.items()
                if tuple(shape) == (batch, gamma)
            ]
            bounds += rivals.verify(tokens, settings)
            rows = point.measure("verify_greedy", case, bounds, settings)
            if (batch, gamma, alpha) in LOOPED and settings.check:
                clock.add(rows, VERIFY_GREEDY, arguments, FEED)
            yield from rows
            advance()


def compiled_verifies(
    batches_gammas: list[tuple[int, int]], settings: Settings
) -> dict[tuple[int, int, str], jax.stages.Compiled | Absent]:
    """Each backend of greedy verification for each ``(batch, gamma)``."""
    sources_by_key = {}
    for batch, gamma in batches_gammas:
        arguments = shapes(workload.make_tokens(batch, gamma, 0.5).inputs)
        for name, source in sources(VERIFY_GREEDY, arguments, settings).items():
            sources_by_key[batch, gamma, name] = source
    return compile_all("verify", sources_by_key)


def checks(tokens: workload.Tokens) -> Callable[[Any], bool]:
    """Whether the first six outputs are the fields of `Verified`."""
    expected = workload.expected_verified(tokens)
    return lambda outputs: all(map(np.array_equal, outputs, expected))


def show(result: dict[str, Any]) -> None:
    table.show(result, COLUMNS)


SUITE = Suite(
    "verify",
    "greedy verification: every backend, and PyTorch eager and as a CUDA graph",
    run,
    show,
    (VERIFY_GREEDY,),
    rivals.NAMES,
)
