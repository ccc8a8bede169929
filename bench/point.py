"""One point of a suite's grid: check every program, then time the correct ones."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.clocks import DeviceClock, wall
from bench.program import Absent, Program, failure
from bench.settings import Settings

Row = dict[str, Any]
DEVICE = DeviceClock()


def row(
    operation: str, case: Mapping[str, Any], name: str, *, checked: bool | str | None, **rest: Any
) -> Row:
    """A row of a result: operation, case and name, whether its output was right, and samples.

    ``checked``: True or False, None if not checked, or a description of what was checked.
    """
    return {"operation": operation, "case": dict(case), "name": name, "checked": checked} | rest


def measure(
    operation: str,
    case: Mapping[str, Any],
    programs: Sequence[Program | Absent],
    settings: Settings,
    *,
    states: Sequence[str] = ("warm",),
    clocks: Sequence[str] = ("device", "wall"),
    moved: int | None = None,
) -> list[Row]:
    """Rows of every program: one per state of L2 if it ran, else one with the reason.

    ``moved``: bytes that the operation has to read and write. Only programs with correct outputs
    are timed. If the device clock fails, a row with the reason replaces the rows of that state.
    """
    rows, right = [], []
    for program in programs:
        if isinstance(program, Absent):
            checked = False if program.failed else None
            rows.append(row(operation, case, program.name, checked=checked, reason=program.reason))
            continue
        try:
            outputs = program.wait(program.start())
            checked = program.check(outputs) if settings.check else None
            del outputs
        except Exception as error:
            reason = failure(program.name, error).reason
            rows.append(row(operation, case, program.name, checked=False, reason=reason))
            continue
        if checked:
            right.append(program)
        else:
            reason = "not checked, so not timed" if checked is None else "its output is wrong"
            rows.append(row(operation, case, program.name, checked=checked, reason=reason))
    for state in states:
        at = {**case, "l2": state}
        timed: list[Row] = [{} for _ in right]
        if "device" in clocks and DEVICE.reason is None:
            try:
                times_by_program = DEVICE.time(right, settings.repeats, cold=state == "cold")
            except RuntimeError as error:
                rows.append(row(operation, at, "device clock", checked=False, reason=str(error)))
                continue
            for clocks_of_row, times in zip(timed, times_by_program, strict=True):
                clocks_of_row |= {"device_ns": times.samples, "kernels": times.kernels}
        if "wall" in clocks and state == "warm":
            for clocks_of_row, program in zip(timed, right, strict=True):
                clocks_of_row["wall_ns"] = wall(program, settings.repeats)
        for clocks_of_row, program in zip(timed, right, strict=True):
            if clocks_of_row:
                rest = {
                    "backend": not program.alone,
                    "chosen": program.chosen,
                    "bytes": moved,
                } | clocks_of_row
                rows.append(row(operation, at, program.name, checked=True, **rest))
    return rows


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile of a clock's samples, in microseconds."""

    median: float
    low: float
    high: float


def spread(row: Row, clock: str) -> Spread | None:
    """The spread of clock ``"device"``, ``"wall"`` or ``"step"``; None without samples."""
    samples = row.get(f"{clock}_ns")
    if not samples:
        return None
    if len(samples) < 2:
        return Spread(*[samples[0] / 1e3] * 3)
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return Spread(statistics.median(samples) / 1e3, tenths[0] / 1e3, tenths[-1] / 1e3)


def best_clock(row: Row) -> Spread | None:
    """The spread of the device clock, else of the wall clock, else of the step clock."""
    return spread(row, "device") or spread(row, "wall") or spread(row, "step")
