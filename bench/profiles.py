"""Acceptance stated by papers, for models that run with random weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.optimize import brentq

# Accepted draft tokens of an iteration by gamma, the bonus token not counted: table 1 of Yue et al.
# 2026, on LongBench-v2 with 7 % of the cache, by the first and the bonus token.
LONGBENCH: dict[str, dict[int, float]] = {
    "qwen3-8b": {7: 6.11, 11: 8.72},
    "gpt-oss-20b-attention": {7: 6.24, 11: 9.22},
    "gpt-oss-20b": {7: 6.24, 11: 9.22},
    "gpt-oss-20b-mxfp4": {7: 6.24, 11: 9.22},
}
# Acceptance rate of draft tokens by a quantised copy over that by the model's own weights: the
# ratio of the rates fitted to the mean accepted lengths of Vegas in `bench quality`, on the
# bundled model, greedy and sampled rows together. MXFP4: 0.994 by 16 texts (S=4K, new=256), 0.989
# by 8 (S=2K, new=128), gamma 9. The bundled model's weights are int8, so that an int8 copy is
# exact: 1 is an assumption for other models.
QUANTIZED = {"int8": 1.0, "mxfp4": 0.99}
USUAL = "qwen3-8b"  # for models that are not in the table


def rate_of(model: str, quantized: str = "") -> float:
    """The acceptance rate of a draft token after accepted ones, by the paper's table.

    One rate for all positions, fitted to the total of accepted tokens in the table. ``quantized``:
    the kind of the copy that drafts, whose rate is multiplied by `QUANTIZED`.
    """
    stated: Mapping[int, float] = LONGBENCH.get(model, LONGBENCH[USUAL])

    def more(rate: float) -> float:
        return sum(float(reached(rate, gamma).sum()) - n for gamma, n in stated.items())

    rate = float(brentq(more, 0.0, 1.0))  # pyright: ignore[reportArgumentType]
    return rate * QUANTIZED.get(quantized, 1.0)


def reached(rate: float, gamma: int) -> np.ndarray:
    """Probabilities that at least 1, 2, ... ``gamma`` draft tokens are accepted."""
    return rate ** np.arange(1, gamma + 1)


def committed(rate: float, gamma: int) -> float:
    """Mean number of tokens that an iteration commits."""
    return 1 + float(reached(rate, gamma).sum())
