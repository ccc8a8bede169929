"""Tables, and numbers and cases as their text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.point import Row, best_clock
from bench.table import cell, times


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """A Markdown table; the first ``left`` columns are words, the others numbers."""
    rule = ["---" if i < left else "---:" for i in range(len(headings))]
    lines = [headings, rule, *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def merged(rows: Iterable[Sequence[str]], columns: int) -> list[tuple[str, ...]]:
    """Rows of the same first ``columns`` one after another, in the order of the first of them; what
    repeats of these columns is empty."""
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in map(tuple, rows):
        groups.setdefault(row[:columns], []).append(row)
    result, before = [], ("",) * columns
    for row in (row for group in groups.values() for row in group):
        same = 0
        while same < columns and row[same] == before[same]:
            same += 1
        result.append(("",) * same + row[same:])
        before = row
    return result


def is_slower(speed: float) -> bool:
    """Whether a speed over another is below 1 as tables show it."""
    return round(speed, 2) < 1


def ratio(speed: float | None, of: str = "") -> str:
    """A speed over another, ``of`` which in words; a lower one is called slower."""
    if speed is None:
        return ""
    return f"{times(speed)}{of}" + (", slower" if is_slower(speed) else "")


def case_words(case: Mapping[str, Any], without: Sequence[str]) -> str:
    """``B=8, S=32K`` of a case, its parts in ``without`` left out."""
    return ", ".join(f"{k}={cell(k, v)}" for k, v in case.items() if k not in without)


def microseconds(row: Row) -> float:
    """The median of a row that has a clock."""
    time = best_clock(row)
    assert time is not None
    return time.median


def median(rows: dict[str, Row], name: str) -> float | None:
    """Of the best clock of that row, None where there is no such row."""
    return microseconds(rows[name]) if name in rows else None


def pick(result: dict[str, Any], operation: str, **case: Any) -> dict[str, Row]:
    """The rows with times whose case has these values, by name."""
    return {
        row["name"]: row
        for row in result["rows"]
        if row["operation"] == operation
        and all(row["case"].get(key) == value for key, value in case.items())
        and best_clock(row) is not None
    }


def names(result: dict[str, Any], operation: str) -> list[str]:
    """Of everything that has times for an operation, in the order of the result."""
    rows = (r for r in result["rows"] if r["operation"] == operation)
    return list(dict.fromkeys(r["name"] for r in rows if best_clock(r) is not None))


def values(result: dict[str, Any], operation: str, key: str) -> list[Any]:
    """What a part of the case takes among the rows that have times."""
    rows = (r for r in result["rows"] if r["operation"] == operation)
    return sorted({r["case"][key] for r in rows if best_clock(r) is not None and key in r["case"]})
