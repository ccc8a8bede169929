"""What every policy is: frozen settings with a few methods, of which most policies write one."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout as Order
from jax.experimental.layout import with_layout_constraint

from jspec.cache import Cache, Linear, Stripe
from jspec.cache.cache import Shapes
from jspec.cache.layout import Layout
from jspec.config import LayerSpec
from jspec.ops.select import select
from jspec.ops.select_sharded import select_sharded
from jspec.sharding import Placing
from jspec.typing import Array, Model


@dataclasses.dataclass(frozen=True)
class Policy:
    """A sparse view of the cache. Subclasses are frozen dataclasses of settings.

    ``arrays`` are what `prepare` made, from `jspec.Models`; a policy with ``needs_arrays`` cannot
    do without. With ``needs_keys=False`` they do not depend on the keys of a sample text.
    ``reads_queries=False`` promises that `select` ignores its query and gives None or ``[B, n]``:
    one selection then serves a whole draft. A layer with a sliding window is read whole, and keeps
    nothing for a policy: its methods are not asked about it.
    """

    reads_queries: ClassVar[bool] = True
    needs_arrays: ClassVar[bool] = False
    needs_keys: ClassVar[bool] = True

    @property
    def layers_served(self) -> int:
        """How many layers read one selection: the one that made it, and those behind it."""
        return 1

    @property
    def moves_keys(self) -> bool:
        """Whether queries read what was selected as `moved` says, in a copy."""
        return False

    @property
    def page_size(self) -> int:
        """Positions of a page of `pages`."""
        return 1

    def columns(self, spec: LayerSpec) -> Shapes:
        """What a layer keeps of each token beside its key and value: shape and dtype by name.

        A dtype of None is that of the keys.
        """
        return {}

    def in_host(self, layer: int) -> bool:
        """Whether the keys and values of a layer lie in the host's memory, its columns apart.

        Its `select` then scores by the columns alone, and gives ascending positions, never None.
        """
        return False

    def predicts_layer(self, layer: int) -> bool:
        """Whether what such a layer reads is predicted, and fetched while another computes."""
        return False

    def pages(self, spec: LayerSpec) -> Shapes:
        """What a layer keeps of each page of ``page_size`` positions: shape and dtype by name."""
        return {}

    def prepare(self, specs: Sequence[LayerSpec], keys: Sequence[np.ndarray] | None) -> Any:
        """The ``arrays`` that the other methods take, a pytree.

        ``keys``: those of a sample text, float32 ``[M, K, H]`` a layer, or None. Raises
        `ValueError` where the policy cannot do without.
        """
        return None

    def prepare_for(self, model: Model, keys: Sequence[np.ndarray] | None) -> Any:
        """What `jspec.prepare` gives: `prepare`, unless the policy needs more of the model."""
        return self.prepare(model.config.layers, keys)

    def encode(self, arrays: Any, layer: int, k: Array) -> dict[str, Array]:
        """The `columns` of new tokens, ``[B, T, ...]``, from their keys ``k [B, T, K, H]``."""
        return {}

    def encode_values(self, arrays: Any, layer: int, v: Array) -> dict[str, Array]:
        """More of the `columns` of new tokens, from their values ``v [B, T, K, value size]``."""
        return {}

    def codes_by(self, arrays: Any, layer: int) -> Array | None:
        """The matrices ``[K, H, R]`` of which `jspec.hash_encode` makes the only column, ``codes``.

        None where `encode` does something else. The codes are then made as the keys are written.
        """
        return None

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

    def read_as(self, arrays: Any, layer: int, cache: Cache) -> dict[str, Array] | None:
        """``keys`` and ``values`` of a layer's slots as queries read them, None for as they are.

        Asked where `select` gives None; what follows the committed context is read as it is.
        """
        return None

    def moved(self, arrays: Any, layer: int, k: Array, chosen: Array, until: Array) -> Array:
        """The keys ``k [B, n, K, H]`` of the positions ``chosen [B, n]`` as queries read them."""
        return k

    def weigh(
        self, arrays: Any, layer: int, cache: Cache, q: Array, until: Array, chosen: Array
    ) -> Array | None:
        """The log-weights of the positions ``chosen`` that `select` gave for the queries ``q``.

        float32 ``[B, T, N, n]``, as `jspec.gathered_attention` takes them; None weighs all alike.
        Layers that read the selection of another one are not asked.
        """
        return None


def encoded(policy: Policy, arrays: Any, layer: int, k: Array, v: Array | None) -> dict[str, Array]:
    """What ``policy`` keeps of new tokens with keys ``k`` and values ``v``, None if in the keys."""
    more = {} if v is None else policy.encode_values(arrays, layer, v)
    return policy.encode(arrays, layer, k) | more


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
    """An empty `Cache` with what ``policy`` keeps beside keys and values.

    Raises `ValueError` for a policy that keeps keys and values in the host's memory where there is
    none, and where the positions of a layout do not lie in order.
    """
    columns, pages = (functools.partial(kept, policy) for kept in (columns_of, pages_of))
    host = [i for i, x in enumerate(specs) if x.window is None and policy.in_host(i)]
    for layer in host:
        if not isinstance(layouts[layer], Linear):
            raise ValueError(
                f"{type(policy).__name__} keeps layer {layer} in host memory, where positions lie "
                f"in order, not as {layouts[layer]}; take a policy that keeps it on the device"
            )
    return Cache.create(
        *(specs, layouts, batch, dtype, columns, sharding),
        pages=pages,
        page=policy.page_size,
        host=host,
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
class Budgeted(Policy):
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

    @property
    def floor(self) -> int:
        """How many positions, or pages, a ratio comes to at least."""
        return self._always

    def within(self, best: Callable[..., Array], size: int, until: Array) -> Array:
        """The positions that ``best`` gives for the budget of rows with ``until [B]`` committed.

        ``size``: the capacity of the layer. ``best(most, counts=, lengths=, sinks=, recent=)``
        gives the positions, or pages, of the ``most`` highest scores, as `jspec.select` does.
        """
        pages = until
        if self.page_size > 1:
            pages, size = -(-until // self.page_size), whole_pages(size, self.page_size)
        if isinstance(self.budget, float):
            most = min(max(math.ceil(self.budget * size), self.floor, 1), size)
            share = jnp.ceil(self.budget * until.astype(jnp.float32) / self.page_size)
            counts = jnp.maximum(share.astype(jnp.int32), self.floor)
        else:
            own = self.budget // self.page_size
            most = min(max(own, 1), size)
            # Where it is the same for all rows, no array needs to say so.
            counts = None if own else jnp.zeros_like(until)
        recent = touched(self._recent, self.page_size)
        sinks = whole_pages(self.sinks, self.page_size)
        # A capacity that the budget exceeds holds them all, whatever is a sink or recent.
        sinks = min(sinks, most)
        recent = min(recent, most - sinks)
        counts = None if counts is None else jnp.minimum(counts, most)
        chosen = best(most, counts=counts, lengths=pages, sinks=sinks, recent=recent)
        return chosen if self.page_size == 1 else _inside(chosen, self.page_size, until)

    @property
    def _recent(self) -> int:
        """How many of the last positions are read; the last page always is."""
        return max(self.recent, 1) if self.page_size > 1 else self.recent

    @property
    def _always(self) -> int:
        """How many positions, or pages, are read whatever they score."""
        return whole_pages(self.sinks, self.page_size) + touched(self._recent, self.page_size)


@dataclasses.dataclass(frozen=True)
class ScoredPolicy(Budgeted):
    """A `Budgeted` policy that scores the cache for the queries of each pass."""

    def score(self, arrays: Any, layer: int, cache: Cache, q: Array) -> Array:
        """Scores of all slots of a layer, ``[B, S]`` or, per head, ``[B, K, S]``.

        With a ``page_size`` above 1, those of all pages, which are then read whole. Minus infinity
        is not read, unless it is a sink or recent. What it gives for a slot without a committed
        position is ignored, NaN included.
        """
        raise NotImplementedError

    @jax.named_scope("selection")
    def select(
        self, arrays: Any, layer: int, cache: Cache, q: Array | None, until: Array
    ) -> Array | None:
        if layer < self.dense_layers:
            return None
        assert q is not None
        best = functools.partial(self.best, arrays, layer, cache, q)
        return self.within(best, cache.layouts[layer].capacity, until)

    def best(
        self, arrays: Any, layer: int, cache: Cache, q: Array, most: int, **budget: Any
    ) -> Array:
        """The positions, or pages, of the ``most`` highest scores, int32 ``[B, ..., most]``.

        ``budget`` is what else `jspec.select` takes. Minus infinity is not read, unless forced.
        """
        scores = self.score(arrays, layer, cache, q)
        if self.page_size == 1:
            return best_positions(scores, cache.layouts[layer], most, **budget)
        return highest(scores, most, **budget)


def best_positions(scores: Array, layout: Layout, most: int, **budget: Any) -> Array:
    """The positions with the ``most`` highest of the scores ``[..., S]`` of all slots.

    int32 ``[..., most]``, as `jspec.select` gives; of a `Stripe` those that this device holds.
    ``budget`` is what else that takes. Minus infinity is not read, unless ``budget`` forces it.
    """
    if not isinstance(layout, Stripe):
        return highest(in_order(scores, layout), most, **budget)
    slots = select_sharded(
        *(scores, layout.held(budget["lengths"] - 1), most),
        axis_name=layout.axis,
        capacity=layout.capacity,
        **budget,
    )
    positions = jnp.where(slots >= 0, layout.at(slots), -1)
    return _read_of(scores, slots, positions, **budget)


def in_order(scores: Array, layout: Layout) -> Array:
    """Scores of all slots ``[..., S]`` in the order of the positions that live in them."""
    if isinstance(layout, Linear):
        return scores
    order = layout.slots(jnp.arange(layout.size, dtype=jnp.int32))
    return jnp.take(scores, order, axis=-1)


def highest(scores: Array, most: int, **budget: Any) -> Array:
    """The places of the ``most`` highest scores, int32 ``[..., most]``, as `jspec.select` gives.

    Minus infinity is not read, unless ``budget`` forces it.
    """
    chosen = select(scores, most, **budget)
    return _read_of(scores, chosen, chosen, **budget)


def _read_of(
    scores: Array,
    slots: Array,
    positions: Array,
    *,
    lengths: Array,
    sinks: int,
    recent: int,
    **others: Any,
) -> Array:
    """The chosen ``positions``, -1 for those whose scores, in ``slots``, are minus infinity."""
    if not jnp.issubdtype(scores.dtype, jnp.floating):
        return positions
    end = lengths.reshape(-1, *[1] * (positions.ndim - 1))
    forced = (positions < sinks) | (positions >= end - recent)
    found = jnp.take_along_axis(scores, jnp.maximum(slots, 0), axis=-1) > -jnp.inf
    return jnp.where(forced | found, positions, -1)


def _inside(pages: Array, size: int, until: Array) -> Array:
    """All positions of ``pages [..., n]`` that are below ``until [B]``."""
    inside = jnp.arange(size, dtype=jnp.int32).reshape(*[1] * pages.ndim, size)
    positions = jnp.where(pages[..., None] >= 0, pages[..., None] * size + inside, -1)
    positions = positions.reshape(*pages.shape[:-1], -1)
    end = until.reshape(-1, *[1] * (pages.ndim - 1))
    return jnp.where(positions < end, positions, -1)


def check_page(page: int) -> None:
    """Raise `ValueError` for pages without a position."""
    if page < 1:
        raise ValueError(f"page={page} must be at least 1 position")


def whole_pages(positions: int, size: int) -> int:
    """Pages of ``size`` that hold the first ``positions``."""
    return -(-positions // size)


def touched(positions: int, size: int) -> int:
    """The most pages of ``size`` that ``positions`` side by side lie in."""
    return min(positions, whole_pages(positions - 1, size) + 1)


def taken(cache: Cache, layer: int, positions: Array, names: Sequence[str]) -> dict[str, Array]:
    """Some columns ``[B, n, K, ...]`` at ``positions [B, n]`` or, per head, ``[B, K, n]``.

    What stands for -1 means nothing.
    """
    slots = cache.layouts[layer].slots(positions)
    index = slots[:, :, None, None] if slots.ndim == 2 else jnp.swapaxes(slots, 1, 2)[..., None]
    columns = cache.columns[layer]
    return {
        name: jnp.take_along_axis(columns[name], index, axis=1, mode="clip")
        for name in names
        if name in columns
    }


def pooled(q: Array, kv_heads: int) -> Array:
    """``q [B, T, N, H]`` summed over tokens and the heads of a group, float32 ``[B, K, H]``.

    A product with it is the sum of the products with each query, as products are linear.
    """
    batch, tokens, heads, size = q.shape
    q = q.reshape(batch, tokens, kv_heads, heads // kv_heads, size)
    return q.astype(jnp.float32).sum(axis=(1, 3))


def dots(*pairs: tuple[Array, Array]) -> Array:
    """``q [B, K, H]`` times each of ``k [B, S, K, H]``, summed in float32: ``[B, K, S]``.

    Of several pairs ``q, k`` the sum, as one kernel. No matrix product: XLA would bring all keys
    into another order for it. Nor may it choose an order for a column that no kernel of jspec's
    fixes: a chunk of steps would begin and end with a copy of the whole column.
    """
    products = (
        with_layout_constraint(k, Order((0, 1, 2, 3))).astype(jnp.float32) * q[:, None]
        for q, k in pairs
    )
    return jnp.swapaxes(functools.reduce(jnp.add, products).sum(axis=-1), 1, 2)
