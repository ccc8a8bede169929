"""The sampling law by enumeration: what each token's probability is, to the last bit.

Written in NumPy from the definitions in `docs/sampling.md`, without the code that draws.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jspec.config import SamplingParams
from jspec.ops.distribution import ONE_BITS, POLYNOMIAL
from jspec.ops.vocabulary import TILE

Integers = NDArray[np.uint64]


def token_probabilities(logits: ArrayLike, params: SamplingParams) -> NDArray[np.float64]:
    """The exact probability with which each token is drawn.

    Every backend draws by this law, up to the 2**-64 of a random number: probabilities are integer
    masses over their sum (`docs/sampling.md`).

    Args:
        logits: ``[..., V]``, taken as float32.
        params: temperature, top-k, top-p and min-p.

    Returns:
        float64 ``[..., V]``. A greedy row (temperature 0), and a row without a finite logit, have
        all mass on one token.

    Raises:
        ValueError: for logits without a row or without a token.
    """
    logits = np.asarray(logits).astype(np.float32)
    if logits.ndim == 0 or 0 in logits.shape:
        raise ValueError(f"logits {logits.shape} must be [..., V] with at least one row and token")
    rows = [masses(row, params) for row in logits.reshape(-1, logits.shape[-1])]
    return np.stack([row / np.float64(row.sum()) for row in rows]).reshape(logits.shape)


def masses(logits: NDArray[np.float32], params: SamplingParams) -> Integers:
    """The law of one row, ``[V]`` to ``[V]``, as masses in whole numbers below 2**64."""
    logits = np.where(np.isnan(logits), -np.inf, np.minimum(logits, np.finfo(np.float32).max))
    rate = rate_of(params.temperature)
    if rate == 0 or not np.isfinite(logits).any():
        return np.eye(1, logits.size, int(logits.argmax()), dtype=np.uint64)[0]
    # 24 bits by 16: the product is exact in float64, and so is all that follows.
    power = np.maximum(logits, np.finfo(np.float32).min) * np.float64(rate)
    fixed = np.floor(np.clip(power, -(2**30), 2**30) * 2**23).astype(np.int64)
    tiles, keep = _Tiles(fixed), np.isfinite(logits)
    if params.top_k:
        keep &= logits >= np.sort(logits)[::-1][min(params.top_k, logits.size) - 1]
    if np.float32(params.top_p) < 1:
        keep &= logits >= _top_p(logits, tiles.probabilities(keep), params.top_p)
    if params.min_p > 0:
        below = fixed - fixed.max()
        ratio = np.ldexp(exp2_fixed(below & (2**23 - 1)).astype(np.float64), (below >> 23) - 22)
        keep &= ratio >= np.float32(params.min_p)
    return tiles.masses(keep)


def rate_of(temperature: float) -> np.float32:
    """log2(e) / temperature as it counts: to 16 bits, within 2**-100..2**20; 0 for a greedy row."""
    if np.float32(temperature) == 0:
        return np.float32(0)
    rate = np.float32(np.log2(np.e)) / np.float32(max(temperature, 1e-6))
    mantissa, exponent = np.frexp(np.clip(rate, np.float32(2.0**-100), np.float32(2.0**20)))
    return np.ldexp(np.rint(mantissa * 2**16), exponent - 16).astype(np.float32)


def _top_p(logits: NDArray[np.float32], probabilities: Integers, top_p: float) -> np.float32:
    """The smallest logit that top-p keeps."""
    order = np.argsort(-logits, kind="stable")
    reached = np.cumsum(probabilities[order])
    needed = max(int(reached[-1]) * int(np.float64(np.float32(top_p)) * 2**32) >> 32, 1)
    return logits[order][np.argmax(reached >= needed)]


def exp2_fixed(fraction: NDArray[np.int64]) -> Integers:
    """``2**u`` for u = fraction / 2**23 in [0, 1), as `jspec.ops.distribution.exp2_fixed`.

    Args:
        fraction: int64, 0 to 2**23 - 1.

    Returns:
        ``2**u`` in units of 2**-22: uint64, 2**22 to 2**23.
    """
    # (1 + u) / 4 in units of 2**-32: the variable of `POLYNOMIAL`.
    quarter = (fraction.astype(np.uint64) + np.uint64(2**23)) << np.uint64(7)
    p = np.zeros_like(quarter)
    for i, coefficient in enumerate(POLYNOMIAL):
        p = np.uint64(coefficient) + (p * quarter >> np.uint64(32))
        if i == 0:  # From the fifth power to the third: the polynomial has no fourth.
            p = p * quarter >> np.uint64(32)
    return p


class _Tiles:
    """Powers ``fixed`` int64 ``[V]``, in units of 2**-23, in tiles that have an exponent each."""

    def __init__(self, fixed: NDArray[np.int64]):
        count = -(-fixed.size // TILE)
        exponents = np.array([fixed[i * TILE : (i + 1) * TILE].max() >> 23 for i in range(count)])
        self.starts = np.arange(count) * TILE
        self.below = np.repeat(exponents, TILE)[: fixed.size] - (fixed >> 23)
        self.mantissas = exp2_fixed(fixed & (2**23 - 1))
        self.shifts = exponents.max() - exponents + (count - 1).bit_length()

    def masses(self, keep: NDArray[np.bool_]) -> Integers:
        """Of the tokens kept; a tile's cumulative sums are rounded, not its tokens."""
        weights = self.mantissas << np.maximum(31 - self.below, 0).astype(np.uint64)
        weights = np.where(keep & (self.below < 32), weights, np.uint64(0))
        ends = [
            _shifted(np.cumsum(weights[start : start + TILE]), shift)
            for start, shift in zip(self.starts, self.shifts, strict=True)
        ]
        return np.concatenate([np.diff(x, prepend=np.uint64(0)) for x in ends])

    def probabilities(self, keep: NDArray[np.bool_]) -> Integers:
        """Of the tokens kept, in units of 2**-53: what acceptance and top-p compare."""
        total = int(self.masses(keep).sum())
        width = total.bit_length()
        reciprocal = 2**62 // (total >> width - 32)
        shifts = np.repeat(self.shifts, TILE)[: self.below.size] + self.below
        shifted = _shifted(self.mantissas * np.uint64(reciprocal), shifts + width - ONE_BITS - 1)
        return np.where(keep & (self.below < 32), shifted, np.uint64(0))


def _shifted(x: Integers, count: NDArray[np.int64]) -> Integers:
    """``x // 2**count``."""
    return np.where(count < 64, x >> np.minimum(count, 63).astype(np.uint64), np.uint64(0))


__all__ = ["token_probabilities"]
