"""The tables of the section on real models after its first: acceptance, rivals, limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bench.cases import kilo
from bench.real import tables
from bench.real.drafters import ALL, PLAIN
from bench.real.figures import Row, committed_per_step, limits, plain_of, steady_rate, step_ms
from bench.report.real_cells import MORE, VEGAS, Cell
from bench.report.real_text import (
    SAMPLED,
    merged,
    per_step,
    rate_of,
    ratio,
    rows_of,
    sampling_of,
    speeds_of,
)
from bench.report.text import paragraphs, table

DECODERS = {
    PLAIN: "jspec, plain decoding",
    "transformers": "transformers `generate`",
    "torch_graph": "torch, FlashAttention-3, one CUDA graph",
}


# Every drafter, where all of them ran


def headlines(every: Sequence[Cell]) -> Iterator[list[Cell]]:
    """The cells where more drafters than everywhere ran, those of one case but for sampling."""
    by_case: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in every:
        at = tuple(x for key, x in cell.case.items() if key not in ("sampling", "drafts"))
        by_case.setdefault(at, []).append(cell)
    for of_case in by_case.values():
        if any(name in cell.drafters for cell in of_case for name in MORE):
            yield of_case


def every_drafter(of_case: Sequence[Cell]) -> str:
    """The table of `python -m bench real` for greedy decoding, and one for sampling."""
    case = of_case[0].case
    new = f", {case['new']:,} new tokens"
    parts = [
        f"### {case['model']}: every drafter, {rows_of(case)} of {kilo(case['S'])} tokens{new}"
    ]
    sampled = [cell for cell in of_case if cell.case["sampling"] != "greedy"]
    for cell in of_case:
        if cell not in sampled and cell.plain is not None:
            rows = [_drafter_cells(cell, row) for row in (cell.plain, *_fastest_first(cell))]
            parts.append(
                "Greedy, the fastest first. *of floor*: tok/s over plain decoding at its byte "
                "floor; *same*: answers equal to plain decoding's, token for token (others differ "
                "at a near tie); *repeat*: answers that repeat themselves."
            )
            parts.append(table(tables.HEADINGS, rows))
    if sampled:
        names = list(dict.fromkeys(row["name"] for x in sampled for row in _fastest_first(x)))
        headings = [f"{sampling_of(x.case)}: tokens/step" for x in sampled]
        columns = [word for heading in headings for word in (heading, "vs plain", "batch")]
        lines = [(name, *(x for cell in sampled for x in _sampled(cell, name))) for name in names]
        parts.append(table(("drafter", *columns), lines))
    return paragraphs(*parts)


def _fastest_first(cell: Cell) -> list[Row]:
    """All timed drafters; last those whose steady speed is unknown, as all answers repeat."""
    names = [row["name"] for row in cell.ranked]
    return [*cell.ranked, *(row for name, row in cell.drafters.items() if name not in names)]


def _drafter_cells(cell: Cell, row: Row) -> tuple[str, ...]:
    values = dict(zip(tables.HEADINGS, tables.cells(row, cell.rows), strict=True))
    if row["name"] != PLAIN:
        values |= zip(("vs plain", "batch", "end to end"), speeds_of(cell, row), strict=True)
    return tuple(values.values())


def _sampled(cell: Cell, name: str) -> tuple[str, ...]:
    row = cell.drafters.get(name)
    if row is None:
        return "not timed" if name in cell.not_timed else "", "", ""
    return per_step(row), *speeds_of(cell, row)[:2]


# Acceptance


def acceptance(model: str, of_model: Sequence[Cell]) -> str:
    """By position of the draft and by context, of the largest batch that has a drafter."""
    largest: dict[tuple[str, int, str], Row] = {}
    for cell in of_model:  # by rows, so that the last one is of the largest batch
        for name, row in cell.drafters.items():
            if not cell.exact and row.get("attempts_at"):
                at = (name, cell.case["S"], cell.case["sampling"])
                if at not in largest or largest[at]["case"]["new"] >= cell.case["new"]:
                    largest[at] = row
    samplings = [x for x in SAMPLED if any(x == sampling for *_, sampling in largest)]
    lines = []
    for name, context in sorted({at[:2] for at in largest}, key=lambda at: (_place(at[0]), at[1])):
        rows = [largest.get((name, context, sampling)) for sampling in samplings]
        lines.append((name, kilo(context), *(x for row in rows for x in _by_position(row))))
    if not lines:
        return ""
    words = [f"{SAMPLED[sampling]}: tokens/step" for sampling in samplings]
    columns = [word for heading in words for word in (heading, "% accepted by position")]
    return paragraphs(
        f"### {model}: acceptance by position and context",
        "Of the largest batch. *by position*: of the steps that drafted so many tokens, the share "
        "in which the first, second, ... draft token was accepted, over all answers.",
        table(("drafter", "context", *columns), merged(lines, columns=1), left=2),
    )


def _place(name: str) -> int:
    return list(ALL).index(name)


def _by_position(row: Row | None) -> tuple[str, str]:
    if row is None:
        return "", ""
    pairs = zip(row["accepted_at"], row["attempts_at"], strict=True)
    shares = [f"{100 * accepted / attempts:.0f}" for accepted, attempts in pairs if attempts]
    return per_step(row), " ".join(shares)


# Exact mode


def exact(every: Sequence[Cell]) -> str:
    """Rows equal to plain decoding with and without ``exact=True``."""
    lines = []
    for cell in every:
        if not cell.exact or cell.plain is None:
            continue
        case = cell.case | {"exact": "no", "drafts": ""}
        usual = next((x for x in every if x.case | {"drafts": ""} == case), None)
        at = (cell.model, str(cell.case["B"]), kilo(cell.case["S"]))
        lines.append((*at, PLAIN, "", "", rate_of(cell.plain), "", _over_usual(cell.plain, usual)))
        for name, row in cell.drafters.items():
            other = None if usual is None else usual.drafters.get(name)
            lines.append(
                (
                    *(*at, name, _same(row), _same(other), rate_of(row)),
                    *(ratio(cell.speed(row)), _over_usual(row, usual)),
                )
            )
    if not lines:
        return ""
    headings = (
        *("model", "rows", "context", "drafter", "equal to plain", "without exact"),
        *("tok/s", "vs exact plain", "vs plain without exact"),
    )
    return paragraphs(
        "### Exact mode",
        "Greedy, `exact=True`: every pass computes a token by the same bits, so that no answer may "
        "differ from plain decoding's. *equal to plain*: answers that are, token for token.",
        table(headings, merged(lines, columns=3), left=4),
    )


def _same(row: Row | None) -> str:
    return "" if row is None else f"{row['identical_rows']}/{row['rows']}"


def _over_usual(row: Row, usual: Cell | None) -> str:
    """The steady speed of exact mode over plain decoding without it."""
    plain = None if usual is None or usual.plain is None else steady_rate(usual.plain)
    rate = steady_rate(row)
    return "" if plain is None or rate is None else ratio(rate / plain)


# Other libraries


def rivals(every: Sequence[Cell]) -> str:
    lines, notes = [], {}
    for cell in every:
        for name, row in cell.rivals.items():
            plain = plain_of(row, cell.rows)
            at = (cell.model, str(cell.case["B"]), kilo(cell.case["S"]))
            for decoder in (plain, row):
                if decoder is not None:
                    lines.append((*at, *_decoder(cell, decoder)))
            if row.get("note"):
                notes.setdefault(f"{DECODERS[name]}: {row['note']}", None)
    if not lines:
        return ""
    headings = (
        *("model", "rows", "context", "decoder", "ms/step", "tok/s"),
        *("vs jspec plain", "same"),
    )
    return paragraphs(
        "### Other libraries",
        "Plain greedy decoding of the same prompts with the same weights, each next to jspec's "
        "plain decoding in the same run. *same*: answers equal to jspec's, token for token.",
        table(headings, merged(list(dict.fromkeys(lines)), columns=3), left=4),
        "\n".join(f"- {note}" for note in notes),
    )


def _decoder(cell: Cell, row: Row) -> tuple[str, ...]:
    step = step_ms(row)
    return (
        DECODERS[row["name"]],
        "" if step is None else f"{step:.2f}",
        rate_of(row),
        "" if row["name"] == PLAIN else ratio(cell.speed(row)),
        "" if row["name"] == PLAIN else _same(row),
    )


# What limits each cell


def limits_of(model: str, of_model: Sequence[Cell]) -> str:
    """Where the time of a step goes: of plain decoding, vegas, the fastest and all that lose."""
    lines = []
    for cell in of_model:
        greedy = cell.case["sampling"] == "greedy"
        if cell.exact or not greedy or cell.plain is None or limits(cell.plain) is None:
            continue
        at = (str(cell.case["B"]), kilo(cell.case["S"]))
        lines.append((*at, *_spent(cell, cell.plain)))
        for row in cell.ranked:
            speed = cell.speed(row) or 0.0
            if row["name"] == VEGAS or row is cell.ranked[0] or round(speed, 2) < 1:
                lines += [(*at, *_spent(cell, row))] if limits(row) is not None else []
    if not lines:
        return ""
    headings = (
        *("rows", "context", "drafter", "vs plain", "tokens/step", "plain steps"),
        *("bytes", "kernels", "gaps", "limit", "longest part, over its bytes"),
    )
    return paragraphs(
        f"### {model}: what limits each cell",
        "Greedy, by a profile of the step. *plain steps*: the time of a step in those of plain "
        "decoding; a drafter loses where that is more than its tokens/step. The step divides into "
        "*bytes*, the time to read what it needs at the read ceiling; *kernels*, what its kernels "
        "take above that; and *gaps* between kernels. *limit*: the largest of the three.",
        table(headings, merged(lines, columns=2), left=3),
    )


def _spent(cell: Cell, row: Row) -> tuple[str, ...]:
    shares, plain = limits(row), plain_of(row, cell.rows)
    assert shares is not None
    mean = committed_per_step(row, repetitive=False)
    mine, theirs = step_ms(row), None if plain is None else step_ms(plain)
    divided = {
        "bytes": shares.floor,
        "kernels": shares.kernels - shares.floor,
        "gaps": 1 - shares.kernels,
    }
    over = "" if shares.part_over is None else f", {shares.part_over:.1f} times"
    return (
        row["name"],
        "" if row["name"] == PLAIN else ratio(cell.speed(row)),
        "" if mean is None else f"{mean.mean:.2f}",
        "" if mine is None or theirs is None else f"{mine / theirs:.2f}",
        *(f"{share:.0%}" for share in divided.values()),
        max(divided, key=divided.__getitem__),
        f"{shares.part} {shares.part_time:.0%}{over}",
    )


def not_timed(every: Sequence[Cell]) -> str:
    """What has no times, and why, each reason once."""
    places: dict[str, list[str]] = {}
    for cell in every:
        at = f"{cell.model}, {rows_of(cell.case)}, {kilo(cell.case['S'])}, {sampling_of(cell.case)}"
        at += ", exact" if cell.exact else ""
        for name, reason in cell.not_timed.items():
            places.setdefault(reason, []).append(f"{name} ({at})")
    lines = [f"- {', '.join(names)}: {reason}" for reason, names in places.items()]
    return "Not timed:\n\n" + "\n".join(lines) if lines else ""
