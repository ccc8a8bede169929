"""A result as a table that fits the terminal, and the comparison with an earlier one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from bench.cases import kilo
from bench.point import Row, best_clock, spread
from bench.settings import console

HEADINGS = {"bytes": "MB"}
SLOTS = ("S", "n")  # sizes that tables show in K


FOOT = (
    "x: how many times as fast, above 1 for faster; vs best: than the fastest of the case; "
    "vs before: than in --compare"
)


@dataclasses.dataclass(frozen=True)
class Floor:
    """The ``read`` ceiling of a run in bytes a second, None if not measured.

    ``bytes``: a description of the bytes of a row that are compared with it.
    """

    read: float | None
    bytes: str

    def share(self, row: Row) -> float | None:
        """A row's bytes a second over the ceiling."""
        best = best_clock(row)
        if best is None or self.read is None:
            return None
        return row["bytes"] / best.median * 1e6 / self.read

    def __str__(self) -> str:
        ceiling = "not measured" if self.read is None else f"{self.read / 1e9:,.0f} GB/s"
        return (
            "of read: MB over time, as a share of the read ceiling of this run, "
            f"{ceiling}; MB: {self.bytes}"
        )


def show(result: dict[str, Any], columns: Sequence[str], floor: Floor | None = None) -> None:
    """Print a line per row: its case, clocks, bytes a second, and speed relative to the fastest.

    With ``floor``, the bytes that a row needs and their share of the read ceiling replace bytes a
    second. On a narrow terminal, the percentiles of the clocks are left out.
    """
    screen = console()
    table, notes = _table(result, columns, floor, percentiles=True)
    if Measurement.get(screen, screen.options.update(width=1000), table).maximum > screen.width:
        table, notes = _table(result, columns, floor, percentiles=False)
    screen.print(table)
    if floor is not None:
        screen.print(str(floor), markup=False)
    screen.print(FOOT, markup=False)
    if any(r.get("chosen") for r in result["rows"]):
        screen.print("* what implementation=None takes")
    for number, reason in enumerate(notes, 1):
        screen.print(f"[{number}] {reason}", markup=False)
    for clock, reason in result.get("clocks", {}).items():
        screen.print(f"no {clock} clock: {reason}", markup=False)


def _table(
    result: dict[str, Any], columns: Sequence[str], floor: Floor | None, *, percentiles: bool
) -> tuple[Table, list[str]]:
    """The table, and the reasons that rows reference by number."""
    table = Table(
        title=f"{result['suite']}: {result['machine']['device']}; times in microseconds",
        title_justify="left",
        padding=(0, 1, 0, 0),
        box=None,
    )
    for heading in columns:
        table.add_column(HEADINGS.get(heading, heading), justify="right")
    table.add_column("name", overflow="fold")
    clocks = [c for c in ("device", "wall", "step") if any(spread(r, c) for r in result["rows"])]
    for clock in clocks:
        table.add_column(clock, justify="right")
        if percentiles:
            table.add_column("p10-p90", justify="right", style="dim")
    compared = any("ratio" in r for r in result["rows"])
    rates = ("GB/s",) if floor is None else ("MB", "of read")
    for heading in (*rates, "vs best", *(["vs before"] if compared else [])):
        table.add_column(heading, justify="right")
    fastest = _fastest(result["rows"])
    notes: dict[str, None] = {}
    for row in result["rows"]:
        cells = [cell(h, row["case"].get(h)) for h in columns]
        name = row["name"] + ("*" if row.get("chosen") else "")
        if row.get("reason"):
            note = f"{row['operation']}, {row['name']}: {row['reason']}"
            if note in notes:
                continue  # each reason once
            notes[note] = None
            cells += [escape(f"{name} [{len(notes)}]")]
        else:
            cells += [name, *_times(row, clocks, percentiles=percentiles)]
            best = best_clock(row)
            cells += _rate(row) if floor is None else _of_floor(row, floor)
            fastest_of_case = fastest.get(_where(row))
            cells.append(times(fastest_of_case / best.median) if best and fastest_of_case else "")
            if compared:
                cells.append(times(row["ratio"]) if "ratio" in row else "")
        table.add_row(*cells)
    return table, list(notes)


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


def _rate(row: Row) -> list[str]:
    """Gigabytes a second, empty for at most 1 KiB."""
    best, moved = best_clock(row), row.get("bytes") or 0
    return [f"{moved / best.median / 1e3:,.0f}" if best and moved > 2**10 else ""]


def _of_floor(row: Row, floor: Floor) -> list[str]:
    """The bytes that a row needs, and their share of the read ceiling."""
    share = floor.share(row)
    return [number(row["bytes"] / 1e6), "" if share is None else f"{share:.1%}"]


def cell(heading: str, value: Any) -> str:
    """Format a value of a case for tables."""
    if heading == "bytes" and value is not None:
        return number(value / 1e6)
    if heading in SLOTS and value is not None:
        return kilo(value)
    return "" if value is None else str(value)


def _where(row: Row) -> tuple[Any, ...]:
    return row["operation"], tuple(sorted(row["case"].items()))


def _fastest(rows: Sequence[Row]) -> dict[tuple[Any, ...], float]:
    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        time = best_clock(row)
        if time is not None:
            where = _where(row)
            best[where] = min(best.get(where, time.median), time.median)
    return best


def compare(result: dict[str, Any], earlier: dict[str, Any]) -> int:
    """Write into each row its speedup over the earlier result; returns how many had one.

    Rows are matched by operation, case and name, and compared on the device clock, or on the wall
    clock if either has no device clock.
    """
    before = {(*_where(r), r["name"]): r for r in earlier["rows"]}
    met = 0
    for row in result["rows"]:
        other = before.get((*_where(row), row["name"]), {})
        for clock in ("device", "wall"):
            now, then = spread(row, clock), spread(other, clock)
            if now and then:
                row["ratio"] = then.median / now.median
                met += 1
                break
    return met
