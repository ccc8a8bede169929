"""The picture of real models: speed over plain decoding against rows and against context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.cases import kilo
from bench.report.real_cells import VEGAS, Cell, cells, usual
from bench.report.real_text import rows_of
from bench.report.text import is_slower

COLOURS = ("#2b6cb0", "#38a169", "#d69e2e", "#805ad5", "#dd6b20")
SLOWER = "#c53030"
STYLES = {"greedy": "-", "t0.8": ":"}
HEIGHT = 3.3  # inches of a model's panels
# A line: its label, the sampling, and speeds by rows or by context.
Line = tuple[str, str, dict[int, float]]


def speeds(figure: Any, result: dict[str, Any]) -> bool:
    """Of each model vegas against rows, a line a context, and drafters against context."""
    every = usual(cells(result))
    models = list(dict.fromkeys(cell.model for cell in every))
    if not models:
        return False
    figure.set_size_inches(10, 0.4 + HEIGHT * len(models))
    axes = figure.subplots(len(models), 2, squeeze=False, sharey="row")
    for pair, model in zip(axes, models, strict=True):
        of_model = [cell for cell in every if cell.model == model]
        rows = max(cell.case["B"] for cell in of_model)
        largest = [cell for cell in of_model if cell.case["B"] == rows]
        _panel(pair[0], _against_rows(of_model), f"{model}: {VEGAS}", "rows", str)
        title = f"{model}: {rows_of(largest[0].case)}"
        _panel(pair[1], _against_context(largest), title, "context, tokens", kilo)
        pair[0].set_ylabel("speed over plain decoding")
    device = result["machine"]["device"]
    figure.suptitle(f"{device}, acceptance measured (solid: greedy, dotted: T=0.8)", fontsize=10)
    return True


def _against_rows(every: Sequence[Cell]) -> list[Line]:
    lines = []
    for context in sorted({cell.case["S"] for cell in every}):
        for sampling in STYLES:
            of_line = [x for x in every if (x.case["S"], x.case["sampling"]) == (context, sampling)]
            lines.append((f"{kilo(context)} tokens", sampling, _of(of_line, VEGAS, "B")))
    return lines


def _against_context(every: Sequence[Cell]) -> list[Line]:
    names = dict.fromkeys(name for cell in every for name in cell.drafters)
    lines = []
    for name in sorted(names, key=lambda name: name != VEGAS):
        for sampling in STYLES:
            of_line = [cell for cell in every if cell.case["sampling"] == sampling]
            lines.append((name, sampling, _of(of_line, name, "S")))
    return [line for line in lines if len(line[2]) > 1 or len({x.case["S"] for x in every}) == 1]


def _of(every: Sequence[Cell], name: str, key: str) -> dict[int, float]:
    speeds = {x.case[key]: x.speed(x.drafters[name]) for x in every if name in x.drafters}
    return {at: speed for at, speed in sorted(speeds.items()) if speed is not None}


def _panel(axis: Any, lines: Sequence[Line], title: str, xlabel: str, tick: Any) -> None:
    labels = list(dict.fromkeys(label for label, _, points in lines if points))
    for label, sampling, points in lines:
        if not points:
            continue
        colour = COLOURS[labels.index(label) % len(COLOURS)]
        name = label if sampling == "greedy" else None
        places, ys = zip(*points.items(), strict=True)
        axis.plot(places, ys, STYLES[sampling], color=colour, marker=".", label=name)
        losing = [(place, speed) for place, speed in points.items() if is_slower(speed)]
        for place, speed in losing:
            axis.plot(place, speed, "x", color=SLOWER, markersize=8, zorder=3)
    axis.axhline(1, color="#1a202c", linestyle="--", linewidth=1)
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, 0.6), max(high, 1.4))
    axis.axhspan(axis.get_ylim()[0], 1, color=SLOWER, alpha=0.07, linewidth=0)
    ticks = sorted({place for *_, points in lines for place in points})
    axis.set(xscale="log", xlabel=xlabel)
    axis.set_xticks(ticks, [tick(place) for place in ticks], fontsize=8)
    axis.minorticks_off()
    axis.set_title(title, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, frameon=False, loc="upper left")
    words = "dashed: plain decoding; x: slower than that"
    axis.text(0.99, 0.02, words, transform=axis.transAxes, ha="right", color=SLOWER, fontsize=7)
