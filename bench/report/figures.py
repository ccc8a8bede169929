"""The pictures of RESULTS.md and README: panels of curves, each of a machine's result."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import table
from bench.cases import kilo
from bench.point import Row, best_clock
from bench.report.markdown import is_slower, microseconds
from bench.report.real import rows_of
from bench.report.real_cells import VEGAS, Cell, fastest_pairs
from bench.report.runs import Run

SLOWER = "#c53030"
# Policies that read as many bytes of a key, and the exact choice.
EQUAL_BYTES = ("exact_topk", "hata", "quest-16", "loki-16", "magicpig-16")
DOTTED = ", T=0.8"  # ends the label of a curve that is dotted, without a place in the legend
# A curve's points by its label.
Curves = dict[str, dict[float, float]]


@dataclasses.dataclass(frozen=True)
class Panel:
    """Curves against ``xlabel``, on a logarithmic scale."""

    title: str
    xlabel: str
    curves: Mapping[str, Mapping[float, float]]


@dataclasses.dataclass(frozen=True)
class Picture:
    """Panels of a run.

    Attributes:
        name: of its file, after the machine's.
        words: what it shows.
        ylabel: of its panels.
        panels: rows of panels, which share a scale; empty where the run has nothing to show.
        size: inches of a row of panels.
        yscale: ``"linear"`` or ``"log"``.
        against_one: whether curves are speeds, of which those below 1 are marked.
        every_card: whether there is a picture of each machine, not of the first one alone.
    """

    name: str
    words: str
    ylabel: str
    panels: Callable[[Run], Sequence[Sequence[Panel]]]
    size: tuple[float, float]
    yscale: str = "linear"
    against_one: bool = False
    every_card: bool = False

    def draw(self, figure: Any, run: Run) -> bool:
        """Draw the run's panels into a figure; whether there are any."""
        grid = [row for row in self.panels(run) if row]
        if not grid:
            return False
        width, height = self.size
        figure.set_size_inches(width, height * len(grid))
        every = figure.subplots(len(grid), len(grid[0]), squeeze=False, sharey="row")
        for axes, panels in zip(every, grid, strict=True):
            for axis, panel in zip(axes, panels, strict=True):
                self._panel(axis, panel)
            axes[0].set_ylabel(self.ylabel)
            if not self.against_one:
                place = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
                axes[-1].legend(fontsize=7, frameon=False, **place)
        return True

    def _panel(self, axis: Any, panel: Panel) -> None:
        from matplotlib import colormaps
        from matplotlib.ticker import LogLocator

        colours: Any = colormaps["tab20"]
        labels = list(dict.fromkeys(label.removesuffix(DOTTED) for label in panel.curves))
        for label, points in panel.curves.items():
            name = label.removesuffix(DOTTED)
            index = labels.index(name)
            style = {"color": colours.colors[(2 * index + index // 10) % 20], "marker": "."}
            style |= {"linestyle": "-", "label": name} if name == label else {"linestyle": ":"}
            axis.plot(*zip(*points.items(), strict=True), **style)
            for x, y in points.items() if self.against_one else ():
                if is_slower(y):
                    axis.plot(x, y, "x", color=SLOWER, markersize=8, zorder=3)
        axis.set(xlabel=panel.xlabel, xscale="log", yscale=self.yscale)
        axis.set_title(panel.title, fontsize=9)
        ticks = sorted({x for points in panel.curves.values() for x in points})
        names = [kilo(x) if isinstance(x, int) else f"{x:.3g}" for x in ticks]
        axis.set_xticks(ticks, names, fontsize=7, rotation=45 if max(map(len, names)) > 4 else 0)
        axis.minorticks_off()
        if self.yscale == "log":
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
        if self.against_one:
            _mark_one(axis)


def _mark_one(axis: Any) -> None:
    """A line at 1, and a band of what is slower."""
    axis.axhline(1, color="#1a202c", linestyle="--", linewidth=1)
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, 0.6), max(high, 1.4))
    axis.axhspan(axis.get_ylim()[0], 1, color=SLOWER, alpha=0.07, linewidth=0)
    words = "dashed: plain decoding; x: slower than that; dotted: T=0.8"
    axis.text(0.99, 0.02, words, transform=axis.transAxes, ha="right", color=SLOWER, fontsize=7)
    axis.legend(fontsize=7, frameon=False, loc="upper left")


@contextlib.contextmanager
def new(path: Path) -> Iterator[Any]:
    """A figure that is written to ``path`` where something was drawn into it."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(layout="constrained")
    try:
        yield figure
        if figure.axes:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=120, metadata={"Software": None})
    finally:
        plt.close(figure)


def draw(picture: Picture, run: Run, path: Path) -> bool:
    """Write a picture of a run; whether the run has what it shows."""
    with new(path) as figure:
        return picture.draw(figure, run)


def _grid(
    rows: Iterable[Row],
    xlabel: str,
    *,
    title: Callable[[Row], str],
    x: Callable[[Row], float],
    y: Callable[[Row], float | None],
) -> list[list[Panel]]:
    """A row of panels, one for each title, with a curve for each name that has two points."""
    panels: dict[str, Curves] = {}
    for row in rows:
        if (value := y(row)) is not None:
            panels.setdefault(title(row), {}).setdefault(row["name"], {})[x(row)] = value
    long = {
        words: {name: dict(sorted(x.items())) for name, x in curves.items() if len(x) > 1}
        for words, curves in panels.items()
    }
    return [[Panel(words, xlabel, curves) for words, curves in long.items() if curves]]


def _of_gamma(run: Run) -> list[list[Panel]]:
    """Latency against gamma at B=32, a panel an alpha."""
    rows = (row for row in run.rows if row["operation"] == "verify_greedy" and best_clock(row))
    return _grid(
        sorted((row for row in rows if row["case"]["B"] == 32), key=lambda x: x["case"]["alpha"]),
        "gamma",
        title=lambda row: f"B=32, alpha={row['case']['alpha']}",
        x=lambda row: row["case"]["gamma"],
        y=microseconds,
    )


def _of_context(run: Run) -> list[list[Panel]]:
    """Share of the read ceiling against the context: a cache of four rows and one token."""
    at = {"B": 4, "heads": "32/8", "H": 128, "T": 1, "lengths": "full"}.items()
    rows = (x for x in run.rows if x["operation"] == "attention" and at <= x["case"].items())
    return _grid(
        rows,
        "slots",
        title=lambda row: "B=4, 32/8 heads of 128, T=1",
        x=lambda row: row["case"]["S"],
        y=lambda row: table.share(run.result, row),
    )


def _of_budget(run: Run) -> list[list[Panel]]:
    """Score against budget, of exact top-k and of what reads as few bytes as hashes."""
    rows = (x for x in run.rows if "score" in x and x["operation"] == "read")
    return _grid(
        sorted((x for x in rows if x["name"] in EQUAL_BYTES), key=lambda x: x["case"]["S"]),
        "budget, % of the context",
        title=lambda row: f"{kilo(row['case']['S'])} tokens",
        x=lambda row: 100 * row["case"]["budget"],
        y=lambda row: row["score"],
    )


def _of_batch(run: Run) -> list[list[Panel]]:
    """Tokens a second against rows, a panel a context."""
    return _grid(
        (row for row in run.rows if row["operation"] == "generate" and row["checked"]),
        "rows",
        title=lambda row: f"{kilo(row['case']['S'])} tokens of context",
        x=lambda row: row["case"]["B"],
        y=lambda row: row["tokens_per_s"],
    )


def _of_models(run: Run) -> list[list[Panel]]:
    """Of each model vegas against rows, a curve a context, and drafters against context."""
    every = [cell for pair in fastest_pairs(run.result) for cell in pair.cells if cell.ranked]
    grid = []
    for model in dict.fromkeys(cell.model for cell in every):
        of_model = [cell for cell in every if cell.model == model]
        rows = max(cell.case["B"] for cell in of_model)
        largest = [cell for cell in of_model if cell.case["B"] == rows]
        contexts = sorted({cell.case["S"] for cell in of_model})
        against_rows: Curves = {}
        for context in contexts:
            of_context = [cell for cell in of_model if cell.case["S"] == context]
            against_rows |= _speeds(of_context, VEGAS, f"{kilo(context)} tokens", "B")
        names = dict.fromkeys([VEGAS, *(name for cell in largest for name in cell.drafters)])
        curves: Curves = {}
        for name in names:
            curves |= _speeds(largest, name, name, "S")
        longest = max(map(len, curves.values()), default=0)
        shown = {name: points for name, points in curves.items() if len(points) > 1 or longest == 1}
        title = f"{run.card}, {model}"
        grid.append(
            [
                Panel(f"{title}: {VEGAS}", "rows", against_rows),
                Panel(f"{title}: {rows_of(largest[0].case)}", "context, tokens", shown),
            ]
        )
    return grid


def _speeds(every: Sequence[Cell], name: str, label: str, key: str) -> Curves:
    """Speeds of a drafter over plain decoding, greedy and at T=0.8."""
    curves: Curves = {}
    for cell in sorted(every, key=lambda cell: cell.case[key]):
        speed = cell.speed(cell.drafters[name]) if name in cell.drafters else None
        if speed is not None:
            ending = "" if cell.case["sampling"] == "greedy" else DOTTED
            curves.setdefault(label + ending, {})[cell.case[key]] = speed
    return dict(sorted(curves.items()))


OF_MODELS = Picture(
    *("real", "speed over plain decoding", "speed over plain decoding", _of_models, (10, 3.4)),
    against_one=True,
    every_card=True,
)
OF_GAMMA = Picture(
    *("verify-gamma", "latency against draft length", "time, us", _of_gamma, (10, 3)),
    yscale="log",
    every_card=True,
)
SHARE = "share of the read ceiling"
OF_CONTEXT = Picture("attention-context", SHARE, SHARE, _of_context, (8, 3.4))
OF_BUDGET = Picture("ruler-budget", "score by budget", "score, %", _of_budget, (8, 3.4))
OF_BATCH = Picture(
    *("step", "tokens a second by drafter", "tokens / s", _of_batch, (9, 3)),
    yscale="log",
)
