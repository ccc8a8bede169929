"""The figures of a result; each is left out where its rows were not measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import attention, ruler
from bench.ceilings import bandwidth
from bench.point import best_clock, spread
from bench.regret import is_pipeline
from bench.report import hata_figures, iteration_figures, parity, real_figures
from bench.report.text import median, names, pick, values

COLOURS = {
    "xla": "#805ad5",
    "cuda": "#2b6cb0",
    "cuda_naive": "#e53e3e",
    "cuda_single": "#e53e3e",
    "cuda+torch": "#718096",
    "two_steps": "#00a3c4",
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
Drawing = Callable[[Any, dict[str, Any]], bool]
Lines = dict[str, list[tuple[float, float]]]
LOG_X = ("log", "linear")


def write(result: dict[str, Any], folder: Path, prefix: str = "") -> list[Path]:
    """Draw a result's figures into ``folder``; their paths."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, (draw, size) in FIGURES.get(result["suite"], {}).items():
        figure = plt.figure(figsize=size, layout="constrained")
        if draw(figure, result):
            path = folder / f"{prefix}{name}.png"
            figure.savefig(path, dpi=120, metadata={"Software": None})
            paths.append(path)
        plt.close(figure)
    return paths


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


def _alpha(figure: Any, result: dict[str, Any]) -> bool:
    """Sensitivity to alpha in long drafts, B=32: time over that at the smallest alpha."""
    alphas = values(result, "verify_greedy", "alpha")
    panels = []
    for gamma in (64, 128):
        lines = _series(result, "alpha", alphas, B=32, gamma=gamma)
        relative = {name: [(x, y / line[0][1]) for x, y in line] for name, line in lines.items()}
        panels.append((f"B=32, gamma={gamma}", relative))
    return _panels(figure, panels, "alpha", f"{_clock(result)} time, lowest alpha = 1")


def _speedup(figure: Any, result: dict[str, Any]) -> bool:
    """The ballot kernel over the naive one, a panel a batch, by gamma and alpha."""
    batches, gammas, alphas = (values(result, "verify_greedy", k) for k in ("B", "gamma", "alpha"))
    grids = []
    for batch in batches:
        grid = []
        for alpha, gamma in itertools.product(alphas, gammas):
            own = pick(result, "verify_greedy", B=batch, gamma=gamma, alpha=alpha)
            naive, ballot = median(own, "cuda_naive"), median(own, "cuda")
            grid.append(None if naive is None or ballot is None else naive / ballot)
        if None not in grid:
            grids.append((batch, grid))
    if not grids:
        return False
    top = max(max(grid) for _, grid in grids)
    axes = figure.subplots(1, len(grids), squeeze=False)[0]
    for axis, (batch, grid) in zip(axes, grids, strict=True):
        rows = [grid[i : i + len(gammas)] for i in range(0, len(grid), len(gammas))]
        axis.imshow(rows, vmin=0, vmax=top, cmap="Blues", aspect="auto")
        for i, j in itertools.product(range(len(alphas)), range(len(gammas))):
            shade = "white" if rows[i][j] > 0.6 * top else "black"
            axis.text(j, i, f"{rows[i][j]:.1f}", ha="center", va="center", color=shade, fontsize=7)
        axis.set_xticks(range(len(gammas)), gammas)
        axis.set_yticks(range(len(alphas)), alphas)
        axis.set_title(f"B={batch}", fontsize=9)
        axis.set_xlabel("gamma")
    axes[0].set_ylabel("alpha")
    figure.suptitle(f"naive over ballot, {_clock(result)} time", fontsize=10)
    return True


def _ablation(figure: Any, result: dict[str, Any]) -> bool:
    """Every implementation at the point of largest divergence, device and wall."""
    own = pick(result, "verify_greedy", B=32, gamma=128, alpha=0.9)
    clocks = [c for c in ("device", "wall") if any(spread(row, c) for row in own.values())]
    if not clocks:
        return False
    axes = figure.subplots(1, len(clocks), squeeze=False)[0]
    for axis, clock in zip(axes, clocks, strict=True):
        found = {name: s for name, row in own.items() if (s := spread(row, clock)) is not None}
        heights = [s.median for s in found.values()]
        reach = [
            [s.median - s.low for s in found.values()],
            [s.high - s.median for s in found.values()],
        ]
        colours = [COLOURS.get(name, "#a0aec0") for name in found]
        bars = axis.bar(range(len(found)), heights, yerr=reach, color=colours, capsize=3)
        axis.set_xticks(range(len(found)), list(found), rotation=30, ha="right", fontsize=8)
        axis.bar_label(bars, [f"{height:.2f}" for height in heights], fontsize=8, padding=2)
        axis.set_title(f"B=32, gamma=128, alpha=0.9: {clock} time, us", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.12)
    return True


def _crossover(figure: Any, result: dict[str, Any]) -> bool:
    """Fused and two-step against the width of a row at B=32, a panel a gamma that was run at
    several; warm L2."""
    widths = values(result, "verify_and_pack", "D")
    panels = []
    for gamma in values(result, "verify_and_pack", "gamma"):
        at = {"B": 32, "gamma": gamma, "alpha": 0.9, "l2": "warm"}
        lines = _series(result, "D", widths, operation="verify_and_pack", **at)
        if max(map(len, lines.values()), default=0) < 2:
            continue
        fused = {name: line for name, line in lines.items() if "+" not in name}
        best: list[tuple[float, float]] = []
        for width in widths:
            own = pick(result, "verify_and_pack", D=width, **at)
            times = [median(own, name) for name, row in own.items() if is_pipeline(row)]
            best += [(width, min(t for t in times if t is not None))] if times else []
        paper = {"cuda+torch": lines["cuda+torch"]} if "cuda+torch" in lines else {}
        panels.append((f"B=32, gamma={gamma}, alpha=0.9", fused | paper | {"best two-step": best}))
    return _panels(figure, panels, "D", f"{_clock(result)} time, us", scales=("log", "log"))


def _vocabulary(figure: Any, result: dict[str, Any]) -> bool:
    """Time against vocabulary, a panel a batch and draft, with the floor of reading; cold L2."""
    operation = "verify_stochastic"
    sizes, batches = (values(result, operation, key) for key in ("V", "B"))
    l2 = values(result, operation, "l2")[:1]
    read = bandwidth(result["ceilings"], "read")
    panels = []
    for draft, batch in itertools.product(values(result, operation, "draft"), batches):
        at = {"B": batch, "draft": draft, **({"l2": l2[0]} if l2 else {})}
        lines = _series(result, "V", sizes, operation=operation, **at)
        floor = []
        for size in sizes:
            row = next(iter(pick(result, operation, V=size, **at).values()), None)
            if row is not None and read:
                floor.append((size, row["bytes"] / read * 1e6))
        panels.append((f"{draft}, B={batch}", lines | {"floor": floor}))
    return _panels(
        figure, panels, "vocabulary", f"{_clock(result)} time, us", scales=("linear", "log")
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


def _tokens(figure: Any, result: dict[str, Any]) -> bool:
    """Share of the read ceiling against the tokens of a pass: a cache of 4 x 32K."""
    at = {"B": 4, "S": 32768, "heads": "32/8", "H": 128, "lengths": "full"}
    panels = [("B=4, S=32K, 32/8 heads of 128", _shares(result, "T", at))]
    return _panels(figure, panels, "T", "share of the read ceiling", scales=LOG_X)


def _shares(result: dict[str, Any], key: str, at: dict[str, Any]) -> Lines:
    """Each name's share of the read ceiling against ``key``, of names with two points or more."""
    held = attention.floor(result)
    lines: Lines = {}
    for x in values(result, "attention", key):
        for name, row in pick(result, "attention", **{key: x}, **at).items():
            share = held.share(row)
            lines.setdefault(name, []).extend([] if share is None else [(x, share)])
    return {name: line for name, line in lines.items() if len(line) > 1}


def _decoding(figure: Any, result: dict[str, Any]) -> bool:
    """Tokens a second of each case, a bar a draft source."""
    rows = [row for row in result["rows"] if row["checked"]]
    cases = list(dict.fromkeys((r["batch"], r["context"]) for r in rows))
    if not cases:
        return False
    axes = figure.subplots(1, len(cases), squeeze=False)[0]
    for axis, case in zip(axes, cases, strict=True):
        own = {r["source"]: r for r in rows if (r["batch"], r["context"]) == case}
        speeds = [r["decode_tokens_per_s"] for r in own.values()]
        bars = axis.bar(list(own), speeds, color=["#9aa5b1", "#2b6cb0", "#38a169"][: len(own)])
        axis.bar_label(bars, [f"{r['speedup']:.2f}x" for r in own.values()], fontsize=8)
        axis.tick_params(axis="x", labelsize=8)
        axis.set_title(f"batch {case[0]}, context {case[1]}", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.12)
    axes[0].set_ylabel("tokens / s")
    return True


def _budget(figure: Any, result: dict[str, Any]) -> bool:
    """Score against budget, of exact top-k and of what reads as few bytes as hashes."""
    panels = []
    for length in sorted({row["case"]["S"] for row in result["rows"]}):
        found: Lines = {}
        for row in result["rows"]:
            case, name = row["case"], row["name"]
            wanted = name in (*ruler.EQUAL_BYTES, "exact_topk") and case["kind"] == "read"
            if wanted and case["S"] == length:
                found.setdefault(name, []).append((100 * case["budget"], row["score"]))
        panels.append((f"{length / 1024:g}K tokens", {n: sorted(x) for n, x in found.items()}))
    return _panels(figure, panels, "budget, % of the context", "score, %", scales=LOG_X)


def _floor(figure: Any, result: dict[str, Any]) -> bool:
    """Step over floor of each case, a group of bars a batch and context, a bar a pass's tokens."""
    ratios: dict[tuple[str, int, int], dict[int, float]] = {}
    for row in result["rows"]:
        found, case = spread(row, "step"), row["case"]
        if found is not None and row["operation"] == "decode_step":
            own = ratios.setdefault((case["model"], case["B"], case["context"]), {})
            own[case["T"]] = found.median * 1e3 / row["floor_ns"]
    if not ratios:
        return False
    counts = sorted(set().union(*ratios.values()))
    axis = figure.subplots()
    width = 0.8 / max(map(len, ratios.values()))
    for index, count in enumerate(counts):
        points = [
            (at + (sorted(own).index(count) - (len(own) - 1) / 2) * width, own[count])
            for at, own in enumerate(ratios.values())
            if count in own
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


def _series(
    result: dict[str, Any],
    key: str,
    xs: list[Any],
    *,
    operation: str = "verify_greedy",
    **at: Any,
) -> Lines:
    """Each name's medians against ``key``, where the rest of the case is ``at``."""
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
            style = "--" if name in ("floor", "best two-step") else "-"
            xs, ys = zip(*line, strict=True)
            colour = COLOURS.get(name, "#1a202c" if style == "--" else "#a0aec0")
            axis.plot(xs, ys, style, marker=".", color=colour, label=name)
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


FIGURES: dict[str, dict[str, tuple[Drawing, tuple[float, float]]]] = {
    "real": {"real": (real_figures.speeds, (10, 7))},
    "verify": {
        "verify-gamma": (_gamma, (10, 3)),
        "verify-alpha": (_alpha, (8, 3)),
        "verify-speedup": (_speedup, (12, 2.6)),
        "verify-ablation": (_ablation, (9, 3.2)),
    },
    "fused": {"fused-crossover": (_crossover, (10, 3))},
    "sampling": {"sampling-vocabulary": (_vocabulary, (13, 3))},
    "attention": {
        "attention-context": (_context, (8, 3.4)),
        "attention-tokens": (_tokens, (8, 3.4)),
    },
    "hata-layer": {"hata-layer": (hata_figures.layer, (11, 4))},
    "hata-ablation": {"hata-ablation": (hata_figures.parts, (11, 3.2))},
    "hash-bits": {"hash-bits": (hata_figures.bits, (9, 3.2))},
    "hata-e2e": {"hata-e2e": (hata_figures.steps, (9, 3.2))},
    "ruler": {"ruler-budget": (_budget, (8, 3.4))},
    "step": {"step": (_decoding, (9, 3))},
    "parity": {"parity-margins": (parity.margins, (7, 3.4))},
    "throughput": {"throughput": (iteration_figures.speeds, (13, 3.6))},
    "vegas-breakdown": {"vegas-breakdown": (iteration_figures.parts, (12, 3.6))},
    "decode": {"decode-floor": (_floor, (10, 4))},
    "families": {
        "families-floor": (_floor, (14, 4)),
        "families-parts": (iteration_figures.parts, (14, 3.6)),
    },
}
