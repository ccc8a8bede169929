"""The section on real models: acceptance and speed as they happen, win or lose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bench.cases import kilo
from bench.real.figures import Row, batch_rate, floor_rate, steady_rate
from bench.report import real_tables
from bench.report.real_cells import USUAL_SAMPLING, VEGAS, Cell, cells, highlights, models_of
from bench.report.real_text import (
    merged,
    per_step,
    rate_of,
    ratio,
    rows_of,
    sampling_of,
    speeds_of,
)
from bench.report.text import header, paragraphs, picture, table

HEADLINE = (
    *("rows", "context", "sampling", "plain tok/s", "drafter", "tokens/step", "tok/s"),
    *("vs plain", "batch", "end to end"),
)
SECTION = "Real models, acceptance measured"


def section(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    """Every question a table: speed, acceptance, exact mode, other libraries, what limits."""
    every = cells(result)
    models = list(dict.fromkeys(cell.model for cell in every))
    by_model = {model: [cell for cell in every if cell.model == model] for model in models}
    return paragraphs(
        header(SECTION, result),
        _words(result),
        picture(pictures, "real", "speed over plain decoding against rows and context"),
        *(_speeds(model, of_model) for model, of_model in by_model.items()),
        *map(real_tables.every_drafter, real_tables.headlines(every)),
        *(real_tables.acceptance(model, of_model) for model, of_model in by_model.items()),
        real_tables.exact(every),
        real_tables.rivals(every),
        *(real_tables.limits_of(model, of_model) for model, of_model in by_model.items()),
        real_tables.not_timed(every),
    )


def lines(result: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """For the table at a glance: the largest and the slowest cells of each model."""
    for cell, row in highlights(cells(result)):
        rows, context = rows_of(cell.case), kilo(cell.case["S"])
        words = f"{cell.model}, {rows}, {context} tokens, {sampling_of(cell.case)}, {row['name']}"
        steady = ratio(cell.speed(row), " plain decoding")
        batch = ratio(cell.speed(row, batch_rate), " until the slowest row ends")
        yield words, f"{rate_of(row)} tokens/s", f"{steady}; {batch}; acceptance measured"


def _words(result: dict[str, Any]) -> str:
    models = "; ".join(
        f"{model['name']}, {model['weight_bytes'] / 1e9:.2f} GB in {model['dtype']}"
        for model in models_of(result)
    )
    return (
        f"Real weights, real texts, **acceptance measured**: {models}. Prompts of up to *context* "
        "tokens (the shortest 30 % shorter) are source code, Python's documentation and package "
        "metadata, each with a question in the model's chat template. A batch of fewer than 8 "
        "*rows* is decoded for several prompts, one batch after the other. *plain tok/s*: plain "
        "decoding, and in brackets its share of the rate at which the card could read the bytes "
        "of its steps (the byte floor). *tokens/step*: committed per verification step, with the "
        "standard error over rows, of answers that do not repeat a 16-gram three times; in "
        "brackets of all answers. *tok/s*: steady, while all rows decode, at that acceptance; in "
        "brackets over plain decoding **at its byte floor**, so that a slow plain step flatters "
        "nothing. The drafter *none* is plain decoding. *vs plain*: the steady speed over plain "
        "decoding in the same run. *batch*: all tokens until the slowest row of `jspec.generate` "
        "has ended, over plain's. *end to end*: that with the prefill. Above 1 is faster, below 1 "
        "is called slower. Greedy answers were compared with plain decoding's, sampled ones with "
        "the model's law (docs/bench.md)."
    )


# Speed over plain decoding


def _speeds(model: str, of_model: Sequence[Cell]) -> str:
    """The fastest drafter and vegas of each cell, a table for each length of answers."""
    shown = [x for x in of_model if not x.exact and x.case["sampling"] in USUAL_SAMPLING]
    parts = []
    for new in sorted({cell.case["new"] for cell in shown}):
        of_length = [cell for cell in shown if cell.case["new"] == new]
        rows = merged([line for cell in of_length for line in _headline(cell)], columns=4)
        if rows:
            text = table(HEADLINE, rows, left=5)
            parts.append(
                f"### {model}: the fastest drafter and vegas, {new:,} new tokens\n\n{text}"
            )
    return paragraphs(*parts)


def _headline(cell: Cell) -> Iterator[tuple[str, ...]]:
    if cell.plain is None:
        return
    where = (str(cell.case["B"]), kilo(cell.case["S"]), sampling_of(cell.case))
    at = (*where, f"{rate_of(cell.plain)} ({_of_floor(cell.plain)})")
    chosen = {row["name"]: row for row in cell.ranked[:1]}
    if VEGAS in cell.drafters:
        chosen[VEGAS] = cell.drafters[VEGAS]
    elif VEGAS in cell.not_timed:
        yield (*at, VEGAS, "not timed", "", "", "", "")
    for name, row in chosen.items():
        rate = rate_of(row)
        yield (
            *at,
            name,
            per_step(row),
            rate and f"{rate} ({_of_floor(row)})",
            *speeds_of(cell, row),
        )


def _of_floor(row: Row) -> str:
    rate = steady_rate(row)
    return "" if rate is None else f"{rate / floor_rate(row):.2f}"
