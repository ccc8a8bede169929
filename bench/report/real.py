"""The tables on real models: acceptance and speed as they happen, win or lose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from bench.cases import kilo
from bench.drafters import ALL, PLAIN
from bench.real.figures import (
    Row,
    batch_rate,
    floor_rate,
    limits,
    plain_of,
    steady_rate,
    step_ms,
)
from bench.report.real_cells import MORE, USUAL_SAMPLING, VEGAS, Cell, cells, highlights
from bench.report.real_text import per_step, rate_of, rows_of, sampling_of
from bench.report.runs import Run
from bench.report.text import merged, ratio, table

DECODERS = {
    PLAIN: "jspec",
    "transformers": "transformers `generate`",
    "torch_graph": "torch, FlashAttention-3, CUDA graph",
}
AT = ("card", "model", "rows", "context")
Line = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Card:
    """What real models show on a machine."""

    run: Run

    @cached_property
    def cells(self) -> list[Cell]:
        return cells(self.run.result)

    def at(self, cell: Cell) -> Line:
        """The columns `AT`."""
        return self.run.card, cell.model, str(cell.case["B"]), kilo(cell.case["S"])

    def shortest(self, model: str) -> int:
        """The fewest new tokens of an answer that a model was asked for."""
        return min(cell.case["new"] for cell in self.cells if cell.model == model)

    def pairs(self) -> Iterator[tuple[Cell | None, ...]]:
        """Cells that differ in sampling alone, a place for each of `USUAL_SAMPLING`."""
        by_case: dict[tuple[str, ...], dict[str, Cell]] = {}
        for cell in self.cells:
            if not cell.exact and cell.plain is not None:
                at = tuple(f"{k}={x}" for k, x in cell.case.items() if k not in DIFFERING)
                by_case.setdefault(at, {})[cell.case["sampling"]] = cell
        for of_case in by_case.values():
            if any(sampling in of_case for sampling in USUAL_SAMPLING):
                yield tuple(of_case.get(sampling) for sampling in USUAL_SAMPLING)


DIFFERING = ("sampling", "drafts")


def lines(result: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """For the table at a glance: the largest and the slowest cells of each model."""
    for cell, row in highlights(cells(result)):
        rows, context = rows_of(cell.case), kilo(cell.case["S"])
        words = f"{cell.model}, {rows}, {context} tokens, {sampling_of(cell.case)}, {row['name']}"
        steady = ratio(cell.speed(row), " plain decoding")
        batch = ratio(cell.speed(row, batch_rate), " until the slowest row ends")
        yield words, f"{rate_of(row)} tokens/s", f"{steady}; {batch}; acceptance measured"


# The fastest drafter and vegas


def speeds(runs: Sequence[Run]) -> str:
    rows: list[Line] = []
    for card in map(Card, runs):
        for pair in card.pairs():
            cell = next(cell for cell in pair if cell is not None)
            if cell.plain is None or cell.case["new"] > card.shortest(cell.model):
                continue
            at = (*card.at(cell), f"{rate_of(cell.plain)} ({_of_floor(cell.plain)})")
            rows.append((*at, *(x for sampled in pair for x in _speeds(sampled))))
    both = [
        f"{sampling}{word}"
        for sampling in ("", "T=0.8: ")
        for word in ("fastest", "vegas, tokens/step", "vs plain", "batch")
    ]
    return table((*AT, "plain tok/s", *both), merged(rows, columns=4), left=4)


def _speeds(cell: Cell | None) -> Line:
    if cell is None:
        return ("",) * 4
    first = cell.ranked[0] if cell.ranked else None
    fastest = "" if first is None else f"{first['name']} {ratio(cell.speed(first))}"
    row = cell.drafters.get(VEGAS)
    if row is None:
        return fastest, "not timed" if VEGAS in cell.not_timed else "", "", ""
    steady, batch = (ratio(cell.speed(row, rate)) for rate in (steady_rate, batch_rate))
    return fastest, per_step(row), steady, batch


def _of_floor(row: Row) -> str:
    rate = steady_rate(row)
    return "" if rate is None else f"{rate / floor_rate(row):.2f}"


# Every drafter, where all of them ran


def drafters(runs: Sequence[Run]) -> str:
    """A line a drafter, for each case with more drafters than everywhere, the fastest first."""
    columns: list[tuple[str, dict[str, str]]] = []
    for card in map(Card, runs):
        for pair in card.pairs():
            every = [cell for cell in pair if cell is not None]
            if not any(name in cell.drafters for cell in every for name in MORE):
                continue
            at = f"{card.run.card}, {every[0].model}, {rows_of(every[0].case)} of "
            at += kilo(every[0].case["S"])
            greedy, _ = pair
            columns.append((f"{at}: tokens/step", _column(greedy, lambda _, row: per_step(row))))
            columns += [(word, _column(x, _speed)) for word, x in zip(WORDS, pair, strict=True)]
    names = list(dict.fromkeys(name for _, column in columns[1:2] for name in column))
    names += [name for name in ALL if any(name in x for _, x in columns) and name not in names]
    rows = [(name, *(column.get(name, "") for _, column in columns)) for name in names]
    return table(("drafter", *(heading for heading, _ in columns)), rows) if columns else ""


WORDS = ("vs plain", "T=0.8: vs plain")  # of a column of each of `USUAL_SAMPLING`


def _column(cell: Cell | None, words: Callable[[Cell, Row], str]) -> dict[str, str]:
    """``words`` of each drafter, the fastest first."""
    if cell is None:
        return {}
    ranked = {row["name"]: row for row in cell.ranked}
    rows = ranked | {name: row for name, row in cell.drafters.items() if name not in ranked}
    result = {name: words(cell, row) for name, row in rows.items()}
    return result | {name: "not timed" for name in cell.not_timed if name in ALL}


def _speed(cell: Cell, row: Row) -> str:
    return ratio(cell.speed(row))


# Acceptance of vegas


def acceptance(runs: Sequence[Run]) -> str:
    """By position of the draft and by context, of the largest batch that has vegas."""
    rows: dict[tuple[str, str, int], dict[str, Line]] = {}
    cards = dict.fromkeys(run.card for run in runs)
    for card in map(Card, runs):
        for pair in card.pairs():  # by rows, so that the last one is of the largest batch
            greedy, sampled = pair
            cell = greedy or sampled
            if cell is not None and cell.case["new"] == card.shortest(cell.model):
                by_card = rows.setdefault((cell.model, kilo(cell.case["S"]), cell.case["S"]), {})
                by_card[card.run.card] = (_by_position(greedy), _by_position(sampled))
    headings = [f"{card}, {word}" for card in cards for word in ("greedy", "T=0.8")]
    lines = [
        (model, context, *(x for card in cards for x in by_card.get(card, ("", ""))))
        for (model, context, _), by_card in sorted(rows.items(), key=lambda row: row[0][::2])
    ]
    return table(("model", "context", *headings), merged(lines, columns=1))


def _by_position(cell: Cell | None) -> str:
    row = None if cell is None else cell.drafters.get(VEGAS)
    if row is None:
        return ""
    pairs = zip(row["accepted_at"], row["attempts_at"], strict=True)
    shares = [f"{100 * accepted / attempts:.0f}" for accepted, attempts in pairs if attempts]
    return f"{per_step(row, error=True)}: {' '.join(shares)}"


# Exact mode and other libraries


def decoders(runs: Sequence[Run]) -> str:
    """Greedy decoding in exact mode and by other libraries, over jspec's plain decoding."""
    rows: list[Line] = []
    for card in map(Card, runs):
        for cell in card.cells:
            case = cell.case | {"exact": "no", "drafts": ""}
            usual = next((x for x in card.cells if x.case | {"drafts": ""} == case), None)
            if cell.exact and usual is not None and usual.plain is not None:
                for row in (cell.plain, cell.drafters.get(VEGAS)):
                    rows += [] if row is None else [(*card.at(cell), *_exact(row, usual))]
            for row in cell.rivals.values():
                step = (rate_of(row), ratio(cell.speed(row)), _same(row), "")
                rows.append((*card.at(cell), DECODERS[row["name"]], *step))
    headings = ("decoder", "tok/s", "vs jspec", "same answers", "vegas without exact")
    return table((*AT, *headings), merged(rows, columns=4), left=5)


def _exact(row: Row, usual: Cell) -> Line:
    """Plain decoding and vegas with ``exact=True``, over plain decoding without it."""
    assert usual.plain is not None
    plain, rate = steady_rate(usual.plain), steady_rate(row)
    other = usual.drafters.get(row["name"])
    is_plain = row["name"] == PLAIN
    return (
        "jspec, exact" + ("" if is_plain else f", {row['name']}"),
        rate_of(row),
        "" if plain is None or rate is None else ratio(rate / plain),
        "" if is_plain else _same(row),
        "" if other is None else _same(other),
    )


def _same(row: Row) -> str:
    return f"{row['identical_rows']}/{row['rows']}"


# What limits a step


def limited(runs: Sequence[Run]) -> str:
    """Where the time of greedy steps of plain decoding and of vegas goes, of the largest and the
    slowest cell of each model."""
    rows: list[Line] = []
    for card in map(Card, runs):
        greedy = [cell for cell in card.cells if cell.case["sampling"] == "greedy"]
        for cell, _ in highlights(greedy):
            vegas = cell.drafters.get(VEGAS)
            if cell.plain and vegas:
                mine, theirs = step_ms(vegas), plain_of(vegas, cell.rows)
                plain = None if theirs is None else step_ms(theirs)
                steps = "" if mine is None or plain is None else f"{mine / plain:.2f}"
                cells = (per_step(vegas), steps, ratio(cell.speed(vegas)))
                rows.append((*card.at(cell), _spent(cell.plain), _spent(vegas), *cells))
    headings = ("plain: bytes, kernels, gaps", "vegas: bytes, kernels, gaps; longest part")
    more = ("tokens/step", "plain steps", "vs plain")
    return table((*AT, *headings, *more), merged(rows, columns=2), left=2)


def _spent(row: Row) -> str:
    shares = limits(row)
    if shares is None:
        return ""
    parts = (shares.floor, shares.kernels - shares.floor, 1 - shares.kernels)
    words = ", ".join(f"{part:.0%}" for part in parts)
    longest = f"; {shares.part} {shares.part_time:.0%}"
    return words if row["name"] == PLAIN else words + longest


def not_timed(runs: Sequence[Run]) -> str:
    """What has no times, and why, each reason once."""
    places: dict[str, dict[str, None]] = {}
    for card in map(Card, runs):
        for cell in card.cells:
            for name, reason in cell.not_timed.items():
                place = f"{name} ({', '.join(card.at(cell))}, {sampling_of(cell.case)})"
                places.setdefault(reason, {})[place] = None
    cells = [f"{', '.join(names)}: {reason}" for reason, names in places.items()]
    return f"Not timed: {'; '.join(cells)}." if cells else ""
