"""The key-value cache: append at ragged offsets, roll back by length, view a window.

A slot is a position: the key of the token at position s sits in slot s. Slots at or past a row's
length hold nothing; their content, NaN included, never reaches an output.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from jspec.config import LayerSpec
from jspec.ops.attention import attention
from jspec.typing import Array, Attend, ModelShape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer, each ``[B, S, K, H]``, and ``lengths`` int32 ``[B]``."""

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    lengths: Array

    @classmethod
    def create(cls, shape: ModelShape, batch: int, capacity: int, dtype) -> KVCache:
        """An empty cache of ``capacity`` slots a row."""
        for index, spec in enumerate(shape.layers):
            plain = LayerSpec(spec.kv_heads, spec.key_size, spec.key_size, rope=spec.rope)
            if spec != plain:
                raise ValueError(
                    f"layers[{index}]={spec} asks for what attention over a KVCache does not have; "
                    f"it has {plain}"
                )
        sizes = [(batch, capacity, spec.kv_heads, spec.key_size) for spec in shape.layers]
        keys, values = (tuple(jnp.zeros(size, dtype) for size in sizes) for _ in range(2))
        return cls(keys, values, jnp.zeros((batch,), jnp.int32))

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values over all layers."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in self.keys + self.values)

    def append(self, layer: int, k: Array, v: Array, positions: Array) -> KVCache:
        """Write ``k``, ``v [B, T, K, H]`` of one layer at ``positions [B, T]``; -1 writes nothing.

        Lengths stay as they are until `with_lengths`: what was written past them can be committed
        or, by doing nothing, be undone. Positions must be below the capacity, which
        `jspec.decode.state.start` makes sure of before the first step.
        """
        return dataclasses.replace(
            self,
            keys=_replaced(self.keys, layer, _scatter(self.keys[layer], k, positions)),
            values=_replaced(self.values, layer, _scatter(self.values[layer], v, positions)),
        )

    def with_lengths(self, lengths: Array) -> KVCache:
        """The same slots with other ``lengths [B]``: shorter rolls back, longer commits."""
        return dataclasses.replace(self, lengths=lengths)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Window:
    """A small copy of a cache's slots with their ``positions [B, S']``, -1 where empty."""

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    positions: Array

    @classmethod
    def view(cls, cache: KVCache, sinks: int, recent: int, spare: int) -> Window:
        """Copy the first ``sinks`` and last ``recent`` slots of each row, with ``spare`` room."""
        sinks = min(sinks, cache.capacity)
        recent = min(recent, cache.capacity)
        first = jnp.maximum(cache.lengths - recent, 0)[:, None] + jnp.arange(recent)[None]
        head = jnp.broadcast_to(jnp.arange(sinks), (first.shape[0], sinks))
        positions = jnp.concatenate([head, jnp.where(first >= sinks, first, -1)], axis=1)
        positions = jnp.where(positions < cache.lengths[:, None], positions, -1)
        slots = jnp.concatenate([head, first], axis=1)

        def pick(x: Array) -> Array:
            x = jnp.take_along_axis(x, slots[:, :, None, None], axis=1, mode="clip")
            return jnp.pad(x, ((0, 0), (0, spare), (0, 0), (0, 0)))

        return cls(
            tuple(map(pick, cache.keys)),
            tuple(map(pick, cache.values)),
            jnp.pad(positions, ((0, 0), (0, spare)), constant_values=-1),
        )

    def append(self, layer: int, k: Array, v: Array, slot: Array) -> Window:
        """Write one token's ``k``, ``v [B, 1, K, H]`` of one layer into ``slot`` of every row."""
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=slot, axis=1)
        return dataclasses.replace(
            self,
            keys=_replaced(self.keys, layer, put(self.keys[layer], k)),
            values=_replaced(self.values, layer, put(self.values[layer], v)),
        )


def dense(positions: Array, implementation: str | None = None) -> Attend:
    """The ``attend`` that appends to a `KVCache` at ``positions [B, T]`` and reads all of it."""

    def attend(layer, q, k, v, cache, *, sinks=None, up=None):
        _refuse_extras(v, sinks, up)
        cache = cache.append(layer, k, v, positions)
        keys, values = cache.keys[layer], cache.values[layer]
        out, _ = attention(q, keys, values, positions, implementation=implementation)
        return out, cache

    return attend


def windowed(positions: Array, slot: Array, implementation: str | None = None) -> Attend:
    """The ``attend`` that appends one token at ``positions [B, 1]`` to a `Window` and reads it.

    The caller marks ``slot`` in the window's positions beforehand.
    """

    def attend(layer, q, k, v, window, *, sinks=None, up=None):
        _refuse_extras(v, sinks, up)
        window = window.append(layer, k, v, slot)
        out, _ = attention(
            q,
            window.keys[layer],
            window.values[layer],
            positions,
            key_positions=window.positions,
            implementation=implementation,
        )
        return out, window

    return attend


def _refuse_extras(v: Array | None, sinks: Array | None, up: Array | None) -> None:
    if v is None or sinks is not None or up is not None:
        raise NotImplementedError("attention over a KVCache has neither v=None nor sinks nor up")


def _replaced(items: tuple[Array, ...], index: int, item: Array) -> tuple[Array, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _scatter(slots: Array, new: Array, positions: Array) -> Array:
    # Padding is sent past the end, where "drop" leaves it out; -1 itself would wrap around.
    target = jnp.where(positions >= 0, positions, slots.shape[1])
    rows = jnp.arange(slots.shape[0])[:, None]
    return slots.at[rows, target].set(new.astype(slots.dtype), mode="drop")
