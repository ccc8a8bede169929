"""The tables of docs/comparison.md: every operation, step and sharded attention by each backend.

The prose of the page is written by hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import ceilings
from bench.point import Row, best_clock
from bench.report import figures, whole
from bench.report.code import lines_of_code
from bench.report.families import FAMILIES, Entry
from bench.report.markdown import (
    Line,
    case_words,
    common,
    microseconds,
    ratio,
    table,
    without_constants,
    wrapped,
)
from bench.report.operations import is_rival
from bench.report.runs import Run
from bench.report.whole import COLUMNS, NO_TIME, NOT_MEASURED
from bench.table import cell, number
from bench.tune import order_at, points_of
from jspec.ops import registry

NEAR = 1.03  # times of the fastest backend
RIVAL = "best rival"
UNSAID = ("weights",)  # of a case


def operations(name: str, runs: Sequence[Run]) -> str:
    """A picture of a family, and a table for each entry."""
    parts = [f"![{name}: speed of each backend over the fastest]({picture_of(name)})\n"]
    parts += [_table(entry, runs) for entry in FAMILIES[name]]
    return "\n".join(parts)


def _table(entry: Entry, runs: Sequence[Run]) -> str:
    """What all lines share, then the time and the share of the ceiling of each backend, and the
    best rival: a line for each case and card that was measured."""
    shared = common(entry.cases)
    lines, reasons, untimed = [], set[str](), dict[str, list[str]]()
    for case in entry.cases:
        differs = {k: v for k, v in case.items() if k not in shared and k not in UNSAID}
        by_card = dict(points(entry, case, runs))
        rows = [row for point in by_card.values() for row in point.rows]
        absent = {column: _reason(entry, column, rows) for column in COLUMNS}
        ran = {column for point in by_card.values() for column in point.times}
        absent |= dict.fromkeys(ran, NO_TIME)  # what an older version refused
        reasons |= set(absent.values()) - {NO_TIME}
        for card, point in by_card.items():
            if point.times:
                cells = {k: cell(k, v) for k, v in differs.items()} | {"card": card}
                lines.append(Line(cells | _times(entry, point, absent)))
            else:
                untimed.setdefault(card, []).append(case_words(differs))
    purpose = entry.purpose.removeprefix("the same, ")
    title = f"`{entry.operation}`, {purpose}: {case_words(shared, UNSAID)}."
    if not lines:
        return wrapped(f"{title} {NOT_MEASURED.capitalize()}.")
    may_go = {*cards(runs), *reasons, NO_TIME}
    alike, lines = without_constants(lines, ["card", *COLUMNS, RIVAL], may_go)
    title += _absences(alike)
    for card in dict.fromkeys(line.cells.get("card") for line in lines):
        if card in untimed:
            title += f" Not timed on an {card}: {'; '.join(untimed[card])}."
    noted = dict.fromkeys(x for line in lines for x in line.cells.values() if x in reasons)
    numbers = {reason: f"[{index}]" for index, reason in enumerate(noted, 1)}
    lines = [
        Line({heading: numbers.get(x, x) for heading, x in line.cells.items()}) for line in lines
    ]
    labels = [x for x in lines[0].cells if x not in (*COLUMNS, RIVAL)]
    parts = [wrapped(title), table(lines, len(labels))]
    parts += ["".join(f"{number} {reason}  \n" for reason, number in numbers.items())]
    return "\n".join(filter(None, parts))


def _absences(alike: Mapping[str, str]) -> str:
    """Why a table lacks the columns whose cells were ``alike``."""
    text = f" Timed on an {alike['card']} only." if "card" in alike else ""
    for reason in dict.fromkeys(alike.values()):
        columns = [column for column in COLUMNS if alike.get(column) == reason]
        if columns:
            why = "not timed" if reason == NO_TIME else reason
            text += f" Without {' and '.join(columns)}: {why}."
    return text


def _times(entry: Entry, point: Point, absent: Mapping[str, str]) -> dict[str, str]:
    """The cells of a line: a time of each backend, or what is said where it has none."""
    best = min(point.times.values()) if len(point.times) >= entry.enough else None
    cells = {}
    for column, timed in point.timed.items():
        words = timed.words(entry.work) if timed else absent[column]
        cells[column] = f"**{words}**" if timed and timed.time == best else words
    rival = point.rival and f"{number(point.rival.time)}, {point.rival.row['name']}"
    return cells | {RIVAL: rival or NO_TIME}


def _reason(entry: Entry, column: str, rows: Sequence[Row]) -> str:
    """Why a backend has no time, `NO_TIME` where only no run had it."""
    reasons = [row["reason"] for row in rows if row["name"] in COLUMNS[column] and "reason" in row]
    return entry.without.get(column) or next(iter(reasons), NO_TIME)


def picture_of(family: str) -> str:
    """The name of a family's picture."""
    return f"comparison-{family}.png"


@dataclasses.dataclass(frozen=True)
class Timed:
    """A row, its time in microseconds, and the run that it is of."""

    run: Run
    row: Row
    time: float

    def words(self, work: str | None) -> str:
        """Microseconds and, with bytes that a ceiling bounds, the share of it."""
        rate = work and ceilings.bandwidth(self.run.result.get("ceilings", []), work)
        moved = self.row.get("bytes")
        share = f" ({moved / self.time * 1e6 / rate:.0%})" if rate and moved else ""
        return f"{number(self.time)}{share}"


@dataclasses.dataclass(frozen=True)
class Point:
    """An operation at a case on a card.

    Attributes:
        rows: of all runs.
        timed: the time of each column: of the run with most of them, else of the last other one.
        rival: the fastest of other libraries.
    """

    rows: Sequence[Row]
    timed: Mapping[str, Timed | None]
    rival: Timed | None

    @property
    def times(self) -> dict[str, float]:
        """Microseconds of each column that ran."""
        return {column: timed.time for column, timed in self.timed.items() if timed}


def points(
    entry: Entry, case: Mapping[str, Any], runs: Sequence[Run]
) -> Iterator[tuple[str, Point]]:
    """The point of each card."""
    for card in cards(runs):
        by_run = [
            (run, [row for row in run.rows if _is_at(row, entry.operation, case)])
            for run in runs
            if run.card == card
        ]
        fastest = [
            {column: _fastest(entry, run, rows, names) for column, names in COLUMNS.items()}
            for run, rows in sorted(by_run, key=lambda x: x[0].result["machine"]["date"])
        ]
        fastest.sort(key=lambda x: sum(timed is not None for timed in x.values()))  # is stable
        timed = {
            column: next((x[column] for x in reversed(fastest) if x[column]), None)
            for column in COLUMNS
        }
        rivals = [
            _fastest(entry, run, rows, [row["name"] for row in rows if is_rival(row)])
            for run, rows in by_run
        ]
        rival = min((x for x in rivals if x), key=lambda x: x.time, default=None)
        yield card, Point([row for _, rows in by_run for row in rows], timed, rival)


def cards(runs: Sequence[Run]) -> list[str]:
    """The GPUs of the results."""
    return list(dict.fromkeys(run.card for run in runs if run.device != "cpu"))


def _is_at(row: Row, operation: str, case: Mapping[str, Any]) -> bool:
    return row.get("operation") == operation and case.items() <= (row.get("case") or {}).items()


def _fastest(entry: Entry, run: Run, rows: Sequence[Row], names: Sequence[str]) -> Timed | None:
    right = [row for row in rows if row["name"] in names and row["checked"]]
    timed = [Timed(run, row, time) for row in right if (time := entry.time(row)) is not None]
    return min(timed, key=lambda x: x.time, default=None)


def answers(runs: Sequence[Run]) -> str:
    """Which backend to take for what, and how many times the fastest one's time each one takes,
    over all cases and cards that `Entry.enough` backends ran."""
    lines = []
    for entry in (entry for entries in FAMILIES.values() for entry in entries):
        times = [
            point.times
            for case in entry.cases
            for _, point in points(entry, case, runs)
            if len(point.times) >= entry.enough
        ]
        lines += _answer(entry.purpose, times)
    by_model: dict[str, list[dict[str, float]]] = {}
    for place, by_name in whole.step_times(runs).items():
        by_column = {x: by_name[x].ms for x in COLUMNS if x in by_name}
        times = {column: ms for column, ms in by_column.items() if ms is not None}
        if len(times) >= 3:
            model = place.model.partition(",")[0].removesuffix("-Instruct")
            by_model.setdefault(model, []).append(times)
    for model, times in by_model.items():
        lines += _answer(f"a step of {model}", times)
    return table(lines, 2) or f"Backends: {NOT_MEASURED}.\n"


def _answer(purpose: str, times: Sequence[Mapping[str, float]]) -> list[Line]:
    """The line of the backends whose ``times``, each at one point, are given; none without any."""
    slowdowns: dict[str, list[float]] = {}
    for at_point in times:
        for column, time in at_point.items():
            slowdowns.setdefault(column, []).append(time / min(at_point.values()))
    if not slowdowns:
        return []
    always = {k: round(max(x), 2) for k, x in slowdowns.items() if len(x) == len(times)}
    least = max(NEAR, min(always.values()))
    best = sorted((x for x in always if always[x] <= least), key=always.__getitem__)
    cells = {"for": purpose, "take": ", ".join(best)}
    for column in COLUMNS:
        of_column = slowdowns.get(column, [])
        span = dict.fromkeys(number(bound(of_column)) for bound in (min, max) if of_column)
        cells[column] = " to ".join(span) + ("" if column in always else "*") if span else NO_TIME
    return [Line(cells)]


def scans(runs: Sequence[Run]) -> str:
    """The naive acceptance scan of the verification paper against its ballot kernel."""
    times: dict[tuple[Any, ...], dict[str, float]] = {}
    for run in runs:
        for row in run.rows:
            if row.get("operation") == "acceptance_scan" and row["checked"] and best_clock(row):
                place = (*row["case"].items(), ("card", run.card))
                times.setdefault(place, {})[row["name"]] = microseconds(row)
    names = {"naive": "cuda_naive", "ballot": "cuda"}
    places = [
        x for x in sorted(times, key=lambda x: x[:-1]) if set(names.values()) <= times[x].keys()
    ]
    if not places:
        return f"Naive and ballot scan: {NOT_MEASURED}.\n"
    shared = common([dict(place) for place in places])
    lines = []
    for place in places:
        cells = {k: cell(k, v) for k, v in place if k not in shared}
        naive, ballot = (times[place][name] for name in names.values())
        cells |= {"naive": number(naive), "ballot": number(ballot)}
        lines.append(Line(cells | {"ballot is": ratio(naive / ballot)}))
    labels = len(places[0]) - len(shared)
    return f"{case_words(shared, UNSAID)}.\n\n{table(lines, labels)}"


def kernels(runs: Sequence[Run]) -> str:
    """What the kernels of each family cost: lines of code, compile time, registers and memory."""
    lines = []
    for family, by_backend in lines_of_code().items():
        for backend, count in by_backend.items():
            lines.append(
                Line(
                    {
                        "family": family,
                        "backend": backend,
                        "lines of code": str(count),
                        "compile, s": _compile_time(family, backend, runs),
                        **_resources(family, backend, runs),
                    }
                )
            )
    families = dict.fromkeys(line.cells["family"] for line in lines)
    counted = {line.cells["family"] for line in lines if line.cells["registers"] != NO_TIME}
    uncounted = [family for family in families if family not in counted]
    rest = f"\nHardware counters were not read for {' and '.join(uncounted)}.\n"
    return table(lines, 2) + (rest if uncounted else "")


def _rows_of(family: str, backend: str, runs: Sequence[Run]) -> list[Row]:
    names = {entry.operation for entry in FAMILIES[family]}
    return [
        row
        for run in runs
        for row in run.rows
        if row.get("operation") in names and row["name"] == backend
    ]


def _compile_time(family: str, backend: str, runs: Sequence[Run]) -> str:
    """The longest of the programs of a family."""
    times = [row["compile_s"] for row in _rows_of(family, backend, runs) if "compile_s" in row]
    return f"{max(times):.1f}" if times else NO_TIME


def _resources(family: str, backend: str, runs: Sequence[Run]) -> dict[str, str]:
    """Registers of a thread and shared memory of a block, of all kernels of a family."""
    rows = [row for row in _rows_of(family, backend, runs) if "registers" in row]
    headings = {"registers": "registers", "shared_bytes": "shared memory, KB"}
    cells = dict.fromkeys(headings.values(), NO_TIME)
    for key, heading in headings.items() if rows else ():
        values = sorted({row[key] // (1024 if key == "shared_bytes" else 1) for row in rows})
        cells[heading] = str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"
    return cells


def draw(family: str, runs: Sequence[Run], path: Path) -> bool:
    """Draw how fast each backend and the best rival are over the fastest backend; whether any ran.

    A panel for each card, a group of bars for each case.
    """
    groups: dict[str, dict[str, dict[str, float]]] = {}  # by card and case
    for entry in FAMILIES[family]:
        for case in entry.cases:
            for card, point in points(entry, case, runs):
                words = f"{entry.operation}\n{case_words(case, UNSAID)}"
                if point.times:
                    best = min(point.times.values())
                    speeds = {name: best / time for name, time in point.times.items()}
                    if point.rival is not None:
                        speeds[RIVAL] = best / point.rival.time
                    groups.setdefault(card, {})[words] = speeds
    if not groups:
        return False
    labels = list(dict.fromkeys(words for cases in groups.values() for words in cases))
    with figures.new(path) as figure:
        figure.set_size_inches(2 + 3.5 * len(groups), 1.2 + 0.7 * len(labels))
        every = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
        for axis, (card, cases) in zip(every, groups.items(), strict=True):
            _bars(axis, card, labels, cases)
        every[0].set_yticks(range(len(labels)), labels, fontsize=7)
        every[0].invert_yaxis()
        handles = {}
        for axis in every:
            shown, names = axis.get_legend_handles_labels()
            handles |= dict(zip(names, shown, strict=True))
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=5)
    return True


def _bars(
    axis: Any, card: str, labels: Sequence[str], cases: Mapping[str, Mapping[str, float]]
) -> None:
    names = [*COLUMNS, RIVAL]
    height = 0.8 / len(names)
    for index, name in enumerate(names):
        if not any(name in speeds for speeds in cases.values()):
            continue
        speeds = {labels.index(words): x[name] for words, x in cases.items() if name in x}
        places = [place + (index - 2) * height for place in speeds]
        axis.barh(places, list(speeds.values()), height, label=name, color=f"C{index}")
    axis.axvline(1, color="gray", linewidth=0.5)
    axis.set(xlabel="speed over the fastest backend")
    axis.set_title(card, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)


def defaults(runs: Sequence[Run]) -> str:
    """In how many cases today's orders of backends begin with the fastest backend, by card, and the
    worst case of each operation where they do not."""
    lines = []
    for card in cards(runs):
        of_card = [run for run in runs if run.card == card]
        rows = [row for run in of_card for row in run.rows if row.get("sizes")]
        costs: dict[str, dict[str, float]] = {}
        for operation in registry.operations():
            for point in points_of(rows, operation):
                rules = of_card[0].table.orders.get(operation.name, ())
                order = order_at(rules, point.sizes)
                cost = point.cost(order or operation.default_order)
                costs.setdefault(operation.name, {})[case_words(point.sizes)] = cost
        number_of_cases = sum(map(len, costs.values()))
        near = sum(cost <= NEAR for of_case in costs.values() for cost in of_case.values())
        text = f"- {card}: {near} of {number_of_cases} cases of {len(costs)} operations."
        for name, of_case in costs.items():
            worst = max(of_case, key=of_case.__getitem__)
            if of_case[worst] > NEAR:
                text += f" `{name}` is {of_case[worst] - 1:.2%} slower at worst: {worst}."
        lines += [wrapped(text, "  ")] if costs else []
    return "".join(lines) or f"Defaults: {NOT_MEASURED}.\n"


TABLES: dict[str, Callable[[Sequence[Run]], str]] = {
    **{name: lambda runs, name=name: operations(name, runs) for name in FAMILIES},
    "answers": answers,
    "scans": scans,
    "kernels": kernels,
    "steps": whole.steps,
    "sharded attention": whole.sharded,
    "defaults": defaults,
}


def tables(runs: Sequence[Run]) -> dict[str, str]:
    """The tables of the page by name."""
    return {name: text_of(runs) for name, text_of in TABLES.items()}
