"""The tables of a result, which fit the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from bench import ceilings
from bench.cases import kilo
from bench.point import Row, best_clock, spread
from bench.settings import console

SLOTS = ("S", "n")  # sizes that tables show in K
COPYING = ("pack", "verify_and_pack")  # operations whose bytes are compared with the copy ceiling
# Fields of a row that are no columns of their own.
KNOWN = ("operation", "case", "name", "checked", "reason", "backend", "chosen", "bytes", "ratio")
KNOWN += ("compile_s",)
FOOT = "x: how many times as fast, above 1 for faster; vs best: than the fastest of the case"


def show(result: dict[str, Any]) -> None:
    """Print a table for each operation of a result: of any suite, by the names of its fields.

    A row has its case, clocks, bytes, their share of the run's ceiling, and its speed relative to
    the fastest row of the case. What all cases have in common stands in the title. Percentiles are
    left out where the terminal is narrow.
    """
    screen, notes = console(), {}
    rows = result["rows"]
    for operation in dict.fromkeys(row.get("operation", "") for row in rows):
        of_operation = [row for row in rows if row.get("operation", "") == operation]
        table = _table(result, of_operation, notes, percentiles=True)
        if Measurement.get(screen, screen.options.update(width=1000), table).maximum > screen.width:
            table = _table(result, of_operation, notes, percentiles=False)
        screen.print(_title(result, of_operation), markup=False, style="italic")
        screen.print(table)
    if any(map(best_clock, rows)):
        screen.print(FOOT, markup=False)
    if any(row.get("chosen") for row in rows):
        screen.print("* what implementation=None takes")
    for reason, index in notes.items():
        screen.print(f"[{index}] {reason}", markup=False)
    for clock, reason in result.get("clocks", {}).items():
        screen.print(f"no {clock} clock: {reason}", markup=False)


def _table(
    result: dict[str, Any], rows: Sequence[Row], notes: dict[str, int], *, percentiles: bool
) -> Table:
    """The table of one operation; ``notes`` gets a number for each reason."""
    options, _ = _options(rows)
    clocks = _clocks(rows)
    others = _other_fields(rows)
    has_bytes = any(r.get("bytes") for r in rows)
    table = Table(padding=(0, 1, 0, 0), box=None)
    for key in options:
        table.add_column(_heading(key), justify="right", overflow="fold")
    table.add_column("name", overflow="fold")
    for clock in clocks:
        table.add_column(clock, justify="right")
        if percentiles:
            table.add_column("p5-p95", justify="right", style="dim")
    headings = [*others, *(("MB", "GB/s", "of ceiling") if has_bytes else ())]
    headings += ["vs best"] if clocks else []
    for heading in headings:
        # With spaces it takes several lines where the terminal is narrow, and is not cut.
        table.add_column(_heading(heading).replace("_", " "), justify="right", overflow="fold")
    fastest, rate = _fastest(rows), _ceiling(result, rows[0])
    shown: set[str] = set()
    for row in rows:
        cells = [cell(key, _case(row).get(key)) for key in options]
        name = str(row.get("name", "")) + ("*" if row.get("chosen") else "")
        if row.get("reason"):
            note = f"{row['operation']}, {row['name']}: {row['reason']}"
            if note not in shown:  # each reason once
                index = notes.setdefault(note, len(notes) + 1)
                table.add_row(*cells, escape(f"{name} [{index}]"))
            shown.add(note)
            continue
        cells += [escape(name), *_times(row, clocks, percentiles=percentiles)]
        cells += ["" if key not in row else cell(key, row[key]) for key in others]
        time = best_clock(row)
        if has_bytes:
            cells += _rate(row, rate)
        if clocks:
            cells.append("" if time is None else times(fastest[_where(row)] / time.median))
        table.add_row(*cells)
    return table


def _title(result: dict[str, Any], rows: Sequence[Row]) -> str:
    """The operation, the device, and what all cases have in common."""
    _, common = _options(rows)
    parts = [rows[0].get("operation") or result["suite"], result["machine"]["device"]]
    parts += [f"{_heading(key)}={cell(key, value)}" for key, value in common.items()]
    return ", ".join(parts) + ("; times in microseconds" if _clocks(rows) else "")


def _heading(key: str) -> str:
    """``MB`` of a field in bytes, as `cell` formats it."""
    return key.removesuffix("bytes").replace("_", " ") + "MB" if key.endswith("bytes") else key


def _case(row: Row) -> Mapping[str, Any]:
    return row.get("case") or {}


def _options(rows: Sequence[Row]) -> tuple[list[str], dict[str, Any]]:
    """The options of the cases that differ, and those that all rows have in common."""
    every = [_case(row) for row in rows if _case(row)]
    keys = dict.fromkeys(key for case in every for key in case)
    values = {key: [case[key] for case in every if key in case] for key in keys}
    common = {key: x[0] for key, x in values.items() if len(x) > 1 and all(y == x[0] for y in x)}
    return [key for key in keys if key not in common], common


def _clocks(rows: Sequence[Row]) -> list[str]:
    """The clocks that have samples, those of `bench.clocks` first."""
    samples = (key for row in rows for key, x in row.items() if isinstance(x, list) and x)
    known = ("device", "span", "wall", "step", *(key.removesuffix("_ns") for key in samples))
    return [clock for clock in dict.fromkeys(known) if any(f"{clock}_ns" in r for r in rows)]


def _other_fields(rows: Sequence[Row]) -> list[str]:
    """Fields with one number or word, other than those that every table has."""
    kinds = (int, float, str)
    keys = dict.fromkeys(k for row in rows for k, x in row.items() if type(x) in kinds)
    return [key for key in keys if key not in (*KNOWN, "kernels", "waits")]


def _ceiling(result: dict[str, Any], row: Row) -> float | None:
    """Bytes a second of the ceiling of an operation in the same run."""
    work = "copy" if row.get("operation") in COPYING else "read"
    return ceilings.bandwidth(result.get("ceilings", []), work)


def share(result: dict[str, Any], row: Row) -> float | None:
    """A row's bytes a second over the ceiling of its operation in the same run."""
    rate, time = _ceiling(result, row), best_clock(row)
    if rate is None or time is None or not row.get("bytes"):
        return None
    return row["bytes"] / time.median * 1e6 / rate


def times(ratio: float) -> str:
    """Format a speedup, as in 1.50x."""
    return f"{ratio:.2f}x"


def _times(row: Row, clocks: Sequence[str], *, percentiles: bool) -> list[str]:
    cells = []
    for clock in clocks:
        times = spread(row, clock)
        cells.append("" if times is None else number(times.median))
        if percentiles:
            cells.append("" if times is None else f"{number(times.low)}-{number(times.high)}")
    return cells


def number(x: float) -> str:
    """Format a number with at least three digits."""
    return f"{x:,.2f}" if abs(x) < 10 else f"{x:,.1f}" if abs(x) < 100 else f"{x:,.0f}"


def _rate(row: Row, ceiling: float | None) -> list[str]:
    """The bytes that a row needs, bytes a second, and their share of the ceiling."""
    time, moved = best_clock(row), row.get("bytes")
    if time is None or not moved:
        return ["", "", ""]
    rate = moved / time.median * 1e6
    return [number(moved / 1e6), number(rate / 1e9), f"{rate / ceiling:.1%}" if ceiling else ""]


def cell(heading: str, value: Any) -> str:
    """Format a value of a case for tables."""
    if value is None:
        return ""
    if heading.endswith("bytes"):
        return number(value / 1e6)
    if heading in SLOTS and isinstance(value, int):
        return kilo(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _where(row: Row) -> tuple[Any, ...]:
    return row.get("operation"), tuple(sorted(_case(row).items()))


def _fastest(rows: Sequence[Row]) -> dict[tuple[Any, ...], float]:
    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        time = best_clock(row)
        if time is not None:
            where = _where(row)
            best[where] = min(best.get(where, time.median), time.median)
    return best
