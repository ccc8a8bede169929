"""Layouts: which slot of the cache a position has, and which position a slot has.

Every layout writes positions in ascending order, one pass after another, and is undone by length:
what a pass wrote past the committed length is overwritten by the passes that follow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jspec.config import LayerSpec
from jspec.typing import Array

# Positions of a block: a tile of attention, so that a kernel reads a tile from one block.
BLOCK = 128


class Layout(Protocol):
    """A map between positions and the ``size`` slots of a row: a frozen pytree."""

    @property
    def size(self) -> int: ...

    @property
    def capacity(self) -> int:
        """Most positions that have a slot, those of other devices included."""
        ...

    @property
    def wraps(self) -> bool:
        """Whether a position takes the slot of the one ``capacity`` before it."""
        ...

    @property
    def ranks(self) -> int:
        """The number of equal parts of the slots, each of which grows at its own end."""
        ...

    def slots(self, positions: Array) -> Array:
        """The slot of each position, int32 of the same shape; ``size`` for a negative position."""
        ...

    def slot_positions(self, newest: Array) -> Array:
        """The position in each slot, int32 ``[B, S]``, -1 where the slot is empty.

        ``newest`` int32 ``[B]``: the last position that was written to each row, -1 for an empty
        row.
        """
        ...

    def grown(self, capacity: int) -> Layout:
        """The layout for ``capacity`` positions, in which every position stays in its slot of its
        rank.

        Each of the ``ranks`` parts gets its new slots at its end.
        """
        ...


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class LinearLayout:
    """One slot per position, in order."""

    size: int

    def __post_init__(self) -> None:
        _check_size(self)

    @property
    def capacity(self) -> int:
        return self.size

    @property
    def wraps(self) -> bool:
        return False

    @property
    def ranks(self) -> int:
        return 1

    def slots(self, positions: Array) -> Array:
        return jnp.where(positions >= 0, positions, self.size)

    def slot_positions(self, newest: Array) -> Array:
        slot = jnp.arange(self.size, dtype=jnp.int32)[None]
        return _slot_positions(slot, newest, self.size, wraps=False)

    def grown(self, capacity: int) -> LinearLayout:
        return LinearLayout(capacity)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class PagedLayout(LinearLayout):
    """One slot per position, in order, in blocks that lie anywhere in the memory of all rows.

    Which block has which slots of a row is said by the block table of the `Cache`, so that a row
    takes as many blocks as it has positions. Keys are ``[blocks, block, K, H]``.

    Attributes:
        size: Most positions of a row, a multiple of ``block``.
        blocks: Blocks of all rows.
        block: Positions of a block.
    """

    blocks: int
    block: int = BLOCK

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blocks < 1 or self.block < 1 or self.size % self.block:
            raise ValueError(
                f"size={self.size} must be a multiple of block={self.block}, at least 1, and "
                f"blocks={self.blocks} at least 1"
            )

    @property
    def width(self) -> int:
        """Blocks of a row that has all its positions."""
        return self.size // self.block

    @property
    def in_one_piece(self) -> LinearLayout:
        """The layout of a row with memory of its own."""
        return LinearLayout(self.size)

    def pool_slots(self, table: Array, slots: Array) -> Array:
        """Where ``slots [B, ...]`` are in the ``blocks * block`` slots of all rows, in that shape.

        Past their end for a slot that a row does not have. ``table`` as in `Cache`.
        """
        index = jnp.clip(slots // self.block, 0, self.width - 1).reshape(len(slots), -1)
        block = jnp.take_along_axis(table, index, axis=1).reshape(slots.shape)
        exists = (slots >= 0) & (slots < self.size) & (block >= 0)
        return jnp.where(exists, block * self.block + slots % self.block, self.blocks * self.block)

    def grown(self, capacity: int) -> LinearLayout:
        raise ValueError(
            f"{self} cannot grow to {capacity} positions; start with the capacity that is needed"
        )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class RingLayout:
    """The last ``size`` positions, for a layer with a sliding window.

    A window of w tokens needs ``w + gamma + 1`` slots: a pass that writes gamma + 1 tokens then
    overwrites nothing that a query of this pass, or of the next after a rejection, reads.
    """

    size: int

    def __post_init__(self) -> None:
        _check_size(self)

    @property
    def capacity(self) -> int:
        return self.size

    @property
    def wraps(self) -> bool:
        return True

    @property
    def ranks(self) -> int:
        return 1

    def slots(self, positions: Array) -> Array:
        return jnp.where(positions >= 0, positions % self.size, self.size)

    def slot_positions(self, newest: Array) -> Array:
        slot = jnp.arange(self.size, dtype=jnp.int32)[None]
        return _slot_positions(slot, newest, self.size, wraps=True)

    def grown(self, capacity: int) -> RingLayout:
        return self  # it has the last ``size`` positions, however many there are


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StripedLayout:
    """Blocks of ``block`` positions dealt to ``ranks`` in a cycle (Helix, section 2.1).

    The slots of a rank are contiguous, so that sharding the slots over a mesh axis of ``ranks``
    devices gives each device its own: slots ``[r * size / ranks, (r + 1) * size / ranks)``. With
    ``wraps``, a `RingLayout` of ``size`` positions is dealt so, and each rank has a ring.
    """

    size: int
    ranks: int
    block: int = 16
    wraps: bool = False

    def __post_init__(self) -> None:
        _check_size(self)
        if self.ranks < 1 or self.block < 1 or self.size % (self.ranks * self.block):
            raise ValueError(
                f"size={self.size} must be a multiple of ranks={self.ranks} times "
                f"block={self.block}, each at least 1"
            )

    @classmethod
    def holding(
        cls, capacity: int, ranks: int, block: int, *, wraps: bool = False
    ) -> StripedLayout:
        """The smallest one with room for ``capacity`` positions."""
        return cls(-(-capacity // (ranks * block)) * ranks * block, ranks, block, wraps)

    @property
    def capacity(self) -> int:
        return self.size

    def part(self, axis: str | tuple[str, ...]) -> Stripe:
        """The layout of one rank, inside a `jax.shard_map` over the mesh axis or axes ``axis``."""
        return Stripe(self._share, self.ranks, self.block, axis, self.wraps)

    def slots(self, positions: Array) -> Array:
        place = positions % self.size if self.wraps else positions
        block_index, within = place // self.block, place % self.block
        slot = (
            (block_index % self.ranks) * self._share
            + block_index // self.ranks * self.block
            + within
        )
        return jnp.where(positions >= 0, slot, self.size)

    def slot_positions(self, newest: Array) -> Array:
        slot = jnp.arange(self.size, dtype=jnp.int32)[None]
        rank, rank_slot = slot // self._share, slot % self._share
        place = (rank_slot // self.block * self.ranks + rank) * self.block + rank_slot % self.block
        return _slot_positions(place, newest, self.size, wraps=self.wraps)

    def grown(self, capacity: int) -> StripedLayout:
        return self if self.wraps else StripedLayout.holding(capacity, self.ranks, self.block)

    @property
    def _share(self) -> int:
        """Slots of a rank."""
        return self.size // self.ranks


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Stripe:
    """The ``size`` slots that one of ``ranks`` devices has of a `StripedLayout` row.

    It is used inside a `jax.shard_map`, whose ``axis`` gives the rank. Positions of other ranks
    have no slot. Slots have positions in ascending order, unless the row ``wraps``.
    """

    size: int
    ranks: int
    block: int
    axis: str | tuple[str, ...]
    wraps: bool = False

    @property
    def capacity(self) -> int:
        return self.size * self.ranks

    @property
    def whole(self) -> StripedLayout:
        """The layout of all ranks."""
        return StripedLayout(self.capacity, self.ranks, self.block, self.wraps)

    def slots(self, positions: Array) -> Array:
        place = positions % self.capacity if self.wraps else positions
        block_index, within = place // self.block, place % self.block
        is_local = (positions >= 0) & (block_index % self.ranks == self._rank)
        return jnp.where(is_local, block_index // self.ranks * self.block + within, self.size)

    def slot_positions(self, newest: Array) -> Array:
        place = self.at(jnp.arange(self.size, dtype=jnp.int32)[None])
        return _slot_positions(place, newest, self.capacity, wraps=self.wraps)

    def at(self, slots: Array) -> Array:
        """The first position that each of ``slots`` can have, its only one unless ``wraps``."""
        block_index = slots // self.block * self.ranks + self._rank
        return block_index * self.block + slots % self.block

    def last_slots(self, positions: Array) -> Array:
        """The slot of the last local position up to each of ``positions``; -1 if there is none.

        So a query reads the slots up to it, as if they were the positions of a `LinearLayout`. Not
        for a row that wraps.
        """
        block_index, within = positions // self.block, positions % self.block
        before = (block_index - self._rank + self.ranks - 1) // self.ranks * self.block
        in_block = jnp.where(block_index % self.ranks == self._rank, within + 1, 0)
        return jnp.where(positions >= 0, before + in_block - 1, -1)

    def grown(self, capacity: int) -> Stripe:
        raise ValueError(f"{self} cannot grow to {capacity} positions inside jax.shard_map")

    @property
    def _rank(self) -> Array:
        return lax.axis_index(self.axis)


def _slot_positions(place: Array, newest: Array, capacity: int, *, wraps: bool) -> Array:
    """The position in each slot, int32 ``[B, S]``, -1 for an empty one.

    ``place`` int32 ``[1, S]``: the first position of each slot, below ``capacity``; ``newest``
    int32 ``[B]``: the last position of each row.
    """
    newest = newest[:, None]
    if not wraps:
        return jnp.where(place <= newest, place, -1)
    position = newest - (newest - place) % capacity
    return jnp.where(position >= 0, position, -1)


def _check_size(layout: Layout) -> None:
    if layout.size < 1:
        raise ValueError(f"size={layout.size} must be at least 1 slot")


def layouts_of(
    specs: Sequence[LayerSpec],
    capacity: int,
    gamma: int,
    longest: int | None = None,
    *,
    rings: bool = True,
    ranks: int = 1,
    block: int = 16,
) -> tuple[Layout, ...]:
    """A layout for each layer: a `RingLayout` where a sliding window is shorter than a row.

    Args:
        specs: The `LayerSpec` of each layer.
        capacity: Positions per row.
        gamma: Most draft tokens of a step.
        longest: Positions of a row at the end, where the capacity is to grow; None is ``capacity``.
        rings: Whether there are ring layouts; without, every layer has room for all positions.
        ranks: Devices that share a row; with several, all layouts are `StripedLayout`.
        block: Positions of a block of these.
    """
    longest = capacity if longest is None else longest

    def layout_of(window: int | None) -> Layout:
        needed = longest if window is None or not rings else window + gamma + 1
        wraps = needed < longest
        if ranks == 1:
            return RingLayout(needed) if wraps else LinearLayout(capacity)
        ring = StripedLayout.holding(needed, ranks, block, wraps=True)
        # Rounded up, a ring may have room for a whole row.
        wraps = wraps and ring.size < longest
        return ring if wraps else StripedLayout.holding(capacity, ranks, block)

    return tuple(layout_of(spec.window) for spec in specs)


def check_rings(specs: Sequence[LayerSpec], layouts: Sequence[Layout], gamma: int) -> None:
    """Raise `ValueError` where a pass of ``gamma + 1`` tokens overwrites what its queries read."""
    for spec, layout in zip(specs, layouts, strict=True):
        if layout.wraps and spec.window is not None:
            room = layout.capacity - spec.window - 1
            if gamma > room:
                raise ValueError(
                    f"gamma={gamma} does not fit a cache whose rings were made for gamma={room}; "
                    "start decoding with the gamma of the longest step"
                )
