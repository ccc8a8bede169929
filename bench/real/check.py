"""Whether the answers of a drafter are the model's: greedy ones token by token, sampled ones by
their likelihood."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import jspec
from jspec.decode.score import score

NEAR_TIE = 0.5  # logits apart: what bfloat16 can turn around over 30K tokens of context
LOOKED_AT = 2  # rows of a batch that are scored
STANDARD_ERRORS = 6.0  # that mean log-probabilities may be apart
Tokens = Sequence[Sequence[int]]


def greedy(
    model: jspec.Decoder, prompts: Tokens, answers: Tokens, plain: Tokens, *, exact: bool
) -> dict[str, Any]:
    """Rows equal to plain decoding; where one differs, its token must nearly tie with plain's.

    Of the rows that differ the first `LOOKED_AT` are scored. With ``exact`` none may differ.
    """
    differing = [
        (row, at) for row, pair in enumerate(zip(answers, plain, strict=True))
        if (at := _first_difference(*pair)) is not None
    ]
    result = {"rows": len(answers), "identical_rows": len(answers) - len(differing)}
    if exact:
        return result | {"checked": not differing}
    margins = []
    if looked_at := differing[:LOOKED_AT]:
        texts = [
            [*prompts[row], *side[row][: at + 1]]
            for row, at in looked_at
            for side in (answers, plain)
        ]
        # A row that ended where the other went on has no token there to compare.
        last = [float(x[-1]) for x in _scored(model, texts)]
        margins = [abs(a - b) for a, b in zip(last[::2], last[1::2], strict=True)]
    near = all(margin <= NEAR_TIE for margin in margins)
    return result | {"flip_margins": margins, "checked": near}


def sampled(
    model: jspec.Decoder, prompts: Tokens, answers: Tokens, plain: Tokens
) -> dict[str, Any]:
    """Whether the answers to the first prompts are about as likely as those of plain decoding.

    Mean log-probabilities of tokens, at temperature 1, may be `STANDARD_ERRORS` apart. This finds a
    verification that lets anything through; the exact law is tested elsewhere.
    """
    rows = range(min(LOOKED_AT, len(answers)))
    texts = [[*prompts[row], *side[row]] for side in (answers, plain) for row in rows]
    scores = _scored(model, texts)
    means, variances = [], []
    for index, side in enumerate((answers, plain)):
        parts = scores[index * len(rows) : (index + 1) * len(rows)]
        of_tokens = np.concatenate([x[-len(side[row]) :] for row, x in zip(rows, parts, strict=True)])
        means.append(float(of_tokens.mean()))
        variances.append(float(of_tokens.var()) / len(of_tokens))
    error = math.sqrt(sum(variances)) + 1e-3
    apart = abs(means[0] - means[1]) / error
    return {
        "rows": len(answers),
        "log_probability": means[0],
        "log_probability_of_plain": means[1],
        "checked": apart <= STANDARD_ERRORS,
    }


def _first_difference(row: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position where two answers differ; None where they are equal."""
    pairs = zip(row, other, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None and len(row) != len(other):
        return min(len(row), len(other)) - 1
    return at


def _scored(model: jspec.Decoder, texts: list[list[int]]) -> list[np.ndarray]:
    """Log-probabilities of ``texts``, scored in batches of one size, so that they share a
    program."""
    size = 2 * LOOKED_AT
    return score(model, texts + texts[-1:] * (size - len(texts)))[: len(texts)]
