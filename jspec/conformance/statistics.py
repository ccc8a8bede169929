"""p-values of counts, with NumPy and the standard library alone."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

LEAST_EXPECTED = 10  # outcomes that are expected less often share a cell


def chi2_tail(x: float, freedom: int) -> float:
    """P(X >= x) of a chi-squared variable with ``freedom`` degrees of freedom, a whole number.

    The finite sums of the incomplete gamma function at whole and half orders (Abramowitz and
    Stegun, 26.4.4 and 26.4.5).
    """
    if x <= 0:
        return 1.0
    half = x / 2
    if freedom % 2:
        total, orders = math.erfc(math.sqrt(half)), np.arange(0.5, freedom / 2)
    else:
        total, orders = 0.0, np.arange(0.0, freedom / 2)
    logs = (order * math.log(half) - half - math.lgamma(order + 1) for order in orders)
    return min(total + math.fsum(map(math.exp, logs)), 1.0)


def poisson_tail(count: int, mean: float) -> float:
    """P(X >= count) of a Poisson variable."""
    if count == 0 or mean == 0:
        return float(count == 0)
    logs = np.arange(count, count + 200) * math.log(mean) - mean
    logs -= np.array([math.lgamma(at + 1) for at in range(count, count + 200)])
    return min(math.fsum(np.exp(logs)), 1.0)


def binomial_test(count: int, trials: int, probability: float) -> float:
    """The two-sided p-value: the probability of all counts that are as unlikely as ``count``."""
    counts = np.arange(trials + 1)
    factorials = np.cumsum(np.log(np.maximum(counts, 1)))
    logs = factorials[-1] - factorials - factorials[::-1]
    logs += counts * math.log(probability) + (trials - counts) * math.log1p(-probability)
    weights = np.exp(logs)
    return min(float(weights[logs <= logs[count] + 1e-7].sum()), 1.0)


def g_test(observed: NDArray[np.int64], law: NDArray[np.float64]) -> float:
    """The p-value of counts against probabilities that sum to 1.

    Outcomes expected less than `LEAST_EXPECTED` times share a cell; an outcome of probability 0
    gives 0.

    Args:
        observed: counts ``[outcomes]``.
        law: probabilities ``[outcomes]``.
    """
    if observed[law == 0].any():
        return 0.0
    total = observed.sum()
    common = law * total >= LEAST_EXPECTED
    counts = np.append(observed[common], observed[~common].sum()).astype(np.float64)
    expected = np.append(law[common], law[~common].sum()) * total
    rare = 1.0
    if expected[-1] < LEAST_EXPECTED:
        rare = poisson_tail(int(counts[-1]), float(expected[-1]))
        counts, expected = counts[:-1], expected[:-1]
    if len(expected) < 2:
        return rare
    some = counts > 0
    g = 2 * (counts[some] * np.log(counts[some] / expected[some])).sum()
    g -= 2 * (counts.sum() - expected.sum())
    return min(chi2_tail(float(g), len(expected) - 1), rare)
