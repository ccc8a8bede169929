"""The sections on attention over a cache and over a selection of it."""

from __future__ import annotations

from typing import Any

from bench import attention, gather, regret
from bench.point import best_clock
from bench.report.ceilings import rates
from bench.report.text import absent, choice, header, names, paragraphs, picture, table, time
from bench.table import Floor, cell, number

COLD = (
    "Device time, each call behind 128 MiB of other data (wall time where there is no device "
    "clock); in brackets the share of the read ceiling of this run: the bytes that the case needs "
    "over the time. FlashAttention-3 takes the "
    "fastest of four numbers of splits. *MB* counts "
)


def dense(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    floor = attention.floor(result)
    return paragraphs(
        header("Attention over a cache", result),
        f"bfloat16. {COLD}{floor.bytes}.",
        shares(result, "attention", attention.COLUMNS, floor),
        picture(pictures, "attention-context", "share of the read ceiling against context"),
        picture(pictures, "attention-tokens", "share of the read ceiling against tokens"),
        choice(result, "attention"),
        rates(result["ceilings"]),
        absent(result),
    )


def gathered(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    floor, columns = gather.floor(result), gather.COLUMNS[:-1]
    operations = gather.OPERATIONS.values()
    places, copies, reads = (shares(result, x, columns, floor) for x in operations)
    return paragraphs(
        header("Attention over a selection of a cache", result),
        f"bfloat16. {COLD}{floor.bytes}.",
        "### Read in place\n",
        places,
        "### Copied once, then read as a dense cache\n",
        "The copy:",
        copies,
        "Reading it:",
        reads,
        "\n".join(f"- {even}" for even in gather.evens(result["rows"])),
        choice(result, "gathered_attention"),
        rates(result["ceilings"]),
        absent(result),
    )


def shares(result: dict[str, Any], operation: str, columns: tuple[str, ...], floor: Floor) -> str:
    """A line a case, its bytes, and each name's time and share of the read ceiling."""
    everyone = names(result, operation)
    lines = []
    for case, rows in regret.points(result["rows"], operation):
        own = {row["name"]: row for row in rows}
        cells = [_cell(own.get(name), floor) for name in everyone]
        head = (cell(x, case[x]) for x in columns)
        lines.append((*head, number(rows[0]["bytes"] / 1e6), *cells))
    return table((*columns, "MB", *everyone), lines, left=0)


def _cell(row: dict[str, Any] | None, floor: Floor) -> str:
    if row is None:
        return ""
    share = floor.share(row)
    return time(best_clock(row)) + ("" if share is None else f" ({share:.0%})")
