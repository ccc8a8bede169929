"""Whether answers are the model's: greedy ones token by token, sampled ones by their likelihood.

Sampled tokens: at each position the log-probability of the token that was drawn has a known mean
and variance under the model's law. So the sum of what it is above that mean, over all positions, is
a martingale, and is near normal: its distance from 0 in standard deviations tests the law, whatever
text was drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jspec
from jspec.cache import Cache
from jspec.decode.state import DecodeState

NEAR_TIE = 0.5  # margin of logits that bfloat16 can reverse over 30K tokens of context
ROWS = 4  # answers that are scored together
DEVIATIONS = 5.0  # from the mean of the model's law
OUTSIDE = 0.01  # share of tokens that rounding may bring in over a filter's threshold
CHUNK = 128  # tokens of an answer whose logits are in memory at once
Answers = Sequence[Sequence[int]]
# What `score_answers` gives for answers to the prompts of these rows.
Scorer = Callable[[Sequence[int], Answers, jspec.SamplingParams], list[np.ndarray]]


def greedy(scorer: Scorer, answers: Answers, plain: Answers, *, exact: bool) -> dict[str, Any]:
    """Rows equal to plain decoding; where one differs, its token must nearly tie with plain's.

    Of the rows that differ the first two are scored. With ``exact`` none may differ. ``compared``:
    tokens, of a row that differs up to the first one that does.
    """
    differing = [
        (row, at)
        for row, pair in enumerate(zip(answers, plain, strict=True))
        if (at := first_difference(*pair)) is not None
    ]
    ends = dict(differing)
    result = {
        "rows": len(answers),
        "identical_rows": len(answers) - len(differing),
        "compared": sum(ends.get(row, len(text) - 1) + 1 for row, text in enumerate(answers)),
    }
    if exact or not differing:
        return result | {"checked": not differing}
    looked_at = differing[: ROWS // 2]
    rows = [row for row, _ in looked_at for _ in range(2)]
    texts = [side[row][: at + 1] for row, at in looked_at for side in (answers, plain)]
    last = [float(x[-1, 0]) for x in scorer(rows, texts, jspec.SamplingParams(temperature=1.0))]
    margins = [abs(a - b) for a, b in zip(last[::2], last[1::2], strict=True)]
    return result | {"flip_margins": margins, "checked": max(margins) <= NEAR_TIE}


def agreement(scorer: Scorer, answers: Answers, plain: Answers) -> dict[str, Any]:
    """How far greedy answers of a lossy policy are those of ``plain`` decoding.

    ``agreement``: the share of plain decoding's tokens before the first one that differs, mean over
    rows. ``log_probability``: of a token of the first `ROWS` answers by the model that reads all,
    in nats, and ``plain_log_probability`` that of plain decoding's own.
    """
    differences = [first_difference(*pair) for pair in zip(answers, plain, strict=True)]
    shares = [
        1.0 if at is None else at / len(text) for at, text in zip(differences, plain, strict=True)
    ]
    rows = list(range(min(ROWS, len(answers))))
    params = jspec.SamplingParams(temperature=1.0)
    means = [
        float(np.concatenate(scorer(rows, [texts[row] for row in rows], params))[:, 0].mean())
        for texts in (answers, plain)
    ]
    return {
        "rows": len(answers),
        "identical_rows": differences.count(None),
        "agreement": sum(shares) / len(shares),
        "log_probability": means[0],
        "plain_log_probability": means[1],
        "lossy": True,
        "checked": True,
    }


def sampled(scorer: Scorer, answers: Answers, params: jspec.SamplingParams) -> dict[str, Any]:
    """Whether the first `ROWS` answers are as likely as tokens that the model draws."""
    rows = list(range(min(ROWS, len(answers))))
    scores = np.concatenate(scorer(rows, [answers[row] for row in rows], params)).astype(float)
    inside = scores[np.isfinite(scores[:, 0])]
    above = (inside[:, 0] - inside[:, 1]).sum() / math.sqrt(max(inside[:, 2].sum(), 1e-9))
    outside = 1 - len(inside) / len(scores)
    return {
        "rows": len(answers),
        "deviations": float(above),
        "outside": outside,
        "checked": bool(abs(above) <= DEVIATIONS and outside <= OUTSIDE),
    }


def first_difference(row: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position where two answers differ; None where they are equal."""
    pairs = zip(row, other, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None and len(row) != len(other):
        return min(len(row), len(other)) - 1
    return at


def scorer_of(
    model: jspec.Decoder, prompts: Sequence[Sequence[int]], params: Sequence[jspec.SamplingParams]
) -> Scorer:
    """A scorer of answers to ``prompts``, `ROWS` at most, of at most as many tokens as ``params``.

    Each call prefills the prompts again, so that their cache takes memory only meanwhile.
    """

    def scorer(
        rows: Sequence[int], answers: Answers, law: jspec.SamplingParams
    ) -> list[np.ndarray]:
        state = jspec.start_decoding(model, prompts, params)
        return score_answers(model, [state], rows, answers, law)

    return scorer


def score_answers(
    model: jspec.Decoder,
    states: Sequence[DecodeState],
    rows: Sequence[int],
    answers: Answers,
    params: jspec.SamplingParams,
) -> list[np.ndarray]:
    """How likely answers are under the law of ``params``, each after a prompt that is in a cache.

    Args:
        model: the model.
        states: after the prefill, batches of one size.
        rows: of all batches one after the other, the prompt of each answer; `ROWS` at most.
        answers: token ids of each.
        params: of which temperature, top_k, and top_p with a top_k, count.

    Returns:
        For each answer float32 ``[tokens, 3]``: the log-probability of a token, and the mean and
        the variance of that number where the model draws the token.
    """
    batch = len(states[0].lengths)
    padding = ROWS - len(rows)
    rows = [*rows, *[rows[0]] * padding]
    answers = [*answers, *[answers[0]] * padding]
    parts = [_row_of(states[row // batch].cache, row % batch) for row in rows]
    cache = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    before = [states[row // batch] for row in rows]
    lengths = [int(state.lengths[row % batch]) for state, row in zip(before, rows, strict=True)]
    last = [
        int(state.tokens[row % batch, length - 1])
        for state, row, length in zip(before, rows, lengths, strict=True)
    ]
    scores: list[list[np.ndarray]] = [[] for _ in rows]
    filters = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
    for begin in range(0, max(map(len, answers)), CHUNK):
        tokens, positions, following = (np.full((ROWS, CHUNK), -1, np.int32) for _ in range(3))
        for line, (answer, first, length) in enumerate(zip(answers, last, lengths, strict=True)):
            fed, next_ones = [first, *answer[:-1]][begin:][:CHUNK], answer[begin:][:CHUNK]
            tokens[line, : len(fed)], following[line, : len(fed)] = fed, next_ones
            positions[line, : len(fed)] = length - 1 + begin + np.arange(len(fed))
        cache, part = _score_chunk(model, cache, tokens, positions, following, **filters)
        for line, (row, values) in enumerate(zip(scores, np.asarray(part), strict=True)):
            row.extend(values[: max(len(answers[line]) - begin, 0)])
    return [np.stack(x) for x in scores[: ROWS - padding]]


def _row_of(cache: Cache, row: int) -> Cache:
    return jax.tree.map(lambda x: x[row : row + 1], cache)


@jax.jit(donate_argnames="cache", static_argnames=("top_k", "top_p"))
def _score_chunk(
    model: jspec.Decoder,
    cache: Cache,
    tokens: jax.Array,
    positions: jax.Array,
    following: jax.Array,
    temperature: float,
    top_k: int,
    top_p: float,
) -> tuple[Cache, jax.Array]:
    """Append ``tokens [B, T]``; the figures of `score_answers` of ``following``, ``[B, T, 3]``."""
    hidden, cache = model(tokens, positions, jspec.policies.DenseAttend(positions), cache)
    logits = model.logits(hidden) / temperature
    if top_k:
        highest, _ = jax.lax.top_k(logits, top_k)
        shares = jax.nn.softmax(highest)
        in_top_p = jnp.cumsum(shares, axis=-1) - shares < top_p
        lowest = jnp.where(in_top_p, highest, jnp.inf).min(axis=-1, keepdims=True)
        logits = jnp.where(logits >= lowest, logits, -jnp.inf)
    of_all = jax.nn.log_softmax(logits, axis=-1)
    shares, finite = jnp.exp(of_all), jnp.where(jnp.isfinite(of_all), of_all, 0)
    mean = (shares * finite).sum(axis=-1)
    variance = (shares * finite**2).sum(axis=-1) - mean**2
    chosen = jnp.take_along_axis(of_all, jnp.maximum(following, 0)[..., None], axis=-1)
    return cache, jnp.stack([chosen[..., 0], mean, variance], axis=-1)
