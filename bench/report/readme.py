"""The part of README on real models: a picture, a small table, and when drafting wins and loses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.cases import kilo
from bench.real.figures import batch_rate, steady_rate
from bench.report.real_cells import VEGAS, Cell, cells, highlights, usual
from bench.report.real_text import rate_of, rows_of, sampling_of
from bench.report.text import is_slower, ratio, table

BEGIN = "<!-- real models: written by `python -m bench report` -->"
END = "<!-- end of real models -->"
HEADINGS = (
    *("model", "card", "rows", "context", "sampling", "drafter"),
    *("tokens/s", "speed over plain", "whole batch"),
)
NOTHING = "No result of `python -m bench real` is committed."


def refreshed(page: str, results: dict[str, dict[str, Any]]) -> str:
    """``page`` with what ``results`` show between `BEGIN` and `END`.

    Args:
        page: the text of README.
        results: of suite `real`, by the prefix of their pictures.

    Raises `ValueError` where ``page`` lacks the two lines.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md must have the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{_part(results)}\n{END}{after}"


def _part(results: dict[str, dict[str, Any]]) -> str:
    every = {prefix: cells(result) for prefix, result in results.items()}
    lines = [
        line
        for prefix, of_machine in every.items()
        for line in _lines(results[prefix]["machine"]["device"], of_machine)
    ]
    if not lines:
        return f"{NOTHING}\n"
    prefix = next(prefix for prefix, of_machine in every.items() if usual(of_machine))
    device = results[prefix]["machine"]["device"]
    new = max(cell.case["new"] for of_machine in every.values() for cell in usual(of_machine))
    return (
        f"![Speed over plain decoding on an {device}](docs/{prefix}-real.png)\n\n"
        f"Real models on real texts, answers of up to {new} tokens, **acceptance measured**: of "
        "each model the largest batch, and where drafting does worst. *speed over plain*: over "
        "jspec's plain decoding in the same run, while all rows decode; *whole batch*: until the "
        "slowest row has ended.\n\n"
        f"{table(HEADINGS, lines, left=6)}\n{_verdict(every)}\n"
    )


def _lines(device: str, every: list[Cell]) -> Iterator[tuple[str, ...]]:
    for cell, row in highlights(every):
        yield (
            *(cell.model, device, str(cell.case["B"]), kilo(cell.case["S"])),
            *(sampling_of(cell.case), row["name"]),
            rate_of(row),
            *(ratio(cell.speed(row, rate)) for rate in (steady_rate, batch_rate)),
        )


def _verdict(every: dict[str, list[Cell]]) -> str:
    """When vegas wins and when it loses, over all cells."""
    speeds: list[float] = []
    slower: dict[str, dict[str, list[str]]] = {}
    for of_machine in every.values():
        for cell in usual(of_machine):
            row = cell.drafters.get(VEGAS)
            speed = None if row is None else cell.speed(row)
            speeds += [] if speed is None else [speed]
            if speed is not None and is_slower(speed):
                of_model = slower.setdefault(cell.model, {})
                contexts = of_model.setdefault(rows_of(cell.case), [])
                contexts += {kilo(cell.case["S"])} - set(contexts)
    places = []
    for model, of_model in slower.items():
        cells_of = [f"{rows} of {_listed(sizes, 'or')}" for rows, sizes in of_model.items()]
        places.append(f"{_listed(cells_of, 'and')} tokens ({model})")
    loses = f"It is slower than plain decoding with {'; '.join(places)}. " if places else ""
    best = f", up to {ratio(max(speeds))}" if speeds else ""
    return (
        f"`{VEGAS}`, which drafts with 7 % of the context, wins where many rows have long contexts"
        f"{best}: there a plain step is mostly the reading of their caches. "
        f"{loses}With few rows or short contexts a step waits for its kernels, not for memory. "
        "[docs/RESULTS.md](docs/RESULTS.md) has all cells, every drafter at the largest batch, "
        "acceptance by position, other libraries, and what limits the largest and slowest cells."
    )


def _listed(words: list[str], last: str) -> str:
    """``a, b or c`` with ``last`` as "or"."""
    return f" {last} ".join([*([", ".join(words[:-1])] if words[:-1] else []), words[-1]])
