"""The tables on operations: what `implementation=None` takes, against ceilings and rivals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bench import ceilings
from bench.point import Row, by_case
from bench.report.markdown import Line, case_words, is_slower, microseconds, ratio
from bench.report.runs import Run
from bench.rivals import attention, select, verification
from bench.table import number
from bench.tune import order_at

RIVALS = {*attention.NAMES, *attention.GATHERED, *select.NAMES, *verification.VERIFY}
RIVALS |= {"fa3_jax", "flashinfer", "flashinfer_fa3", "cub_rows"}
UNSAID = ("part", "lengths", "indices")
Point = tuple[dict[str, Any], list[Row]]


def is_rival(row: Row) -> bool:
    """Whether a row is of another library, or of two operations in place of a fused one."""
    return row["name"] in RIVALS or "+" in row["name"]


def is_backend(row: Row) -> bool:
    """Whether a row is of another of jspec's kernels."""
    return row["backend"] and not row.get("chosen") and not is_rival(row)


# What the speed of a row is over, by the heading of its column.
OTHERS = {"over the best rival": is_rival, "over jspec's best other": is_backend}


@dataclasses.dataclass(frozen=True)
class Cases:
    """Cases of an operation, and the one where it does worst.

    Attributes:
        operation: its name.
        cases: parts of cases; of runs with the same one that with the fastest rival is shown.
        work: the ceiling of its bytes, if any.
        worst: whether the worst of all cases is a row where it is slower.
        headlines: how many of the last cases are in the first table.
    """

    operation: str
    cases: Sequence[Mapping[str, Any]]
    work: str | None = None
    worst: bool = True
    headlines: int = 1

    def lines(self, run: Run, points: Sequence[Point]) -> Iterator[Line]:
        for index, case in enumerate(self.cases):
            matching = [x for x in points if case.items() <= x[0].items()]
            if matching:
                point = min(matching, key=lambda x: _over(x[1], is_rival) or math.inf)
                words = case_words({k: point[0][k] for k in case}, UNSAID)
                headline = index >= len(self.cases) - self.headlines
                yield Line(self._cells(run, words, point[1]), headline)
        compared = [(speed, x) for x in points if (speed := _slowest(x[1])) is not None]
        if self.worst and compared:
            speed, (case, rows) = min(compared, key=lambda pair: pair[0])
            if is_slower(speed):
                words = f"worst of {len(compared)}: {case_words(case, UNSAID)}"
                yield Line(self._cells(run, words, rows))

    def points(self, run: Run) -> list[Point]:
        """The cases of a run in which what `implementation=None` takes today has a time."""
        every = [_chosen_today(run, x) for x in by_case(run.rows, self.operation)]
        return [(x[0]["case"], x) for x in every if any(row.get("chosen") for row in x)]

    def _cells(self, run: Run, case: str, rows: Sequence[Row]) -> dict[str, str]:
        chosen = _chosen(rows)
        time = microseconds(chosen)
        rate = self.work and ceilings.bandwidth(run.result["ceilings"], self.work)
        share = f"{chosen['bytes'] / time * 1e6 / rate:.0%} of {self.work}" if rate else ""
        cells = {"operation": self.operation, "card": run.card, "case": case}
        cells |= {"us": number(time), "of ceiling": share}
        return cells | {heading: _speed_over(rows, time, heading) for heading in OTHERS}


def _speed_over(rows: Sequence[Row], time: float, heading: str) -> str:
    others = [row for row in rows if OTHERS[heading](row)]
    if not others:
        return ""
    best = min(others, key=microseconds)
    return f"{ratio(microseconds(best) / time)} ({best['name']} {number(microseconds(best))})"


def _over(rows: Sequence[Row], is_other: Callable[[Row], bool]) -> float | None:
    """The speed over the fastest of some others."""
    time = microseconds(_chosen(rows))
    return min((microseconds(row) / time for row in rows if is_other(row)), default=None)


def _slowest(rows: Sequence[Row]) -> float | None:
    """The lowest of the speeds over the fastest of each kind of others."""
    speeds = [_over(rows, is_other) for is_other in OTHERS.values()]
    return min((speed for speed in speeds if speed is not None), default=None)


def _chosen_today(run: Run, rows: list[Row]) -> list[Row]:
    """The rows of a case, with ``chosen`` by today's order of backends instead of that of the run.

    They stay as they are where none says its sizes, or no backend of the order has a row.
    """
    sized = next((row for row in rows if "sizes" in row), None)
    order = sized and order_at(run.table.orders.get(sized["operation"], ()), sized["sizes"])
    first = next((x for x in order or () if any(row["name"] == x for row in rows)), None)
    if first is None:
        return rows
    return [row | {"chosen": row["name"] == first} for row in rows]


def _chosen(rows: Sequence[Row]) -> Row:
    return next(row for row in rows if row.get("chosen"))


def lines_of(*every: Cases) -> Callable[[Sequence[Run]], Iterator[Line]]:
    """The lines of these cases, of every machine."""

    def lines(runs: Sequence[Run]) -> Iterator[Line]:
        for cases in every:
            for machine in dict.fromkeys(run.machine for run in runs):
                points = [(x, cases.points(x)) for x in runs if x.machine == machine]
                measured = [(run, of_run) for run, of_run in points if of_run]
                if measured:
                    together = [x for _, of_run in measured for x in of_run]
                    yield from cases.lines(measured[0][0], together)

    return lines


VERIFY = {"B": 32, "alpha": 0.9}
verify_lines = lines_of(
    Cases("verify_greedy", [VERIFY | {"gamma": 8}, VERIFY | {"gamma": 128}]),
    Cases(
        "pack",
        [VERIFY | {"gamma": 128, "D": 2048, "l2": "cold"}],
        *("copy", False),
        headlines=0,
    ),
    Cases(
        "verify_and_pack",
        [VERIFY | {"gamma": 128, "D": 2048, "l2": "cold"}],
        "copy",
    ),
    # Steps verify one-hot drafts by tokens that they draw.
    Cases(
        "verify_stochastic",
        [{"B": 32, "draft": "logits", "V": 128256, "l2": "cold"}],
        "read",
    ),
)
HEADS = {"heads": "32/8", "H": 128, "cache": "bfloat16"}
attention_lines = lines_of(
    Cases(
        "attention",
        [{"B": 4, "S": 131072, "T": t} | HEADS for t in (1, 10)],
        "read",
        headlines=2,
    ),
    Cases("gathered_attention", [{"B": 8, "S": 131072, "n": 8192, "T": 1} | HEADS], "read"),
    Cases(
        "select",
        [
            {"rows": 256, "n": 32768, "k": 512, "scores": "float32"},
            {"rows": 8, "n": 2**20, "k": 8192, "scores": "float32"},
        ],
        "read",
    ),
)
