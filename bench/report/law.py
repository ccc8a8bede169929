"""The table of docs/sampling.md: `python -m bench.report.law` writes it.

The law of what is drawn, by enumeration, against float64 softmax at the temperature that counts.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

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
RELEVANT = 1e-9  # a token of this probability or more must have mass
PEAK = 4 * TILE + 900  # a token somewhere inside a tile


@dataclasses.dataclass(frozen=True)
class Enumerated:
    """How far a law is from softmax: ``variation``, the total one, and how many tokens of
    probability `RELEVANT` or more are ``lost``: without mass, so that they are never drawn."""

    variation: float
    lost: int


def shapes(vocabulary: int, dtype: str) -> dict[str, np.ndarray]:
    """Logits of each shape, float32 ``[V]``, rounded to ``dtype``; seed 0."""
    rng = np.random.default_rng(0)
    token = np.arange(vocabulary)
    peak = np.log(0.9999 / 0.0001 * (vocabulary - 1))
    # At temperature 1 the others of the tile lie a little more than 31 binary orders below, where
    # weights end: the worst that there is.
    others = np.where(token == PEAK, 21.5, -0.0007)
    by_shape = {
        "flat": np.zeros(vocabulary),
        "Gaussian, deviation 3": 3 * rng.standard_normal(vocabulary),
        "Student t, 3 degrees": 3 * rng.standard_t(3, vocabulary),
        "0.9999 over a flat tail": np.where(token == PEAK, peak, 0),
        "peak over its tile's tail": np.where(token // TILE == PEAK // TILE, others, -30),
    }
    return {name: x.astype(DTYPES[dtype]).astype(np.float32) for name, x in by_shape.items()}


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    """In float64, at the temperature that counts."""
    powers = np.float64(logits) * np.float64(rate_of(temperature))
    weights = np.exp2(powers - powers.max())
    return weights / weights.sum()


def compare(law: np.ndarray, expected: np.ndarray) -> Enumerated:
    """A law and softmax, ``[V]`` each."""
    lost = int(((law == 0) & (expected >= RELEVANT)).sum())
    return Enumerated(float(np.abs(law - expected).sum() / 2), lost)


def enumerate_law(logits: np.ndarray, temperature: float) -> Enumerated:
    """The law of ``logits [V]``."""
    law = token_probabilities(logits, SamplingParams(temperature=temperature))
    return compare(law, softmax(logits, temperature))


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
                laws = [enumerate_law(logits, temperature) for temperature in TEMPERATURES]
                cells.append(f"{max(x.variation for x in laws):.1e}")
                lost += sum(x.lost for x in laws)
            lines.append(f"| {shape} | {dtype} | " + " | ".join(cells) + f" | {lost} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    page = DOCS / "sampling.md"
    text = page.read_text()
    before, rest = text.split(BEGIN)
    page.write_text(before + BEGIN + table() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
