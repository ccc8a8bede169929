"""Exact top-k: the keys with the largest q.k (Gupta et al. 2021)."""

from __future__ import annotations

import dataclasses
from typing import Any

from jspec.cache import Cache
from jspec.ops.key_scores import dot_scores
from jspec.policies.budgeted import ScoredPolicy
from jspec.typing import Array


@dataclasses.dataclass(frozen=True)
class ExactTopK(ScoredPolicy):
    """Scores q.k of every key, summed over a KV head's group of queries.

    The reference for approximate scores: it reads all keys, and saves only the values.
    """

    def score(self, policy_params: Any, layer: int, cache: Cache, q: Array) -> Array:
        return dot_scores(q, cache.keys(layer))
