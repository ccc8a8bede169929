"""What the rows of `python -m bench real` say: speeds over plain decoding and over its floor."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from bench.drafters import DEFAULT_BACKENDS, PLAIN
from bench.real.answers import PerStep, per_step

Row = dict[str, Any]
# What rows are compared within.
WHERE = ("model", "B", "S", "gamma", "exact", "sampling", "new", "backends")


def where(row: Row) -> tuple[Any, ...]:
    """The case of a row without its drafter, and the run that measured it."""
    return (*(row["case"][key] for key in WHERE), row["run"])


def prefers_none(row: Row) -> bool:
    """Whether its steps ran by the measured orders of backends."""
    return row["case"]["backends"] == DEFAULT_BACKENDS


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
    """Tokens per second while all rows decode, at the acceptance of rows that do not repeat.

    Plain decoding and a lossy policy commit a token a step whether or not answers repeat.
    """
    commits_one = row["name"] == PLAIN or row.get("lossy", False)
    mean = committed_per_step(row, repetitive=commits_one)
    time = step_ms(row)
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


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a step is spent on while all rows decode, in shares of its wall time.

    Attributes:
        floor: the time to read its bytes at the read ceiling.
        kernels: the time of its kernels, `floor` included; the rest is gaps between them.
        part: the part whose kernels take longest, such as ``"verification"``.
        part_time: the time of that part's kernels.
        part_over: that time over the part's floor; None for a part without one.
        packing: the time of packing the accepted path of a tree, 0 where drafts are chains.
    """

    floor: float
    kernels: float
    part: str
    part_time: float
    part_over: float | None
    packing: float


def limits(row: Row) -> Limits | None:
    """Of a row with a profile; None for one without."""
    if "parts_ns" not in row or "step_ns" not in row:
        return None
    wall = statistics.median(row["step_ns"])
    part, time = max(row["parts_ns"].items(), key=lambda pair: pair[1])
    floor = row["floors_ns"].get(part)
    return Limits(
        floor=sum(row["floors_ns"].values()) / wall,
        kernels=sum(row["parts_ns"].values()) / wall,
        part=part,
        part_time=time / wall,
        part_over=time / floor if floor else None,
        packing=row["parts_ns"].get("packing", 0) / wall,
    )
