"""What the rows of `python -m bench real` say: speeds over plain decoding and over its floor."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from bench.real.answers import PerStep, per_step
from bench.real.drafters import PLAIN

Row = dict[str, Any]
WHERE = ("model", "B", "S", "gamma", "exact", "sampling", "new")  # what rows are compared within


def where(row: Row) -> tuple[Any, ...]:
    """The case of a row without its drafter, and the run that measured it."""
    return (*(row["case"][key] for key in WHERE), row["run"])


def is_timed(row: Row) -> bool:
    return bool(row["checked"]) and ("step_ns" in row or "decode_s_samples" in row)


def plain_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """Plain decoding of the same case in the same run; None where it has no times."""
    at = where(row)
    return next((x for x in rows if x["name"] == PLAIN and where(x) == at and is_timed(x)), None)


def committed_per_step(row: Row, *, repetitive: bool) -> PerStep | None:
    """Tokens per step of the rows that do not repeat themselves, or of all with ``repetitive``.

    None where no such row is left, or for a rival, which has no steps.
    """
    if "steps" not in row:
        return None
    triples = zip(row["tokens"], row["steps"], row["repeats"], strict=True)
    chosen = [(t, s) for t, s, repeats in triples if repetitive or not repeats]
    return per_step(*zip(*chosen, strict=True)) if chosen else None


def step_ms(row: Row) -> float | None:
    """Milliseconds of a step while all rows decode."""
    return statistics.median(row["step_ns"]) / 1e6 if "step_ns" in row else None


def steady_rate(row: Row) -> float | None:
    """Tokens per second while all rows decode, at the acceptance of rows that do not repeat."""
    mean, time = committed_per_step(row, repetitive=False), step_ms(row)
    return None if mean is None or time is None else row["case"]["B"] * mean.mean / time * 1e3


def batch_rate(row: Row) -> float:
    """Tokens per second of all rows, until the last of a batch has ended."""
    return sum(row["tokens"]) / statistics.median(row["decode_s_samples"])


def end_to_end_rate(row: Row) -> float:
    """`batch_rate` with the prefill counted, and what a drafter makes of the prompts."""
    seconds = statistics.median(row["decode_s_samples"]) + row["prefill_s"]
    seconds += 0.0 if row["name"] == PLAIN else row.get("switch_s", 0.0)
    return sum(row["tokens"]) / seconds


def floor_rate(row: Row) -> float:
    """Tokens per second of plain decoding at its byte floor."""
    return row["case"]["B"] / row["plain_floor_ns"] * 1e9


def over_plain(row: Row, rows: Sequence[Row], rate: Callable[[Row], float | None]) -> float | None:
    """How many times the ``rate`` of plain decoding in the same run; None where one is unknown."""
    plain = plain_of(row, rows)
    if plain is None:
        return None
    mine, theirs = rate(row), rate(plain)
    return None if mine is None or not theirs else mine / theirs


def limits(row: Row) -> str:
    """What a step is spent on: kernels over wall time, and the largest part over its floor."""
    if "parts_ns" not in row or "step_ns" not in row:
        return ""
    wall = statistics.median(row["step_ns"])
    busy = sum(row["parts_ns"].values()) / wall
    floor = sum(row["floors_ns"].values()) / wall
    part, time = max(row["parts_ns"].items(), key=lambda pair: pair[1])
    over = row["floors_ns"].get(part)
    ratio = "" if not over else f", {time / over:.1f}x its bytes"
    return f"floor {floor:.0%} of the step, kernels {busy:.0%}; {part} {time / wall:.0%}{ratio}"
