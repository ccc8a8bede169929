"""Whether the answers of a drafter are the model's: greedy ones token by token, sampled ones by
their likelihood."""

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

NEAR_TIE = 0.5  # logits apart: what bfloat16 can turn around over 30K tokens of context
LOOKED_AT = 2  # rows that are scored
STANDARD_ERRORS = 6.0  # that mean log-probabilities may be apart
CHUNK = 128  # tokens of an answer whose logits are in memory at once
Answers = Sequence[Sequence[int]]
# Log-probabilities of the tokens of answers to the prompts of these rows.
Scorer = Callable[[Sequence[int], Answers], list[np.ndarray]]


def greedy(scorer: Scorer, answers: Answers, plain: Answers, *, exact: bool) -> dict[str, Any]:
    """Rows equal to plain decoding; where one differs, its token must nearly tie with plain's.

    Of the rows that differ the first `LOOKED_AT` are scored. With ``exact`` none may differ.
    """
    differing = [
        (row, at)
        for row, pair in enumerate(zip(answers, plain, strict=True))
        if (at := _first_difference(*pair)) is not None
    ]
    result = {"rows": len(answers), "identical_rows": len(answers) - len(differing)}
    if exact or not differing:
        return result | {"checked": not differing}
    looked_at = differing[:LOOKED_AT]
    rows = [row for row, _ in looked_at for _ in range(2)]
    texts = [side[row][: at + 1] for row, at in looked_at for side in (answers, plain)]
    last = [float(x[-1]) for x in scorer(rows, texts)]
    margins = [abs(a - b) for a, b in zip(last[::2], last[1::2], strict=True)]
    return result | {"flip_margins": margins, "checked": max(margins) <= NEAR_TIE}


def sampled(scorer: Scorer, answers: Answers, plain: Answers) -> dict[str, Any]:
    """Whether the answers to the first prompts are about as likely as those of plain decoding.

    Mean log-probabilities of tokens, at temperature 1, may be `STANDARD_ERRORS` apart. This finds a
    verification that lets anything through; the exact law is tested elsewhere.
    """
    rows = list(range(min(LOOKED_AT, len(answers))))
    texts = [side[row] for side in (answers, plain) for row in rows]
    scores = scorer(rows * 2, texts)
    of_sides = [np.concatenate(scores[: len(rows)]), np.concatenate(scores[len(rows) :])]
    mean, mean_of_plain = (float(x.mean()) for x in of_sides)
    error = math.sqrt(sum(float(x.var()) / len(x) for x in of_sides)) + 1e-3
    return {
        "rows": len(answers),
        "log_probability": mean,
        "log_probability_of_plain": mean_of_plain,
        "checked": abs(mean - mean_of_plain) <= STANDARD_ERRORS * error,
    }


def _first_difference(row: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position where two answers differ; None where they are equal."""
    pairs = zip(row, other, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None and len(row) != len(other):
        return min(len(row), len(other)) - 1
    return at


def score_answers(
    model: jspec.Decoder,
    states: Sequence[DecodeState],
    rows: Sequence[int],
    answers: Answers,
) -> list[np.ndarray]:
    """Log-probabilities at temperature 1 of answers, each after a prompt that is in a cache.

    Args:
        model: the model.
        states: after the prefill, batches of one size.
        rows: of all batches one after the other, the prompt of each answer; 2 `LOOKED_AT` at most.
        answers: token ids of each.

    Returns:
        A float32 array for each answer.
    """
    batch, size = len(states[0].lengths), 2 * LOOKED_AT
    padding = size - len(rows)
    rows, answers = [*rows, *rows[:1] * padding], [*answers, *answers[:1] * padding]
    parts = [_row_of(states[row // batch].cache, row % batch) for row in rows]
    cache = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    before = [states[row // batch] for row in rows]
    lengths = [int(state.lengths[row % batch]) for state, row in zip(before, rows, strict=True)]
    last = [
        int(state.tokens[row % batch, length - 1])
        for state, row, length in zip(before, rows, lengths, strict=True)
    ]
    scores: list[list[float]] = [[] for _ in rows]
    for begin in range(0, max(map(len, answers)), CHUNK):
        tokens, positions, following = (np.full((size, CHUNK), -1, np.int32) for _ in range(3))
        for line, (answer, first, length) in enumerate(zip(answers, last, lengths, strict=True)):
            fed, next_ones = [first, *answer[:-1]][begin:][:CHUNK], answer[begin:][:CHUNK]
            tokens[line, : len(fed)], following[line, : len(fed)] = fed, next_ones
            positions[line, : len(fed)] = length - 1 + begin + np.arange(len(fed))
        cache, part = _score_chunk(model, cache, tokens, positions, following)
        for line, (row, values) in enumerate(zip(scores, np.asarray(part), strict=True)):
            row.extend(values[: max(len(answers[line]) - begin, 0)])
    return [np.array(x, np.float32) for x in scores[: size - padding]]


def _row_of(cache: Cache, row: int) -> Cache:
    return jax.tree.map(lambda x: x[row : row + 1], cache)


@jax.jit(donate_argnames="cache")
def _score_chunk(
    model: jspec.Decoder,
    cache: Cache,
    tokens: jax.Array,
    positions: jax.Array,
    following: jax.Array,
) -> tuple[Cache, jax.Array]:
    """Append ``tokens [B, T]``; float32 ``[B, T]``, log-probabilities of ``following``."""
    hidden, cache = model(tokens, positions, jspec.dense_attend(positions), cache)
    of_all = jax.nn.log_softmax(model.logits(hidden), axis=-1)
    chosen = jnp.take_along_axis(of_all, jnp.maximum(following, 0)[..., None], axis=-1)
    return cache, chosen[..., 0]
