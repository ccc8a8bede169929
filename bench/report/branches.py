"""The table of docs/drafting.md.

Tokens that a step commits with drafts of one path and with trees, from the results of ``op=trees``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench import show
from bench.point import Row
from bench.report.markdown import Line, table

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
