"""How far the log-probabilities of a rollout are from those of other forwards of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from bench.point import Row
from bench.rivals.tunix import log_probabilities

ROWS = 4  # texts whose logits are in memory at once
# A histogram counts zeros, then differences below the first edge, from each edge to the next, and
# from the last one on.
EDGES = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
_forward = jax.jit(log_probabilities)


def histogram(differences: np.ndarray) -> Row:
    """The ``counts`` of absolute ``differences [N]`` by `EDGES`, and their ``max``.

    One that is not a number counts as more than the last edge.
    """
    bins = np.where(differences == 0, 0, 1 + np.searchsorted(EDGES, differences, side="right"))
    counts = np.bincount(bins, minlength=len(EDGES) + 2)
    return {"max": float(differences.max(initial=0)), "counts": counts.tolist()}


def between(ours: Sequence[Any], scores: Sequence[np.ndarray]) -> Row:
    """The `histogram` of answers' log-probabilities ``ours`` against ``scores`` of whole texts.

    Each text ends with its answer.
    """
    pairs = zip(ours, scores, strict=True)
    parts = [np.abs(x[len(x) - len(own) :] - np.float32(own)) for own, x in pairs]
    return histogram(np.concatenate(parts))


def trainer_scores(
    actor: nnx.Module, texts: Sequence[Sequence[int]], size: int
) -> list[np.ndarray]:
    """As `jspec.score_tokens`, by the forward of Tunix's model, with texts padded to ``size``."""
    graph, weights = nnx.split(actor)
    tokens = np.zeros((len(texts) + -len(texts) % ROWS, size), np.int32)
    for row, text in zip(tokens, texts, strict=False):
        row[: len(text)] = text
    pieces = np.split(tokens, len(tokens) // ROWS)
    scores = np.concatenate([_forward(graph, weights, piece) for piece in pieces])
    return [row[: len(text) - 1] for row, text in zip(scores, texts, strict=False)]
