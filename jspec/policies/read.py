"""What an `Attend` reads: a layer's columns, those of other devices included, as one output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jspec.cache import Cache, Linear, Stripe
from jspec.config import LayerSpec
from jspec.dispatch import Backends
from jspec.ops.attention.dense import attention
from jspec.policies.policy import Policy, taken
from jspec.typing import Array


def read_whole(
    cache: Cache,
    layer: int,
    q: Array,
    positions: Array,
    sinks: Array | None = None,
    up: Array | None = None,
    backends: Mapping[str, str] = Backends(),
) -> Array:
    """Attention over all that a layer holds, the new tokens at ``positions`` included."""
    spec, columns = cache.specs[layer], cache.columns[layer]
    positions, where = in_slots(cache, layer, positions)

    def read(q: Array) -> tuple[Array, Array]:
        return _attention(spec, q, columns, positions, where, backends)

    return finished(*over_shards(cache, read, q), *of_own_heads(cache, sinks, up))


def in_slots(cache: Cache, layer: int, positions: Array) -> tuple[Array, Array | None]:
    """Positions ``[B, T]`` of queries and ``[B, S]`` of a layer's slots for `jspec.attention`.

    None for the latter where a slot's position is its number.
    """
    layout = cache.layouts[layer]
    if isinstance(layout, Linear):
        return positions, None
    if isinstance(layout, Stripe) and cache.specs[layer].window is None:
        return layout.seen(positions), None
    return positions, layout.held(positions.max(axis=1))


def over_shards(
    cache: Cache, read: Callable[[Array], tuple[Array, Array]], q: Array
) -> tuple[Array, Array]:
    """What ``read(q)`` gives, and where devices share the rows, that of all their keys."""
    return read(q) if cache.shards is None else cache.shards.attended(read, q)


def of_own_heads(cache: Cache, *arrays: Array | None) -> tuple[Array | None, ...]:
    """What a model gives for each query head, for the heads that attention comes back with."""
    shards = cache.shards
    if shards is None:
        return arrays
    return tuple(None if x is None else shards.own_heads(x) for x in arrays)


def with_tail(
    cache: Cache, layer: int, columns: Mapping[str, Array], until: Array, positions: Array
) -> Cache:
    """The cache where a layer's ``columns`` are others below ``until [B]``, for reading alone."""
    held = cache.layouts[layer].held(positions.max(axis=1))
    is_tail = (held >= until[:, None])[..., None, None]
    own = cache.columns[layer]
    return cache.replaced(
        layer, **{name: jnp.where(is_tail, own[name], x) for name, x in columns.items()}
    )


def picked_columns(
    policy: Policy, arrays: Any, cache: Cache, layer: int, chosen: Array, until: Array
) -> dict[str, Array]:
    """A copy of the keys and values that ``policy`` chose, the keys where it moves them to."""
    picked = taken(cache, layer, chosen, ("keys", "values"))
    if policy.moves_keys and cache.specs[layer].window is None:
        picked["keys"] = policy.moved(arrays, layer, picked["keys"], chosen, until)
    return picked


def joined_columns(held: Mapping[str, Array], new: Mapping[str, Array]) -> dict[str, Array]:
    """What a layer held, and new tokens behind it."""
    return {
        name: jnp.concatenate([held[name], x.astype(held[name].dtype)], axis=1)
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
    backends: Mapping[str, str],
) -> Array:
    """Attention of a layer over keys that stand at ``key_positions``, all of them for None."""
    out, lse = _attention(spec, q, columns, positions, key_positions, backends)
    return finished(out, lse, sinks, up)


def _attention(
    spec: LayerSpec,
    q: Array,
    columns: Mapping[str, Array],
    positions: Array,
    key_positions: Array | None,
    backends: Mapping[str, str],
) -> tuple[Array, Array]:
    return attention(
        q,
        columns["keys"],
        columns.get("values"),
        positions,
        key_positions=key_positions,
        window=spec.window,
        implementation=backends.get("attention"),
        **settings_of(spec),
    )


def settings_of(spec: LayerSpec) -> dict[str, Any]:
    """What a layer asks of attention, whatever it reads."""
    value_size = spec.value_size if spec.values_in_keys else None
    return {"scale": spec.scale, "softcap": spec.softcap, "value_size": value_size}


def finished(out: Array, lse: Array, sinks: Array | None, up: Array | None) -> Array:
    """The output after the model's sinks and projection."""
    if sinks is not None:
        out = out * jax.nn.sigmoid(lse - sinks[None, None]).astype(out.dtype)[..., None]
    if up is not None:
        out = jnp.einsum("btnv,nvh->btnh", out, up)
    return out
