"""The tables of `python -m bench real`, one for each cell, sampling and length of answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from bench.cases import kilo
from bench.real.answers import PerStep
from bench.real.figures import (
    Limits,
    Row,
    batch_rate,
    committed_per_step,
    end_to_end_rate,
    floor_rate,
    is_timed,
    limits,
    over_plain,
    prefers_none,
    steady_rate,
    step_ms,
    where,
)
from bench.settings import console
from bench.table import times

FOOT = (
    "tokens/step: committed per verification step, ± standard error over rows, of answers that do "
    "not repeat a 16-gram three times; all rows: with those that do. tok/s: steady, of all rows "
    "while all decode, at the first acceptance. of floor: that over plain decoding at its byte "
    "floor. batch: all tokens of jspec.generate until the slowest row has ended, over plain; end "
    "to end: with the prefill. same: rows whose tokens are plain's. repeat: rows that do"
)


def groups(rows: Sequence[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """The rows by case, those of a later run of the same case in place of earlier ones."""
    result: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        result.setdefault(where(row)[:-1], []).append(row)
    return result


def title(row: Row) -> str:
    """What the rows of a table share, in words."""
    case = row["case"]
    rows = f"{case['B']} row" + ("s" if case["B"] > 1 else "")
    words = f"{case['model']}: {rows} of up to {kilo(case['S'])} tokens, {case['sampling']}, "
    words += f"{case['new']} new, gamma {case['gamma']}"
    words += "" if case["exact"] == "no" else f", exact {case['exact']}"
    return words + ("" if prefers_none(row) else f", backends {case['backends']}")


def cells(row: Row, rows: Sequence[Row]) -> dict[str, str]:
    """A timed row, by heading."""
    mean, every = (committed_per_step(row, repetitive=x) for x in (False, True))
    steady, step = steady_rate(row), step_ms(row)
    rates = {"vs plain": steady_rate, "batch": batch_rate, "end to end": end_to_end_rate}
    over = {heading: over_plain(row, rows, rate) for heading, rate in rates.items()}
    speeds = {heading: "" if speed is None else times(speed) for heading, speed in over.items()}
    return {
        "drafter": row["name"],
        "tokens/step": "" if mean is None else with_error(mean),
        "all rows": "" if every is None else f"{every.mean:.2f}",
        "ms/step": "" if step is None else f"{step:.2f}",
        "tok/s": "" if steady is None else f"{steady:,.0f}",
        "of floor": "" if steady is None else f"{steady / floor_rate(row):.2f}",
        **speeds,
        "same": f"{row['identical_rows']}/{row['rows']}" if "identical_rows" in row else "",
        "repeat": str(sum(row["repeats"])) if "repeats" in row else "",
    }


def with_error(per_step: PerStep) -> str:
    """Tokens per step and their standard error, which a single row does not have."""
    error = "" if math.isnan(per_step.error) else f" ±{per_step.error:.2f}"
    return f"{per_step.mean:.2f}{error}"


def limits_line(shares: Limits) -> str:
    """What a step is spent on, on a line."""
    words = f"floor {shares.floor:.0%} of the step, kernels {shares.kernels:.0%}; "
    words += f"{shares.part} {shares.part_time:.0%}"
    words += "" if shares.part_over is None else f", {shares.part_over:.1f}x its bytes"
    return words + (f"; packing {shares.packing:.2%}" if shares.packing else "")


def lossy_line(row: Row) -> str:
    """How far the answers of a lossy policy are the model's, on a line."""
    own, plain = row["log_probability"], row["plain_log_probability"]
    return (
        f"lossy, without verification; {row['agreement']:.0%} of the tokens are plain decoding's, "
        f"up to the first one that differs; {own:.2f} nats a token by dense attention, of plain "
        f"decoding's answers {plain:.2f}"
    )


def show(result: dict[str, Any]) -> None:
    """A table a case; what was not timed is a line with its reason."""
    screen = console()
    for rows in groups(result["rows"]).values():
        heading = f"{result['machine']['device']}, acceptance measured. {title(rows[0])}"
        table = Table(title=heading, title_justify="left", padding=(0, 1, 0, 0), box=None)
        lines = [cells(row, rows) for row in rows if is_timed(row)]
        for word in lines[0] if lines else ():
            table.add_column(word, justify="left" if word == "drafter" else "right")
        for line in lines:
            table.add_row(*line.values())
        screen.print(table)
        for row in rows:
            if row.get("reason"):
                screen.print(f"{row['name']}: {row['reason']}", markup=False)
                continue
            if row.get("lossy"):
                screen.print(f"  {row['name']}: {lossy_line(row)}", markup=False)
            if (shares := limits(row)) is not None:
                line = f"  {row['name']}: {limits_line(shares)}"
                screen.print(line, markup=False, style="dim")
    screen.print(FOOT, markup=False)
