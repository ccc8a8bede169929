"""Arguments for the cases of operations, in NumPy: the same ones for the same settings.

Tests, `jspec doctor` and the benchmarks use these cases.
"""

from __future__ import annotations

import numpy as np

Tokens = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def paper_tokens(
    batch: int, gamma: int, alpha: float, *, vocabulary: int = 4096, seed: int = 7
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The verification paper's workload: draft, target and accepted counts, int32.

    The counts are Binomial(gamma, alpha). The target agrees with the draft before that position and
    disagrees at it.
    """
    rng = np.random.default_rng([seed, batch, gamma, round(1000 * alpha)])
    accepted = rng.binomial(gamma, alpha, batch)
    draft = rng.integers(0, vocabulary, (batch, gamma))
    target = rng.integers(0, vocabulary, (batch, gamma + 1))
    index = np.arange(gamma)[None]
    # The shift is never a multiple of the vocabulary, so the token changes.
    other = (draft + rng.integers(1, vocabulary, (batch, gamma))) % vocabulary
    target[:, :gamma] = np.where(index == accepted[:, None], other, target[:, :gamma])
    target[:, :gamma] = np.where(index < accepted[:, None], draft, target[:, :gamma])
    return draft.astype(np.int32), target.astype(np.int32), accepted.astype(np.int32)


def accepted_tokens(batch: int, gamma: int) -> Tokens:
    """Arguments of greedy verification with every draft token accepted: no unspecified outputs."""
    target = np.arange(batch * (gamma + 1), dtype=np.int32).reshape(batch, gamma + 1)
    return target[:, :-1], target, np.full(batch, gamma, np.int32), target[:, :0]


def ragged_tokens(batch: int, gamma: int, stops: int, *, seed: int = 0, dtype=np.int32) -> Tokens:
    """Arguments of greedy verification with everything that can occur.

    There are few ids, so accepted runs have every length; drafts are ragged and padded, and stop
    tokens are at every position. Lengths exceed 0..gamma on both sides; ids include the limits of
    the dtype.
    """
    rng = np.random.default_rng([seed, batch, gamma, stops])
    ids = np.array([0, 1, np.iinfo(dtype).max], dtype)
    target = rng.choice(ids, (batch, gamma + 1), p=[0.45, 0.45, 0.1])
    rates = [0, 0.5 / max(gamma, 1), 2 / max(gamma, 2), 0.5, 1]
    rejected = rng.random((batch, gamma)) < rng.choice(rates, (batch, 1))
    draft = np.where(rejected, rng.choice(ids, (batch, gamma)), target[:, :-1])
    lengths = np.where(rng.random(batch) < 0.5, gamma, rng.integers(-1, gamma + 2, batch))
    draft = np.where(np.arange(gamma) < lengths[:, None], draft, dtype(-1))
    # One of the few ids would end every row at once: the stop token is another id, set at random.
    stop = dtype(7)
    stop_tokens = np.where(rng.random((batch, stops)) < 0.6, stop, rng.choice(ids, (batch, stops)))
    stop_tokens = np.where(rng.random((batch, stops)) < 0.6, stop_tokens, dtype(-1))
    at = rng.integers(0, gamma + 1, batch)
    target[np.arange(batch), at] = stop
    placed = (at < gamma) & (rng.random(batch) < 0.9)
    draft[placed, at[placed]] = stop
    # An id of -1 in both: it matches, and stops nothing even where a stop token is -1.
    padding = rng.random((batch, gamma + 1)) < rng.choice([0, 0.5 / max(gamma, 1), 0.3], (batch, 1))
    target[padding] = -1
    draft[padding[:, :-1]] = -1
    return draft, target, lengths.astype(np.int32), stop_tokens


def kv_rows(batch: int, gamma: int, width: int, dtype: str) -> np.ndarray:
    """KV rows ``[B, gamma, D]`` of small whole numbers; neighbouring rows differ."""
    rows = np.arange(batch * gamma * width).reshape(batch, gamma, width) * 7 % 113
    return rows.astype(np.dtype(dtype))


def counts(batch: int, gamma: int, *, seed: int = 0) -> np.ndarray:
    """Accepted counts int32 ``[B]``: 0 and gamma are frequent, and some exceed 0..gamma."""
    rng = np.random.default_rng([seed, batch, gamma])
    anywhere = rng.integers(-1, gamma + 2, batch)
    extreme = rng.random(batch) < 0.3
    return np.where(extreme, rng.choice([0, gamma], batch), anywhere).astype(np.int32)
