"""Needles at all depths and lengths, and the picture of how many were found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jspec.eval.evaluate import evaluate
from jspec.eval.fitting import needle_question
from jspec.models.tokenizer import Tokenizer
from jspec.policies import Policy
from jspec.typing import Model

DEPTHS = tuple(np.linspace(0, 1, 11).tolist())


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
