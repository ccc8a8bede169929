"""What `implementation=None` loses to the best backend, and fused backends to two steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from bench.point import Row, best_clock
from bench.settings import console


@dataclasses.dataclass(frozen=True)
class Regret:
    """Ratios over ``points`` of a grid: the ``mean`` and the ``worst``, and where that was."""

    points: int
    mean: float
    worst: float
    where: dict[str, Any]

    def __str__(self) -> str:
        where = ", ".join(f"{key}={value}" for key, value in self.where.items())
        return f"mean {self.mean:.2f}, worst {self.worst:.2f} ({where}), {self.points} points"


def of_choice(rows: Sequence[Row], operation: str) -> Regret | None:
    """The chosen backend's time over that of the fastest backend, pipelines left out."""
    return _worst(
        (case, _fastest(own, lambda r: bool(r.get("chosen"))), _fastest(own, _is_backend))
        for case, own in points(rows, operation)
    )


def of_fusion(rows: Sequence[Row]) -> Regret | None:
    """The chosen fused backend's time over that of the fastest pipeline of two steps."""
    return _worst(
        (case, _fastest(own, lambda r: bool(r.get("chosen"))), _fastest(own, is_pipeline))
        for case, own in points(rows, "verify_and_pack")
    )


def points(rows: Sequence[Row], operation: str) -> list[tuple[dict[str, Any], list[Row]]]:
    """The rows of an operation that have times, by case."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["operation"] == operation and best_clock(row) is not None:
            found.setdefault(tuple(row["case"].items()), []).append(row)
    return [(dict(case), own) for case, own in found.items()]


def is_pipeline(row: Row) -> bool:
    """Whether a row is of two programs, one behind the other."""
    return "+" in row["name"]


def _is_backend(row: Row) -> bool:
    return not is_pipeline(row) and row["backend"]


def _fastest(rows: Sequence[Row], wanted: Any) -> float | None:
    times = [time.median for r in rows if wanted(r) and (time := best_clock(r)) is not None]
    return min(times, default=None)


def _worst(ratios: Any) -> Regret | None:
    found = [(a / b, case) for case, a, b in ratios if a is not None and b is not None]
    if not found:
        return None
    worst = max(found, key=lambda x: x[0])
    return Regret(len(found), sum(x for x, _ in found) / len(found), *worst)


def show(rows: Sequence[Row]) -> None:
    """A line an operation, under its table."""
    screen = console()
    for operation in dict.fromkeys(r["operation"] for r in rows):
        found = of_choice(rows, operation)
        if found is not None:
            screen.print(f"{operation}: implementation=None over the fastest backend: {found}")
    found = of_fusion(rows)
    if found is not None:
        screen.print(f"verify_and_pack over the fastest pipeline of two steps: {found}")
