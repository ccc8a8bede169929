"""The figures on a layer of each policy, and on what makes one of HATA fast and good."""

from __future__ import annotations

from typing import Any

from bench.decode import lossy
from bench.layer import ablation, tables
from bench.report.hata import paper
from bench.table import kilo

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


def layer(figure: Any, result: dict[str, Any]) -> bool:
    """Speed over the fastest dense attention, a group of bars a case; the paper's HATA a star,
    what is to be reached a line."""
    groups = [group for group in tables.groups(result["rows"]) if group.fastest]
    names = [name for name in COLOURS if any(name in group.policies for group in groups)]
    if not names:
        return False
    axis, width = figure.subplots(), 0.8 / len(names)
    for index, name in enumerate(names):
        found = [(at, group.speedup(name)) for at, group in enumerate(groups)]
        points = [(at, speedup) for at, speedup in found if speedup is not None]
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


def steps(figure: Any, result: dict[str, Any]) -> bool:
    """Tokens a second of each policy, a panel a case, with the speed over the dense step."""
    found = lossy.steps(result["rows"])
    every = list(dict.fromkeys(step.case for step in found))
    if not every:
        return False
    for axis, case in zip(figure.subplots(1, len(every), squeeze=False)[0], every, strict=True):
        own = [step for step in found if step.case == case]
        colours = [COLOURS[step.policy] for step in own]
        bars = axis.bar([step.policy for step in own], [s.tokens for s in own], color=colours)
        labels = [f"{s.speedup:.2f}x" if s.speedup else "" for s in own]
        axis.bar_label(bars, labels, fontsize=8)
        model, _, batch, context = lossy.case_cells(own[0])
        axis.set_title(f"{model}, B={batch}, S={context}", fontsize=9)
        axis.tick_params(axis="x", labelsize=7, rotation=30)
        axis.set_ylabel("tokens / s")
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.12)
    return True


def parts(figure: Any, result: dict[str, Any]) -> bool:
    """Times of the stages as bars; of policies against selected slots, of HATA against bits."""
    stages = ablation.stages(result["rows"])
    panels = [("selected slots", ablation.series(result["rows"], "hata_budget", "n"))]
    panels.append(("bits of a code", ablation.series(result["rows"], "hata_bits", "R")))
    panels = [(label, lines) for label, lines in panels if lines]
    if not stages and not panels:
        return False
    axes = list(figure.subplots(1, bool(stages) + len(panels), squeeze=False)[0])
    if stages:
        axis = axes.pop(0)
        bars = axis.bar(list(stages), list(stages.values()), color=COLOURS["hata"])
        axis.bar_label(bars, [f"{y:,.0f}" for y in stages.values()], fontsize=7)
        axis.tick_params(axis="x", labelsize=7, rotation=30)
        axis.set_ylabel("time of a layer, us")
        axis.spines[["top", "right"]].set_visible(False)
    for axis, (label, lines) in zip(axes, panels, strict=True):
        for name, line in lines.items():
            axis.plot(*zip(*line, strict=True), marker=".", color=COLOURS.get(name), label=name)
        ticks = sorted({x for line in lines.values() for x, _ in line})
        axis.set(xlabel=label, xscale="log", ylim=(0, None))
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=7)
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=7, frameon=False)
    return True


def bits(figure: Any, result: dict[str, Any]) -> bool:
    """What hashes find, and the score, by their bits; what reads every key exactly is dashed."""
    rows = {name: [r for r in result["rows"] if r["name"] == name] for name in ("hata", "exact")}
    if not rows["hata"]:
        return False
    shares = {"recall": "recall", "random_recall": "recall, random", "mass": "mass"}
    axes = figure.subplots(1, 2)
    for colour, (key, label) in zip(("#2b6cb0", "#a0aec0", "#38a169"), shares.items(), strict=True):
        axes[0].plot(*_by_bits(rows["hata"], key), marker=".", color=colour, label=label)
    axes[1].plot(*_by_bits(rows["hata"], "score"), marker=".", color="#2b6cb0", label="hata")
    for row in rows["exact"]:
        axes[0].axhline(row["mass"], color="#38a169", linestyle="--", label="mass, exact")
        axes[1].axhline(row["score"], color="#1a202c", linestyle="--", label="exact")
    for axis, label in zip(axes, ("share", "score, %"), strict=True):
        axis.set(xlabel="bits of a hash", ylabel=label, xscale="log")
        ticks = [row["case"]["R"] for row in rows["hata"]]
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, frameon=False)
    return True


def _by_bits(rows: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    return [row["case"]["R"] for row in rows], [row[key] for row in rows]
