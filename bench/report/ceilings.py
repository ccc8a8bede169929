"""The section on what the machine can do at most."""

from __future__ import annotations

from typing import Any

from bench.point import spread
from bench.report.text import CLOCKS, absent, header, paragraphs, table, time


def section(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    return paragraphs(
        header("Ceilings", result),
        CLOCKS + " Where a table says *cold*, 128 MiB of other data passed through L2 before "
        "each call.",
        rates(result["rows"]),
        absent(result),
    )


def rates(rows: list[dict[str, Any]]) -> str:
    """The rows of the suite as a table; ``copy`` counts bytes read and bytes written."""
    lines = []
    for row in rows:
        device, wall = spread(row, "device"), spread(row, "wall")
        best = device or wall
        if best is None:
            continue
        size = row["bytes"]
        rate = f"{size / best.median / 1e3:,.0f}" if size > 2**10 else ""
        cells = (row["case"]["work"], f"{size / 2**20:,.0f}" if rate else "", row["case"]["l2"])
        lines.append((*cells, time(device, spread=True), time(wall), rate))
    return table(("work", "MiB", "L2", "device", "wall", "GB/s"), lines)
