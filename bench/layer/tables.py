"""The table of a layer's policies, and their targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import ceilings
from bench.point import Row, Spread, best_clock, spread
from bench.settings import console
from bench.table import Floor, cell, number, times

CASE = ("B", "S", "n", "heads")
COLUMNS = ("time", "p10-p90", "kernels", "MB", "of floor", "vs dense", "vs target")
BYTES = (
    "what the policy keeps of every token and scores (of exact top-k its key), keys and values of "
    "the n selected and the new one, queries and outputs; of dense attention all keys and values"
)
FOOT = (
    "vs dense: how many times as fast as the fastest dense attention of the case; of floor: the "
    "time of MB at the read ceiling of this run, {ceiling}, over the time; vs target: speed over "
    "what it is to reach, 1 or more for reached. MB: {bytes}"
)
# Target speedups of HATA over the fastest dense attention, by heads, rows and slots.
TARGETS = {("32/32", 8, 32768): 15.0, ("32/32", 1, 2**18): 15.0, ("32/8", 8, 32768): 10.0}
# Target speedups of HATA over these policies.
OTHERS = {"quest_16": 1.2, "quest_32": 1.2, "loki": 2.0}


@dataclasses.dataclass(frozen=True)
class Group:
    """The rows of one case that have times: ``dense`` attention's and those of ``policies``."""

    case: dict[str, Any]
    dense: dict[str, Row]
    policies: dict[str, Row]

    @property
    def fastest(self) -> tuple[str, float] | None:
        """The fastest dense attention and its microseconds."""
        medians = {name: time_of(row).median for name, row in self.dense.items()}
        return min(medians.items(), key=lambda pair: pair[1], default=None)

    def speedup(self, name: str) -> float | None:
        """Speedup of a policy over the fastest dense attention."""
        row = self.policies.get(name)
        return self.fastest[1] / time_of(row).median if row and self.fastest else None

    def beside(self, name: str) -> float | None:
        """Speedup of HATA over another policy."""
        hata, other = self.policies.get("hata"), self.policies.get(name)
        return time_of(other).median / time_of(hata).median if hata and other else None

    def target(self, name: str) -> tuple[float, float] | None:
        """The target of a policy's row and the measured value: HATA's speed over dense attention,
        or over that policy."""
        reached = aim = None
        if name == "hata":
            aim = TARGETS.get(tuple(self.case[key] for key in ("heads", "B", "S")))
            reached = self.speedup(name)
        elif name in OTHERS:
            aim, reached = OTHERS[name], self.beside(name)
        return None if aim is None or reached is None else (aim, reached)


def time_of(row: Row) -> Spread:
    """The best clock of a row that has times."""
    clock = best_clock(row)
    assert clock is not None
    return clock


def groups(rows: Sequence[Row], operation: str = "hata_layer") -> list[Group]:
    """The rows that have times, by case."""
    by_case: dict[tuple[Any, ...], Group] = {}
    for row in rows:
        if best_clock(row) is None or row["operation"] not in ("attention", operation):
            continue
        group = by_case.setdefault(tuple(row["case"].items()), Group(row["case"], {}, {}))
        (group.dense if row["operation"] == "attention" else group.policies)[row["name"]] = row
    return list(by_case.values())


def lines(group: Group, floor: Floor) -> Iterator[tuple[str, ...]]:
    """The name and the cells under `COLUMNS` of each row: the fastest dense attention, then the
    policies."""
    best = group.fastest
    if best is not None:
        yield best[0], *cells(group.dense[best[0]], floor), times(1.0), ""
    for name, row in group.policies.items():
        speedup, target = group.speedup(name), group.target(name)
        yield (
            name,
            *cells(row, floor),
            "" if speedup is None else times(speedup),
            "" if target is None else f"{target[1] / target[0]:.2f} of {target[0]:g}x",
        )


def cells(row: Row, floor: Floor) -> tuple[str, ...]:
    """The cells under `COLUMNS` except the last two."""
    time, share = time_of(row), floor.share(row)
    return (
        number(time.median),
        f"{number(time.low)}-{number(time.high)}",
        str(row.get("kernels", "")),
        number(row["bytes"] / 1e6),
        "" if share is None else f"{share:.0%}",
    )


def floor_of(result: dict[str, Any]) -> Floor:
    """The read ceiling that rows are compared with."""
    return Floor(ceilings.bandwidth(result["ceilings"], "read"), BYTES)


def foot(floor: Floor) -> str:
    """What the columns mean."""
    ceiling = "not measured" if floor.read is None else f"{floor.read / 1e9:,.0f} GB/s"
    return FOOT.format(ceiling=ceiling, bytes=floor.bytes)


def show(result: dict[str, Any], operation: str = "hata_layer") -> None:
    """Print each case with the fastest dense attention and all policies; reasons of other rows."""
    screen, floor, rows = console(), floor_of(result), result["rows"]
    device = result["machine"]["device"]
    table = Table(title=f"{result['suite']}: {device}; times in microseconds", title_justify="left")
    table.box, table.padding = None, (0, 1, 0, 0)
    for heading in (*CASE, "name", *COLUMNS):
        table.add_column(heading, justify="left" if heading == "name" else "right")
    for group in groups(rows, operation):
        for line in lines(group, floor):
            table.add_row(*(cell(key, group.case[key]) for key in CASE), *line)
    screen.print(table)
    screen.print(foot(floor), markup=False)
    show_reasons(screen, result)


def show_reasons(screen: Console, result: dict[str, Any]) -> None:
    """Print the reasons of rows without times, each once."""
    rows = result["rows"]
    reasons = (f"{row['name']}: {row['reason']}" for row in rows if row.get("reason"))
    for reason in dict.fromkeys(reasons):
        screen.print(reason, markup=False)
    if not any(spread(row, "device") for row in rows):
        screen.print("wall time: there is no device clock")
