"""Rows of tables as Markdown, and speeds and cases as their text."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from bench.point import Row, best_clock
from bench.table import cell, number, times

# A table of a page stands between a line that names it and `END`.
BEGIN = "<!-- table {}: written by `python -m bench report` -->"
END = "<!-- end of table -->"


@dataclasses.dataclass(frozen=True)
class Line:
    """A row of a table: its ``cells`` by heading, and whether the first table of RESULTS.md has it
    too."""

    cells: Mapping[str, str]
    headline: bool = False


def distinct(lines: Iterable[Line], labels: int) -> list[Line]:
    """The first of the lines whose first ``labels`` cells are equal."""
    by_label: dict[tuple[str, ...], Line] = {}
    for line in lines:
        by_label.setdefault(tuple(line.cells.values())[:labels], line)
    return list(by_label.values())


def table(lines: Sequence[Line], labels: int) -> str:
    """A Markdown table, "" without lines.

    Args:
        lines: its rows; the headings are those of all of them, in order.
        labels: the first columns, which say what a row is of. One that equals that above it is
            empty, but for the last one.
    """
    headings = list(dict.fromkeys(heading for line in lines for heading in line.cells))
    if not headings:
        return ""
    rule = ["---" if i < labels else "---:" for i in range(len(headings))]
    rows = [[line.cells.get(heading, "") for heading in headings] for line in lines]
    return "".join(
        "| " + " | ".join(cells) + " |\n" for cells in (headings, rule, *merged(rows, labels - 1))
    )


def without_constants(
    lines: Sequence[Line], headings: Sequence[str], words: Container[str]
) -> tuple[dict[str, str], list[Line]]:
    """The cells that two or more lines share, by heading, and the lines without them.

    Args:
        lines: of a table.
        headings: the columns to look at.
        words: the cells that may go.
    """
    alike = {
        heading: lines[0].cells[heading]
        for heading in headings
        if len(lines) > 1 and len({line.cells[heading] for line in lines}) == 1
        if lines[0].cells[heading] in words
    }
    rest = [Line({k: v for k, v in x.cells.items() if k not in alike}, x.headline) for x in lines]
    return alike, rest


def common(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all cases have, in the order of the first."""
    return {k: v for k, v in cases[0].items() if all(case.get(k) == v for case in cases)}


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


def wrapped(text: str, indent: str = "") -> str:
    """A paragraph in lines of up to 100 characters, all but the first after ``indent``."""
    lines = textwrap.wrap(
        text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "".join(f"{line}\n" for line in lines)


def is_slower(speed: float) -> bool:
    """Whether a speed over another is below 1 as tables show it."""
    return round(speed, 2) < 1


def ratio(speed: float | None) -> str:
    """A speed over another; a lower one is called slower."""
    if speed is None:
        return ""
    return times(speed) + (", slower" if is_slower(speed) else "")


def ms(microseconds: float) -> str:
    """Milliseconds with two or three decimals."""
    return f"{microseconds / 1e3:.{2 if microseconds >= 1e3 else 3}f}"


def us(microseconds: float) -> str:
    """Microseconds with their unit."""
    return f"{number(microseconds)} us"


def case_words(case: Mapping[str, Any], without: Sequence[str] = ()) -> str:
    """``B=8, S=32K`` of a case, its parts in ``without`` and a cache of 16 bits left out."""
    said = {k: v for k, v in case.items() if k not in without and (k, v) != ("cache", "bfloat16")}
    return ", ".join(f"{k}={cell(k, v)}" for k, v in said.items())


def microseconds(row: Row) -> float:
    """The median of a row that has a clock."""
    time = best_clock(row)
    assert time is not None
    return time.median


def refreshed(page: str, tables: Mapping[str, str]) -> str:
    """``page`` with its tables written again, from ``tables`` by name.

    Raises:
        ValueError: for a table that the page names and that there is none of.
    """

    def written(match: re.Match[str]) -> str:
        name = match[1]
        if name not in tables:
            raise ValueError(f"there is no table {name!r}; there are {', '.join(tables)}")
        return f"{BEGIN.format(name)}\n\n{tables[name]}\n{END}"

    pattern = re.escape(BEGIN).replace(r"\{\}", r"([\w -]+)") + ".*?" + re.escape(END)
    return re.sub(pattern, written, page, flags=re.DOTALL)
