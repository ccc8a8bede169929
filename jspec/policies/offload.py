"""Attention over layers in host memory: appended to, copied, fetched by a selection, predicted."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jspec.cache import Cache
from jspec.cache.storage import (
    copy_to_device,
    empty_device_rows,
    fetch_slots,
    is_in_host,
    prefetch_slots,
    store_slots,
    token_columns,
)
from jspec.ops.append import rotate_and_append
from jspec.ops.host_rows import DeviceRows, PrefetchedRows
from jspec.policies.policy import Policy, columns_of, select_with
from jspec.policies.read import SelectedSlots
from jspec.policies.selection import NewTokens
from jspec.typing import Array


def is_offloaded(cache: Cache, layer: int) -> bool:
    """Whether the keys and values of a layer lie in host memory."""
    return layer < len(cache.specs) and is_in_host(cache.columns[layer])


def append_to_host(
    cache: Cache, layer: int, tokens: NewTokens, policy: Policy, policy_params: Any
) -> tuple[Array, Cache]:
    """Append tokens to a layer in host memory.

    Returns the queries ``[B, T, N, H]``, normed and rotated, and the cache with the new tokens.
    """
    slots, columns = cache.slots(layer, tokens.positions), cache.columns[layer]
    if tokens.qk_rope is not None and tokens.v is not None:
        # By the operation that appends on a device, into room for the new tokens alone: the same
        # bits.
        dtype = columns["keys"].dtype
        keys, values = jnp.zeros(tokens.k.shape, dtype), jnp.zeros(tokens.v.shape, dtype)
        buffer_slots = jnp.arange(slots.shape[1], dtype=jnp.int32)[None]
        q, k, v = rotate_and_append(
            *(tokens.q, tokens.k, tokens.v, tokens.qk_rope, keys, values),
            jnp.broadcast_to(buffer_slots, slots.shape),
        )
        tokens = NewTokens(q, k, v, None, tokens.positions)
    tokens = tokens.rotated()
    policy_columns = {}
    if columns_of(policy, layer, cache.specs[layer]):
        policy_columns = policy.encoder(policy_params, layer)(tokens.k, tokens.v)
    stored = store_slots(columns, tokens.columns, slots)
    return tokens.q, cache.replaced(layer, **stored).written(layer, slots, **policy_columns)


def attend_on_device(
    attend: Callable[..., tuple[Array, Cache]], cache: Cache, layer: int, positions: Array
) -> tuple[Array, Cache]:
    """The result of ``attend(cache)``, which appends at ``positions [B, T]`` to a layer in host
    memory, by a copy of the layer on the device.
    """
    columns, slots = cache.columns[layer], cache.slots(layer, positions)
    size = columns["keys"].shape[1]
    first = jnp.where(positions >= 0, positions, size).min(axis=1)
    out, after = attend(cache.replaced(layer, **copy_to_device(columns, first)))
    rows = jnp.arange(len(slots))[:, None]
    new = {
        name: after.columns[layer][name].at[rows, slots].get(mode="clip")
        for name in token_columns(columns)
    }
    return out, after.replaced(layer, **store_slots(columns, new, slots))


def fetch_selected(
    cache: Cache,
    layer: int,
    selected: Array,
    new_positions: Array,
    prefetched: PrefetchedRows | None,
) -> tuple[dict[str, Array], SelectedSlots, Cache]:
    """Fetch the keys and values of a layer at ``selected`` and at ``new_positions``.

    Args:
        cache: The cache, whose keys and values of the layer lie in host memory.
        layer: The layer's index.
        selected: int32 ``[B, n]`` or, per KV head, ``[B, K, n]``: selected positions, -1 for none.
        new_positions: int32 ``[B, m]``: positions of new tokens, which all heads read.
        prefetched: Rows of the layer whose fetch has begun.

    Returns:
        The fetched columns by name, ``[B, n + m, K, H]``; the slots in them; and the cache, with
        the selected rows as its `device_rows`.
    """
    device_rows = cache.device_rows_of(layer)
    by_head = _by_head(cache, layer, selected)
    slots = jnp.concatenate([by_head, _by_head(cache, layer, new_positions)], axis=-1)
    columns = fetch_slots(
        cache.columns[layer], cache.layouts[layer].slots(slots), device_rows, prefetched
    )
    count = selected.shape[-1]
    selected_slots = jnp.where(selected >= 0, jnp.arange(count, dtype=jnp.int32), -1)
    new_slots = count + jnp.arange(new_positions.shape[1], dtype=jnp.int32)
    if device_rows is not None:
        # What is selected is committed, so that its rows stay as they are; positions are slots.
        rows = DeviceRows(tuple(x[:, :count] for x in columns.values()), by_head)
        cache = cache.with_device_rows(layer, rows)
    new_slots = jnp.broadcast_to(new_slots, new_positions.shape)
    return columns, SelectedSlots(selected_slots, new_slots), cache


def prefetch_next(
    cache: Cache,
    layer: int,
    known: Array | None,
    next_queries: Callable[[], Array] | None,
    through: Array,
    context_len: Array,
    policy: Policy,
    policy_params: Any,
) -> tuple[PrefetchedRows | None, Array]:
    """Start to fetch what the layer after ``layer`` will read, where it lies in host memory.

    Args:
        cache: The cache.
        layer: The layer that computes now.
        known: The positions that the next layer reads, where an earlier layer selected them.
        next_queries: Returns queries of the next layer, by which its selection is predicted.
        through: What this layer computes with; it is returned unchanged, after the fetch has begun.
        context_len: int32 ``[B]``: committed positions per row.
        policy: The policy.
        policy_params: What `jspec.policies.prepare_params` made for it.
    """
    following, storage = layer + 1, cache.storage
    if storage is None or not storage.prefetch_share or not is_offloaded(cache, following):
        return None, through
    if known is None and next_queries is not None:
        q = next_queries()[:, :1]
        select = functools.partial(policy.select, budget_share=storage.prefetch_share)
        known = select(policy_params, following, cache, q, context_len).positions
    if known is None:
        return None, through
    slots, rows = _by_head(cache, following, known), cache.device_rows_of(following)
    return prefetch_slots(cache.columns[following], slots, through, rows)


def with_room_for_device_rows(cache: Cache, policy: Policy, policy_params: Any) -> Cache:
    """The cache with room for its `device_rows`, all of them empty.

    Valid only while no other request fills a row, and none is rolled back past what was committed.
    """
    if cache.storage is None or not cache.storage.reuse:
        return cache

    def device_rows(layer: int) -> DeviceRows | None:
        if not is_offloaded(cache, layer):
            return None
        spec, lengths = cache.specs[layer], cache.lengths
        # How many positions are selected does not depend on the number of query heads.
        shape = (len(lengths), 1, spec.kv_heads, spec.key_size)
        selected: Any = jax.eval_shape(
            lambda q: select_with(policy, policy_params, layer, cache, q, lengths).positions,
            jax.ShapeDtypeStruct(shape, cache.keys(layer).dtype),
        )
        return empty_device_rows(cache.columns[layer], selected.shape[-1])

    rows = tuple(map(device_rows, range(len(cache.specs))))
    return dataclasses.replace(cache, device_rows=rows if any(rows) else ())


def _by_head(cache: Cache, layer: int, positions: Array) -> Array:
    """``positions [B, n]`` or ``[B, K, n]`` as ``[B, K, n]``."""
    positions = positions if positions.ndim == 3 else positions[:, None]
    shape = (len(positions), cache.specs[layer].kv_heads, positions.shape[-1])
    return jnp.broadcast_to(positions, shape)
