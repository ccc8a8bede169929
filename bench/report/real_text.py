"""Pieces of the tables of real models: cases, speeds and acceptance as text."""

from __future__ import annotations

from bench.real import tables
from bench.real.figures import Row, committed_per_step, steady_rate

SAMPLED = {
    "greedy": "greedy",
    "t0.8": "T=0.8",
    "paper": "T=0.6, top-p 0.95, top-k 20",
}


def rows_of(case: Row) -> str:
    return f"{case['B']} row" + ("s" if case["B"] > 1 else "")


def sampling_of(case: Row) -> str:
    return SAMPLED[case["sampling"]]


def rate_of(row: Row) -> str:
    """Steady tokens per second."""
    rate = steady_rate(row)
    return "" if rate is None else f"{rate:,.0f}"


def per_step(row: Row, *, error: bool = False) -> str:
    """Tokens per step of answers that do not repeat themselves, in brackets of all where those
    are none; with the standard ``error``."""
    mean, every = (committed_per_step(row, repetitive=x) for x in (False, True))
    if mean is not None:
        return tables.with_error(mean) if error else f"{mean.mean:.2f}"
    return "" if every is None else f"({every.mean:.2f})"
