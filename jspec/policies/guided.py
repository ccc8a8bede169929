"""Policies guided by verification: a draft reads what the last full pass attended to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jspec.cache import Cache
from jspec.cache.cache import Shapes
from jspec.config import LayerSpec
from jspec.dispatch import named_backend
from jspec.ops.attention.appended import PARTS, rotate_append_attend
from jspec.ops.selection import select
from jspec.policies.budgeted import Budgeted, whole_pages
from jspec.policies.dense import Dense
from jspec.policies.hata import Hata
from jspec.policies.policy import Encoder, Policy, TokenAttention
from jspec.policies.scores import best_positions, highest, in_order, max_with_previous, softmax
from jspec.policies.selection import NewTokens, Selection
from jspec.sharding import varying_axes, varying_over
from jspec.typing import Array

COLLECTS = ("ends", "all", "accepted", "last")
SCORES = ("logit", "softmax", "weight")
INITIAL_SINKS = 4
MAX_AHEAD = 1024  # each of them is an operation of the step


class Guidance(NamedTuple):
    """The ``policy_params`` of a `Guided` policy: what the passes of a draft read.

    Attributes:
        read: Of each layer that selects, the positions that it reads: int32 ``[B, n]`` or, per
            head, ``[B, K, n]``, -1 for none. None for other layers, and where a layer selects again
            by hashes.
        since: int32 ``[B, m]``: the ascending positions that were committed since the last
            verification began, -1 after them; all of them are read.
        hashes: The parameters of `Guided.cache_policy`.
        slots: Of each of ``read``, on a device that has some of a row only, what
            `jspec.policies.read.local_slots` returns of it, found once for all passes of a draft;
            layers that share the selection of another find theirs in each pass. None where all do,
            as after a refresh.
    """

    read: tuple[Array | None, ...]
    since: Array
    hashes: Any = None
    slots: tuple[tuple[Array, Array] | None, ...] | None = None

    def for_refresh(self) -> Guidance:
        """For a pass in which each layer selects again, by hashes."""
        return self._replace(read=(None,) * len(self.read))

    def with_selections(self, selections: Sequence[Array | None]) -> Guidance:
        """For the passes after a refresh, in which each layer reads its one of ``selections``."""

        def like(read: Array | None, selection: Array | None) -> Array | None:
            # On a mesh, of the same type too, or no loop would carry it.
            if read is None or selection is None:
                return None
            return varying_over(varying_axes(read), padded(selection, read.shape[-1]))

        return self._replace(read=tuple(map(like, self.read, selections)))


@dataclasses.dataclass(frozen=True)
class Guided(Budgeted):
    """A selection by the scores of a verification, which drafts read until the next one.

    Methods take a `Guidance` as ``policy_params``. Layers with a sliding window are read whole.

    Attributes:
        collect: The tokens of a verification pass whose queries score the keys. ``ends``: the first
            one, and the last, which gives the bonus token; ``all``: every one, discarded draft
            tokens included; ``accepted``: those that were not discarded; ``last``: the last of
            these alone.
        score: ``logit``, q.k, or ``weight``, its softmax: their mean over those tokens and all
            query heads, with ``per_head`` over the query heads of a KV head. Or ``softmax``, that
            of the mean logit of each KV head, for which no key is read again.
        per_head: Whether each KV head selects for itself.
        ahead: A position counts as much as the best of so many before it, since a draft that copies
            a text reads the positions that follow those that the last verification read (SnapKV
            pools scores so, both ways; Li et al. 2024, section 4.2).
        least: The least positions that a ratio gives.
        refresh: After so many passes of a draft, and after each as many more, layers select again
            by the bits that the hash codes of keys share with those of the current queries
            (`Hata`), summed over the same heads; 0 is never. A pass drafts a token, or is a round
            of a chain.
    """

    budget: int | float = 0.07
    sinks: int = 0
    recent: int = 0
    dense_layers: int = 0
    collect: str = "ends"
    score: str = "logit"
    per_head: bool = False
    ahead: int = 0
    least: int = 256
    refresh: int = 0

    def __post_init__(self) -> None:
        for name, known in (("collect", COLLECTS), ("score", SCORES)):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name}={value!r} must be one of {', '.join(known)}")
        for name in ("ahead", "least", "refresh"):
            if (count := getattr(self, name)) < 0:
                raise ValueError(f"{name}={count} must be at least 0")
        if self.ahead > MAX_AHEAD:
            raise ValueError(f"ahead={self.ahead} must be at most {MAX_AHEAD}")
        if self.ahead and self.page_size > 1:
            raise ValueError(f"ahead={self.ahead} goes with single positions, and not with pages")
        super().__post_init__()

    @property
    def cache_policy(self) -> Policy:
        """The policy whose columns it needs to select again."""
        if not self.refresh:
            return Dense()
        return Hata(dense_layers=self.dense_layers, every=self.every)

    @property
    def runs_on_mesh(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.page_size == 1

    def columns(self, layer: int, spec: LayerSpec) -> Shapes:
        return self.cache_policy.columns(layer, spec)

    def encoder(self, policy_params: Guidance, layer: int) -> Encoder:
        return self.cache_policy.encoder(policy_params.hashes, layer)

    @property
    def needs_verdict(self) -> bool:
        """Whether the tokens that score are known only once the draft has been verified."""
        return self.collect in ("accepted", "last")

    @property
    def floor(self) -> int:
        return max(self._always, whole_pages(self.least, self.page_size))

    def leaders(self, specs: Sequence[LayerSpec]) -> tuple[int | None, ...]:
        """The layer that selects for each layer: itself, an earlier one, or None for no layer."""
        leaders: list[int | None] = []
        current, served = None, 0
        for layer, spec in enumerate(specs):
            if spec.window is not None or layer < self.dense_layers:
                leaders.append(None)
                continue
            alike = current is not None and (
                not self.per_head or specs[current].kv_heads == spec.kv_heads
            )
            if not alike or served == self.every:
                current, served = layer, 0
            served += 1
            leaders.append(current)
        return tuple(leaders)

    def select(
        self,
        policy_params: Guidance,
        layer: int,
        cache: Cache,
        q: Array | None,
        context_len: Array,
        budget_share: float = 1.0,
    ) -> Selection:
        leader = self.leaders(cache.specs)[layer]
        if leader is None:
            return Selection()
        read = policy_params.read[leader]
        if read is None:
            read = self._select_by_hashes(policy_params, layer, cache, q, context_len)
        slots = None if policy_params.slots is None else policy_params.slots[leader]
        return Selection(read, slots=slots, num_layers=self.every)

    def attend_token(
        self,
        policy_params: Guidance,
        layer: int,
        cache: Cache,
        token: NewTokens,
        context_len: Array,
        num_uncommitted: int,
    ) -> TokenAttention | None:
        leader = self.leaders(cache.specs)[layer]
        q, k, v, qk_rope, positions = token
        if leader is None or self.refresh or any(map(named_backend, PARTS)):
            return None
        if v is None or qk_rope is None or qk_rope.joined is None:
            return None
        selection = self.select(policy_params, layer, cache, None, context_len)
        spec, columns = cache.specs[layer], cache.columns[layer]
        assert selection.positions is not None
        # Slots of a linear layout are positions.
        tail = context_len[:, None] + jnp.arange(num_uncommitted, dtype=jnp.int32)[None]
        out, lse, keys, values = rotate_append_attend(
            *(q, k, v, qk_rope, columns["keys"], columns["values"]),
            *(positions, selection.positions, tail, context_len),
            scale=spec.scale,
            softcap=spec.softcap,
        )
        cache = cache.replaced(layer, keys=keys, values=values)
        return TokenAttention(out, lse, selection, cache)

    @jax.named_scope("selection")
    def _select_by_hashes(
        self, policy_params: Guidance, layer: int, cache: Cache, q: Array | None, context_len: Array
    ) -> Array:
        """What the queries ``q`` select by hashes, where verification would have selected."""
        cache_policy = self.cache_policy
        assert isinstance(cache_policy, Hata)
        assert q is not None
        scores = cache_policy.score(policy_params.hashes, layer, cache, q).astype(jnp.float32)
        first = policy_params.since[:, 0]
        begin = jnp.where(first >= 0, first, context_len)
        best = self._best(self._over_heads(scores), cache, layer, begin)
        return with_since(best, policy_params.since)

    def scoring(self, positions: Array, accepted: Array | None = None) -> Array:
        """Which tokens of a pass at ``positions [B, T]`` score, int32 ``[B, P]``, -1 for none.

        Padding never does. ``accepted`` int32 ``[B]``: draft tokens accepted per row, None before
        that is known.
        """
        index = _token_indices(positions)
        newest = last_token(positions)
        if self.collect == "all":
            return index
        if self.collect == "ends":
            # The first and the last of a single token are one.
            return jnp.concatenate([jnp.minimum(newest, 0), jnp.where(newest > 0, newest, -1)], 1)
        assert accepted is not None
        latest = jnp.minimum(accepted[:, None], newest)
        return latest if self.collect == "last" else jnp.where(index <= latest, index, -1)

    @jax.named_scope("selection")
    def pick(
        self, scores: Mapping[int, Array], cache: Cache, context_len: Array
    ) -> dict[int, Array]:
        """The positions with the highest ``scores [B, K, S]`` of the slots of some layers.

        Layers with the same layout and number of heads select in one call, which takes less time
        than one for each, and on a mesh one all-gather; ``score="softmax"`` adds one for each.

        Args:
            scores: ``[B, K, S]`` by layer.
            cache: whose slots have the scores.
            context_len: int32 ``[B]``: committed positions per row.

        Returns:
            Of each layer int32 ``[B, n]``, or ``[B, K, n]`` with ``per_head``, all below
            ``context_len [B]``; -1 for none.
        """
        alike: dict[Any, list[int]] = {}
        for layer, of_layer in scores.items():
            alike.setdefault((cache.layouts[layer], of_layer.shape), []).append(layer)
        picked: dict[int, Array] = {}
        for (layout, _), layers in alike.items():
            rows = []
            for layer in layers:
                weights = scores[layer]
                if self.score == "softmax":
                    weights = softmax(weights, layout, context_len)
                rows.append(self._over_heads(weights))
            ends = jnp.tile(context_len, len(layers))
            best = self._best(jnp.concatenate(rows), cache, layers[0], ends)
            picked |= zip(layers, jnp.split(best, len(layers)), strict=True)
        return picked

    def _over_heads(self, scores: Array) -> Array:
        """``scores [B, K, S]``, or their sums ``[B, S]`` over this device's heads."""
        return scores if self.per_head else scores.sum(axis=1)

    def _best(self, scores: Array, cache: Cache, layer: int, context_len: Array) -> Array:
        """The positions of the highest of what `_over_heads` returns for each row.

        int32 ``[B, n]``, or ``[B, K, n]`` with ``per_head``, all below ``context_len [B]``.
        """
        layout = cache.layouts[layer]
        if not self.per_head and cache.shards is not None:
            scores = cache.shards.over_heads(scores)
        if self.ahead:
            scores, layout = max_with_previous(scores, layout, self.ahead, context_len)

        def best(k: int, **budget: Any) -> Array:
            if self.page_size == 1:
                return best_positions(scores, layout, k, **budget)
            means = _page_means(in_order(scores, layout), self.page_size, context_len)
            return highest(means, k, **budget)

        return self.within(best, layout.capacity, context_len)

    def initial_selection(self, kv_heads: int, size: int, context_len: Array) -> Array:
        """What a draft reads where no query has selected: the first positions, and the last ones.

        ``size``: the capacity of the layer. int32 ``[B, n]``, or ``[B, K, n]`` with ``per_head``.
        """

        def best(k: int, *, sinks: int, recent: int, **budget: Any) -> Array:
            later = jnp.arange(whole_pages(size, self.page_size), dtype=jnp.int32)[None]
            later = jnp.broadcast_to(later, (len(context_len), later.shape[1]))
            sinks = min(max(sinks, whole_pages(INITIAL_SINKS, self.page_size)), k - recent)
            return select(later, k, sinks=sinks, recent=recent, **budget)

        positions = self.within(best, size, context_len)
        if not self.per_head:
            return positions
        return jnp.broadcast_to(positions[:, None], (len(positions), kv_heads, positions.shape[1]))


def _token_indices(positions: Array) -> Array:
    """The index of each token of a pass at ``positions [B, T]``, -1 for padding."""
    index = jnp.arange(positions.shape[1], dtype=jnp.int32)[None]
    return jnp.where(positions >= 0, index, -1)


def last_token(positions: Array) -> Array:
    """The index of the last token of a pass at ``positions [B, T]``, int32 ``[B, 1]``.

    -1 in rows without one.
    """
    return _token_indices(positions).max(axis=1, keepdims=True)


def mean_query(q: Array, scoring: Array, kv_heads: int) -> Array:
    """The mean of queries ``q [B, T, N, H]`` over ``scoring [B, P]`` tokens and a KV head's group.

    float32 ``[B, K, H]``. As q.k is linear, that of the mean is the mean over the queries.
    """
    batch, tokens, heads, size = q.shape
    group = heads // kv_heads
    counts = jax.nn.one_hot(scoring, tokens).max(axis=1)
    weights = counts / (group * jnp.maximum(counts.sum(axis=1, keepdims=True), 1))
    q = jnp.where(counts[..., None, None] > 0, q, 0)  # those of padding may be NaN
    q = q.reshape(batch, tokens, kv_heads, group, size).astype(jnp.float32)
    return jnp.einsum("bt,btkgh->bkh", weights, q, precision="highest")


def gather_tokens(x: Array, scoring: Array) -> Array:
    """``x [B, T, ...]`` at the tokens ``scoring [B, P]``; undefined for -1."""
    index = jnp.maximum(scoring, 0).reshape(*scoring.shape, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1)


def positions_before(lengths: Array, size: int) -> Array:
    """The last ``size`` positions below ``lengths [B]``, ascending, int32 ``[B, size]``.

    -1 after those of rows that have fewer.
    """
    index = jnp.arange(size, dtype=jnp.int32)[None]
    positions = jnp.maximum(lengths[:, None] - size, 0) + index
    return jnp.where(positions < lengths[:, None], positions, -1)


def with_since(picked: Array, since: Array) -> Array:
    """``since [B, m]``, then ``picked [B, n]`` or ``[B, K, n]``.

    In this order the -1 of a device that has few of ``picked`` end the list, and need not be read.
    """
    since = since if picked.ndim == 2 else since[:, None]
    since = jnp.broadcast_to(since, (*picked.shape[:-1], since.shape[-1]))
    return jnp.concatenate([since, picked], axis=-1)


def padded(positions: Array, size: int) -> Array:
    """``positions [..., n]`` padded with -1 to ``[..., size]``."""
    widths = [(0, 0)] * (positions.ndim - 1) + [(0, size - positions.shape[-1])]
    return jnp.pad(positions, widths, constant_values=-1)


def _page_means(scores: Array, size: int, context_len: Array) -> Array:
    """The mean of ``scores [B, ..., S]`` over the positions below ``context_len`` of each page."""
    slots = scores.shape[-1]
    end = context_len.reshape(-1, *[1] * (scores.ndim - 1))
    inside = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1) < end
    pad = [(0, 0)] * (scores.ndim - 1) + [(0, -slots % size)]

    def by_page(x: Array) -> Array:
        return jnp.pad(x, pad).reshape(*x.shape[:-1], -1, size).sum(axis=-1)

    total, counts = by_page(jnp.where(inside, scores, 0)), by_page(inside.astype(jnp.float32))
    return total / jnp.maximum(counts, 1)
