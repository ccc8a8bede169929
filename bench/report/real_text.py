"""Pieces of the section on real models: cases, speeds and acceptance as text."""

from __future__ import annotations

from collections.abc import Iterable

from bench.real import tables
from bench.real.figures import (
    Row,
    batch_rate,
    committed_per_step,
    end_to_end_rate,
    steady_rate,
)
from bench.report.real_cells import Cell
from bench.table import times

SAMPLED = {
    "greedy": "greedy",
    "t0.8": "T=0.8",
    "paper": "T=0.6, top-p 0.95, top-k 20",
}


def rows_of(case: Row) -> str:
    return f"{case['B']} row" + ("s" if case["B"] > 1 else "")


def sampling_of(case: Row) -> str:
    return SAMPLED[case["sampling"]]


def is_slower(speed: float) -> bool:
    """Whether a speed over another is below 1 as tables show it."""
    return round(speed, 2) < 1


def ratio(speed: float | None, of: str = "") -> str:
    """A speed over another, ``of`` which in words; a lower one is called slower."""
    if speed is None:
        return ""
    return f"{times(speed)}{of}" + (", slower" if is_slower(speed) else "")


def rate_of(row: Row) -> str:
    """Steady tokens per second."""
    rate = steady_rate(row)
    return "" if rate is None else f"{rate:,.0f}"


def per_step(row: Row) -> str:
    mean, every = (committed_per_step(row, repetitive=x) for x in (False, True))
    first = "" if mean is None else tables.with_error(mean)
    return first if every is None else f"{first} ({every.mean:.2f})".strip()


def speeds_of(cell: Cell, row: Row) -> tuple[str, str, str]:
    """Over plain decoding: steady, of the whole batch, and with the prefill."""
    steady, batch, end_to_end = (
        ratio(cell.speed(row, rate)) for rate in (steady_rate, batch_rate, end_to_end_rate)
    )
    return steady, batch, end_to_end


def merged(rows: Iterable[tuple[str, ...]], columns: int) -> list[tuple[str, ...]]:
    """Rows whose first ``columns`` are empty where they and those before them repeat."""
    result, before = [], ("",) * columns
    for row in rows:
        same = 0
        while same < columns and row[same] == before[same]:
            same += 1
        result.append(("",) * same + row[same:])
        before = row
    return result
