"""The figures of layers, steps and iterations."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from bench import breakdown, throughput
from bench.decode import phases
from bench.decode.drafting import case_cells
from bench.decode.tables import of_kind
from bench.layer import tables
from bench.point import spread
from bench.table import kilo

PAPER = Path(__file__).parents[1] / "paper_hata.json"
COLOURS = {
    "hata": "#2b6cb0",
    "quest_16": "#d69e2e",
    "quest_32": "#b7791f",
    "loki": "#38a169",
    "magicpig": "#805ad5",
    "exact_topk": "#e53e3e",
    "streaming": "#a0aec0",
    "dense": "#2d3748",
}
PARTS = dict(
    zip(
        phases.PARTS,
        ("#2b6cb0", "#38a169", "#d69e2e", "#e53e3e", "#805ad5", "#718096"),
        strict=True,
    )
)


@cache
def paper() -> dict[str, Any]:
    """The figures of the paper on HATA, and where they stand in it."""
    return json.loads(PAPER.read_text())


def layer(figure: Any, result: dict[str, Any]) -> bool:
    """Speed over the fastest dense attention, a group of bars a case; the paper's HATA a star,
    what is to be reached a line."""
    groups = [group for group in tables.groups(result["rows"]) if group.fastest]
    names = [name for name in COLOURS if any(name in group.policies for group in groups)]
    if not names:
        return False
    axis, width = figure.subplots(), 0.8 / len(names)
    for index, name in enumerate(names):
        speedups = [(at, group.speedup(name)) for at, group in enumerate(groups)]
        points = [(at, speedup) for at, speedup in speedups if speedup is not None]
        places = [at + (index - (len(names) - 1) / 2) * width for at, _ in points]
        bars = axis.bar(places, [y for _, y in points], width, color=COLOURS[name], label=name)
        labels = axis.bar_label(
            bars, [f"{y:.1f}" for _, y in points], fontsize=6, rotation=90, padding=2
        )
        for label in labels:  # readable on the lines of what is to be reached
            label.set_bbox({"color": "white", "pad": 0.5})
    theirs = {tuple(row[:3]): row[4] for row in paper()["layer"]["rows"] if row[3] == "dense"}
    for at, group in enumerate(groups):
        where = tuple(group.case[key] for key in ("heads", "B", "S"))
        if where in theirs:
            label = "HATA, paper" if where == next(iter(theirs)) else None
            axis.plot(at, theirs[where], "*", color="#1a202c", label=label)
        if where in tables.TARGETS:
            label = "HATA, to be reached" if where == next(iter(tables.TARGETS)) else None
            ends = at - 0.45, at + 0.45
            axis.hlines(tables.TARGETS[where], *ends, "#1a202c", "dashed", label=label, zorder=0)
    labels = [f"{g.case['heads']}\nB={g.case['B']}, S={kilo(g.case['S'])}" for g in groups]
    axis.set_xticks(range(len(groups)), labels, fontsize=7)
    axis.set_ylabel("speed over the fastest dense attention")
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(y=0.12)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return True


def parts(figure: Any, result: dict[str, Any]) -> bool:
    """Each drafter's iteration as stacked parts, next to it their floors in a lighter colour."""
    rows = of_kind(result["rows"], "iteration")
    known = [(row, of_row) for row in rows if (of_row := breakdown.parts_of(row, rows))]
    cases = list(dict.fromkeys(case_cells(row) for row, _ in known))
    if not cases:
        return False
    axes = figure.subplots(1, len(cases), squeeze=False)[0]
    for axis, case in zip(axes, cases, strict=True):
        of_case = [(row, of_row) for row, of_row in known if case_cells(row) == case]
        below, below_floors = [0.0] * len(of_case), [0.0] * len(of_case)
        for part in phases.PARTS:
            heights = [of_row[part] / 1e6 for _, of_row in of_case]
            floors = [row["floors_ns"].get(part, 0.0) / 1e6 for row, _ in of_case]
            places = range(len(of_case))
            colour = PARTS[part]
            axis.bar([x - 0.2 for x in places], heights, 0.4, below, color=colour, label=part)
            axis.bar([x + 0.2 for x in places], floors, 0.4, below_floors, color=colour, alpha=0.4)
            below = [a + b for a, b in zip(below, heights, strict=True)]
            below_floors = [a + b for a, b in zip(below_floors, floors, strict=True)]
        names = [row["name"] for row, _ in of_case]
        axis.set_xticks(range(len(of_case)), names, fontsize=7, rotation=30)
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
        of_case = [row for row in rows if case_cells(row) == case]
        bars = axis.bar([row["name"] for row in of_case], [row["tokens_per_s"] for row in of_case])
        above = [throughput.speedup(row, rows) for row in of_case]
        axis.bar_label(bars, [f"{x:.2f}x" if x else "" for x in above], fontsize=7)
        model, _, batch, context = case
        kind = of_case[0]["acceptance"]
        axis.set_title(f"{model}, B={batch}, S={context}\nacceptance {kind}", fontsize=8)
        axis.tick_params(axis="x", labelsize=6, rotation=40)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.12)
    axes[0].set_ylabel("tokens / s")
    return True


def sources(figure: Any, result: dict[str, Any]) -> bool:
    """Tokens a second of each case, a bar a draft source."""
    rows = [row for row in result["rows"] if row["checked"]]
    cases = list(dict.fromkeys((r["batch"], r["context"]) for r in rows))
    if not cases:
        return False
    axes = figure.subplots(1, len(cases), squeeze=False)[0]
    for axis, case in zip(axes, cases, strict=True):
        by_source = {r["source"]: r for r in rows if (r["batch"], r["context"]) == case}
        speeds = [r["decode_tokens_per_s"] for r in by_source.values()]
        colours = ["#9aa5b1", "#2b6cb0", "#38a169"][: len(by_source)]
        bars = axis.bar(list(by_source), speeds, color=colours)
        axis.bar_label(bars, [f"{r['speedup']:.2f}x" for r in by_source.values()], fontsize=8)
        axis.tick_params(axis="x", labelsize=8)
        axis.set_title(f"batch {case[0]}, context {case[1]}", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.12)
    axes[0].set_ylabel("tokens / s")
    return True


def floor(figure: Any, result: dict[str, Any]) -> bool:
    """Step over floor of each case, a group of bars a batch and context, a bar a pass's tokens."""
    ratios: dict[tuple[str, int, int], dict[int, float]] = {}
    for row in result["rows"]:
        time, case = spread(row, "step"), row["case"]
        if time is not None and row["operation"] == "decode_step":
            bars_of = ratios.setdefault((case["model"], case["B"], case["context"]), {})
            bars_of[case["T"]] = time.median * 1e3 / row["floor_ns"]
    if not ratios:
        return False
    counts = sorted(set().union(*ratios.values()))
    axis = figure.subplots()
    width = 0.8 / max(map(len, ratios.values()))
    for index, count in enumerate(counts):
        points = [
            (
                at + (sorted(bars_of).index(count) - (len(bars_of) - 1) / 2) * width,
                bars_of[count],
            )
            for at, bars_of in enumerate(ratios.values())
            if count in bars_of
        ]
        places, heights = zip(*points, strict=True)
        bars = axis.bar(places, heights, width, color=f"C{index}", label=f"T={count}")
        axis.bar_label(bars, [f"{height:.2f}" for height in heights], fontsize=6, rotation=90)
    labels = [f"{model}\nB={batch}, {context / 1024:g}K" for model, batch, context in ratios]
    axis.set_xticks(range(len(ratios)), labels, fontsize=7, rotation=20)
    axis.axhline(1, color="#1a202c", linestyle="--", linewidth=1)
    axis.set_ylabel("step over floor")
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(y=0.15)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return True
