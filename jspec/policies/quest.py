"""Quest: pages scored by an upper bound of the scores of their keys (Tang et al. 2024)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jspec.cache import Cache
from jspec.config import LayerSpec
from jspec.ops.key_scores import page_scores
from jspec.policies.budgeted import ScoredPolicy, check_page, max_pages_of
from jspec.policies.policy import Pages
from jspec.typing import Array


@dataclasses.dataclass(frozen=True)
class Quest(ScoredPolicy):
    """Whole pages of ``page`` positions; the page of the last position is always read.

    Each page keeps the smallest and the largest key in every channel. It scores ``sum_i max(q_i
    low_i, q_i high_i)`` for each query (algorithm 1), which no key in it exceeds, summed over a KV
    head's group of queries. ``budget`` is in positions and is rounded down to pages.
    """

    page: int = 16

    def __post_init__(self) -> None:
        check_page(self.page)
        super().__post_init__()

    @property
    def page_size(self) -> int:
        return self.page

    def pages(self, layer: int, spec: LayerSpec) -> Pages | None:
        if layer < self.dense_layers:
            return None
        channels = ((spec.kv_heads, spec.key_size), None)
        return Pages(self.page, {"low": channels, "high": channels}, self._fold)

    def _fold(
        self,
        policy_params: Any,
        layer: int,
        cache: Cache,
        before: Array,
        after: Array,
        max_new: int,
    ) -> dict[str, Array]:
        """The ``fold`` of `Pages`: those with new positions, from all committed keys in them."""
        pages = cache.pages[layer]
        count = max_pages_of(max_new, self.page)
        page = before[:, None] // self.page + jnp.arange(count, dtype=jnp.int32)[None]
        offset = jnp.arange(self.page, dtype=jnp.int32)[None, None]
        positions = page[..., None] * self.page + offset
        committed = (positions < after[:, None, None]) & (before < after)[:, None, None]
        rows = jnp.arange(len(before))[:, None, None]
        slots = cache.layouts[layer].slots(positions)
        keys = cache.keys(layer).at[rows, slots].get(mode="clip")
        is_committed = committed[..., None, None]
        bounds = {
            "low": jnp.where(is_committed, keys, jnp.inf).min(axis=2),
            "high": jnp.where(is_committed, keys, -jnp.inf).max(axis=2),
        }
        target = jnp.where(committed.any(axis=2), page, pages["low"].shape[1])
        return {
            name: pages[name].at[rows[..., 0], target].set(x, mode="drop")
            for name, x in bounds.items()
        }

    def score(self, policy_params: Any, layer: int, cache: Cache, q: Array) -> Array:
        pages = cache.pages[layer]
        return page_scores(q, pages["low"], pages["high"])
