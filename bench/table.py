"""A result as a table that fits the terminal, and the comparison with an earlier one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from bench.point import Row, best_clock, spread
from bench.settings import console

HEADINGS = {"bytes": "MB"}


FOOT = (
    "x: how many times as fast, above 1 for faster; vs best: than the fastest of the case; "
    "vs before: than in --compare"
)


def show(result: dict[str, Any], columns: Sequence[str]) -> None:
    """A line a row: its case, each clock, bytes a second, and its speed against the fastest's.

    Where the terminal is too narrow, the percentiles of the clocks are left out.
    """
    screen = console()
    table, notes = _table(result, columns, percentiles=True)
    if Measurement.get(screen, screen.options.update(width=1000), table).maximum > screen.width:
        table, notes = _table(result, columns, percentiles=False)
    screen.print(table)
    screen.print(FOOT, markup=False)
    if any(r.get("chosen") for r in result["rows"]):
        screen.print("* what implementation=None takes")
    for number, reason in enumerate(notes, 1):
        screen.print(f"[{number}] {reason}", markup=False)
    for clock, reason in result.get("clocks", {}).items():
        screen.print(f"no {clock} clock: {reason}", markup=False)


def _table(
    result: dict[str, Any], columns: Sequence[str], *, percentiles: bool
) -> tuple[Table, list[str]]:
    """The table, and the reasons that its rows refer to by number."""
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
    for heading in ("GB/s", "vs best", *(["vs before"] if compared else [])):
        table.add_column(heading, justify="right")
    fastest = _fastest(result["rows"])
    notes: dict[str, None] = {}
    for own in result["rows"]:
        cells = [_cell(h, own["case"].get(h)) for h in columns]
        name = own["name"] + ("*" if own.get("chosen") else "")
        if own.get("reason"):
            note = f"{own['operation']}, {own['name']}: {own['reason']}"
            if note in notes:
                continue  # once is enough
            notes[note] = None
            cells += [escape(f"{name} [{len(notes)}]")]
        else:
            cells += [name, *_times(own, clocks, percentiles=percentiles)]
            best = best_clock(own)
            moved = own.get("bytes") or 0
            cells.append(f"{moved / best.median / 1e3:,.0f}" if best and moved > 2**10 else "")
            own_best = fastest.get(_where(own))
            cells.append(times(own_best / best.median) if best and own_best else "")
            if compared:
                cells.append(times(own["ratio"]) if "ratio" in own else "")
        table.add_row(*cells)
    return table, list(notes)


def times(ratio: float) -> str:
    """How many times as fast, as tables show it."""
    return f"{ratio:.2f}x"


def _times(own: Row, clocks: Sequence[str], *, percentiles: bool) -> list[str]:
    cells = []
    for clock in clocks:
        found = spread(own, clock)
        cells.append("" if found is None else number(found.median))
        if percentiles:
            cells.append("" if found is None else f"{number(found.low)}-{number(found.high)}")
    return cells


def number(x: float) -> str:
    """Three digits or more."""
    return f"{x:,.2f}" if abs(x) < 10 else f"{x:,.1f}" if abs(x) < 100 else f"{x:,.0f}"


def _cell(heading: str, value: Any) -> str:
    if heading == "bytes" and value is not None:
        return number(value / 1e6)
    return "" if value is None else str(value)


def _where(own: Row) -> tuple[Any, ...]:
    return own["operation"], tuple(sorted(own["case"].items()))


def _fastest(rows: Sequence[Row]) -> dict[tuple[Any, ...], float]:
    best: dict[tuple[Any, ...], float] = {}
    for own in rows:
        time = best_clock(own)
        if time is not None:
            where = _where(own)
            best[where] = min(best.get(where, time.median), time.median)
    return best


def compare(result: dict[str, Any], earlier: dict[str, Any]) -> int:
    """Write into each row how many times as fast it is as in the earlier result; how many had one.

    Rows meet by operation, case and name, and are compared on the device clock, on the wall clock
    where either has no device clock.
    """
    before = {(*_where(r), r["name"]): r for r in earlier["rows"]}
    met = 0
    for own in result["rows"]:
        other = before.get((*_where(own), own["name"]), {})
        for clock in ("device", "wall"):
            now, then = spread(own, clock), spread(other, clock)
            if now and then:
                own["ratio"] = then.median / now.median
                met += 1
                break
    return met
