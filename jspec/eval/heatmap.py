"""Needles at all depths and lengths, and the picture of how many were found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jspec.eval.evaluate import evaluate
from jspec.eval.fitting import needle_question, shortest_needle
from jspec.models.tokenizer import Tokenizer
from jspec.policies import Policy
from jspec.typing import Model

DEPTHS = tuple(np.linspace(0, 1, 11).tolist())


def lengths_up_to(
    tokenizer: Tokenizer, length: int, *, examples: int = 1, seed: int = 0
) -> list[int]:
    """Four lengths in tokens up to ``length``, from a fourth of it or the shortest that asks.

    Raises `ValueError` if no needle of `needles` fits into ``length``.
    """
    each = [(depth, one) for depth in DEPTHS for one in range(seed, seed + examples)]
    least = max(shortest_needle(tokenizer, *one) for one in each)
    if least > length:
        raise ValueError(
            f"--length {length} is too short for --heatmap; its shortest takes {least}"
        )
    return np.linspace(max(length // 4, least), length, 4).astype(int).tolist()


def check_picture(path: str) -> None:
    """Raise `ValueError` unless `draw` can write to ``path``."""
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in kinds:
        raise ValueError(f"--heatmap {path} must end in one of .{', .'.join(sorted(kinds))}")
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"--heatmap {path}: {Path(path).parent} is no folder")


def needles(
    model: Model,
    tokenizer: Tokenizer,
    policy: Policy,
    lengths: Sequence[int],
    *,
    examples: int = 1,
    seed: int = 0,
    batch: int = 8,
) -> np.ndarray:
    """The share of needles found, float64 ``[depths, lengths]``, at each of `DEPTHS`."""
    shares = np.zeros((len(DEPTHS), len(lengths)))
    for column, length in enumerate(lengths):
        questions = [
            needle_question(tokenizer, length, depth, each)
            for depth in DEPTHS
            for each in range(seed, seed + examples)
        ]
        score = evaluate(model, tokenizer, policy, questions, length=length, batch=batch)
        shares[:, column] = np.reshape(score.each, (len(DEPTHS), examples)).mean(axis=1)
    return shares


def draw(shares: np.ndarray, lengths: Sequence[int], title: str, path: str | Path) -> None:
    """Write the picture of ``shares [depths, lengths]``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.6 + 0.7 * len(lengths), 4.5), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45)
    axes.set_yticks(range(len(DEPTHS)), [f"{depth:.0%}" for depth in DEPTHS])
    axes.set_xlabel("length, tokens")
    axes.set_ylabel("depth of the needle")
    axes.set_title(title, fontsize="medium")
    for (row, column), value in np.ndenumerate(shares):
        axes.text(column, row, f"{value:.0%}", ha="center", va="center", fontsize="small")
    figure.colorbar(image, label="needles found")
    figure.savefig(path, dpi=150)
