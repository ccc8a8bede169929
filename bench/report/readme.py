"""The part of README on real models: a picture, a small table, and when drafting wins and loses."""

from __future__ import annotations

from collections.abc import Sequence

from bench.cases import kilo
from bench.report.markdown import Line, is_slower, ratio, table
from bench.report.real import rows_of, speeds
from bench.report.real_cells import VEGAS, fastest_pairs
from bench.report.runs import Run

BEGIN = "<!-- real models: written by `python -m bench report` -->"
END = "<!-- end of real models -->"
LABELS = ("card", "model", "rows", "context")
COLUMNS = (*LABELS, "gamma", "plain tok/s", "fastest", "vs plain", "batch", "vs plain, T=0.8")
NOTHING = "No result of `python -m bench real` is committed."


def refreshed(page: str, runs: Sequence[Run]) -> str:
    """``page`` with what real models show between `BEGIN` and `END`.

    Args:
        page: the text of README.
        runs: of suite `real`.

    Raises:
        ValueError: where ``page`` lacks the two lines.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md must have the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{_part(runs)}\n{END}{after}"


def _part(runs: Sequence[Run]) -> str:
    lines = [line.cells for line in speeds(runs) if line.headline]
    if not lines:
        return f"{NOTHING}\n"
    run = next(run for run in runs if fastest_pairs(run.result))
    new = max(pair.case["new"] for run in runs for pair in fastest_pairs(run.result))
    shown = [Line({heading: cells[heading] for heading in COLUMNS}) for cells in lines]
    return (
        f"![Speed over plain decoding on an {run.device}](docs/{run.machine}-real.png)\n\n"
        f"Real models on real texts, answers of up to {new} tokens, **acceptance measured**: of "
        "each model the largest batch, and where drafting does worst. *gamma*: draft tokens of a "
        "step, where vegas is fastest of those measured; *plain tok/s*: in brackets "
        "over plain decoding that only reads its bytes; *fastest*: the drafter with the most tokens"
        " a second; *vs plain*: those of vegas over jspec's plain decoding in the same run, while "
        "all rows decode; *batch*: until the slowest row has ended.\n\n"
        f"{table(shown, len(LABELS))}\n{_verdict(runs)}\n"
    )


def _verdict(runs: Sequence[Run]) -> str:
    """When vegas wins and when it loses, over all cells."""
    best: list[tuple[float, str]] = []
    slower: dict[str, dict[str, dict[str, None]]] = {}
    cells = ((run, x) for run in runs for pair in fastest_pairs(run.result) for x in pair.cells)
    for run, cell in cells:
        row = cell.shown.get(VEGAS)
        speed = None if row is None else cell.speed(row)
        size = kilo(cell.case["S"])
        where = f"{run.card}, {cell.model}, {rows_of(cell.case)} of {size} tokens"
        best += [] if speed is None else [(speed, where)]
        if speed is not None and is_slower(speed):
            of_model = slower.setdefault(cell.model, {})
            of_model.setdefault(rows_of(cell.case), {})[size] = None
    places = []
    for model, of_model in slower.items():
        of_rows = [f"{rows} of {_listed(list(sizes), 'or')}" for rows, sizes in of_model.items()]
        places.append(f"{_listed(of_rows, 'and')} tokens ({model})")
    loses = f"It is slower than plain decoding with {'; '.join(places)}. " if places else ""
    speed, where = max(best, default=(0, ""))
    return (
        f"`{VEGAS}`, which drafts with 7 % of the context, wins where many rows have long contexts"
        f"{f', up to {ratio(speed)} ({where})' if best else ''}: there a plain step is mostly the "
        f"reading of their caches. {loses}With few rows or short contexts a step waits for its "
        "kernels, not for memory. [docs/RESULTS.md](docs/RESULTS.md) has all cells, every drafter "
        "at the largest batch, acceptance by position, other libraries, and what limits the "
        "largest and slowest cells."
    )


def _listed(words: list[str], last: str) -> str:
    """``a, b or c`` with ``last`` as "or"."""
    return f" {last} ".join([*([", ".join(words[:-1])] if words[:-1] else []), words[-1]])
