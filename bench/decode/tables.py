"""The tables of the suite, and the comparison with an earlier result."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from bench.decode.parts import PARTS
from bench.point import Row, spread
from bench.settings import console
from bench.table import number, times

FOOT = (
    "step: ms of a step, the median; chunks of {steps} steps that follow each other. "
    "floor: ms to read the weights that a step needs (no embedding table that only looks tokens "
    "up), and the keys and values of the context in each row and layer, at the read ceiling of "
    "this run, {ceiling:,.0f} GB/s; for many rows, the products with the weights at the matrix "
    "ceiling in place of reading these. /floor: step over floor. idle: 1 - time of kernels over "
    "the step, below 0 where kernels overlap. peak: memory over weights and cache, measured where "
    "this row set the process's peak, else (~) as the program's plan has it. temp: temporary "
    "memory of the program over the cache. "
    "name: the backend of attention. checked: the logits of so many layers, against passes of one "
    "token by xla. x: how many times as fast, above 1 for faster"
)
PREFILL_FOOT = (
    "share: of {ceiling:,.0f} TFLOP/s, bfloat16 products of 8192 x 8192 random numbers in this "
    "run. FLOP: 2 x weights x tokens, without the tables of the vocabulary, and 4 x N x H x "
    "tokens ** 2 / 2 a layer (with a window: of the pairs that are seen)"
)


def of_kind(rows: Iterable[Row], operation: str) -> list[Row]:
    """The rows of an operation: ``"decode_step"``, ``"prefill"`` or ``"iteration"``."""
    return [row for row in rows if row["operation"] == operation]


def ms(microseconds: float) -> str:
    """Milliseconds, with two or three decimals."""
    return f"{microseconds / 1e3:.{2 if microseconds >= 1e3 else 3}f}"


def step_cells(row: Row) -> tuple[str, ...]:
    """The cells under `STEP` of a row with times."""
    step = spread(row, "step")
    assert step is not None
    floor = row["floor_ns"] / 1e3
    needed = row["weight_bytes"] + row["cache_bytes"]
    measured = "" if row.get("peak_measured") else "~"
    return (
        ms(step.median),
        f"{ms(step.low)}-{ms(step.high)}",
        ms(floor),
        f"{step.median / floor:.2f}",
        number(row["kernels"]) if "kernels" in row else "",
        f"{row['idle']:.1%}" if "idle" in row else "",
        f"{measured}{row['peak_bytes'] / needed:.3f}" if "peak_bytes" in row else "",
        f"{row['temp_bytes'] / row['cache_bytes']:.1%}" if "temp_bytes" in row else "",
    )


def part_cells(row: Row) -> tuple[str, ...]:
    """Milliseconds and share of a step for each part and idle, of a row with kernels."""
    step = spread(row, "step")
    assert step is not None
    parts = {part: row["parts_ns"][part] / 1e3 for part in PARTS}
    parts["idle"] = step.median - sum(parts.values())
    return tuple(f"{ms(time)} ({time / step.median:.0%})" for time in parts.values())


def prefill_cells(row: Row) -> tuple[str, ...]:
    """Tokens a second, TFLOP/s and share of the matrix ceiling, of a row with times."""
    seconds = statistics.median(row["wall_ns"]) / 1e9
    rate = row["flops"] / seconds
    share = rate / row["matrix_ceiling_flops_per_s"]
    return f"{row['case']['tokens'] / seconds:,.0f}", number(rate / 1e12), f"{share:.0%}"


CASE = ("model", "layers", "B", "context", "T")
STEP = ("step", "p10-p90", "floor", "/floor", "kernels", "idle", "peak", "temp")


def show(result: dict[str, Any]) -> None:
    """Print steps, the parts of their time, and prefill; rows without times as their reason.

    On a narrow terminal, the percentiles are left out.
    """
    screen, rows = console(), result["rows"]
    reasons = list(dict.fromkeys(row["reason"] for row in rows if row.get("reason")))
    title = f"{result['machine']['device']}; times in milliseconds"
    steps = _steps(title, rows, reasons, percentiles=True)
    if Measurement.get(screen, screen.options.update(width=1000), steps).maximum > screen.width:
        steps = _steps(title, rows, reasons, percentiles=False)
    parts = _table("where the time of a step goes", (*CASE, *PARTS, "idle"))
    for row in of_kind(rows, "decode_step"):
        if "parts_ns" in row:
            parts.add_row(*_case(row), *part_cells(row))
    prefills = _prefills(of_kind(rows, "prefill"), reasons)
    for table in (steps, parts, prefills):
        if table.row_count:
            screen.print(table)
    ceiling = result["read_ceiling_bytes_per_s"] / 1e9
    screen.print(FOOT.format(steps=result["steps"], ceiling=ceiling), markup=False)
    if prefills.row_count:
        ceiling = result["matrix_ceiling_flops_per_s"] / 1e12
        screen.print(PREFILL_FOOT.format(ceiling=ceiling), markup=False)
    for index, reason in enumerate(reasons, 1):
        screen.print(f"[{index}] {reason}", markup=False)
    for clock, reason in result.get("clocks", {}).items():
        screen.print(f"no {clock} clock: {reason}", markup=False)


def _steps(title: str, rows: list[Row], reasons: list[str], *, percentiles: bool) -> Table:
    columns = [i for i, heading in enumerate(STEP) if percentiles or heading != "p10-p90"]
    compared = any("ratio" in row for row in rows)
    headings = (*CASE, "name", *(STEP[i] for i in columns), *(["vs before"] if compared else []))
    table = _table(title, headings)
    for row in of_kind(rows, "decode_step"):
        cells = [*_case(row), row["name"]]
        if row.get("reason"):
            cells[-1] = escape(f"{row['name']} [{reasons.index(row['reason']) + 1}]")
        else:
            cells += [step_cells(row)[i] for i in columns]
            cells += [times(row["ratio"])] if "ratio" in row else []
        table.add_row(*cells)
    return table


def _prefills(rows: list[Row], reasons: list[str]) -> Table:
    table = _table("prefill", ("model", "layers", "tokens", "tokens/s", "TFLOP/s", "share"))
    for row in rows:
        cells = [str(row["case"][key]) for key in ("model", "layers", "tokens")]
        if row.get("reason"):
            table.add_row(*cells, escape(f"[{reasons.index(row['reason']) + 1}]"))
        else:
            table.add_row(*cells, *prefill_cells(row))
    return table


def _case(row: Row) -> list[str]:
    return [str(row["case"][key]) for key in CASE]


def _table(title: str, headings: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", padding=(0, 1, 0, 0), box=None)
    for heading in headings:
        words = heading in ("model", "name")
        justify = "left" if words else "right"
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=not words)
    return table


def compare(result: dict[str, Any], earlier: dict[str, Any]) -> int:
    """Write into each row its speedup over the earlier result; returns how many had one.

    Rows are matched by operation and case.
    """
    before = {_where(row): _time(row) for row in earlier["rows"]}
    met = 0
    for row in result["rows"]:
        now, then = _time(row), before.get(_where(row))
        if now is not None and then is not None:
            row["ratio"] = then / now
            met += 1
    return met


def _where(row: Row) -> tuple[Any, ...]:
    return row["operation"], tuple(sorted(row["case"].items()))


def _time(row: Row) -> float | None:
    time = spread(row, "step") or spread(row, "wall")
    return None if time is None else time.median
