"""Layers with keys and values in the host's memory: fetched whole, or the rows that are read.

A pass that reads all of a layer works on a copy of it. One that reads a selection fetches its rows
into a small buffer. Both store the new keys and values in the host's memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jspec.cache import Cache
from jspec.host import in_host
from jspec.ops.append import QKRope, rotate_and_append
from jspec.ops.host_rows import DeviceRows, PrefetchedRows, fetch_ahead, fetch_rows, store_rows
from jspec.policies.policy import Policy, columns_of
from jspec.typing import Array, Attend


def is_offloaded(cache: Cache, layer: int) -> bool:
    """Whether the keys and values of a layer lie in the host's memory."""
    return layer < len(cache.specs) and in_host(cache.keys(layer))


def through_device(
    attend: Attend, positions: Array, backends: Mapping[str, str]
) -> Callable[..., Any]:
    """``attend``, which appends at ``positions [B, T]``, also for layers in the host's memory.

    It gets a copy of such a layer on the device while it reads it.
    """

    @functools.wraps(attend)
    def on_device(layer, q, k, v, cache: Cache, **more):
        if not is_offloaded(cache, layer):
            return attend(layer, q, k, v, cache, **more)
        host_columns, slots = _host_columns(cache, layer), cache.slots(layer, positions)
        copies = dict(zip(host_columns, _whole(cache, layer, positions, backends), strict=True))
        out, after = attend(layer, q, k, v, cache.replaced(layer, **copies), **more)
        rows = jnp.arange(len(slots))[:, None]
        new = [after.columns[layer][name].at[rows, slots].get(mode="clip") for name in host_columns]
        return out, _stored(after.replaced(layer, **host_columns), layer, new, slots, backends)

    return on_device


def append_to_host(
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
    slots, host_columns = cache.slots(layer, positions), _host_columns(cache, layer)
    encode = functools.partial(policy.encode, policy_params, layer)
    dtype = host_columns["keys"].dtype
    if qk_rope is not None and v is not None:
        # By the operation that appends on a device, into room for the new tokens alone: the same
        # bits.
        keys, values = jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype)
        buffer_slots = jnp.broadcast_to(
            jnp.arange(slots.shape[1], dtype=jnp.int32)[None], slots.shape
        )
        implementation = backends.get("rotate_and_append")
        q, k, v = rotate_and_append(
            *(q, k, v, qk_rope, keys, values, buffer_slots), implementation=implementation
        )
    elif qk_rope is not None:
        q, k = qk_rope(q, k)
    policy_columns = encode(k) if columns_of(policy, layer, cache.specs[layer]) else {}
    new = [x.astype(dtype) for x in (k, v) if x is not None]
    return q, _stored(cache, layer, new, slots, backends).written(layer, slots, **policy_columns)


def rows_of(
    cache: Cache,
    layer: int,
    chosen: Array,
    new_positions: Array,
    prefetched: PrefetchedRows | None,
    backends: Mapping[str, str],
) -> tuple[dict[str, Array], Array, Array, Cache]:
    """Fetch the keys and values of a layer at ``chosen`` and at ``new_positions``.

    Args:
        cache: The cache, whose columns ``keys`` and ``values`` of the layer lie in host memory.
        layer: The layer's index.
        chosen: int32 ``[B, n]`` or, per KV head, ``[B, K, n]``: selected positions, -1 for none.
        new_positions: int32 ``[B, m]``: positions of new tokens, which all heads read.
        prefetched: Rows of the layer that are on their way already.
        backends: Named backends of operations.

    Returns:
        The fetched columns by name, ``[B, n + m, K, H]``; the slots in them of the chosen
        positions and of the new ones, as `jspec.ops.gathered_attention` takes them; and the cache,
        with the chosen rows as its `device_rows`.
    """
    host_columns, slots = _host_columns(cache, layer), cache.layouts[layer].slots
    heads = cache.specs[layer].kv_heads
    shared = (chosen if chosen.ndim == 3 else chosen[:, None], new_positions[:, None])
    row_slots = [jnp.broadcast_to(slots(x), (len(x), heads, x.shape[-1])) for x in shared]
    rows = fetch_rows(
        tuple(host_columns.values()),
        jnp.concatenate(row_slots, axis=-1),
        device_rows=cache.device_rows_of(layer),
        prefetched=prefetched,
        implementation=backends.get("fetch_rows"),
    )
    count = chosen.shape[-1]
    places = jnp.where(chosen >= 0, jnp.arange(count, dtype=jnp.int32), -1)
    rest = count + jnp.arange(new_positions.shape[1], dtype=jnp.int32)
    if cache.device_rows_of(layer) is not None:
        # What is chosen is committed, so that its rows stay as they are; and positions are slots.
        places_of = jnp.broadcast_to(shared[0], row_slots[0].shape)
        cache = cache.with_device_rows(
            layer, DeviceRows(tuple(x[:, :count] for x in rows), places_of)
        )
    columns = dict(zip(host_columns, rows, strict=True))
    return columns, places, jnp.broadcast_to(rest, new_positions.shape), cache


def with_room_for_device_rows(cache: Cache, policy: Policy) -> Cache:
    """The cache with room for its `device_rows`, all of them empty.

    Valid only while no other request fills a row, and none is rolled back past what was committed.
    """
    device_rows: list[DeviceRows | None] = []
    for layer, (spec, layout) in enumerate(zip(cache.specs, cache.layouts, strict=True)):
        count = policy.num_device_rows(layer, layout.capacity) if is_offloaded(cache, layer) else 0
        if not count:
            device_rows.append(None)
            continue
        host_columns = _host_columns(cache, layer).values()
        rows = tuple(jnp.zeros((len(x), count, *x.shape[2:]), x.dtype) for x in host_columns)
        none = jnp.full((len(rows[0]), spec.kv_heads, count), -1, jnp.int32)
        device_rows.append(DeviceRows(rows, none))
    return dataclasses.replace(cache, device_rows=tuple(device_rows) if any(device_rows) else ())


def fetch_next(
    cache: Cache,
    layer: int,
    known: Array | None,
    next_queries: Callable[[], Array] | None,
    through: Array,
    context_len: Array,
    policy: Policy,
    policy_params: Any,
    backends: Mapping[str, str],
) -> tuple[PrefetchedRows | None, Array]:
    """Start to fetch what the layer after ``layer`` will read, where the policy predicts it.

    Args:
        cache: The cache.
        layer: The layer that computes now.
        known: The selection of the next layer, where an earlier layer made it.
        next_queries: Returns queries of the next layer, by which its selection is predicted.
        through: What this layer computes with; it is returned unchanged, after the fetch has begun.
        context_len: int32 ``[B]``: committed positions per row.
        policy: The policy.
        policy_params: What `jspec.policies.prepare_params` made for it.
        backends: Named backends of operations.
    """
    following = layer + 1
    predictor = policy.prefetch_policy(following) if is_offloaded(cache, following) else None
    if predictor is None:
        return None, through
    if known is None and next_queries is not None:
        known = predictor.select(
            policy_params, following, cache, next_queries()[:, :1], context_len
        )
    if known is None:
        return None, through
    columns, heads = (
        tuple(_host_columns(cache, following).values()),
        cache.specs[following].kv_heads,
    )
    known = known if known.ndim == 3 else known[:, None]
    slots = jnp.broadcast_to(known, (len(known), heads, known.shape[-1]))
    return fetch_ahead(
        *(columns, slots, through),
        device_rows=cache.device_rows_of(following),
        implementation=backends.get("fetch_ahead"),
    )


def _whole(
    cache: Cache, layer: int, positions: Array, backends: Mapping[str, str]
) -> tuple[Array, ...]:
    """A copy of a layer on the device up to ``positions [B, T]``, zeros after that.

    By the operation that fetches rows: copies by XLA begin with the program, those of all layers.
    """
    columns = tuple(_host_columns(cache, layer).values())
    batch, size, heads, _ = columns[0].shape
    first = jnp.where(positions >= 0, positions, size).min(axis=1, keepdims=True)
    slots = jnp.arange(size, dtype=jnp.int32)[None]
    slots = jnp.where(slots < first, slots, -1)[:, None]
    slots = jnp.broadcast_to(slots, (batch, heads, size))
    return fetch_rows(columns, slots, implementation=backends.get("fetch_rows"))


def _host_columns(cache: Cache, layer: int) -> dict[str, Array]:
    columns = cache.columns[layer]
    return {name: columns[name] for name in ("keys", "values") if name in columns}


def _stored(
    cache: Cache, layer: int, new: Sequence[Array], slots: Array, backends: Mapping[str, str]
) -> Cache:
    host_columns = _host_columns(cache, layer)
    stored = store_rows(
        tuple(host_columns.values()), new, slots, implementation=backends.get("store_rows")
    )
    return cache.replaced(layer, **dict(zip(host_columns, stored, strict=True)))
