"""Pieces of the report that every section uses: tables, headers, and numbers as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bench import regret
from bench.point import Row, Spread, best_clock, spread
from bench.table import number

CLOCKS = (
    "*Device* time is the sum of a call's kernels as CUPTI records them, without what lies between "
    "them and without the driver's fills and copies; *wall* is from Python's call to outputs that "
    "are there; *step* is what one more step costs inside a jitted loop, above a step that only "
    "counts, everything included. All are medians in microseconds, with the 10th and 90th "
    "percentile in brackets where there is room. No output was timed that had not been checked."
)


def is_imposed(result: dict[str, Any]) -> bool:
    """Whether some rows have an acceptance that was imposed."""
    return "imposed" in _acceptance(result)


def _acceptance(result: dict[str, Any]) -> list[str]:
    """How the acceptance of rows came about, each once."""
    kinds = {row["acceptance"] for row in result.get("rows", ()) if "acceptance" in row}
    return sorted(kinds, reverse=True)


def header(title: str, result: dict[str, Any]) -> str:
    """A section's heading, which says where acceptance is imposed, and its machine."""
    title += f", {' and '.join(_acceptance(result))} acceptance" if is_imposed(result) else ""
    machine = result["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    driver = f"driver {machine['driver']}; " if machine["driver"] else ""
    cut = " The run was interrupted: cases are missing." if result.get("interrupted") else ""
    return (
        f"## {title}: {machine['device']}\n\n{versions}; {driver}{machine['cores']} cores; "
        f"{machine['date']}.{cut}\n"
    )


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """A Markdown table; the first ``left`` columns are words, the others numbers."""
    rule = ["---" if i < left else "---:" for i in range(len(headings))]
    lines = [headings, rule, *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def loops(result: dict[str, Any], columns: Sequence[str], words: str) -> str:
    """What a step costs in a jitted loop, of every row that says, beside the row's other clocks."""
    rows = [
        (
            row["name"],
            *(str(row["case"][column]) for column in columns),
            *(time(spread(row, "device")), time(spread(row, "step"), spread=True)),
            time(spread(row, "wall")),
        )
        for row in result["rows"]
        if spread(row, "step") is not None
    ]
    headings = ("", *columns, "device", "step", "wall")
    own = f"### Inside a jitted loop\n\n{words}\n\n" + table(headings, rows)
    return own if rows else ""


def picture(pictures: dict[str, str], name: str, words: str) -> str:
    """A picture where it was drawn, nothing where not."""
    return f"![{words}]({pictures[name]})\n" if name in pictures else ""


def paragraphs(*parts: str) -> str:
    """The parts that say something, an empty line between them."""
    return "\n".join(part if part.endswith("\n") else f"{part}\n" for part in parts if part)


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


def median(rows: dict[str, Row], name: str) -> float | None:
    """Of the best clock of that row, None where there is no such row."""
    time = best_clock(rows[name]) if name in rows else None
    return None if time is None else time.median


def time(found: Spread | None, *, spread: bool = False) -> str:
    if found is None:
        return ""
    inside = f" ({number(found.low)}-{number(found.high)})" if spread else ""
    return number(found.median) + inside


def ratio(a: float | None, b: float | None) -> str:
    """How many times b goes into a."""
    return "" if a is None or b is None else f"{a / b:.2f}x"


def choice(result: dict[str, Any], operation: str) -> str:
    """How fast what `implementation=None` takes is beside the fastest backend."""
    found = regret.of_choice(result["rows"], operation)
    return "" if found is None else f"`implementation=None` against the fastest backend: {found}."


def absent(result: dict[str, Any]) -> str:
    """What did not run, and why, each reason once."""
    reasons = dict.fromkeys(
        f"{row['name']}, {row['operation']}: {row['reason']}"
        for row in result["rows"]
        if row.get("reason")
    )
    clocks = [f"the {clock} clock: {reason}" for clock, reason in result.get("clocks", {}).items()]
    lines = [*clocks, *reasons]
    return "" if not lines else "Not run here:\n\n" + "\n".join(f"- {x}" for x in lines) + "\n"
