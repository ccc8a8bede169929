"""The tables of docs/comparison.md on whole steps and on attention over several GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from bench.cases import kilo
from bench.drafters import DEFAULT_BACKENDS
from bench.point import Row, best_clock
from bench.real.figures import step_ms
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
# The backends that ran, in their order, by operation and the reason against the preferred one.
Notes = dict[tuple[str, str], dict[str, None]]


def steps(runs: Sequence[Run]) -> str:
    """Whole steps by backend: random weights at a model's shape, then real models, of whose runs
    on several days the last counts that has more than the default."""
    lines, notes = [], dict[str, Notes]()
    by_case: dict[tuple[str, str], dict[str, str]] = {}
    real: dict[tuple[str, str], dict[str, dict[str, str]]] = {}  # by date
    for run in runs:
        for row in run.rows:
            if row.get("operation") == "backend" and (cell := _step_cell(row)):
                case = row["case"]
                words = f"{case['model']}, B={case['B']}, S={kilo(case['S'])}"
                words += f", {case['draft']}, {case['sampling']}"
                by_case.setdefault((run.card, words), {}).setdefault(row["name"], cell)
                _note(row["name"], row.get("backends", ()), notes)
            time = step_ms(row) if row.get("operation") == "real" and row["checked"] else None
            if time is not None:
                case = row["case"]
                if case["sampling"] == "greedy" and row["name"] in ("none", "vegas"):
                    words = f"{case['model']} (real), B={case['B']}, S={kilo(case['S'])}"
                    words += f", {'plain' if row['name'] == 'none' else row['name']}, greedy"
                    cell = f"{time:.2f} ms"
                    if "floors_ns" in row:
                        cell += f" ({1e6 * time / sum(row['floors_ns'].values()):.2f})"
                    of_case = real.setdefault((run.card, words), {})
                    of_case.setdefault(row["date"], {})[case["backends"]] = cell
    for at, by_date in real.items():
        for _, cells in sorted(by_date.items()):
            if set(cells) - {DEFAULT_BACKENDS}:
                by_case[at] = cells
    for (card, words), cells in by_case.items():
        if set(cells) - {DEFAULT_BACKENDS} and not all(
            x.startswith("needs") for x in cells.values()
        ):
            columns = {x: cells.get(x, NOT_MEASURED) for x in (DEFAULT_BACKENDS, *COLUMNS)}
            lines.append(Line({"step": words, "card": card} | columns))
    if not lines:
        return f"Steps by backend: {NOT_MEASURED}.\n"
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
