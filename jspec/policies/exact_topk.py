"""Exact top-k: the keys of the largest products with the query (Gupta et al. 2021)."""

from __future__ import annotations

import dataclasses
from typing import Any

from jspec.cache import Cache
from jspec.policies.budgeted import ScoredPolicy
from jspec.policies.scores import dots, pooled
from jspec.typing import Array


@dataclasses.dataclass(frozen=True)
class ExactTopK(ScoredPolicy):
    """q.k of every key, summed over a KV head's group of queries.

    What approximate scores are measured against: it reads all keys, and saves the values alone.
    """

    def score(self, policy_params: Any, layer: int, cache: Cache, q: Array) -> Array:
        return dots((pooled(q, cache.specs[layer].kv_heads), cache.keys(layer)))
