"""The `Attend` functions that models get: over the whole cache, a selection, or a copy of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.cache import Cache, LinearLayout, Stripe
from jspec.config import LayerSpec
from jspec.dispatch import Backends
from jspec.ops.append import QKRope, rotate_and_append, rotate_append_encode
from jspec.ops.attention.gathered import filled, gathered_attention
from jspec.ops.host_rows import PrefetchedRows
from jspec.policies.dense import Dense
from jspec.policies.offload import (
    append_to_host,
    fetch_next,
    is_offloaded,
    rows_of,
    through_device,
)
from jspec.policies.policy import Policy, columns_of, encoded
from jspec.policies.read import (
    attended,
    finished,
    gather_columns,
    joined_columns,
    picked_columns,
    read_at,
    read_columns,
    read_whole,
    replace_context,
    settings_of,
)
from jspec.typing import Array, Attend, Model

DENSE = Dense()


def accepting_qk_rope(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Mark an `Attend` that takes ``qk_rope``: queries and keys as the projection gives them."""
    attend.accepts_qk_rope = True  # pyright: ignore[reportFunctionMemberAccess]
    return attend


def dense_attend(
    positions: Array,
    *,
    policy: Policy = DENSE,
    policy_params: Any = None,
    backends: Mapping[str, str] = Backends(),
) -> Attend:
    """The ``attend`` that appends new tokens and reads all positions.

    Args:
        positions: int32 ``[B, T]``: positions of the new tokens, -1 for padding.
        policy: The policy whose columns are appended with keys and values.
        policy_params: What `jspec.policies.prepare_params` made for it.
        backends: Named backends of operations.
    """

    @accepting_qk_rope
    def attend(layer, q, k, v, cache: Cache, *, sinks=None, up=None, qk_rope=None):
        spec, layout, before = cache.specs[layer], cache.layouts[layer], cache.columns[layer]
        overwrites = False
        if layout.wraps and spec.window is not None:
            overwrites = positions.shape[1] > layout.capacity - spec.window
        if overwrites and qk_rope is not None:
            (q, k), qk_rope = qk_rope(q, k), None
        q, cache = appended(
            cache, layer, positions, q, k, v, qk_rope, policy, policy_params, backends
        )
        if not overwrites:
            return read_whole(cache, layer, q, positions, sinks, up, backends), cache
        # Such a pass overwrites what its first queries still see.
        columns = joined_columns(before, _named(k, v))
        first = jnp.where(positions >= 0, positions, np.iinfo(np.int32).max).min(axis=1)
        # Of the new tokens, too, a device reads its own.
        local_positions = jnp.where(layout.slots(positions) < layout.size, positions, -1)
        where = jnp.concatenate([layout.slot_positions(first - 1), local_positions], axis=1)
        return read_at(cache, layer, q, columns, positions, where, sinks, up, backends), cache

    return through_device(attend, positions, backends)


def selected_attend(
    positions: Array,
    context_len: Array,
    num_new: int,
    *,
    policy: Policy,
    policy_params: Any = None,
    backends: Mapping[str, str] = Backends(),
) -> Attend:
    """The ``attend`` that appends new tokens and reads what ``policy`` selects.

    The first query of the pass selects. A layer with a sliding window is read whole: it is small
    already. A model passes the function a `Cache`, or a `PassState` where a selection serves
    several layers or rows are prefetched, and gets one of the same kind.

    Args:
        positions: int32 ``[B, T]``: positions of the new tokens, -1 for padding.
        context_len: int32 ``[B]``: committed positions per row, among which the policy selects.
        num_new: How many positions from ``context_len`` on are read whole: those of this pass, and
            those that earlier passes of the draft wrote.
        policy: The policy that selects.
        policy_params: What `jspec.policies.prepare_params` made for it.
        backends: Named backends of operations.
    """

    @accepting_qk_rope
    def attend(layer, q, k, v, carry, *, sinks=None, up=None, qk_rope=None, next_queries=None):
        cache: Cache = carry.cache if isinstance(carry, PassState) else carry
        spec = cache.specs[layer]
        earlier = carry.serving(layer) if isinstance(carry, PassState) else None
        # Keys in the host's memory, or on several devices, are read in parts.
        local = cache.shards is None and not is_offloaded(cache, layer)
        plain = local and spec.window is None and q.shape[1] == 1
        if earlier is None and plain and qk_rope is not None and v is not None:
            whole = policy.attend_token(
                *(policy_params, layer, cache, q, k, v, qk_rope),
                *(positions, context_len, num_new, backends),
            )
            if whole is not None:
                out, lse, chosen, after = whole
                if isinstance(carry, PassState):
                    after = carry.after_layer(after, chosen, policy.layers_served, is_new=True)
                return finished(out, lse, sinks, up), after
        # Written before it is read: a cache that is read and then written would be copied whole.
        q, cache = appended(
            cache, layer, positions, q, k, v, qk_rope, policy, policy_params, backends
        )
        chosen = earlier
        if chosen is None and spec.window is None:
            # Later queries are of draft tokens: the selection, and with it the law of the tokens
            # before them, must not depend on these.
            chosen = policy.select(policy_params, layer, cache, q[:, :1], context_len)
        after = cache
        if isinstance(carry, PassState):
            after = carry.after_layer(cache, chosen, policy.layers_served, is_new=earlier is None)

        def start_next(through):
            # Its result is what the rest of the layer computes with, so that a GPU is told to fetch
            # before it is told to compute.
            if not isinstance(after, PassState):
                return after, through
            known = after.serving(layer + 1) if layer + 1 < len(cache.specs) else None
            prefetched, through = fetch_next(
                *(
                    cache,
                    layer,
                    known,
                    next_queries,
                    through,
                    context_len,
                    policy,
                    policy_params,
                    backends,
                )
            )
            return dataclasses.replace(after, prefetched=prefetched), through

        if spec.window is not None or chosen is None:
            after, q = start_next(q)
            other = None if spec.window is not None else policy.read_as(policy_params, layer, cache)
            if other is not None:
                cache = replace_context(cache, layer, other, context_len, positions)
            return read_whole(cache, layer, q, positions, sinks, up, backends), after
        weights = None
        if earlier is None:
            weights = policy.weigh(policy_params, layer, cache, q, context_len, chosen)
        new_positions = context_len[:, None] + jnp.arange(num_new, dtype=jnp.int32)[None]
        if policy.moves_keys:
            columns = picked_columns(policy, policy_params, cache, layer, chosen, context_len)
            columns = joined_columns(
                columns, gather_columns(cache, layer, new_positions, ("keys", "values"))
            )
            where = jnp.concatenate([chosen, new_positions], axis=1)
            return read_columns(spec, q, columns, positions, where, sinks, up, backends), after
        counts = None
        if is_offloaded(cache, layer):
            prefetched = carry.prefetched if isinstance(carry, PassState) else None
            columns, selected, rest, cache = rows_of(
                *(cache, layer, chosen, new_positions, prefetched, backends)
            )
            after = (
                dataclasses.replace(after, cache=cache) if isinstance(after, PassState) else cache
            )
            after, columns["keys"] = start_next(columns["keys"])
        else:
            layout, columns = cache.layouts[layer], cache.columns[layer]
            # Of a linear layout they are the positions: no kernel needs to say so.
            linear = isinstance(layout, LinearLayout)
            selected = chosen if linear else jnp.where(chosen >= 0, layout.slots(chosen), -1)
            rest = layout.slots(new_positions)
            if isinstance(layout, Stripe):  # other positions have no slot here
                selected, rest = (jnp.where(x < layout.size, x, -1) for x in (selected, rest))
                counts = filled(selected)
            after, q = start_next(q)

        def read(q: Array, positions: Array) -> tuple[Array, Array]:
            return gathered_attention(
                q,
                columns["keys"],
                columns.get("values"),
                positions,
                selected,
                rest,
                context_len,
                counts=counts,
                log_weights=weights,
                implementation=backends.get("gathered_attention"),
                **settings_of(spec),
            )

        return attended(cache, read, q, positions, sinks, up), after

    attend.accepts_next_queries = True  # pyright: ignore[reportFunctionMemberAccess]
    return attend


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PassState:
    """The state of a pass between two layers.

    ``chosen``: the selection that the next ``left`` layers read too; ``prefetched``: rows of the
    next layer; ``selections``: what each layer so far has read, None for all positions.
    """

    cache: Cache
    chosen: Array | None = None
    left: int = dataclasses.field(default=0, metadata={"static": True})
    prefetched: PrefetchedRows | None = None
    selections: tuple[Array | None, ...] = ()

    def serving(self, layer: int) -> Array | None:
        """The selection that a layer reads, where an earlier one made it."""
        spec, chosen = self.cache.specs[layer], self.chosen
        if not self.left or chosen is None or spec.window is not None:
            return None
        return chosen if chosen.ndim == 2 or chosen.shape[1] == spec.kv_heads else None

    def after_layer(
        self, cache: Cache, chosen: Array | None, served: int, *, is_new: bool
    ) -> PassState:
        """The state for the next layer, after one that read ``chosen``; None for all positions."""
        selections = (*self.selections, chosen)
        if chosen is None:
            return dataclasses.replace(self, cache=cache, selections=selections)
        return PassState(
            cache, chosen, served - 1 if is_new else self.left - 1, selections=selections
        )


def run_selected(
    model: Model,
    tokens: Array,
    positions: Array,
    cache: Cache,
    context_len: Array,
    num_new: int,
    *,
    policy: Policy,
    policy_params: Any = None,
    backends: Mapping[str, str] = Backends(),
) -> tuple[Array, Cache, tuple[Array | None, ...]]:
    """A pass of ``model`` over ``tokens [B, T]`` that reads what ``policy`` selects.

    Returns the hidden states ``[B, T, D]``, the cache with the tokens' columns, and what each layer
    selected, None for all positions. Other arguments as in `selected_attend`.
    """
    attend = selected_attend(
        positions,
        context_len,
        num_new,
        policy=policy,
        policy_params=policy_params,
        backends=backends,
    )
    hidden, pass_state = model(tokens, positions, attend, PassState(cache))
    return hidden, pass_state.cache, pass_state.selections


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Compact:
    """A small copy of what a policy selected, with room for a draft after it.

    A loop that reads one selection many times reads the copy at the full speed of memory.

    Attributes:
        columns: Keys and values of each layer, ``[B, n + spare, K, H]``.
        positions: Their positions in each layer, int32 ``[B, n + spare]``, -1 for none.
        specs: The `LayerSpec` of each layer, static.
    """

    columns: tuple[dict[str, Array], ...]
    positions: tuple[Array, ...]
    specs: tuple[LayerSpec, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    @jax.named_scope("compaction")
    def of(cls, cache: Cache, policy: Policy, policy_params: Any, spare: int) -> Compact:
        """Copy what ``policy`` selects of the committed positions; ``spare`` slots follow."""
        new_positions = cache.lengths[:, None] + jnp.arange(spare, dtype=jnp.int32)[None]
        columns, positions = [], []
        for layer, spec in enumerate(cache.specs):
            chosen = None
            if spec.window is None:
                chosen = policy.select(policy_params, layer, cache, None, cache.lengths)
            if chosen is None:
                chosen = cache.layouts[layer].slot_positions(cache.lengths - 1)
            picked = picked_columns(policy, policy_params, cache, layer, chosen, cache.lengths)
            pad = ((0, 0), (0, spare), (0, 0), (0, 0))
            columns.append({name: jnp.pad(x, pad) for name, x in picked.items()})
            positions.append(jnp.concatenate([chosen, new_positions], axis=1))
        return cls(tuple(columns), tuple(positions), cache.specs)

    def append(self, layer: int, slot: Array, **columns: Array) -> Compact:
        """Write one token's ``columns [B, 1, K, H]`` of one layer into ``slot`` of every row."""
        return self.replaced(
            layer,
            **{
                name: jax.lax.dynamic_update_slice_in_dim(
                    x, columns[name].astype(x.dtype), slot, axis=1
                )
                for name, x in self.columns[layer].items()
            },
        )

    def replaced(self, layer: int, **columns: Array) -> Compact:
        """The copy with these columns of a layer replaced."""
        after = (*self.columns[:layer], columns, *self.columns[layer + 1 :])
        return dataclasses.replace(self, columns=after)


def compact_attend(
    positions: Array, back: Array, *, backends: Mapping[str, str] = Backends()
) -> Attend:
    """The ``attend`` that writes one token at ``positions [B, 1]`` into a `Compact` and reads it.

    ``back``: the distance of the token's slot from the end, 1 for the last slot.
    """

    @accepting_qk_rope
    def attend(layer, q, k, v, cache: Compact, *, sinks=None, up=None, qk_rope=None):
        where = cache.positions[layer]
        slot = where.shape[1] - back
        if qk_rope is not None and v is not None:
            slots = jnp.full(positions.shape, slot, jnp.int32)
            q, cache = _rotated(layer, q, k, v, qk_rope, cache, slots, backends)
        else:
            q, k = (q, k) if qk_rope is None else qk_rope(q, k)
            cache = cache.append(layer, slot, **_named(k, v))
        columns = cache.columns[layer]
        out = read_columns(cache.specs[layer], q, columns, positions, where, sinks, up, backends)
        return out, cache

    return attend


def _named(k: Array, v: Array | None) -> dict[str, Array]:
    """New keys and values as columns; without values, they are part of the keys."""
    return {"keys": k} if v is None else {"keys": k, "values": v}


def appended(
    cache: Cache,
    layer: int,
    positions: Array,
    q: Array,
    k: Array,
    v: Array | None,
    qk_rope: QKRope | None,
    policy: Policy,
    policy_params: Any,
    backends: Mapping[str, str],
) -> tuple[Array, Cache]:
    """The queries, rotated if ``qk_rope`` is not None, and the cache with the new tokens."""
    if is_offloaded(cache, layer):
        return append_to_host(
            *(cache, layer, positions, q, k, v, qk_rope, policy, policy_params, backends)
        )
    keeps_more = columns_of(policy, layer, cache.specs[layer])
    if qk_rope is not None and v is not None:
        slots = cache.slots(layer, positions)
        w = (
            policy.codes_by(policy_params, layer)
            if keeps_more and qk_rope.joined is not None
            else None
        )
        if w is not None:
            cache.check_keeps(layer, keeps_more)
            columns = cache.columns[layer]
            q, keys, values, codes = rotate_append_encode(
                *(q, k, v, qk_rope, columns["keys"], columns["values"], columns["codes"], w, slots),
                implementation=backends.get("rotate_append_encode"),
            )
            return q, cache.replaced(layer, keys=keys, values=values, codes=codes)
        q, cache = _rotated(layer, q, k, v, qk_rope, cache, slots, backends)
        if keeps_more:
            # Of the rotated keys the cache has the only copy; a slot past its end is not written.
            rows = jnp.arange(slots.shape[0])[:, None]
            k = cache.keys(layer).at[rows, slots].get(mode="clip")
            cache = cache.written(layer, slots, **encoded(policy, policy_params, layer, k, v))
        return q, cache
    if qk_rope is not None:
        q, k = qk_rope(q, k)
    more = encoded(policy, policy_params, layer, k, v) if keeps_more else {}
    return q, cache.append(layer, positions, **_named(k, v), **more)


def _rotated(
    layer: int,
    q: Array,
    k: Array,
    v: Array,
    qk_rope: QKRope,
    cache: Any,
    slots: Array,
    backends: Mapping[str, str],
) -> tuple[Array, Any]:
    """The rotated queries, and a `Cache` or `Compact` with rotated keys and values in ``slots``."""
    columns = cache.columns[layer]
    q, keys, values = rotate_and_append(
        *(q, k, v, qk_rope, columns["keys"], columns["values"], slots),
        implementation=backends.get("rotate_and_append"),
    )
    return q, cache.replaced(layer, keys=keys, values=values)


__all__ = [
    "Compact",
    "PassState",
    "compact_attend",
    "dense_attend",
    "run_selected",
    "selected_attend",
]
