"""The two pictures of a tuning, after figures 8 and 13 of Yue et al. 2026."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jspec.eval.tuning import Trial, Tuning


def draw(tuning: Tuning, folder: Path) -> None:
    """Write acceptance.png and throughput.png into ``folder``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axis = figure.subplots()
    _line(axis, [(_percent(trial), trial.accepted) for trial in tuning.acceptance])
    axis.axvline(100 * tuning.settled, color="#1a202c", linestyle="--", linewidth=1)
    axis.set(
        xlabel="ratio of the context, %", ylabel="accepted draft tokens a step", ylim=(0, None)
    )
    figure.savefig(folder / "acceptance.png", dpi=120)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    _line(axes[0], [(trial.setting.gamma, trial.tokens_per_s) for trial in tuning.gammas])
    axes[0].set(xlabel="gamma", ylabel="tokens / s", title=f"ratio {tuning.settled:g}")
    _line(axes[1], [(_percent(trial), trial.tokens_per_s) for trial in tuning.ratios])
    axes[1].set(xlabel="ratio of the context, %", title=f"gamma {tuning.best.setting.gamma}")
    plain = tuning.plain.tokens_per_s
    for axis in axes:
        axis.axhline(plain, color="#718096", linestyle="--", linewidth=1, label="plain")
        axis.set_ylim(0, None)
        axis.legend(fontsize=7, frameon=False)
    figure.savefig(folder / "throughput.png", dpi=120)


def _percent(trial: Trial) -> float:
    return 100 * (trial.setting.ratio or 0)


def _line(axis: Any, points: Sequence[tuple[float, float]]) -> None:
    axis.plot(*zip(*points, strict=True), marker=".", color="#2b6cb0", label="drafts")
    axis.set_xticks([x for x, _ in points])
    axis.spines[["top", "right"]].set_visible(False)
