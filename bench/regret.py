"""Speed of `implementation=None` over the best backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from bench.point import Row, best_clock


@dataclasses.dataclass(frozen=True)
class Regret:
    """Speedups over ``points`` of a grid: mean, worst, and the case of the worst."""

    points: int
    mean: float
    worst: float
    where: dict[str, Any]

    def __str__(self) -> str:
        where = ", ".join(f"{key}={value}" for key, value in self.where.items())
        return f"mean {self.mean:.2f}x, worst {self.worst:.2f}x ({where}), {self.points} points"


def of_choice(rows: Sequence[Row], operation: str) -> Regret | None:
    """The speed of the chosen backend over the fastest one's, pipelines left out."""
    return _worst(
        (
            case,
            _fastest(rows_of_case, lambda r: bool(r.get("chosen"))),
            _fastest(rows_of_case, _is_backend),
        )
        for case, rows_of_case in points(rows, operation)
    )


def points(rows: Sequence[Row], operation: str) -> list[tuple[dict[str, Any], list[Row]]]:
    """The rows of an operation that have times, by case."""
    by_case: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.get("operation") == operation and best_clock(row) is not None:
            by_case.setdefault(tuple(row.get("case", {}).items()), []).append(row)
    return [(dict(case), rows_of_case) for case, rows_of_case in by_case.items()]


def is_pipeline(row: Row) -> bool:
    """Whether a row is of two programs, one after the other."""
    return "+" in row["name"]


def _is_backend(row: Row) -> bool:
    return not is_pipeline(row) and bool(row.get("backend"))


def _fastest(rows: Sequence[Row], matches: Any) -> float | None:
    times = [time.median for r in rows if matches(r) and (time := best_clock(r)) is not None]
    return min(times, default=None)


def _worst(times: Any) -> Regret | None:
    speeds = [(b / a, case) for case, a, b in times if a is not None and b is not None]
    if not speeds:
        return None
    worst = min(speeds, key=lambda x: x[0])
    return Regret(len(speeds), sum(x for x, _ in speeds) / len(speeds), *worst)
