"""The tables of docs/comparison.md: every operation, step and sharded attention by each backend.

The prose of the page is written by hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import ceilings
from bench.point import Row, best_clock, spread
from bench.report import figures, whole
from bench.report.code import lines_of_code
from bench.report.markdown import Line, case_words, microseconds, ratio, table, us
from bench.report.operations import is_rival
from bench.report.runs import Run
from bench.report.whole import COLUMNS, NOT_MEASURED
from bench.table import number
from bench.tune import points_of
from jspec.ops import registry

NEAR = 1.03  # times of the fastest backend
RIVAL = "best rival"
UNSAID = ("indices", "weights")  # of a case


@dataclasses.dataclass(frozen=True)
class Entry:
    """The lines of one operation.

    Attributes:
        operation: its name.
        cases: what the cases of its lines have, a line each.
        work: the ceiling that its bytes are compared with, None where launching it takes longer.
        without: why a backend does not exist, by its name.
        in_loop: whether times are of a step in a jitted loop, since a call by itself copies what
            it updates.
    """

    operation: str
    cases: Sequence[Mapping[str, Any]]
    work: str | None = "read"
    without: Mapping[str, str] = dataclasses.field(default_factory=dict)
    in_loop: bool = False

    def time(self, row: Row) -> float | None:
        """The median in microseconds, None where the row has none."""
        time = spread(row, "step") if self.in_loop else best_clock(row)
        return time and time.median

    @property
    def enough(self) -> int:
        """Backends that have to run a case before one of them is called the fastest."""
        return min(3, len(COLUMNS) - len(self.without))


VERIFY = {"B": 32, "alpha": 0.9}
CACHE = {"cache": "bfloat16"}
HEADS = {"heads": "32/8", "H": 128} | CACHE
EIGHT_BITS = {"cache": "float8_e4m3fn"}
CODES = {"B": 8, "R": 128, "T": 1}
LONG_CODES = CODES | {"S": 32768}
FAMILIES: dict[str, Sequence[Entry]] = {
    "verification": (
        Entry("verify_greedy", [VERIFY | {"gamma": g, "l2": "warm"} for g in (8, 128)], None),
        Entry(
            "acceptance_scan",
            [VERIFY | {"gamma": g} for g in (8, 128)],
            None,
            dict.fromkeys(("pallas", "triton"), "the paper compares its two CUDA kernels"),
        ),
        Entry("verify_and_commit", [{"B": 32, "T": t, "V": 128256} for t in (1, 9)]),
        Entry("verify_tree", [{"B": 32, "gamma": gamma} for gamma in (7, 15)], None),
    ),
    "packing": (
        Entry(
            "pack",
            [VERIFY | {"gamma": 128, "D": d, "l2": "cold"} for d in (128, 2048)],
            "copy",
        ),
        Entry(
            "verify_and_pack",
            [
                VERIFY | {"gamma": 8, "D": 128, "l2": "cold"},
                VERIFY | {"gamma": 128, "D": 2048, "l2": "cold"},
            ],
            "copy",
        ),
        Entry(
            "pack_path",
            [{"B": b, "n": 8, "layers": 36, "heads": "32/8", "H": 128} for b in (1, 32)],
            None,
            in_loop=True,
        ),
    ),
    "sampling": (
        Entry(
            "verify_stochastic",
            [{"B": 32, "V": 128256, "draft": d, "l2": "cold"} for d in ("one-hot", "logits")],
        ),
        Entry("sample", [{"B": 32, "V": 128256}]),
    ),
    "hashes": (
        Entry("hash_encode", [CODES | {"heads": h} for h in ("32/32", "32/8")], None),
        Entry(
            "rotate_append_encode",
            [CODES | {"heads": h} for h in ("32/32", "32/8")],
            None,
            {"cuda": "the CUDA kernel that encodes as it appends is a part of hash_attention"},
        ),
        Entry("hamming_scores", [LONG_CODES | {"heads": h} for h in ("32/32", "32/8")]),
        Entry("hash_select", [LONG_CODES | {"heads": h, "n": 512} for h in ("32/32", "32/8")]),
    ),
    "attention": (
        Entry(
            "attention",
            [{"B": 4, "S": 131072, "T": t} | HEADS for t in (1, 10)]
            + [{"B": 1, "S": 262144, "T": t, "heads": "8/1", "H": 128} | CACHE for t in (1, 10)]
            + [{"B": 8, "S": 32768, "T": 1} | HEADS]
            + [{"B": 8, "S": 32768, "T": 12, "heads": "64/8", "H": 64} | CACHE]
            + [{"B": 96, "S": 7168, "T": 6, "heads": "9/3", "H": 64} | CACHE],
        ),
        Entry(
            "attention",
            [{"B": 4, "S": 131072, "T": t} | HEADS | EIGHT_BITS for t in (1, 10)],
        ),
        Entry("scored_attention", [{"B": 4, "S": 131072, "T": 10} | HEADS]),
        Entry(
            "gathered_attention",
            [
                {"B": 8, "S": 131072, "n": 8192, "indices": "shared", "T": 1} | HEADS,
                {"B": 8, "S": 32768, "n": 512, "indices": "per-head", "heads": "32/32"} | CACHE,
            ],
        ),
    ),
    "matmuls": (
        Entry(
            "linear",
            [
                {"model": model, "part": part, "rows": rows, "weights": "bfloat16"}
                for model, batches in (("smollm2-135m", (12, 96)), ("qwen2.5-coder-0.5b", (16, 64)))
                for part in ("output", "gate_up")
                for rows in batches
            ],
            without={"pallas": "matmuls are no kernel of the papers"},
        ),
    ),
}


def operations(name: str, runs: Sequence[Run]) -> str:
    """Time and share of the ceiling of a family's operations, by backend, and of the best rival."""
    notes: dict[str, int] = {}
    lines = [
        Line(line)
        for entry in FAMILIES[name]
        for case in entry.cases
        for line in _lines(entry, case, runs, notes)
    ]
    footnotes = "".join(f"[{index}] {reason}  \n" for reason, index in notes.items())
    picture = f"![{name}: speed of each backend over the fastest]({picture_of(name)})\n\n"
    return picture + table(lines, 3) + (f"\n{footnotes}" if notes else "")


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
        """``18.3 us`` and, with bytes that a ceiling bounds, the share of it."""
        rate = work and ceilings.bandwidth(self.run.result.get("ceilings", []), work)
        moved = self.row.get("bytes")
        share = f" ({moved / self.time * 1e6 / rate:.0%})" if rate and moved else ""
        return f"{number(self.time)} us{share}"


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


def _lines(
    entry: Entry, case: Mapping[str, Any], runs: Sequence[Run], notes: dict[str, int]
) -> Iterator[dict[str, str]]:
    """A line for each card."""
    by_card = dict(points(entry, case, runs))
    ran = {column for point in by_card.values() for column in point.times}
    for card, point in by_card.items():
        line = {"operation": entry.operation, "case": case_words(case, UNSAID), "card": card}
        best = min(point.times.values()) if len(point.times) >= entry.enough else None
        for column, timed in point.timed.items():
            if timed is not None:
                words = timed.words(entry.work)
                line[column] = f"**{words}**" if timed.time == best else words
            elif column in ran:  # what an older version refused
                line[column] = NOT_MEASURED
            else:
                line[column] = _without(entry, column, point.rows, notes)
        line["best rival"] = "none" if point.rows else NOT_MEASURED
        if point.rival is not None:
            line["best rival"] = f"{point.rival.words(entry.work)}, {point.rival.row['name']}"
        yield line


def _without(entry: Entry, column: str, rows: Sequence[Row], notes: dict[str, int]) -> str:
    """Why a cell has no time: a footnote."""
    reasons = [row["reason"] for row in rows if row["name"] in COLUMNS[column] and "reason" in row]
    reason = entry.without.get(column) or next(iter(reasons), None)
    if reason is None:
        written = {
            name for x in registry.operations() if x.name == entry.operation for name in x.backends
        }
        return NOT_MEASURED if written & set(COLUMNS[column]) else "not written"
    return f"[{notes.setdefault(reason, len(notes) + 1)}]"


def slowdowns(runs: Sequence[Run]) -> str:
    """How many times the fastest backend's time each one takes, over the cases of an operation that
    `Entry.enough` backends ran."""
    times: dict[tuple[str, str], list[dict[str, float]]] = {}
    for entry in (entry for entries in FAMILIES.values() for entry in entries):
        for case in entry.cases:
            for card, point in points(entry, case, runs):
                if len(measured := point.times) >= entry.enough:
                    best = min(measured.values())
                    ratios = {name: time / best for name, time in measured.items()}
                    times.setdefault((entry.operation, card), []).append(ratios)
    lines = []
    for (operation, card), of_cases in times.items():
        cells = {"operation": operation, "card": card, "cases": str(len(of_cases))}
        for name in COLUMNS:
            ratios = sorted(f"{x[name]:.2f}" for x in of_cases if name in x)
            span = ratios[:1] + ratios[-1:] if len(set(ratios)) > 1 else ratios[:1]
            cells[name] = " to ".join(span)
        lines.append(Line(cells))
    return table(lines, 2) or f"Slowdowns: {NOT_MEASURED}.\n"


def scans(runs: Sequence[Run]) -> str:
    """The naive acceptance scan of the verification paper against its ballot kernel."""
    lines = []
    for card in cards(runs):
        times: dict[tuple[Any, ...], dict[str, float]] = {}
        for row in (row for run in runs if run.card == card for row in run.rows):
            if row.get("operation") == "acceptance_scan" and row["checked"] and best_clock(row):
                case = tuple(row["case"].items())
                times.setdefault(case, {})[row["name"]] = microseconds(row)
        for case in sorted(times):
            if {"cuda", "cuda_naive"} <= times[case].keys():
                naive, ballot = times[case]["cuda_naive"], times[case]["cuda"]
                cells = {"case": case_words(dict(case), UNSAID), "card": card}
                cells |= {"naive": us(naive), "ballot": us(ballot)}
                lines.append(Line(cells | {"ballot is": ratio(naive / ballot)}))
    return table(lines, 2) or f"Naive and ballot scan: {NOT_MEASURED}.\n"


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
    return table(lines, 2)


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
    return f"{max(times):.1f}" if times else NOT_MEASURED


def _resources(family: str, backend: str, runs: Sequence[Run]) -> dict[str, str]:
    """Registers of a thread and shared memory of a block, of all kernels of a family."""
    rows = [row for row in _rows_of(family, backend, runs) if "registers" in row]
    headings = {"registers": "registers", "shared_bytes": "shared memory, KB"}
    cells = dict.fromkeys(headings.values(), NOT_MEASURED)
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
    """How far today's orders of backends are from the fastest backend, by card and operation."""
    lines = []
    for operation in registry.operations():
        for card in cards(runs):
            of_card = [run for run in runs if run.card == card]
            rows = [row for run in of_card for row in run.rows if row.get("sizes")]
            costs = {}
            for point in points_of(rows, operation):
                order = of_card[0].table.order(operation.name, point.sizes)
                costs[case_words(point.sizes)] = point.cost(order or operation.default_order)
            if costs:
                worst = max(costs, key=costs.__getitem__)
                near = sum(cost <= NEAR for cost in costs.values())
                cells = {"operation": operation.name, "card": card, "cases": str(len(costs))}
                cells |= {"within 3 %": str(near), "worst slowdown": f"{costs[worst]:.2f}x"}
                lines.append(Line(cells | {"its sizes": worst if costs[worst] > NEAR else ""}))
    return table(lines, 2) or f"Defaults: {NOT_MEASURED}.\n"


TABLES: dict[str, Callable[[Sequence[Run]], str]] = {
    **{name: lambda runs, name=name: operations(name, runs) for name in FAMILIES},
    "slowdowns": slowdowns,
    "scans": scans,
    "kernels": kernels,
    "steps": whole.steps,
    "tree steps": whole.tree_steps,
    "sharded attention": whole.sharded,
    "defaults": defaults,
}


def tables(runs: Sequence[Run]) -> dict[str, str]:
    """The tables of the page by name."""
    return {name: text_of(runs) for name, text_of in TABLES.items()}
