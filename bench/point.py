"""One point of a suite's grid: check every program there, then time those that were right."""

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
    """A row of a result: what ran where, whether its output was right, and its clocks' samples.

    ``checked`` may say how far it was found to be right.
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
    """Rows of every program: one a state of L2 where it ran, one with the reason where it did not.

    ``moved``: the bytes that the operation has to read and write there. No program is timed whose
    outputs were not checked, and none of those that were wrong. Where the device clock fails, the
    whole state is left out, with a row that says so.
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
    """Of ``"device"``, ``"wall"`` or ``"step"``; None where a row has no such samples."""
    samples = row.get(f"{clock}_ns")
    if not samples:
        return None
    if len(samples) < 2:
        return Spread(*[samples[0] / 1e3] * 3)
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return Spread(statistics.median(samples) / 1e3, tenths[0] / 1e3, tenths[-1] / 1e3)


def best_clock(row: Row) -> Spread | None:
    """The device clock's spread, the wall clock's where there is none, or that of a step."""
    return spread(row, "device") or spread(row, "wall") or spread(row, "step")
