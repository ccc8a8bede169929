"""What an `Attend` reads: a layer's columns, and those of other devices, as one output."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.cache import Cache, LinearLayout, PagedLayout, Shards, Stripe
from jspec.cache.cache import Read
from jspec.config import LayerSpec
from jspec.ops.append import rotate
from jspec.ops.attention.dense import attention
from jspec.ops.attention.gathered import filled, gathered_attention
from jspec.ops.attention.tree import tree_attention
from jspec.ops.tree import Tree
from jspec.policies.selection import Selection
from jspec.typing import Array


class SelectedSlots(NamedTuple):
    """Where a layer's queries read, as `jspec.ops.gathered_attention` takes it.

    Attributes:
        selected: int32 ``[B, n]`` or, per head, ``[B, K, n]``: the slots of the selected positions,
            -1 for none.
        new: int32 ``[B, m]``: the slots of the new positions, -1 for none.
        counts: int32 ``[B]`` or ``[B, K]``: how many of the first ``selected`` slots there are, on
            a device that has some of the positions only; None for all.
    """

    selected: Array
    new: Array
    counts: Array | None = None


def read_whole(
    cache: Cache,
    layer: int,
    q: Array,
    positions: Array,
    sinks: Array | None = None,
    up: Array | None = None,
) -> Array:
    """Attention over all positions of a layer, the new tokens at ``positions`` included."""
    positions, where = in_slots(cache, layer, positions)
    table = cache.table_of(layer)
    return read_at(cache, layer, q, cache.columns[layer], positions, where, sinks, up, table)


def read_tree(
    cache: Cache,
    layer: int,
    q: Array,
    tree: Tree,
    positions: Array,
    sinks: Array | None,
    up: Array | None,
) -> Array:
    """Attention of a tree's nodes over a layer, which has the nodes at ``positions [B, T]``, and
    those of the other devices that share the rows.
    """
    spec, layout, columns = cache.specs[layer], cache.layouts[layer], cache.columns[layer]
    key_positions = None
    if not isinstance(layout, LinearLayout):
        key_positions = layout.slot_positions(positions.max(axis=1))
    slots = layout.slots(positions)

    def read(q: Array, positions: Array) -> tuple[Array, Array]:
        nodes = dataclasses.replace(tree, positions=jnp.where(positions < 0, -1, tree.positions))
        return tree_attention(
            q,
            columns["keys"],
            columns.get("values"),
            nodes,
            slots,
            key_positions=key_positions,
            window=spec.window,
            **settings_of(spec),
        )

    return attended(cache, read, q, positions, sinks, up)


def read_at(
    cache: Cache,
    layer: int,
    q: Array,
    columns: Mapping[str, Array],
    positions: Array,
    key_positions: Array | None,
    sinks: Array | None,
    up: Array | None,
    table: Array | None = None,
) -> Array:
    """Attention over ``columns`` of a layer and those of the other devices that share the rows.

    ``positions`` int32 ``[B, T]``: of the queries; ``key_positions`` int32 ``[B, S]``: of the keys,
    -1 for none; None where they are their indices; ``table``: of columns in blocks.
    """

    def read(q: Array, positions: Array) -> tuple[Array, Array]:
        return _attention(cache.specs[layer], q, columns, positions, key_positions, table)

    return attended(cache, read, q, positions, sinks, up)


def in_slots(cache: Cache, layer: int, positions: Array) -> tuple[Array, Array | None]:
    """Positions ``[B, T]`` of queries and ``[B, S]`` of a layer's slots for `jspec.ops.attention`.

    None for the latter where a slot's position is its index.
    """
    layout = cache.layouts[layer]
    if isinstance(layout, LinearLayout):
        return positions, None
    if isinstance(layout, Stripe) and not layout.wraps and cache.specs[layer].window is None:
        return layout.last_slots(positions), None
    return positions, layout.slot_positions(positions.max(axis=1))


def attended(
    cache: Cache, read: Read, q: Array, positions: Array, sinks: Array | None, up: Array | None
) -> Array:
    """The output of ``read(q, positions)``, over the keys of all devices that share the rows.

    ``read`` returns output and log-sum-exp over the keys of this device.
    """
    shards = cache.shards
    if shards is None:
        return finished(*read(q, positions), sinks, up)
    return _finish_local_heads(shards, *shards.attended(read, q, positions, up), sinks)


def merged(cache: Cache, out: Array, lse: Array, sinks: Array | None, up: Array | None) -> Array:
    """The output over the keys of all devices, from ``out`` and ``lse`` over those of this one."""
    shards = cache.shards
    if shards is None:
        return finished(out, lse, sinks, up)
    return _finish_local_heads(shards, *shards.merged(out, lse, up), sinks)


def _finish_local_heads(shards: Shards, out: Array, lse: Array, sinks: Array | None) -> Array:
    """The output after the model's ``sinks`` of the heads that this device has."""
    return finished(out, lse, None if sinks is None else shards.local_heads(sinks), None)


def picked_columns(cache: Cache, layer: int, selection: Selection) -> dict[str, Array]:
    """A copy of the selected keys and values, with the keys rotated where the selection says so."""
    assert selection.positions is not None
    picked = gather_columns(cache, layer, selection.positions, ("keys", "values"))
    if selection.key_rotation is not None:
        angles = selection.key_rotation[:, :, None]
        picked["keys"] = rotate(picked["keys"], jnp.cos(angles), jnp.sin(angles))
    return picked


def rotated_columns(
    cache: Cache, layer: int, selection: Selection, new_positions: Array
) -> tuple[dict[str, Array], Array]:
    """A copy of the selected keys and values and of the new ones, and their positions."""
    assert selection.positions is not None
    picked = picked_columns(cache, layer, selection)
    new = gather_columns(cache, layer, new_positions, ("keys", "values"))
    return joined_columns(picked, new), jnp.concatenate([selection.positions, new_positions], 1)


def joined_columns(columns: Mapping[str, Array], new: Mapping[str, Array]) -> dict[str, Array]:
    """A layer's ``columns`` with ``new`` tokens appended."""
    return {
        name: jnp.concatenate([columns[name], x.astype(columns[name].dtype)], axis=1)
        for name, x in new.items()
    }


def read_columns(
    spec: LayerSpec,
    q: Array,
    columns: Mapping[str, Array],
    positions: Array,
    key_positions: Array | None,
    sinks: Array | None,
    up: Array | None,
) -> Array:
    """Attention of a layer over keys at ``key_positions``; None for their indices."""
    out, lse = _attention(spec, q, columns, positions, key_positions)
    return finished(out, lse, sinks, up)


def _attention(
    spec: LayerSpec,
    q: Array,
    columns: Mapping[str, Array],
    positions: Array,
    key_positions: Array | None,
    table: Array | None = None,
) -> tuple[Array, Array]:
    return attention(
        q,
        columns["keys"],
        columns.get("values"),
        positions,
        key_positions=key_positions,
        table=table,
        window=spec.window,
        **settings_of(spec),
    )


def selected_columns(
    cache: Cache, layer: int, selection: Selection, new_positions: Array
) -> tuple[dict[str, Array], SelectedSlots]:
    """A layer's columns, and the slots of selected positions, -1 for none, and of new ones.

    ``new_positions`` int32 ``[B, m]``.
    """
    layout, selected = cache.layouts[layer], selection.positions
    assert selected is not None
    if isinstance(layout, PagedLayout):
        columns, slots = cache.in_memory(layer, selected)
        _, new_slots = cache.in_memory(layer, new_positions)
        end = layout.blocks * layout.block
        slots, new_slots = (jnp.where(x < end, x, -1) for x in (slots, new_slots))
        return columns, SelectedSlots(slots, new_slots)
    new_slots = layout.slots(new_positions)
    if isinstance(layout, Stripe):
        slots, counts = selection.slots or local_slots(layout, selected)
        new_slots = jnp.where(new_slots < layout.size, new_slots, -1)
        return cache.columns[layer], SelectedSlots(slots, new_slots, counts)
    # Of a linear layout they are the positions: no kernel needs to say so.
    is_linear = isinstance(layout, LinearLayout)
    slots = selected if is_linear else jnp.where(selected >= 0, layout.slots(selected), -1)
    return cache.columns[layer], SelectedSlots(slots, new_slots)


def local_slots(layout: Stripe, positions: Array) -> tuple[Array, Array]:
    """The slots of those of ``positions [..., n]`` that this device has, -1 for others.

    And int32 ``[...]``, how many entries of each list to read: up to its last slot.
    """
    slots = layout.slots(positions)
    slots = jnp.where(slots < layout.size, slots, -1)
    return slots, filled(slots)


def read_slots(
    cache: Cache,
    layer: int,
    q: Array,
    columns: Mapping[str, Array],
    positions: Array,
    slots: SelectedSlots,
    context_len: Array,
    log_weights: Array | None,
    sinks: Array | None,
    up: Array | None,
) -> Array:
    """Attention over some slots of a layer, on all devices that share the rows.

    Args:
        cache: The cache.
        layer: The layer's index.
        q: ``[B, T, N, H]``: queries.
        columns: The keys and values to read, by name.
        positions: int32 ``[B, T]``: positions of the queries, -1 for padding.
        slots: The slots of ``columns`` to read.
        context_len: int32 ``[B]``: the first of the new positions.
        log_weights: float32 ``[B, T, N, n]``: those of the selected slots; None for equal ones.
        sinks: The layer's attention sinks, if it has some.
        up: The linear map of each head's output, if the layer has one.
    """

    def read(q: Array, positions: Array) -> tuple[Array, Array]:
        return gathered_attention(
            q,
            columns["keys"],
            columns.get("values"),
            positions,
            slots.selected,
            slots.new,
            context_len,
            counts=slots.counts,
            log_weights=log_weights,
            **settings_of(cache.specs[layer]),
        )

    return attended(cache, read, q, positions, sinks, up)


def settings_of(spec: LayerSpec) -> dict[str, Any]:
    """The settings of a layer's attention, whatever it reads."""
    value_size = spec.value_size if spec.values_in_keys else None
    return {"scale": spec.scale, "softcap": spec.softcap, "value_size": value_size}


def finished(out: Array, lse: Array, sinks: Array | None, up: Array | None) -> Array:
    """The output ``[B, T, N, H']`` after the model's ``sinks [N]`` and projection ``up``."""
    if sinks is not None:
        out = out * jax.nn.sigmoid(lse - sinks[None, None]).astype(out.dtype)[..., None]
    return projected(out, up)


def projected(out: Array, up: Array | None) -> Array:
    """``out [B, T, N, value size]`` times ``up [N, value size, H]``; unchanged for None."""
    return out if up is None else jnp.einsum("btnv,nvh->btnh", out, up)


def gather_columns(
    cache: Cache, layer: int, positions: Array, names: Sequence[str]
) -> dict[str, Array]:
    """Some columns ``[B, n, K, ...]`` at ``positions [B, n]`` or, per head, ``[B, K, n]``.

    Entries for -1 are undefined.
    """
    columns, slots = cache.in_memory(layer, cache.layouts[layer].slots(positions))
    index = slots[:, :, None, None] if slots.ndim == 2 else jnp.swapaxes(slots, 1, 2)[..., None]
    return {
        name: jnp.take_along_axis(columns[name], index, axis=1, mode="clip")
        for name in names
        if name in columns
    }
