"""A cache on a mesh: the shards of the devices, and their view inside `jax.shard_map`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jspec.cache import Cache, Layout, Stripe, StripedLayout
from jspec.cache.layout import layouts_of
from jspec.config import LayerSpec
from jspec.helix.attention import Exchange
from jspec.helix.mesh import HelixConfig


def layouts_on(
    helix: HelixConfig,
    specs: Sequence[LayerSpec],
    capacity: int,
    gamma: int,
    longest: int | None = None,
) -> tuple[Layout, ...]:
    """Create the layout of each layer's cache on a mesh.

    Rows are striped over the devices that share positions. A layer with a sliding window keeps a
    ring: each device holds its part of the window, rounded up to whole blocks.

    Args:
        helix: the layout of the model.
        specs: the layers.
        capacity: positions of a row, rounded up to whole blocks on each device.
        gamma: the most draft tokens of a step.
        longest: the final number of positions where the capacity grows; None is ``capacity``.

    Returns:
        A layout for each layer.
    """
    return layouts_of(specs, capacity, gamma, longest, ranks=helix.stripes, block=helix.block)


def column_spec(helix: HelixConfig) -> PartitionSpec:
    """How a column ``[B, S, K, ...]`` is sharded: slots over KVP, key-value heads over TPA."""
    return PartitionSpec(None, helix.kvp_axes if helix.stripes > 1 else None, helix.tpa_axes)


def cache_specs(helix: HelixConfig, cache: Cache) -> Cache:
    """Replace each array of ``cache`` by its `PartitionSpec`, for ``in_specs``, ``out_specs``."""
    columns: Any = jax.tree.map(lambda x: column_spec(helix), cache.columns)
    lengths: Any = PartitionSpec()
    return dataclasses.replace(cache, columns=columns, lengths=lengths)


def part_of(helix: HelixConfig, cache: Cache) -> Cache:
    """The view of ``cache`` inside the mesh: this device's slots and heads, and the exchange.

    With it, `jspec.policies.DenseAttend` computes exact attention over the keys of all devices,
    for the heads of this device's part of the output projection.

    Args:
        helix: the layout of the model.
        cache: this device's shards, as `jax.shard_map` passes them.

    Returns:
        The cache for ``attend``; `whole_of` undoes this.
    """
    layouts = tuple(
        x.part(helix.kvp_axes) if isinstance(x, StripedLayout) else x for x in cache.layouts
    )
    specs = tuple(local_spec(spec, helix.tpa) for spec in cache.specs)
    return dataclasses.replace(cache, layouts=layouts, specs=specs, shards=Exchange(helix))


def whole_of(helix: HelixConfig, cache: Cache) -> Cache:
    """Undo `part_of`: the cache with the layouts and specs it has outside the mesh."""
    layouts = tuple(x.whole if isinstance(x, Stripe) else x for x in cache.layouts)
    specs = tuple(dataclasses.replace(x, kv_heads=x.kv_heads * helix.tpa) for x in cache.specs)
    return dataclasses.replace(cache, layouts=layouts, specs=specs, shards=None)


def local_spec(spec: LayerSpec, tpa: int) -> LayerSpec:
    """The layer with the key-value heads of one of ``tpa`` devices."""
    return dataclasses.replace(spec, kv_heads=spec.kv_heads // tpa)
