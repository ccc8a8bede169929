"""One point of a suite's grid: check every program, then time the correct ones."""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.clocks import DeviceClock, Times, wall
from bench.program import Absent, Program, failure, unavailable
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


def row_without(operation: str, case: Mapping[str, Any], absent: Absent) -> Row:
    """The row of what was not measured, with the reason; it counts as wrong where it failed."""
    checked = False if absent.failed else None
    return row(operation, case, absent.name, checked=checked, reason=absent.reason)


def attempt(operation: str, case: Mapping[str, Any], name: str, measured: Callable[[], Row]) -> Row:
    """The row that ``measured`` returns, or one with the reason why there is none.

    What it made is freed, before the next one takes its memory.
    """
    try:
        return measured()
    except Exception as error:
        return row_without(operation, case, unavailable(name, error))
    finally:
        gc.collect()


def measure(
    operation: str,
    case: Mapping[str, Any],
    programs: Sequence[Program | Absent],
    settings: Settings,
    *,
    states: Sequence[str] = ("warm",),
    moved: int | None = None,
    layers: int = 1,
) -> list[Row]:
    """Check every program, and time those whose outputs are right.

    Args:
        operation: of the rows.
        case: of the rows.
        programs: to check and time.
        settings: how often each is timed.
        states: of the L2 cache, for the device clock. Without it the wall clock of warm calls runs.
        moved: bytes that the operation has to read and write.
        layers: that each program runs one after the other. More than one have a span, too; times
            are of one of them.

    Returns:
        A row for each state of each program that ran, else one with the reason. If the device clock
        fails, a row with the reason replaces those of that state.
    """
    rows, right = [], []
    for program in programs:
        result = _checked(operation, case, program)
        if isinstance(result, Program):
            right.append(result)
        else:
            rows.append(result)
    for state in states if DEVICE.reason is None else ("warm",):
        at = {**case, "l2": state}
        samples: list[Row] = [{} for _ in right]
        if DEVICE.reason is None:
            try:
                times_by_program = DEVICE.time(right, settings.repeats, cold=state == "cold")
            except RuntimeError as error:
                rows.append(row(operation, at, "device clock", checked=False, reason=str(error)))
                continue
            samples = [_of_layer(times, layers) for times in times_by_program]
        for program, clocks in zip(right, samples, strict=True):
            if state == "warm":
                clocks["wall_ns"] = _divided(wall(program, settings.repeats), layers)
            rest = {"backend": not program.alone, "chosen": program.chosen, "bytes": moved}
            rows.append(row(operation, at, program.name, checked=True, **rest, **clocks))
    return rows


def _of_layer(times: Times, layers: int) -> Row:
    """The fields of a program's device time, for one of its layers."""
    fields: Row = {
        "device_ns": _divided(times.samples, layers),
        "kernels": times.kernels // layers,
        "waits": times.waits // layers,
    }
    return fields | ({"span_ns": _divided(times.spans, layers)} if layers > 1 else {})


def _divided(samples: Sequence[int], layers: int) -> list[int]:
    return [round(ns / layers) for ns in samples]


def _checked(operation: str, case: Mapping[str, Any], program: Program | Absent) -> Program | Row:
    """The program if its outputs are right, else a row with the reason."""
    if isinstance(program, Absent):
        return row_without(operation, case, program)
    try:
        is_right = program.check(program.wait(program.start()))
    except Exception as error:
        return row_without(operation, case, failure(program.name, error))
    reason = "its output is wrong"
    return program if is_right else row(operation, case, program.name, checked=False, reason=reason)


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median, 5th and 95th percentile of a clock's samples, in microseconds."""

    median: float
    low: float
    high: float


def spread(row: Row, clock: str) -> Spread | None:
    """The spread of clock ``"device"``, ``"span"``, ``"wall"`` or ``"step"``, if it was read."""
    samples = row.get(f"{clock}_ns")
    if not samples:
        return None
    if len(samples) < 2:
        return Spread(*[samples[0] / 1e3] * 3)
    parts = statistics.quantiles(samples, n=20, method="inclusive")
    return Spread(statistics.median(samples) / 1e3, parts[0] / 1e3, parts[-1] / 1e3)


def by_case(rows: Sequence[Row], operation: str) -> list[list[Row]]:
    """The rows of an operation that have times, those of a case together."""
    cases: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.get("operation") == operation and best_clock(row) is not None:
            cases.setdefault(tuple(row.get("case", {}).items()), []).append(row)
    return list(cases.values())


def best_clock(row: Row) -> Spread | None:
    """The spread of the first of these clocks that was read: span, device, wall, step."""
    spreads = (spread(row, clock) for clock in ("span", "device", "wall", "step"))
    return next(filter(None, spreads), None)
