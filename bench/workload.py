"""The synthetic workload of the verification paper, and the expected outputs of each operation.

The number of accepted draft tokens is Binomial(gamma, alpha); the target agrees with the draft
before that position and disagrees at it. The vocabulary has 4096 tokens, the rows of keys and
values are float16. Everything is NumPy, and expected outputs follow from how the inputs were made,
not from the inputs themselves.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import ml_dtypes
import numpy as np

from jspec.ops.cases import paper_tokens

VOCABULARY = 4096
SEED = 7
POOL = 2**22 + 1  # odd, so that no row of an array tiled from it repeats
CHECKED_ROWS = 16  # rows of stochastic verification that are checked in float64
SLACK = 1e-4  # of the mass: error of float32 sums over 150,000 tokens


@dataclasses.dataclass(frozen=True)
class Tokens:
    """``draft`` int32 ``[B, gamma]``, ``target`` ``[B, gamma + 1]``, ``lengths`` ``[B]`` (all
    gamma), ``stops`` ``[B, 1]`` (none); ``accepted`` int32 ``[B]``: how many are to be accepted."""

    draft: np.ndarray
    target: np.ndarray
    lengths: np.ndarray
    stops: np.ndarray
    accepted: np.ndarray

    @property
    def inputs(self) -> tuple[np.ndarray, ...]:
        """The arguments of `jspec.ops.verify_greedy`."""
        return self.draft, self.target, self.lengths, self.stops

    def by_accepted(self) -> Tokens:
        """The same rows in the order of their accepted lengths."""
        order = np.argsort(self.accepted, kind="stable")
        parts = (*self.inputs, self.accepted)
        return Tokens(*(x[order] for x in parts))


def make_tokens(batch: int, gamma: int, alpha: float) -> Tokens:
    """Tokens that depend only on the arguments."""
    draft, target, accepted = paper_tokens(batch, gamma, alpha, vocabulary=VOCABULARY, seed=SEED)
    lengths, stops = np.full(batch, gamma, np.int32), np.full((batch, 1), -1, np.int32)
    return Tokens(draft, target, lengths, stops, accepted)


def expected_verified(tokens: Tokens) -> tuple[np.ndarray, ...]:
    """The fields of `jspec.ops.verify.Verified`, in order."""
    batch, gamma = tokens.draft.shape
    accepted = tokens.accepted
    following = tokens.target[np.arange(batch), accepted]
    blocks = np.full((batch, gamma + 1), -1, np.int32)
    for row, count in enumerate(accepted):
        blocks[row, :count] = tokens.draft[row, :count]
        blocks[row, count] = following[row]
    stopped = np.zeros(batch, bool)
    return accepted, accepted + 1, accepted < gamma, following, stopped, blocks


def make_kv(batch: int, gamma: int, width: int) -> np.ndarray:
    """KV rows, float16 ``[B, gamma, D]``, no two alike."""
    return np.resize(_halves(), (batch, gamma, width))


@lru_cache
def _halves() -> np.ndarray:
    bits = np.random.default_rng(SEED).integers(0, 0x7C00, POOL, dtype=np.uint16)  # all finite
    return bits.view(np.float16)


def expected_packed(kv: np.ndarray, accepted: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """The accepted KV rows concatenated, the offset of each batch row, and their number."""
    packed = np.concatenate([row[:count] for row, count in zip(kv, accepted, strict=True)])
    ends = np.cumsum(accepted)
    return packed, (ends - accepted).astype(np.int32), int(ends[-1])


@dataclasses.dataclass(frozen=True)
class Logits:
    """``draft`` int32 ``[B, gamma]``; ``target`` bfloat16 ``[B, gamma + 1, V]``; ``draft_logits``
    ``[B, gamma, V]``, None for a draft that is certain of its tokens."""

    draft: np.ndarray
    target: np.ndarray
    draft_logits: np.ndarray | None


def make_logits(batch: int, gamma: int, vocabulary: int, *, one_hot: bool) -> Logits:
    """Peaked logits under which about four of five draft tokens are accepted.

    At each position one token has 0.8 of the target's mass, and of the draft's. The draft proposes
    it four times of five (always where it is one-hot), and any other token else.
    """
    rng = np.random.default_rng([SEED, batch, gamma, vocabulary, one_hot])
    peaks = rng.integers(0, vocabulary, (batch, gamma + 1))
    others = rng.integers(0, vocabulary, (batch, gamma))
    strays = (rng.random((batch, gamma)) < 0.2) & (not one_hot)
    draft = np.where(strays, others, peaks[:, :gamma]).astype(np.int32)
    # The mass of V normal logits is about V * exp(1 / 2); this peak has four times as much.
    peak = np.log(4 * vocabulary) + 0.5

    def peaked(where: np.ndarray, shift: int) -> np.ndarray:
        logits = np.resize(np.roll(_normals(), shift), (*where.shape, vocabulary))
        np.put_along_axis(logits, where[..., None], ml_dtypes.bfloat16(peak), axis=-1)
        return logits

    draft_logits = None if one_hot else peaked(peaks[:, :gamma], POOL // 2)
    return Logits(draft, peaked(peaks, 0), draft_logits)


@lru_cache
def _normals() -> np.ndarray:
    normals = np.random.default_rng(SEED + 1).standard_normal(POOL, np.float32)
    return normals.astype(ml_dtypes.bfloat16)


def plausible(
    logits: Logits, uniforms: np.ndarray, accepted: np.ndarray, following: np.ndarray
) -> bool:
    """Whether a result of stochastic verification at temperature 1 follows from its random numbers.

    ``uniforms [3, B, gamma + 1]``: to accept, for a residual, for a bonus token, by position.
    Sums are in float64; numbers within `SLACK` of a boundary may fall on either side. Checks the
    first `CHECKED_ROWS` rows.
    """
    ends = list(zip(accepted, following, strict=True))[:CHECKED_ROWS]
    return all(_row_plausible(logits, uniforms[:, row], row, *end) for row, end in enumerate(ends))


def _row_plausible(
    logits: Logits, uniforms: np.ndarray, row: int, accepted: int, following: int
) -> bool:
    gamma = logits.draft.shape[1]
    for at in range(min(accepted + 1, gamma)):
        p, q, token = _laws(logits, row, at)
        excess = uniforms[0, at] - p[token] / q[token]
        if (excess > SLACK) if at < accepted else (excess < -SLACK):
            return False
    p, q, _ = _laws(logits, row, accepted)
    weights = p if accepted == gamma else np.maximum(p - q, 0)
    ends = np.cumsum(weights)
    u = uniforms[2 if accepted == gamma else 1, accepted] * ends[-1]
    begin, end, slack = ends[following] - weights[following], ends[following], SLACK * ends[-1]
    return bool(weights[following] > 0 and begin - slack <= u <= end + slack)


def _laws(logits: Logits, row: int, at: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Probabilities of target and draft at a position, and the drafted token (-1 at the bonus)."""
    p = _softmax(logits.target[row, at])
    if at == logits.draft.shape[1]:
        return p, np.zeros_like(p), -1
    token = int(logits.draft[row, at])
    if logits.draft_logits is None:
        return p, (np.arange(p.size) == token).astype(np.float64), token
    return p, _softmax(logits.draft_logits[row, at]), token


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64))
    return weights / weights.sum()
