"""What every policy is: frozen settings with a few methods, of which most policies write one."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.cache import Cache
from jspec.cache.cache import Shapes
from jspec.cache.layout import Layout
from jspec.config import LayerSpec
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
    """A policy that reads the positions of the highest scores; ties go to the first slot.

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
        scores = self.score(arrays, layer, cache, q)
        first = self._first(cache, layer, until)
        first = first.reshape(first.shape[0], *[1] * (scores.ndim - 2), first.shape[1])
        first = jnp.broadcast_to(first, scores.shape)
        end = until.reshape(-1, *[1] * (scores.ndim - 1))
        always = (first < self.sinks) | (first + self.page_size > end - self._recent)
        scores = jnp.where(always, jnp.inf, scores.astype(jnp.float32))
        scores, picked = lax.top_k(jnp.where(first >= 0, scores, -jnp.inf), self._most(first))
        chosen = jnp.take_along_axis(first, picked, axis=-1)
        rank = jnp.arange(chosen.shape[-1], dtype=jnp.int32)
        within = rank.reshape(*[1] * (chosen.ndim - 1), -1) < self._count(end)
        return self._whole(jnp.where(within & (scores > -jnp.inf), chosen, -1), end)

    @property
    def _recent(self) -> int:
        """How many of the last positions are read; the last page always is."""
        return max(self.recent, 1) if self.page_size > 1 else self.recent

    @property
    def _always(self) -> int:
        """The most pages, or positions, that are read whatever they score."""
        return whole_pages(self.sinks, self.page_size) + touched(self._recent, self.page_size)

    def _first(self, cache: Cache, layer: int, until: Array) -> Array:
        """The first position of all that has a score, -1 where nothing is committed, ``[B, S]``."""
        if self.page_size == 1:
            return cache.layouts[layer].held(until - 1)
        pages = whole_pages(cache.layouts[layer].size, self.page_size)
        first = self.page_size * jnp.arange(pages, dtype=jnp.int32)[None]
        return jnp.where(first < until[:, None], first, -1)

    def _most(self, first: Array) -> int:
        """How many of the scored are chosen from at most."""
        size = first.shape[-1]
        if isinstance(self.budget, float):
            return min(max(math.ceil(self.budget * size), self._always, 1), size)
        return min(max(self.budget // self.page_size, 1), size)

    def _count(self, until: Array) -> Array:
        """How many of them a row with ``until`` positions reads, as many axes as ``until``."""
        if isinstance(self.budget, float):
            share = jnp.ceil(self.budget * until.astype(jnp.float32) / self.page_size)
            return jnp.maximum(share.astype(jnp.int32), self._always)
        return jnp.full_like(until, self.budget // self.page_size)

    def _whole(self, chosen: Array, end: Array) -> Array:
        """All positions of the ``chosen`` pages that are below ``end``."""
        if self.page_size == 1:
            return chosen
        inside = jnp.arange(self.page_size, dtype=jnp.int32)
        positions = chosen[..., None] + inside.reshape(*[1] * chosen.ndim, -1)
        positions = jnp.where(chosen[..., None] >= 0, positions, -1)
        positions = positions.reshape(*chosen.shape[:-1], -1)
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
