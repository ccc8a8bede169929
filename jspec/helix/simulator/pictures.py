"""The simulator's pictures: read times, frontiers, and spans with and without overlap."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jspec.helix.simulator.frontier import Frontier

Panel = tuple[str, str, Sequence[dict[str, float]]]  # title, name of the abscissa, rows


def draw_roofline(panels: Sequence[Panel], path: str | Path) -> None:
    """Figure 1 of the paper: the times of reading cache and weights, a panel each."""
    with _figure(len(panels), path) as axes:
        for each, (title, name, rows) in zip(axes, panels, strict=True):
            x = [row[name] for row in rows]
            each.plot(x, [row["kv_us"] for row in rows], marker="o", label="KV cache")
            each.plot(x, [row["weights_us"] for row in rows], marker="s", label="weights")
            each.set(title=title, xlabel=name.replace("_", " "), xscale="log", yscale="log")
            each.set_ylabel("read time of a layer, us")
            each.legend()


def draw_frontiers(frontiers: Mapping[str, Frontier], title: str, path: str | Path) -> None:
    """Figures 5 to 7: tokens a second of a GPU against those of a row."""
    from matplotlib.ticker import LogLocator

    with _figure(1, path) as (axes,):
        for name, frontier in frontiers.items():
            style = "--" if "without" in name else "-"  # Often on top of the one with it.
            axes.step(frontier.users, frontier.gpus, style, where="post", marker=".", label=name)
        axes.set(title=title, yscale="log", xlabel="tokens a second of a row")
        axes.set_ylabel("tokens a second of a GPU")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))  # labels of more run together
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.legend()


def draw_overlap(rows: Sequence[dict[str, Any]], title: str, path: str | Path) -> None:
    """The span of attention and its exchange against the number of chunks."""
    with _figure(1, path) as (axes,):
        axes.plot([row["chunks"] for row in rows], [row["span"] for row in rows], marker="o")
        axes.set(title=title, xlabel="chunks", ylabel="span", xscale="log")
        axes.set_ylim(bottom=0)


@contextlib.contextmanager
def _figure(count: int, path: str | Path) -> Iterator[list[Any]]:
    """``count`` axes next to each other, written to ``path`` at the end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * count + 2 * (count == 1), 4), layout="constrained")
    axes = list(np.atleast_1d(figure.subplots(1, count)))
    for each in axes:
        each.grid(alpha=0.3)
    yield axes
    figure.savefig(path, dpi=120)
