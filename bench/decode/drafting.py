"""Cases of suites that measure iterations: models, and drafters at one share of the context."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from bench import cases, decode
from bench.decode.iterations import Drafting, Shape, iterations
from bench.decode.shapes import Ceilings
from bench.machine import matrix_ceiling, read_ceiling
from bench.point import Row
from bench.settings import Settings
from bench.table import times

RATIO = 0.07
STEPS = 4  # of a chunk
CPU_STEPS = 1
GUIDED = f"vegas:budget={RATIO}"
# layers: number of first layers, 0 for all; gamma: of drafters that are not chains.
DEFAULT: cases.Case = {"model": "qwen3-8b", "B": 4, "S": 122880, "gamma": 9, "layers": 0}
CPU = "model=qwen3-4b,B=1,S=2K,gamma=2,layers=1"


def case(text: str) -> cases.Case:
    """Parse a case of ``--case``; raises `ValueError` if it is invalid."""
    return cases.parse(text, DEFAULT)


def grid(settings: Settings, defaults: Sequence[str]) -> list[cases.Case]:
    """The requested cases, or ``defaults``, of which a quick run has only the first."""
    if jax.default_backend() != "gpu":
        defaults = [CPU]
    elif settings.quick:
        defaults = defaults[:1]
    return [case(text) for text in settings.cases or defaults]


def ceilings() -> Ceilings:
    """The ceilings of this machine."""
    cpu = jax.default_backend() == "cpu"
    return Ceilings(read_ceiling(), None if cpu else matrix_ceiling())


def rows(
    case: cases.Case, draftings: Sequence[Drafting], settings: Settings, limits: Ceilings
) -> Iterator[Row]:
    """Measure the iterations of a case; yields a row for each."""
    cpu = jax.default_backend() == "cpu"
    asked = dataclasses.replace(
        settings.decode, steps=CPU_STEPS if cpu else STEPS, layers=case["layers"] or None
    )
    settings = dataclasses.replace(settings, decode=asked, only=())
    name = case["model"]
    shape = Shape(name, case["B"], case["S"])
    model = decode.drawn(name, settings)
    yield from decode.by_size(name, iterations(model, shape, draftings, settings, limits))


def case_cells(row: Row) -> tuple[str, ...]:
    """Cells of a row: model, layers, batch and context."""
    at: dict[str, Any] = row["case"]
    return at["model"], str(at["layers"]), str(at["B"]), cases.kilo(at["S"])


def before_cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    """The cell of the speedup over an earlier result, if ``rows`` were compared with one."""
    if not any("ratio" in other for other in rows):
        return ()
    return (times(row["ratio"]) if "ratio" in row else "",)


CASE = ("model", "layers", "B", "S")
