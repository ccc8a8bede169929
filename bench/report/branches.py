"""The tables of docs/drafting.md: drafts that are trees, timed on real models and counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import real, show
from bench.cases import kilo
from bench.drafters import TREES
from bench.point import Row
from bench.real.figures import prefers_none
from bench.report.markdown import Line, ratio, table
from bench.report.real import SAMPLED, per_step, tokens_per_second
from bench.report.real_cells import Cell, cells
from bench.report.runs import Run

# The cell that was named before trees were timed, and what they have to reach in it.
NAMED = {"model": "SmolLM2-135M-Instruct", "B": 12, "S": 2048, "gamma": 15, "sampling": "t0.8"}
NEEDED = 1.15  # times the tokens/s of the best drafter whose drafts are chains
DRAFTERS = {
    "ngram": "`NgramDraft`, one path",
    "ngram-1": "`NgramDraft(min_match=1)`, one path",
    "ngram-tree": "`NgramDraft(min_match=1, branches=16)`, tree",
    "suffix": "`SuffixDraft`, one path",
    "every-match-3": "every match of 3 tokens, any number of branches",
    "counts": "counts after matches of 1 to 16 tokens, one path",
    "counts-tree": "counts after matches of 1 to 16 tokens, tree",
    "streaming": "`SelfDraft(Streaming(0.07))`, one path",
    "streaming-tree": "`SelfDraft(Streaming(0.07))`, tree",
}


def rows_of(results: Path) -> Iterator[Row]:
    """The rows of ``op=trees`` in all results."""
    for path in sorted(results.glob("*/quality.trees*.json")):
        yield from (row for row in show.read(path)["rows"] if row["operation"] == "trees")


def branches(results: Path) -> str:
    """Tokens per step by model and drafter; a column for each sampling and number of tokens."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows_of(results):
        case = row["case"]
        if row["name"] in DRAFTERS:
            sampling = "greedy" if case["sampling"] == "greedy" else "T=0.8"
            by_column = cells.setdefault((case["model"], DRAFTERS[row["name"]]), {})
            by_column[f"{sampling}, {case['nodes']}"] = f"{row['length']:.2f}"
    order = list(DRAFTERS.values())
    lines = [
        Line({"model": model, "draft": draft} | dict(sorted(by_column.items(), key=_order)))
        for (model, draft), by_column in sorted(
            cells.items(), key=lambda item: (item[0][0], order.index(item[0][1]))
        )
    ]
    return table(lines, 2)


def _order(item: tuple[str, str]) -> tuple[bool, int]:
    sampling, nodes = item[0].split(", ")
    return sampling != "greedy", int(nodes)


def timed(runs: Sequence[Run]) -> str:
    """Whether trees pay in the cell that was named before, and every cell with a tree: tokens per
    step and speed over plain decoding by drafter."""
    lines, verdicts = [], []
    for run in (run for run in runs if run.suite == "real"):
        for cell in (x.of_most_drafters for x in cells(run.result)):
            drafters = cell.drafters  # of one run: a tree timed in another does not compare
            tree = next((drafters[name] for name in TREES if name in drafters), None)
            if tree is None or cell.exact or not prefers_none(tree):
                continue
            speeds = {name: cell.speed(row) for name, row in drafters.items()}
            known = {name: speed for name, speed in speeds.items() if speed is not None}
            over = _over_chains(known, tree["name"])
            lines.append(Line(_line(run.card, cell, speeds, over)))
            is_named = (NAMED | {"new": real.DEFAULT["new"]}).items() <= cell.case.items()
            if is_named and over is not None:
                verdicts.append(_verdict(run.card, cell, known, over))
    if not verdicts:
        verdicts = [f"Trees are experimental: {_words(NAMED)} is to be timed with one.\n"]
    return "\n".join(verdicts) + (f"\n{table(lines, 2)}" if lines else "")


def _over_chains(speeds: Mapping[str, float], tree: str) -> float | None:
    """The speed of a tree over that of the fastest drafter of chains; None where one is unknown."""
    chains = [speed for name, speed in speeds.items() if name not in TREES]
    return speeds[tree] / max(chains) if tree in speeds and chains else None


def _line(
    card: str, cell: Cell, speeds: Mapping[str, float | None], over: float | None
) -> dict[str, str]:
    plain = "" if cell.plain is None else tokens_per_second(cell.plain)
    line = {"card": card, "case": _words(cell.case), "tree / best chain": ratio(over)}
    return (
        line
        | {"plain tok/s": plain}
        | {name: f"{per_step(row)}; {ratio(speeds[name])}" for name, row in cell.drafters.items()}
    )


def _words(case: Mapping[str, Any]) -> str:
    words = f"{case['model']}, {case['B']} rows of {kilo(case['S'])}, {SAMPLED[case['sampling']]}"
    return f"{words}, {case['gamma']} draft tokens"


def _verdict(card: str, cell: Cell, speeds: Mapping[str, float], over: float) -> str:
    best = max((name for name in speeds if name not in TREES), key=speeds.__getitem__)
    tree = next(name for name in TREES if name in speeds)
    decides = (
        f"at least {NEEDED}, which was asked for: trees pay there"
        if over >= NEEDED
        else f"less than {NEEDED}, which was asked for: trees stay experimental"
    )
    rates = [tokens_per_second(cell.drafters[name]) for name in (tree, best)]
    return (
        f"{_words(cell.case)} ({card}), a cell that was named before it was timed: `{tree}` "
        f"decodes {rates[0]} tokens/s, `{best}`, the fastest with as wide a pass, {rates[1]}. That "
        f"is {over:.2f} times as many, {decides}.\n"
    )
