"""The figures of iterations at real models' shapes."""

from __future__ import annotations

from typing import Any

from bench import breakdown, throughput
from bench.decode import phases
from bench.decode.drafting import case_cells
from bench.decode.tables import of_kind

COLOURS = dict(
    zip(
        phases.PARTS,
        ("#2b6cb0", "#38a169", "#d69e2e", "#e53e3e", "#805ad5", "#718096"),
        strict=True,
    )
)


def parts(figure: Any, result: dict[str, Any]) -> bool:
    """Each drafter's iteration as stacked parts, beside it their floors in a lighter colour."""
    rows = of_kind(result["rows"], "iteration")
    known = [(row, own) for row in rows if (own := breakdown.parts_of(row, rows))]
    cases = list(dict.fromkeys(case_cells(row) for row, _ in known))
    if not cases:
        return False
    axes = figure.subplots(1, len(cases), squeeze=False)[0]
    for axis, case in zip(axes, cases, strict=True):
        here = [(row, own) for row, own in known if case_cells(row) == case]
        below, below_floors = [0.0] * len(here), [0.0] * len(here)
        for part in phases.PARTS:
            heights = [own[part] / 1e6 for _, own in here]
            floors = [row["floors_ns"].get(part, 0.0) / 1e6 for row, _ in here]
            places = range(len(here))
            colour = COLOURS[part]
            axis.bar([x - 0.2 for x in places], heights, 0.4, below, color=colour, label=part)
            axis.bar([x + 0.2 for x in places], floors, 0.4, below_floors, color=colour, alpha=0.4)
            below = [a + b for a, b in zip(below, heights, strict=True)]
            below_floors = [a + b for a, b in zip(below_floors, floors, strict=True)]
        names = [row["name"] for row, _ in here]
        axis.set_xticks(range(len(here)), names, fontsize=7, rotation=30)
        model, _, batch, context = case
        axis.set_title(f"{model}, B={batch}, S={context}", fontsize=9)
        axis.set_ylabel("ms; right bars: floors")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return True


def speeds(figure: Any, result: dict[str, Any]) -> bool:
    """Tokens a second of each drafter, a panel a case."""
    rows = [row for row in result["rows"] if "tokens_per_s" in row and row["checked"]]
    cases = list(dict.fromkeys(case_cells(row) for row in rows))
    if not cases:
        return False
    axes = figure.subplots(1, len(cases), squeeze=False)[0]
    for axis, case in zip(axes, cases, strict=True):
        here = [row for row in rows if case_cells(row) == case]
        bars = axis.bar([row["name"] for row in here], [row["tokens_per_s"] for row in here])
        above = [throughput.speedup(row, rows) for row in here]
        axis.bar_label(bars, [f"{x:.2f}x" if x else "" for x in above], fontsize=7)
        model, _, batch, context = case
        kind = here[0]["acceptance"]
        axis.set_title(f"{model}, B={batch}, S={context}\nacceptance {kind}", fontsize=8)
        axis.tick_params(axis="x", labelsize=6, rotation=40)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.12)
    axes[0].set_ylabel("tokens / s")
    return True
