"""The tables of docs/comparison.md on whole steps and on attention over several GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.cases import kilo
from bench.drafters import DEFAULT_BACKENDS, PLAIN, TREES
from bench.point import Row, best_clock
from bench.real.figures import limits, step_ms
from bench.report.markdown import Line, microseconds, ms, table
from bench.report.runs import Run
from bench.table import number

# The backends of a column: names of rows.
COLUMNS = {
    "pallas": ("pallas",),
    "cuda": ("cuda",),
    "triton": ("triton",),
    "xla": ("xla", "xla_blocked"),
}
NOT_MEASURED = "not measured"
Place = tuple[str, str]  # card, and a step in words
# The backends that ran, in their order, by operation and the reason against the preferred one.
Notes = dict[tuple[str, str], dict[str, None]]


def steps(runs: Sequence[Run]) -> str:
    """Whole steps by backend: random weights at a model's shape, then real models."""
    notes = dict[str, Notes]()
    by_case: dict[Place, dict[str, str]] = {}
    for run in runs:
        for row in run.rows:
            if row.get("operation") == "backend" and (cell := _step_cell(row)):
                case = row["case"]
                words = f"{case['model']}, B={case['B']}, S={kilo(case['S'])}"
                words += f", {case['draft']}, {case['sampling']}"
                by_case.setdefault((run.card, words), {}).setdefault(row["name"], cell)
                _note(row["name"], row.get("backends", ()), notes)
    for at, rows in _real_steps(runs, (PLAIN, "vegas")).items():
        by_case[at] = {column: _real_cell(row) for column, row in rows.items()}
    return _by_backend(by_case, notes) or f"Steps by backend: {NOT_MEASURED}.\n"


def tree_steps(runs: Sequence[Run]) -> str:
    """Steps of real models that draft trees, by backend, and those of chains as wide, which pack
    nothing."""
    notes = dict[str, Notes]()
    by_case: dict[Place, dict[str, str]] = {}
    for at, rows in _real_steps(runs, (*TREES.values(), *TREES)).items():
        by_case[at] = {column: _real_cell(row) for column, row in rows.items()}
        for column, row in rows.items():
            if row["name"] in TREES:
                _note(column, row.get("backends", ()), notes)
    return _by_backend(by_case, notes) or f"Steps with trees by backend: {NOT_MEASURED}.\n"


def _real_steps(runs: Sequence[Run], names: Sequence[str]) -> dict[Place, dict[str, Row]]:
    """Greedy steps of real models with drafters of these ``names``: a row for each backend.

    Of several results the last counts that has more than the default.
    """
    timed = [
        (run.card, row)
        for run in runs
        for row in run.rows
        if row.get("operation") == "real" and row["checked"] and "step_ns" in row
        if row["case"]["sampling"] == "greedy"
    ]
    by_date: dict[Place, dict[str, dict[str, Row]]] = {}
    for name in names:
        for card, row in ((card, row) for card, row in timed if row["name"] == name):
            case = row["case"]
            words = f"{case['model']} (real), B={case['B']}, S={kilo(case['S'])}"
            words += ", plain" if name == PLAIN else f", {name}, gamma={case['gamma']}"
            of_case = by_date.setdefault((card, f"{words}, greedy"), {})
            of_case.setdefault(row["date"], {})[case["backends"]] = row
    return {
        at: rows
        for at, dates in by_date.items()
        for _, rows in sorted(dates.items())
        if set(rows) - {DEFAULT_BACKENDS}
    }


def _real_cell(row: Row) -> str:
    """The time of a step, over its floor in brackets, and the share of it that packing takes."""
    time = step_ms(row)
    assert time is not None
    words = f"{time:.2f} ms"
    if "floors_ns" in row:
        words += f" ({1e6 * time / sum(row['floors_ns'].values()):.2f})"
    shares = limits(row)
    return words + (f", packing {shares.packing:.2%}" if shares and shares.packing else "")


def _by_backend(by_case: Mapping[Place, Mapping[str, str]], notes: Mapping[str, Notes]) -> str:
    """A line for each step that ran by more than the default, and what ran in place of a preferred
    backend; "" without lines."""
    lines = []
    for (card, words), cells in by_case.items():
        if set(cells) - {DEFAULT_BACKENDS} and not all(
            x.startswith("needs") for x in cells.values()
        ):
            columns = {x: cells.get(x, NOT_MEASURED) for x in (DEFAULT_BACKENDS, *COLUMNS)}
            lines.append(Line({"step": words, "card": card} | columns))
    if not lines:
        return ""
    words = "".join(f"- {column}: {_in_words(of_column)}\n" for column, of_column in notes.items())
    return table(lines, 2) + (
        f"\nWhat ran in place of the preferred backend:\n\n{words}" if notes else ""
    )


def _step_cell(row: Row) -> str | None:
    """The time of a step, over its floor in brackets, or the memory that the card lacks.

    None for a step that was wrong, or could not run for another reason.
    """
    if best_clock(row):
        return f"{ms(microseconds(row))} ms ({row['over_floor']:.2f})"
    if row["checked"] is None and "memory" in row:
        return f"needs {row['memory']['peak_bytes'] / 1e9:.0f} GB"
    return None


def _note(preferred: str, choices: Sequence[Row], notes: dict[str, Notes]) -> None:
    """Add the backends that operations took in place of the preferred one, by reason."""
    for choice in choices:
        if choice["reason"] is not None:
            at = choice["operation"], choice["reason"]
            notes.setdefault(preferred, {}).setdefault(at, {})[choice["backend"]] = None


def _in_words(notes: Notes) -> str:
    return ", ".join(
        f"`{operation}` by {' and '.join(backends)} ({reason})"
        for (operation, reason), backends in notes.items()
    )


def sharded(runs: Sequence[Run]) -> str:
    """A layer's attention on several GPUs, by kernel and by exchange."""
    by_case: dict[tuple[str, str], dict[str, str]] = {}
    for run in runs:
        for row in run.rows:
            if row.get("operation") != "attend" or best_clock(row) is None:
                continue
            case = row["case"]
            if case["strategy"] != "helix" or case["overlap"] > 1 or case["latent"]:
                continue
            if case["kvp"] * case["tpa"] == 1:
                continue
            words = f"KVP={case['kvp']}, TPA={case['tpa']}, B={case['B']}, S={kilo(case['S'])}"
            words += f", {case['heads']} heads, T={case['T']}"
            kernel, exchange = case["kernel"], case["exchange"]
            column = f"exchange {exchange}" if kernel == DEFAULT_BACKENDS else f"kernel {kernel}"
            cells = by_case.setdefault((run.card, words), {})
            cells.setdefault(column, f"{number(microseconds(row))} us")
    columns = [f"kernel {name}" for name in COLUMNS]
    columns += [f"exchange {name}" for name in ("xla", "pallas", "cuda")]
    lines = [
        Line({"attention": words, "card": card} | {x: cells.get(x, NOT_MEASURED) for x in columns})
        for (card, words), cells in by_case.items()
        if len(cells) > 1
    ]
    return table(lines, 2) or f"Sharded attention by kernel and exchange: {NOT_MEASURED}.\n"
