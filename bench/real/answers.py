"""What the answers of a batch say: tokens per step with its error, and which of them repeat."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

GRAM = 16  # tokens
TIMES = 3  # occurrences of one `GRAM` that make an answer repetitive


def repeats(tokens: Sequence[int]) -> bool:
    """Whether some `GRAM` tokens in a row occur `TIMES` times or more in an answer.

    Such answers loop, and drafts of a loop are accepted more often than drafts of other text.
    """
    grams = Counter(tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1))
    return max(grams.values(), default=0) >= TIMES


@dataclasses.dataclass(frozen=True)
class PerStep:
    """Committed tokens per verification step: the ``mean`` over all steps of some ``rows``, and
    its standard ``error``, NaN for a single row."""

    mean: float
    error: float
    rows: int


def per_step(tokens: Sequence[int], steps: Sequence[int]) -> PerStep | None:
    """Of rows that committed ``tokens`` in ``steps``; None for no rows.

    The error is that of a ratio of two sums over rows, which are independent texts (Cochran,
    Sampling Techniques, equation 2.39).
    """
    committed, step_counts = np.asarray(tokens, float), np.asarray(steps, float)
    if not step_counts.sum():
        return None
    mean, rows = committed.sum() / step_counts.sum(), len(step_counts)
    if rows < 2:
        return PerStep(mean, math.nan, rows)
    residuals = committed - mean * step_counts
    variance = (residuals**2).sum() / (rows - 1) / rows
    return PerStep(mean, math.sqrt(variance) / step_counts.mean(), rows)
