"""What every policy is: frozen settings with a few methods, of which most policies write one."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from jspec.cache import Cache, Linear
from jspec.cache.cache import Shapes
from jspec.cache.layout import Layout
from jspec.config import LayerSpec
from jspec.ops.select import select
from jspec.sharding import Placing
from jspec.typing import Array


@dataclasses.dataclass(frozen=True)
class Policy:
    """A sparse view of the cache. Subclasses are frozen dataclasses of settings.

    ``arrays`` are what `prepare` made, from `jspec.Models`; a policy with ``needs_arrays`` cannot
    do without.
    ``reads_queries=False`` promises that `select` ignores its query and gives None or ``[B, n]``:
    one selection then serves a whole draft. A layer with a sliding window is read whole, and keeps
    nothing for a policy: its methods are not asked about it.
    """

    reads_queries: ClassVar[bool] = True
    needs_arrays: ClassVar[bool] = False

    @property
    def layers_served(self) -> int:
        """How many layers read one selection: the one that made it, and those behind it."""
        return 1

    @property
    def page_size(self) -> int:
        """Positions of a page of `pages`."""
        return 1

    def columns(self, spec: LayerSpec) -> Shapes:
        """What a layer keeps of each token beside its key and value: shape and dtype by name.

        A dtype of None is that of the keys.
        """
        return {}

    def pages(self, spec: LayerSpec) -> Shapes:
        """What a layer keeps of each page of ``page_size`` positions: shape and dtype by name."""
        return {}

    def prepare(self, specs: Sequence[LayerSpec], keys: Sequence[np.ndarray] | None) -> Any:
        """The ``arrays`` that the other methods take, a pytree.

        ``keys``: those of a sample text, float32 ``[M, K, H]`` a layer, or None. Raises
        `ValueError` where the policy cannot do without.
        """
        return None

    def encode(self, arrays: Any, layer: int, k: Array) -> dict[str, Array]:
        """The `columns` of new tokens, ``[B, T, ...]``, from their keys ``k [B, T, K, H]``."""
        return {}

    def fold(
        self, arrays: Any, layer: int, cache: Cache, before: Array, after: Array, most: int
    ) -> dict[str, Array]:
        """The `pages` of a layer once positions ``before [B]`` to ``after - 1 [B]`` are committed.

        These are at most ``most`` a row, and none where ``after <= before``.
        """
        return cache.pages[layer]

    def select(
        self, arrays: Any, layer: int, cache: Cache, q: Array | None, until: Array
    ) -> Array | None:
        """The positions below ``until [B]`` that the queries ``q [B, T, N, H]`` read in a layer.

        int32 ``[B, n]``, shared by all heads, or ``[B, K, n]``; each once, -1 for none. None reads
        all of them. Positions from ``until`` on, the query's own among them, are always read.
        """
        raise NotImplementedError


def columns_of(policy: Policy, spec: LayerSpec) -> Shapes:
    """What ``policy`` keeps of each token in a layer."""
    return {} if spec.window is not None else policy.columns(spec)


def pages_of(policy: Policy, spec: LayerSpec) -> Shapes:
    """What ``policy`` keeps of each page in a layer."""
    return {} if spec.window is not None else policy.pages(spec)


def create_cache(
    policy: Policy,
    specs: Sequence[LayerSpec],
    layouts: Sequence[Layout],
    batch: int,
    dtype: Any,
    sharding: Placing = None,
) -> Cache:
    """An empty `Cache` with what ``policy`` keeps beside keys and values."""
    columns, pages = (functools.partial(kept, policy) for kept in (columns_of, pages_of))
    return Cache.create(
        specs, layouts, batch, dtype, columns, sharding, pages=pages, page=policy.page_size
    )


def with_pages(
    policy: Policy, arrays: Any, cache: Cache, before: Array, after: Array, most: int
) -> Cache:
    """The cache once positions ``before [B]`` to ``after - 1``, at most ``most``, are committed."""
    held = cache.pages or ({},) * len(cache.specs)
    for layer, (spec, own) in enumerate(zip(cache.specs, held, strict=True)):
        if own.keys() != (wanted := pages_of(policy, spec)).keys():
            raise ValueError(
                f"layer {layer} keeps pages {sorted(own)}, but {type(policy).__name__} keeps "
                f"{sorted(wanted)}; start decoding with the config of its steps"
            )
    pages = tuple(
        policy.fold(arrays, layer, cache, before, after, most) if own else own
        for layer, own in enumerate(held)
    )
    return dataclasses.replace(cache, pages=pages) if any(pages) else cache


@dataclasses.dataclass(frozen=True)
class ScoredPolicy(Policy):
    """A policy that reads the positions of the highest scores; ties go to the first.

    ``budget``: how many positions, a whole number, or a ratio of the context such as 0.0156; what
    follows the committed context is read besides. ``sinks`` first and ``recent`` last positions are
    in the budget whatever they score. The first ``dense_layers`` read all there is. A selection
    serves ``every`` layers one after another (Kascade).
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
        if not is_ratio and self.budget < (kept := self._always * self.page_size):
            raise ValueError(
                f"budget={self.budget} must be at least {kept} positions, which sinks={self.sinks} "
                f"and recent={self.recent} take; raise it or lower them"
            )

    @property
    def layers_served(self) -> int:
        return self.every

    def score(self, arrays: Any, layer: int, cache: Cache, q: Array) -> Array:
        """Scores of all slots of a layer, ``[B, S]`` or, per head, ``[B, K, S]``.

        With a ``page_size`` above 1, those of all pages, which are then read whole. Minus infinity
        is not read, unless it is a sink or recent. What it gives for a slot without a committed
        position is ignored, NaN included.
        """
        raise NotImplementedError

    def select(
        self, arrays: Any, layer: int, cache: Cache, q: Array | None, until: Array
    ) -> Array | None:
        if layer < self.dense_layers:
            return None
        assert q is not None
        pages, size = until, cache.layouts[layer].size
        if self.page_size > 1:
            pages, size = -(-until // self.page_size), whole_pages(size, self.page_size)
        if isinstance(self.budget, float):
            most = min(max(math.ceil(self.budget * size), self._always, 1), size)
            share = jnp.ceil(self.budget * until.astype(jnp.float32) / self.page_size)
            counts = jnp.maximum(share.astype(jnp.int32), self._always)
        else:
            most = min(max(self.budget // self.page_size, 1), size)
            counts = jnp.full_like(until, self.budget // self.page_size)
        recent = touched(self._recent, self.page_size)
        sinks = whole_pages(self.sinks, self.page_size)
        # A capacity that the budget exceeds holds them all, whatever is a sink or recent.
        sinks = min(sinks, most)
        recent = min(recent, most - sinks)
        chosen = self.best(
            *(arrays, layer, cache, q, most),
            counts=jnp.minimum(counts, most),
            lengths=pages,
            sinks=sinks,
            recent=recent,
        )
        return chosen if self.page_size == 1 else _inside(chosen, self.page_size, until)

    def best(
        self, arrays: Any, layer: int, cache: Cache, q: Array, most: int, **budget: Any
    ) -> Array:
        """The positions, or pages, of the ``most`` highest scores, int32 ``[B, ..., most]``.

        ``budget`` is what else `jspec.select` takes. Minus infinity is not read, unless forced.
        """
        scores = self.score(arrays, layer, cache, q)
        layout = cache.layouts[layer]
        if self.page_size == 1 and not isinstance(layout, Linear):
            order = layout.slots(jnp.arange(layout.size, dtype=jnp.int32))
            scores = jnp.take(scores, order, axis=-1)
        chosen = select(scores, most, **budget)
        if not jnp.issubdtype(scores.dtype, jnp.floating):
            return chosen
        end = budget["lengths"].reshape(-1, *[1] * (chosen.ndim - 1))
        forced = (chosen < budget["sinks"]) | (chosen >= end - budget["recent"])
        found = jnp.take_along_axis(scores, jnp.maximum(chosen, 0), axis=-1) > -jnp.inf
        return jnp.where(forced | found, chosen, -1)

    @property
    def _recent(self) -> int:
        """How many of the last positions are read; the last page always is."""
        return max(self.recent, 1) if self.page_size > 1 else self.recent

    @property
    def _always(self) -> int:
        """How many positions, or pages, are read whatever they score."""
        return whole_pages(self.sinks, self.page_size) + touched(self._recent, self.page_size)


def _inside(pages: Array, size: int, until: Array) -> Array:
    """All positions of ``pages [..., n]`` that are below ``until [B]``."""
    inside = jnp.arange(size, dtype=jnp.int32).reshape(*[1] * pages.ndim, size)
    positions = jnp.where(pages[..., None] >= 0, pages[..., None] * size + inside, -1)
    positions = positions.reshape(*pages.shape[:-1], -1)
    end = until.reshape(-1, *[1] * (pages.ndim - 1))
    return jnp.where(positions < end, positions, -1)


def whole_pages(positions: int, size: int) -> int:
    """Pages of ``size`` that hold the first ``positions``."""
    return -(-positions // size)


def touched(positions: int, size: int) -> int:
    """The most pages of ``size`` that ``positions`` side by side lie in."""
    return min(positions, whole_pages(positions - 1, size) + 1)


def pooled(q: Array, kv_heads: int) -> Array:
    """``q [B, T, N, H]`` summed over tokens and the heads of a group, float32 ``[B, K, H]``.

    A product with it is the sum of the products with each query, as products are linear.
    """
    batch, tokens, heads, size = q.shape
    q = q.reshape(batch, tokens, kv_heads, heads // kv_heads, size)
    return q.astype(jnp.float32).sum(axis=(1, 3))


def dots(q: Array, k: Array) -> Array:
    """``q [B, K, H]`` times each of ``k [B, S, K, H]``, summed in float32: ``[B, K, S]``.

    No matrix product: XLA would bring all keys into another order for it.
    """
    return jnp.swapaxes((k.astype(jnp.float32) * q[:, None]).sum(axis=-1), 1, 2)
