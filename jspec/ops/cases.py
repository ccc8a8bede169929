"""Arguments that operations are tried with, in numpy: the same ones for the same settings.

Each operation's file makes its cases of them; tests, `jspec doctor` and the bench read them there.
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
    # Never a multiple of the vocabulary, so that the shifted token is another one.
    other = (draft + rng.integers(1, vocabulary, (batch, gamma))) % vocabulary
    target[:, :gamma] = np.where(index == accepted[:, None], other, target[:, :gamma])
    target[:, :gamma] = np.where(index < accepted[:, None], draft, target[:, :gamma])
    return draft.astype(np.int32), target.astype(np.int32), accepted.astype(np.int32)


def accepted_tokens(batch: int, gamma: int) -> Tokens:
    """Arguments of greedy verification of which all is accepted: no output is unspecified."""
    target = np.arange(batch * (gamma + 1), dtype=np.int32).reshape(batch, gamma + 1)
    return target[:, :-1], target, np.full(batch, gamma, np.int32), target[:, :0]


def ragged_tokens(batch: int, gamma: int, stops: int, *, seed: int = 0, dtype=np.int32) -> Tokens:
    """Arguments of greedy verification in which what can occur does.

    Few ids, so that there are accepted runs of every length, ragged drafts, padding, and stop
    tokens at every place. Lengths go past both ends of 0..gamma; the ends of the type are ids.
    """
    rng = np.random.default_rng([seed, batch, gamma, stops])
    ids = np.array([0, 1, np.iinfo(dtype).max], dtype)
    target = rng.choice(ids, (batch, gamma + 1), p=[0.45, 0.45, 0.1])
    rates = [0, 0.5 / max(gamma, 1), 2 / max(gamma, 2), 0.5, 1]
    rejected = rng.random((batch, gamma)) < rng.choice(rates, (batch, 1))
    draft = np.where(rejected, rng.choice(ids, (batch, gamma)), target[:, :-1])
    lengths = np.where(rng.random(batch) < 0.5, gamma, rng.integers(-1, gamma + 2, batch))
    draft = np.where(np.arange(gamma) < lengths[:, None], draft, dtype(-1))
    # A stop token among so few ids would end every row at once: one id of its own, set at random.
    stop = dtype(7)
    stop_tokens = np.where(rng.random((batch, stops)) < 0.6, stop, rng.choice(ids, (batch, stops)))
    stop_tokens = np.where(rng.random((batch, stops)) < 0.6, stop_tokens, dtype(-1))
    at = rng.integers(0, gamma + 1, batch)
    target[np.arange(batch), at] = stop
    placed = (at < gamma) & (rng.random(batch) < 0.9)
    draft[placed, at[placed]] = stop
    # An id of -1 in both, which agrees and ends nothing even where a stop token is -1.
    padding = rng.random((batch, gamma + 1)) < rng.choice([0, 0.5 / max(gamma, 1), 0.3], (batch, 1))
    target[padding] = -1
    draft[padding[:, :-1]] = -1
    return draft, target, lengths.astype(np.int32), stop_tokens


def kv_rows(batch: int, gamma: int, width: int, dtype: str) -> np.ndarray:
    """KV rows ``[B, gamma, D]`` of small whole numbers, each other than its neighbours."""
    rows = np.arange(batch * gamma * width).reshape(batch, gamma, width) * 7 % 113
    return rows.astype(np.dtype(dtype))


def counts(batch: int, gamma: int, *, seed: int = 0) -> np.ndarray:
    """Accepted counts int32 ``[B]``: none and all are frequent, and some are past both ends."""
    rng = np.random.default_rng([seed, batch, gamma])
    anywhere = rng.integers(-1, gamma + 2, batch)
    extreme = rng.random(batch) < 0.3
    return np.where(extreme, rng.choice([0, gamma], batch), anywhere).astype(np.int32)
