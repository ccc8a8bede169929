"""The table and the picture of docs/sampling.md: `python -m bench.report.law` writes them.

The law of what is drawn, by enumeration, against float64 softmax at the temperature that counts.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jspec.config import SamplingParams
from jspec.ops.exact_probabilities import rate_of, token_probabilities
from jspec.ops.vocabulary import TILE

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- table: python -m bench.report.law -->\n", "<!-- end of table -->\n"
VOCABULARIES = (32000, 128256, 262144)
TEMPERATURES = (0.1, 0.5, 1.0, 2.0)
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
SEEN = 1e-9  # a token of this probability or more must have mass
PEAK = 4 * TILE + 900  # a token somewhere inside a tile


@dataclasses.dataclass(frozen=True)
class Enumerated:
    """How far a law is from softmax: ``variation``, the total one, and how many tokens of
    probability `SEEN` or more are ``lost``: without mass, so that they are never drawn."""

    variation: float
    lost: int


def shapes(vocabulary: int, dtype: str) -> dict[str, np.ndarray]:
    """Logits of each shape, float32 ``[V]``, rounded to ``dtype``; seed 0."""
    rng = np.random.default_rng(0)
    token = np.arange(vocabulary)
    peak = np.log(0.9999 / 0.0001 * (vocabulary - 1))
    # At temperature 1 the others of the tile lie a little more than 31 binary orders below, where
    # weights end: the worst that there is.
    beside = np.where(token == PEAK, 21.5, -0.0007)
    found = {
        "flat": np.zeros(vocabulary),
        "Gaussian, deviation 3": 3 * rng.standard_normal(vocabulary),
        "Student t, 3 degrees": 3 * rng.standard_t(3, vocabulary),
        "0.9999 over a flat tail": np.where(token == PEAK, peak, 0),
        "peak over its tile's tail": np.where(token // TILE == PEAK // TILE, beside, -30),
    }
    return {name: x.astype(DTYPES[dtype]).astype(np.float32) for name, x in found.items()}


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    """In float64, at the temperature that counts."""
    powers = np.float64(logits) * np.float64(rate_of(temperature))
    weights = np.exp2(powers - powers.max())
    return weights / weights.sum()


def compare(found: np.ndarray, expected: np.ndarray) -> Enumerated:
    """A law and softmax, ``[V]`` each."""
    lost = int(((found == 0) & (expected >= SEEN)).sum())
    return Enumerated(float(np.abs(found - expected).sum() / 2), lost)


def enumerate_law(logits: np.ndarray, temperature: float) -> Enumerated:
    """The law of ``logits [V]``."""
    found = token_probabilities(logits, SamplingParams(temperature=temperature))
    return compare(found, softmax(logits, temperature))


def coarse_law(expected: np.ndarray, *, number_bits: int, mass_bits: int) -> np.ndarray:
    """What numbers and masses of few bits make of softmax: 23 and 30 of them at 0.1.0."""
    ends = np.cumsum(np.floor(expected * 2.0**mass_bits))
    numbers = np.ceil(ends / ends[-1] * 2.0**number_bits)
    return np.diff(numbers, prepend=0) / 2.0**number_bits


def table() -> str:
    """The largest total variation over the temperatures, and the tokens lost in all of them."""
    lines = ["| logits | dtype | " + " | ".join(f"V = {v}" for v in VOCABULARIES) + " | lost |"]
    lines.append("|---|---|" + "---|" * (len(VOCABULARIES) + 1))
    for dtype in DTYPES:
        for shape in shapes(2 * PEAK, dtype):
            cells, lost = [], 0
            for vocabulary in VOCABULARIES:
                logits = shapes(vocabulary, dtype)[shape]
                found = [enumerate_law(logits, temperature) for temperature in TEMPERATURES]
                cells.append(f"{max(x.variation for x in found):.1e}")
                lost += sum(x.lost for x in found)
            lines.append(f"| {shape} | {dtype} | " + " | ".join(cells) + f" | {lost} |")
    return "\n".join(lines) + "\n"


def picture(path: Path) -> None:
    """From a number to a token above, and the law of 0.1.0 and of now against softmax below."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(9, 7), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(5, 6))
    _bits(above)
    _ratios(below)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def _bits(axes: Any) -> None:
    """The layouts as rows of 64 bits, the highest on the left."""
    rows = (
        ("a weight", [(10, "0", "#e2e8f0"), (23, "mantissa", "#2b6cb0"), (31, "", "#bee3f8")]),
        ("its tile's sum", [(64, "sum of 1024 weights", "#2b6cb0")]),
        ("its tile's mass", [(9, "0", "#e2e8f0"), (55, "sum >> distance + guard", "#38a169")]),
        ("the row's mass", [(64, "sum of all tiles", "#38a169")]),
        ("the number", [(32, "first word of Threefry", "#d69e2e"), (32, "second word", "#ecc94b")]),
        ("the target", [(64, "upper 64 bits of number x row's mass", "#e53e3e")]),
    )
    for y, (name, fields) in enumerate(rows):
        left = 0
        for width, text, colour in fields:
            axes.barh(-y, width, left=left, color=colour, edgecolor="white")
            dark = colour not in ("#e2e8f0", "#bee3f8", "#ecc94b")
            axes.text(left + width / 2, -y, text, ha="center", va="center", fontsize=9,
                      color="white" if dark else "black")  # fmt: skip
            left += width
        axes.text(-1, -y, name, ha="right", va="center")
    axes.text(48.5, 0, "0, moved right by the distance", ha="center", va="center", fontsize=9)
    axes.set(xlim=(0, 64), title="64-bit integers from a logit to the drawn token")
    axes.axis("off")


def _ratios(axes: Any) -> None:
    """What is drawn over softmax, by a token's probability."""
    logits = shapes(128256, "float32")["Gaussian, deviation 3"]
    expected = softmax(logits, 1.0)
    laws = {
        "0.1.0: numbers of 23 bits, masses of 30": (
            coarse_law(expected, number_bits=23, mass_bits=30),
            "#e53e3e",
        ),
        "64 bits": (token_probabilities(logits, SamplingParams(temperature=1.0)), "#2b6cb0"),
    }
    some = np.random.default_rng(0).choice(expected.size, 6000, replace=False)
    for name, (found, colour) in laws.items():
        variation = compare(found, expected).variation
        axes.plot(
            expected[some],
            (found / expected)[some],
            ".",
            markersize=2,
            color=colour,
            label=f"{name}: total variation {variation:.0e}",
        )
    axes.set(
        xscale="log",
        ylim=(-0.1, 3),
        xlabel="probability by softmax",
        ylabel="drawn / softmax",
        title="V = 128256, Gaussian logits of deviation 3, each point a token",
    )
    axes.legend(markerscale=6)


def main() -> None:
    page = DOCS / "sampling.md"
    text = page.read_text()
    before, rest = text.split(BEGIN)
    page.write_text(before + BEGIN + table() + END + rest.split(END)[1])
    picture(DOCS / "sampling.png")


if __name__ == "__main__":
    main()
