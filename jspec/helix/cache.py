"""A cache on a mesh: what each device holds, and what it sees of it inside `jax.shard_map`."""

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
    """A layout for each layer, with room for ``capacity`` positions or a few more.

    Rows are in stripes; whole where nobody shares them. A layer with a sliding window keeps a ring,
    for steps of ``gamma`` draft tokens at most: each device has its part of the window, rounded up
    to whole blocks. ``longest``: the positions of a row in the end, where the capacity is to grow;
    None is ``capacity``.
    """
    return layouts_of(specs, capacity, gamma, longest, ranks=helix.stripes, block=helix.block)


def column_spec(helix: HelixConfig) -> PartitionSpec:
    """How a column ``[B, S, K, ...]`` is sharded: slots over KVP, key-value heads over TPA."""
    return PartitionSpec(None, helix.kvp_axes if helix.stripes > 1 else None, helix.tpa_axes)


def cache_specs(helix: HelixConfig, cache: Cache) -> Cache:
    """``cache`` with how each array is sharded in its place, for ``in_specs`` and ``out_specs``."""
    columns: Any = jax.tree.map(lambda x: column_spec(helix), cache.columns)
    lengths: Any = PartitionSpec()
    return dataclasses.replace(cache, columns=columns, lengths=lengths)


def part_of(helix: HelixConfig, cache: Cache) -> Cache:
    """``cache`` inside the mesh: this device's slots and heads, and how it attends to the others'.

    What `jspec.dense_attend` makes of it is exact attention over all keys, of the heads of this
    device's part of the output projection.
    """
    layouts = tuple(
        x.part(helix.kvp_axes) if isinstance(x, StripedLayout) else x for x in cache.layouts
    )
    specs = tuple(local_spec(spec, helix.tpa) for spec in cache.specs)
    return dataclasses.replace(cache, layouts=layouts, specs=specs, shards=Exchange(helix))


def whole_of(helix: HelixConfig, cache: Cache) -> Cache:
    """What `part_of` made, as it was outside the mesh."""
    layouts = tuple(x.whole if isinstance(x, Stripe) else x for x in cache.layouts)
    specs = tuple(dataclasses.replace(x, kv_heads=x.kv_heads * helix.tpa) for x in cache.specs)
    return dataclasses.replace(cache, layouts=layouts, specs=specs, shards=None)


def local_spec(spec: LayerSpec, tpa: int) -> LayerSpec:
    """What one of ``tpa`` devices keeps of a layer."""
    return dataclasses.replace(spec, kv_heads=spec.kv_heads // tpa)
