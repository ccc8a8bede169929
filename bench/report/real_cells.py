"""The rows of suite `real` by cell: several results of one machine as one, and what each shows."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench import real
from bench.drafters import ALL, BY_HASHES, EXACT, FEW, LOSSY, PLAIN, SAMPLING
from bench.real.figures import Row, is_timed, over_plain, prefers_none, steady_rate, where
from bench.real.rivals import NAMES as RIVALS

VEGAS = "vegas"
VARIANTS = ("vegas-first", "vegas-weight")  # of what it collects: in the JSON alone


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """One case with every drafter.

    Attributes:
        case: of the first row.
        rows: of all runs. A speed over plain decoding is that within the run of a row.
    """

    case: Row
    rows: Sequence[Row]

    @property
    def model(self) -> str:
        return self.case["model"]

    @property
    def exact(self) -> bool:
        return self.case["exact"] != "no"

    @functools.cached_property
    def plain(self) -> Row | None:
        """Plain decoding of the last run with ngram and vegas, else of that with most drafters."""
        by_run = {row["run"]: row for row in self._timed if row["name"] == PLAIN}

        def place(run: int) -> tuple[bool, int, int]:
            timed = {row["name"] for row in self._timed if row["run"] == run}
            usual = timed.issuperset(("ngram", VEGAS))
            return usual, 0 if usual else len(timed.intersection(DRAFTERS)), run

        return by_run[max(by_run, key=place)] if by_run else None

    @functools.cached_property
    def drafters(self) -> dict[str, Row]:
        """The last timed row of each drafter, in the order of the suite, without plain decoding."""
        return self._last(DRAFTERS)

    @functools.cached_property
    def shown(self) -> dict[str, Row]:
        """As `drafters`, but the rows beside `plain` of those that its run has."""
        run = None if self.plain is None else self.plain["run"]
        beside = {row["name"]: row for row in self._timed if row["run"] == run}
        return {name: beside.get(name, row) for name, row in self.drafters.items()}

    @functools.cached_property
    def lossy(self) -> dict[str, Row]:
        """The last timed row of each lossy policy, which competes with no drafter."""
        return self._last(tuple(LOSSY))

    @functools.cached_property
    def rivals(self) -> dict[str, Row]:
        return self._last(RIVALS)

    @functools.cached_property
    def ranked(self) -> list[Row]:
        """The drafters of the run of `plain` or later whose speed is known, the fastest first."""
        since = 0 if self.plain is None else self.plain["run"]
        return [row for row in self._by_speed(self.shown) if row["run"] >= since]

    @property
    def by_speed(self) -> list[Row]:
        """All drafters whose speed over plain decoding in their own run is known."""
        return self._by_speed(self.drafters)

    def _by_speed(self, drafters: dict[str, Row]) -> list[Row]:
        known = [(x, row) for row in drafters.values() if (x := self.speed(row)) is not None]
        return [row for _, row in sorted(known, key=lambda pair: pair[0], reverse=True)]

    @property
    def of_most_drafters(self) -> Cell:
        """The same cell, whose last rows are those of the run of most drafters."""
        counts = Counter(row["run"] for row in self._timed if row["name"] in DRAFTERS)
        run = max(counts, key=lambda run: (counts[run], run), default=None)
        return Cell(self.case, sorted(self.rows, key=lambda row: row["run"] == run))

    def of_result(self, row: Row) -> Cell:
        """The same cell in the result of ``row``, or itself if that lacks plain decoding."""
        cell = Cell(self.case, [other for other in self.rows if other["date"] == row["date"]])
        return self if cell.plain is None else cell

    @property
    def not_timed(self) -> dict[str, str]:
        """Why a drafter or rival has no times, by its name."""
        reasons = {row["name"]: row.get("reason", "not checked") for row in self.rows}
        timed = {row["name"] for row in self._timed}
        return {name: reason for name, reason in reasons.items() if name not in timed}

    def speed(self, row: Row, rate: Any = steady_rate) -> float | None:
        """How many times the ``rate`` of plain decoding in the same run."""
        return over_plain(row, self.rows, rate)

    @functools.cached_property
    def _timed(self) -> list[Row]:
        return [row for row in self.rows if is_timed(row)]

    def _last(self, names: Sequence[str]) -> dict[str, Row]:
        rows = {row["name"]: row for row in self._timed}
        return {name: rows[name] for name in names if name in rows}


USUAL_SAMPLING = ("greedy", "t0.8")
DRAFTERS = (*(name for name in ALL if name != PLAIN), *BY_HASHES)
MORE = tuple(name for name in DRAFTERS if name not in FEW)


def joined(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several results of one machine as one; later runs have higher numbers, rows their date and
    versions.

    Raises `ValueError` where they are of more than one device.
    """
    results = sorted(results, key=lambda result: result["machine"]["date"])
    machines = [result["machine"] for result in results]
    devices = {machine["device"] for machine in machines}
    if len(devices) > 1:
        raise ValueError(f"results of real in one folder are of {', '.join(sorted(devices))}")
    rows: list[Row] = []
    numbers: dict[tuple[int, int], int] = {}
    for index, result in enumerate(results):
        of_result = {key: result["machine"].get(key) for key in ("date", "versions")}
        for row in result["rows"]:
            number = numbers.setdefault((index, row["run"]), len(numbers))
            rows.append(row | {"run": number} | of_result)
    first, last = (machines[i]["date"] for i in (0, -1))
    date = first if first == last else f"{first} to {last}"
    models = {model["name"]: model for result in results for model in models_of(result)}
    return {
        "suite": "real",
        "machine": machines[-1] | {"date": date},
        "models": list(models.values()),
        "rows": rows,
    } | ({"interrupted": True} if any(x.get("interrupted") for x in results) else {})


def models_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The models of one result, or of several joined ones."""
    return result["models"] if "models" in result else [result["model"]]


def cells(result: dict[str, Any]) -> list[Cell]:
    """By model, that of the longest contexts first; then by rows, context, sampling and length."""
    by_case: dict[tuple[Any, ...], list[Row]] = {}
    for row in result["rows"]:
        by_case.setdefault(where(row)[:-1], []).append(row)
    longest: dict[str, int] = {}
    for row in result["rows"]:
        model, context = row["case"]["model"], row["case"]["S"]
        longest[model] = max(longest.get(model, 0), context)

    def place(cell: Cell) -> tuple[Any, ...]:
        case = cell.case
        at = (case["B"], case["S"], case["gamma"], case["new"])
        at += (list(EXACT).index(case["exact"]), case["backends"])
        return -longest[cell.model], cell.model, *at, list(SAMPLING).index(case["sampling"])

    return sorted((Cell(rows[0]["case"], rows) for rows in by_case.values()), key=place)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Cells that differ in sampling alone; None where there is none with plain decoding."""

    greedy: Cell | None
    sampled: Cell | None

    @property
    def cells(self) -> list[Cell]:
        return [cell for cell in (self.greedy, self.sampled) if cell is not None]

    @property
    def case(self) -> Row:
        return self.cells[0].case

    @property
    def speed(self) -> float | None:
        """The lower of the speeds of vegas, of the fastest drafter where it has no times."""
        speeds = [cell.speed(_shown(cell)) for cell in self.cells if cell.ranked]
        return min((speed for speed in speeds if speed is not None), default=None)

    @property
    def tokens_per_second(self) -> float:
        """Those of vegas in the first cell, of the fastest drafter where it has no times."""
        cell = self.cells[0]
        return steady_rate(_shown(cell)) or 0.0 if cell.ranked else 0.0


def pairs(result: dict[str, Any]) -> list[Pair]:
    """The cells that are greedy or at T=0.8, without exact mode, by the measured orders of
    backends, of the suite's gamma, and of its shortest answers of their model."""
    return [pair for pair in _of_any_gamma(result) if pair.case["gamma"] == real.DEFAULT["gamma"]]


def fastest_pairs(result: dict[str, Any]) -> list[Pair]:
    """As `pairs`, but of the gamma of most `Pair.tokens_per_second`."""
    by_size: dict[tuple[Any, ...], list[Pair]] = {}
    for pair in _of_any_gamma(result):
        size = tuple(pair.case[name] for name in ("model", "B", "S"))
        by_size.setdefault(size, []).append(pair)
    return [max(of_size, key=lambda pair: pair.tokens_per_second) for of_size in by_size.values()]


def _of_any_gamma(result: dict[str, Any]) -> list[Pair]:
    usual = [
        cell
        for cell in cells(result)
        if cell.plain and not cell.exact and cell.case["sampling"] in USUAL_SAMPLING
        if prefers_none(cell.rows[0])
    ]
    shortest: dict[tuple[str, int], int] = {}
    for case in (cell.case for cell in usual):
        at = case["model"], case["gamma"]
        shortest[at] = min(shortest.get(at, case["new"]), case["new"])
    by_case: dict[str, dict[str, Cell]] = {}
    for cell in usual:
        if cell.case["new"] == shortest[cell.model, cell.case["gamma"]]:
            same = {k: x for k, x in cell.case.items() if k not in ("sampling", "drafts")}
            by_case.setdefault(str(same), {})[cell.case["sampling"]] = cell
    return [Pair(*map(of_case.get, USUAL_SAMPLING)) for of_case in by_case.values()]


def headlines(every: Sequence[Pair]) -> list[Pair]:
    """Of each model the largest cells, and those where drafting is slowest."""
    speeds = {pair: pair.speed for pair in every}
    result: dict[Pair, None] = {}
    for model in dict.fromkeys(pair.case["model"] for pair in every):
        of_model = {x: y for x, y in speeds.items() if x.case["model"] == model and y is not None}
        if of_model:
            result[max(of_model, key=lambda pair: (pair.case["B"], pair.case["S"]))] = None
            result[min(of_model, key=of_model.__getitem__)] = None
    return list(result)


def _shown(cell: Cell) -> Row:
    """The row of vegas where its speed is known, else that of the fastest drafter."""
    return next((row for row in cell.ranked if row["name"] == VEGAS), cell.ranked[0])
