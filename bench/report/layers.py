"""A layer and a step of each policy against dense ones, from the rows of suite `hata`."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from bench.point import Row, best_clock
from bench.policies import NAMES
from bench.report.text import microseconds

CASE = ("B", "S", "n", "heads")


@dataclasses.dataclass(frozen=True)
class Group:
    """The rows of one case that have times: ``dense`` attention's and those of ``policies``."""

    case: dict[str, Any]
    dense: dict[str, Row]
    policies: dict[str, Row]

    @property
    def fastest(self) -> tuple[str, float] | None:
        """The fastest dense attention and its microseconds."""
        medians = {name: microseconds(row) for name, row in self.dense.items()}
        return min(medians.items(), key=lambda pair: pair[1], default=None)

    def speedup(self, name: str) -> float | None:
        """Speedup of a policy over the fastest dense attention."""
        row = self.policies.get(name)
        return self.fastest[1] / microseconds(row) if row and self.fastest else None


def groups(rows: Sequence[Row]) -> list[Group]:
    """The rows of layers that have times, by case."""
    by_case: dict[tuple[Any, ...], Group] = {}
    for row in rows:
        if row["operation"] in ("attention", "hata_layer") and best_clock(row) is not None:
            group = by_case.setdefault(tuple(row["case"].items()), Group(row["case"], {}, {}))
            is_policy = row["operation"] == "hata_layer" and row["name"] in NAMES
            (group.policies if is_policy else group.dense)[row["name"]] = row
    return list(by_case.values())


def host_steps(rows: Sequence[Row]) -> Iterator[tuple[Row, float, float | None]]:
    """Each row of `hata_off` with a time, its milliseconds, and those of the dense step."""
    timed = [row for row in rows if row["checked"] and row.get("step_ns")]
    for row in timed:
        if row["name"] == "hata_off":
            dense = [x for x in timed if x["case"] == row["case"] and x["name"] == "dense"]
            step, *of_dense = (statistics.median(x["step_ns"]) / 1e6 for x in (row, *dense))
            yield row, step, of_dense[0] if of_dense else None


def cache_bytes_of(row: Row) -> tuple[int, int]:
    """Bytes of the cache on the device and in host memory."""
    memory = row.get("memory", {})
    return memory.get("cache_bytes", row.get("device_bytes")), memory.get(
        "host_bytes", row.get("host_bytes")
    )


def context_of(row: Row) -> int:
    """Tokens of context of a row of `hata_off`; results until 2026-11 call them ``context``."""
    return row["case"].get("S") or row["case"]["context"]
