"""Policies that read a budget of positions or pages: those of the highest scores."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jspec.cache import Cache
from jspec.policies.policy import Policy
from jspec.policies.scores import best_positions, highest
from jspec.policies.selection import Selection
from jspec.typing import Array


@dataclasses.dataclass(frozen=True)
class Budgeted(Policy):
    """A policy that reads the positions of the highest scores; ties go to the first.

    Attributes:
        budget: How many positions, a whole number, or a ratio of the context such as 0.0156.
            Positions after the committed context are read in addition.
        sinks: How many of the first positions are in the budget whatever they score.
        recent: How many of the last positions are in the budget whatever they score.
        dense_layers: How many of the first layers read all positions.
        every: How many consecutive layers read one selection (Kascade).
    """

    budget: int | float = 512
    sinks: int = 4
    recent: int = 16
    dense_layers: int = 2
    every: int = 1

    def __post_init__(self) -> None:
        is_ratio = isinstance(self.budget, float)
        if is_ratio and not 0 <= self.budget <= 1:
            raise ValueError(f"budget={self.budget} must be a ratio in [0, 1], or a whole number")
        for name, least in (("sinks", 0), ("recent", 0), ("dense_layers", 0), ("every", 1)):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        if not is_ratio and self.budget < (forced := self._always * self.page_size):
            raise ValueError(
                f"budget={self.budget} must be at least {forced} positions, which sinks="
                f"{self.sinks} and recent={self.recent} take; raise it or lower them"
            )

    @property
    def page_size(self) -> int:
        """Positions of a page, of which all are read or none."""
        return 1

    @property
    def runs_on_mesh(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.page_size == 1 and self.storage is None

    @property
    def floor(self) -> int:
        """The least positions, or pages, that are selected where the budget is a ratio."""
        return self._always

    def within(
        self,
        best: Callable[..., Array],
        size: int,
        context_len: Array,
        budget_share: float = 1.0,
    ) -> Array:
        """The positions that ``best`` selects within the budget of each row.

        Args:
            best: ``best(k, counts=, lengths=, sinks=, recent=)`` returns the positions, or pages,
                of the ``k`` highest scores, as `jspec.ops.select` does.
            size: The capacity of the layer.
            context_len: int32 ``[B]``: committed positions per row.
            budget_share: The share of the budget to select.
        """
        pages = context_len if self.page_size == 1 else -(-context_len // self.page_size)
        k, budget = self.limits(size, context_len, budget_share)
        chosen = best(k, lengths=pages, **budget)
        return chosen if self.page_size == 1 else _positions_of(chosen, self.page_size, context_len)

    def limits(
        self, size: int, context_len: Array, budget_share: float = 1.0
    ) -> tuple[int, dict[str, Any]]:
        """The budget as ``k``, ``counts``, ``sinks`` and ``recent`` of `jspec.ops.select`.

        Args:
            size: The capacity of the layer.
            context_len: int32 ``[B]``: committed positions per row.
            budget_share: The share of the budget to select.

        Returns:
            ``k``, and the others by name; in pages where `page_size` is above 1.
        """
        size, budget = whole_pages(size, self.page_size), budget_share * self.budget
        is_ratio = isinstance(self.budget, float)
        if is_ratio:
            k = min(max(math.ceil(budget * size), self.floor, 1), size)
        else:
            budget = max(math.ceil(budget), self._always * self.page_size)
            k = min(max(budget // self.page_size, 1), size)
        if is_ratio:
            share = jnp.ceil(budget * context_len.astype(jnp.float32) / self.page_size)
            counts = jnp.maximum(share.astype(jnp.int32), self.floor)
        else:
            # Where it is the same for all rows, no array needs to say so.
            counts = None if budget >= self.page_size else jnp.zeros_like(context_len)
        recent = max_pages_of(self._recent, self.page_size)
        sinks = whole_pages(self.sinks, self.page_size)
        # A capacity that the budget exceeds holds them all, whatever is a sink or recent.
        sinks = min(sinks, k)
        recent = min(recent, k - sinks)
        counts = None if counts is None else jnp.minimum(counts, k)
        return k, {"counts": counts, "sinks": sinks, "recent": recent}

    @property
    def _recent(self) -> int:
        """How many of the last positions are read; the last page always is."""
        return max(self.recent, 1) if self.page_size > 1 else self.recent

    @property
    def _always(self) -> int:
        """How many positions, or pages, are read whatever they score."""
        return whole_pages(self.sinks, self.page_size) + max_pages_of(self._recent, self.page_size)


@dataclasses.dataclass(frozen=True)
class ScoredPolicy(Budgeted):
    """A `Budgeted` policy that scores the cache for the queries of each pass."""

    def score(self, policy_params: Any, layer: int, cache: Cache, q: Array) -> Array:
        """Scores of all slots of a layer; with a ``page_size`` above 1, of all its pages.

        Args:
            policy_params: What `prepare` made.
            layer: The layer's index.
            cache: The cache.
            q: ``[B, T, N, H]``: the queries.

        Returns:
            ``[B, S]`` or, per head, ``[B, K, S]``. A score of minus infinity, or a whole number
            below 0, is not read, unless it is a sink or recent. Scores of slots without a committed
            position are ignored, NaN included.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must have a method score(policy_params, layer, cache, q)"
        )

    @jax.named_scope("selection")
    def select(
        self,
        policy_params: Any,
        layer: int,
        cache: Cache,
        q: Array | None,
        context_len: Array,
        budget_share: float = 1.0,
    ) -> Selection:
        if layer < self.dense_layers:
            return Selection()
        assert q is not None
        best = functools.partial(self.best, policy_params, layer, cache, q)
        capacity = cache.layouts[layer].capacity
        positions = self.within(best, capacity, context_len, budget_share)
        return Selection(positions, num_layers=self.every)

    def best(
        self, policy_params: Any, layer: int, cache: Cache, q: Array, k: int, **budget: Any
    ) -> Array:
        """The positions, or pages, of the ``k`` highest scores, int32 ``[B, ..., k]``.

        ``budget``: other arguments of `jspec.ops.select`. Minus infinity, or a whole number below
        0, is not read, unless it is a sink or recent.
        """
        scores = self.score(policy_params, layer, cache, q)
        if self.page_size == 1:
            slots = cache.keys(layer).shape[1]
            if scores.ndim not in (2, 3) or scores.shape[-1] != slots:
                raise ValueError(
                    f"{type(self).__name__}.score returned {scores.shape} in layer {layer}; it "
                    f"must return a score for each of {slots} slots, [B, S] or [B, K, S]"
                )
            return best_positions(scores, cache.layouts[layer], k, **budget)
        return highest(scores, k, **budget)


def _positions_of(pages: Array, size: int, context_len: Array) -> Array:
    """All positions of ``pages [..., n]`` that are below ``context_len [B]``."""
    inside = jnp.arange(size, dtype=jnp.int32).reshape(*[1] * pages.ndim, size)
    positions = jnp.where(pages[..., None] >= 0, pages[..., None] * size + inside, -1)
    positions = positions.reshape(*pages.shape[:-1], -1)
    end = context_len.reshape(-1, *[1] * (pages.ndim - 1))
    return jnp.where(positions < end, positions, -1)


def check_page(page: int) -> None:
    """Raise `ValueError` for pages without a position."""
    if page < 1:
        raise ValueError(f"page={page} must be at least 1 position")


def whole_pages(positions: int, size: int) -> int:
    """Pages of ``size`` that hold the first ``positions``."""
    return -(-positions // size)


def max_pages_of(positions: int, size: int) -> int:
    """The most pages of ``size`` positions that so many neighbouring ``positions`` can lie in."""
    return min(positions, whole_pages(positions - 1, size) + 1)
