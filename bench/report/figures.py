"""The figures of a result; each is left out where its rows were not measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import table
from bench.point import best_clock, spread
from bench.report import real_figures
from bench.report.text import median, names, pick, values

COLOURS = {
    "xla": "#805ad5",
    "cuda": "#2b6cb0",
    "cuda_naive": "#e53e3e",
    "triton": "#38a169",
    "pallas": "#d69e2e",
    "torch": "#718096",
    "torch_graph": "#2d3748",
    "flashinfer": "#dd6b20",
    "flashinfer_fa3": "#f6ad55",
    "fa3": "#e53e3e",
    "fa3_jax": "#97266d",
    "cudnn": "#0bc5ea",
    "xla_blocked": "#b794f4",
    "exact_topk": "#1a202c",
    "hata": "#2b6cb0",
    "quest-16": "#38a169",
    "loki-16": "#d69e2e",
    "magicpig-16": "#e53e3e",
}
# Policies that read as many bytes of a key, and the exact choice.
EQUAL_BYTES = ("exact_topk", "hata", "quest-16", "loki-16", "magicpig-16")
Lines = dict[str, list[tuple[float, float]]]
LOG_X = ("log", "linear")


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A figure: its file's name, what draws it and says whether it could, inches, and words."""

    name: str
    draw: Callable[[Any, dict[str, Any]], bool]
    size: tuple[float, float]
    words: str


def draw(result: dict[str, Any], path: Path) -> bool:
    """Draw the figure of a result's suite; whether its rows have what it shows."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    drawing = FIGURES[result["suite"]]
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = plt.figure(figsize=drawing.size, layout="constrained")
    drawn = drawing.draw(figure, result)
    if drawn:
        figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)
    return drawn


def _gamma(figure: Any, result: dict[str, Any]) -> bool:
    """Latency against gamma at B=32, a panel an alpha."""
    gammas = values(result, "verify_greedy", "gamma")
    alphas = values(result, "verify_greedy", "alpha")
    return _panels(
        figure,
        [
            (f"B=32, alpha={alpha}", _series(result, "gamma", gammas, B=32, alpha=alpha))
            for alpha in alphas
        ],
        "gamma",
        f"{_clock(result)} time, us",
        scales=("log", "log"),
    )


def _context(figure: Any, result: dict[str, Any]) -> bool:
    """Share of the read ceiling against the context: a cache of four rows and one token."""
    at = {"B": 4, "heads": "32/8", "H": 128, "T": 1, "lengths": "full"}
    lines = {
        name: [(slots / 1024, share) for slots, share in line]
        for name, line in _shares(result, "S", at).items()
    }
    panels = [("B=4, 32/8 heads of 128, T=1", lines)]
    return _panels(figure, panels, "slots, K", "share of the read ceiling", scales=LOG_X)


def _shares(result: dict[str, Any], key: str, at: dict[str, Any]) -> Lines:
    """Each name's share of the read ceiling against ``key``, of names with two points or more."""
    lines: Lines = {}
    for x in values(result, "attention", key):
        for name, row in pick(result, "attention", **{key: x}, **at).items():
            share = table.share(result, row)
            lines.setdefault(name, []).extend([] if share is None else [(x, share)])
    return {name: line for name, line in lines.items() if len(line) > 1}


def _budget(figure: Any, result: dict[str, Any]) -> bool:
    """Score against budget, of exact top-k and of what reads as few bytes as hashes."""
    panels = []
    scored = [x for x in result["rows"] if "score" in x and x["case"].get("kind") != "draft"]
    for length in sorted({row["case"]["S"] for row in scored}):
        lines: Lines = {}
        for row in scored:
            case, name = row["case"], row["name"]
            is_shown = name in EQUAL_BYTES
            if is_shown and case["S"] == length:
                lines.setdefault(name, []).append((100 * case["budget"], row["score"]))
        panels.append((f"{length / 1024:g}K tokens", {n: sorted(x) for n, x in lines.items()}))
    return _panels(figure, panels, "budget, % of the context", "score, %", scales=LOG_X)


def _sources(figure: Any, result: dict[str, Any]) -> bool:
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


def _series(result: dict[str, Any], key: str, xs: list[Any], **at: Any) -> Lines:
    """Each name's medians against ``key``, where the rest of the case is ``at``."""
    operation = "verify_greedy"
    lines: Lines = {}
    for name in names(result, operation):
        points = [(x, median(pick(result, operation, **{key: x}, **at), name)) for x in xs]
        line = [(x, y) for x, y in points if y is not None]
        if line:
            lines[name] = line
    return lines


def _panels(
    figure: Any,
    panels: list[tuple[str, Lines]],
    xlabel: str,
    ylabel: str,
    *,
    scales: tuple[str, str] = ("linear", "linear"),
) -> bool:
    """Draw the panels that have lines, with one scale of y; whether there was any."""
    from matplotlib.ticker import LogLocator

    panels = [(title, {n: line for n, line in lines.items() if line}) for title, lines in panels]
    panels = [(title, lines) for title, lines in panels if lines]
    if not panels:
        return False
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, (title, lines) in zip(axes, panels, strict=True):
        for name, line in lines.items():
            xs, ys = zip(*line, strict=True)
            axis.plot(xs, ys, marker=".", color=COLOURS.get(name, "#a0aec0"), label=name)
        axis.set(title=title, xlabel=xlabel, xscale=scales[0], yscale=scales[1])
        ticks = sorted({x for line in lines.values() for x, _ in line})
        labels = [f"{tick:.6g}" if tick >= 1000 else f"{tick:.3g}" for tick in ticks]
        slant = 45 if max(map(len, labels)) > 4 else 0
        axis.set_xticks(ticks, labels, fontsize=7, rotation=slant)
        axis.minorticks_off()
        if scales[1] == "log":
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
        axis.title.set_fontsize(9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(ylabel)
    axes[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return True


def _clock(result: dict[str, Any]) -> str:
    """The clock that figures of this result show."""
    rows = [row for row in result["rows"] if best_clock(row) is not None]
    return "device" if any(spread(row, "device") for row in rows) else "wall"


FIGURES = {
    "real": Drawing("real", real_figures.speeds, (10, 7), "speed over plain decoding"),
    "verify": Drawing("verify-gamma", _gamma, (10, 3), "latency against draft length"),
    "attention": Drawing("attention-context", _context, (8, 3.4), "share of the read ceiling"),
    "quality": Drawing("ruler-budget", _budget, (8, 3.4), "score by budget"),
    "ruler": Drawing("ruler-budget", _budget, (8, 3.4), "score by budget"),
    "step": Drawing("step", _sources, (9, 3), "tokens a second by drafter"),
}
