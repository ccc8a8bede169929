"""Laws written from their definitions in float64 numpy, and the checks against them.

The checks are plain functions, so that the mutants in `tests.ops.test_mutants` face exactly what
the library faces. Every seed is fixed; a check fails below ``P_VALUE``, which a correct program
does once in 10,000 checks, and then always, since no seed changes.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from scipy import stats

import jspec.cuda_ffi.stochastic
import jspec.triton.stochastic  # noqa: F401 - both take TILE, which `run_blocks` patches
from jspec.config import SamplingParams
from jspec.ops.distribution import ONE, distribution
from jspec.ops.exact_probabilities import rate_of, token_probabilities
from jspec.ops.sample import Sampling, settings_of
from jspec.ops.uint64 import in_64_bits
from jspec.ops.vocabulary import Vocabulary

P_VALUE = 1e-4
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=1.0)
LAST_NUMBER = 2**64 - 1


def sampling_of(params: list[SamplingParams], seeds=None) -> Sampling:
    """The `Sampling` of ``params``, one each, with ``seeds`` 0, 1, ... by default."""
    seeds = np.arange(len(params)) if seeds is None else seeds

    def column(name, dtype):
        return jax.device_put(np.array([getattr(p, name) for p in params], dtype))

    return Sampling(
        column("temperature", np.float32),
        column("top_k", np.int32),
        column("top_p", np.float32),
        column("min_p", np.float32),
        jax.device_put(np.asarray(seeds, np.uint32)),
    )


@functools.partial(jax.jit, static_argnames="filtered")
def _probabilities(logits, rows: Sampling, *, filtered: bool) -> jax.Array:
    vocabulary = Vocabulary(logits.shape[-1])
    return distribution(logits, settings_of(rows), vocabulary, filtered=filtered).probabilities()


def probabilities(logits, rows: Sampling, *, filtered: bool) -> np.ndarray:
    """What each row samples from, float64 ``[B, T, V]``, of ``logits [B, T, V]``."""
    size = logits.shape[-1]
    whole = np.asarray(_probabilities(logits, rows, filtered=filtered))
    return whole.reshape(*logits.shape[:2], -1)[..., :size] / ONE


@in_64_bits
def to_uint64(x, shape: tuple[int, ...] = ()) -> jax.Array:
    """Integers below 2**64; a single value is broadcast to ``shape``."""
    x = np.broadcast_to(np.asarray(x, np.uint64), np.shape(x) or shape)
    return jax.device_put(x)


def filtered_law(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The law of one token, ``[V]`` to ``[V]``: temperature, top-k, top-p, min-p, ties kept."""
    logits = np.asarray(logits, np.float64)
    if params.temperature == 0:
        return np.eye(logits.size)[np.nan_to_num(logits, nan=-np.inf, posinf=np.inf).argmax()]
    scaled = logits * np.float64(rate_of(params.temperature)) * np.log(2)
    keep = np.isfinite(scaled)
    if not keep.any():
        return np.eye(1, logits.size)[0]
    if params.top_k:
        keep &= scaled >= np.sort(scaled)[::-1][min(params.top_k, scaled.size) - 1]
    law = _softmax(scaled, keep)
    if params.top_p < 1:
        descending = np.sort(law)[::-1]
        count = np.argmax(np.cumsum(descending) >= params.top_p * (1 - 1e-9))
        keep &= law >= descending[count]
        law = _softmax(scaled, keep)
    if params.min_p > 0:
        keep &= law >= params.min_p * law.max() * (1 - 1e-9)
    return _softmax(scaled, keep)


def _softmax(scaled: np.ndarray, keep: np.ndarray) -> np.ndarray:
    weights = np.where(keep, np.exp(scaled - scaled[keep].max()), 0)
    return weights / weights.sum()


def check_counts(observed: dict, law: dict) -> None:
    """Chi-square of counts against probabilities that sum to 1; outcomes seldom expected share a
    cell, and an outcome of probability 0 must not occur at all."""
    total = sum(observed.values())
    np.testing.assert_allclose(sum(law.values()), 1, rtol=1e-9)
    impossible = {key: n for key, n in observed.items() if law.get(key, 0) == 0}
    assert not impossible, f"impossible outcomes: {impossible}"
    common = [key for key, p in law.items() if p * total >= 10]
    counts = np.array([observed.get(key, 0) for key in common], float)
    expected = np.array([law[key] for key in common]) * total
    seldom, rest = total - counts.sum(), total - expected.sum()
    if rest >= 10:
        counts, expected = np.append(counts, seldom), np.append(expected, rest)
    elif seldom:
        assert stats.poisson.sf(seldom - 1, rest) > P_VALUE, f"{seldom} seldom outcomes"
    if len(expected) > 1:
        statistic = ((counts - expected) ** 2 / expected).sum()
        p = stats.chi2.sf(statistic, len(expected) - 1)
        assert p > P_VALUE, f"p-value {p:.1e} over {len(expected)} outcomes of {total} draws"


def gaussian_logits(vocabulary: int, spread: float = 3.0) -> np.ndarray:
    """Float32 ``[V]``, seed 0."""
    return (spread * np.random.default_rng(0).standard_normal(vocabulary)).astype(np.float32)


@functools.cache
def unreachable() -> tuple[np.ndarray, np.ndarray]:
    """Where each token ends, in 0..1, and which no number of 24 bits can draw: V = 128256."""
    ends = np.cumsum(token_probabilities(gaussian_logits(128256), SAMPLED))
    return ends, np.diff(np.floor(ends * 2**24), prepend=-1) == 0


def check_tail(numbers: np.ndarray) -> None:
    """Numbers uint64 draw tokens that take more than 24 bits as often as they should."""
    ends, tail = unreachable()
    tokens = np.searchsorted(ends, numbers / 2.0**64, side="right")
    share = np.diff(ends, prepend=0)[tail].sum()
    p = stats.binomtest(int(tail[tokens].sum()), numbers.size, share).pvalue
    assert p > P_VALUE, f"p-value {p:.1e} of the tail's share {share:.1e}"
