"""Where a position lives in the cache, and which position a slot holds.

Every layout writes positions in ascending order, a pass behind the other, and forgets by length:
what a pass wrote past the committed length is overwritten by the passes that follow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import jax.numpy as jnp
from jax import lax

from jspec.config import LayerSpec
from jspec.typing import Array


class Layout(Protocol):
    """A frozen, hashable map between positions and the ``size`` slots of a row."""

    @property
    def size(self) -> int: ...

    @property
    def capacity(self) -> int:
        """The most positions that there are slots for, those of other devices included."""
        ...

    def slots(self, positions: Array) -> Array:
        """The slot of each position, int32 of the same shape; ``size`` for a negative position."""
        ...

    def held(self, newest: Array) -> Array:
        """The position in each slot, -1 where it is empty, int32 ``[B, S]``.

        ``newest [B]``: the last position that was written to each row, -1 for an empty row.
        """
        ...

    def grown(self, capacity: int) -> Layout:
        """The layout for so many positions in which every held position stays in its slot."""
        ...


@dataclasses.dataclass(frozen=True)
class Linear:
    """A slot for each position, in order."""

    size: int

    def __post_init__(self) -> None:
        _check_size(self)

    @property
    def capacity(self) -> int:
        return self.size

    def slots(self, positions: Array) -> Array:
        return jnp.where(positions >= 0, positions, self.size)

    def held(self, newest: Array) -> Array:
        slot = jnp.arange(self.size, dtype=jnp.int32)[None]
        return jnp.where(slot <= newest[:, None], slot, -1)

    def grown(self, capacity: int) -> Linear:
        return Linear(capacity)


@dataclasses.dataclass(frozen=True)
class Ring:
    """The last ``size`` positions: what a layer with a sliding window needs.

    A window of w tokens needs ``w + gamma + 1`` slots: a pass that writes gamma + 1 tokens then
    overwrites nothing that a query of this pass, or of the next after a rejection, can see.
    """

    size: int

    def __post_init__(self) -> None:
        _check_size(self)

    @property
    def capacity(self) -> int:
        return self.size

    def slots(self, positions: Array) -> Array:
        return jnp.where(positions >= 0, positions % self.size, self.size)

    def held(self, newest: Array) -> Array:
        slot = jnp.arange(self.size, dtype=jnp.int32)[None]
        position = newest[:, None] - (newest[:, None] - slot) % self.size
        return jnp.where(position >= 0, position, -1)

    def grown(self, capacity: int) -> Ring:
        return self  # it holds the last positions of any number


@dataclasses.dataclass(frozen=True)
class Striped:
    """Blocks of ``block`` positions dealt to ``ranks`` in turn (Helix, section 2.1).

    A rank's slots lie side by side, so that sharding the slots over a mesh axis of ``ranks``
    devices gives each device its own: slots ``[r * size / ranks, (r + 1) * size / ranks)``.
    """

    size: int
    ranks: int
    block: int = 16

    def __post_init__(self) -> None:
        _check_size(self)
        if self.ranks < 1 or self.block < 1 or self.size % (self.ranks * self.block):
            raise ValueError(
                f"size={self.size} must be a multiple of ranks={self.ranks} times "
                f"block={self.block}, each at least 1"
            )

    @classmethod
    def holding(cls, capacity: int, ranks: int, block: int) -> Striped:
        """The smallest one with room for ``capacity`` positions."""
        return cls(-(-capacity // (ranks * block)) * ranks * block, ranks, block)

    @property
    def capacity(self) -> int:
        return self.size

    def part(self, axis: str | tuple[str, ...]) -> Stripe:
        """What a rank has of it, inside a `jax.shard_map` over the mesh axis or axes ``axis``."""
        return Stripe(self._share, self.ranks, self.block, axis)

    def slots(self, positions: Array) -> Array:
        turn, within = positions // self.block, positions % self.block
        slot = (turn % self.ranks) * self._share + turn // self.ranks * self.block + within
        return jnp.where(positions >= 0, slot, self.size)

    def held(self, newest: Array) -> Array:
        slot = jnp.arange(self.size, dtype=jnp.int32)[None]
        rank, own = slot // self._share, slot % self._share
        position = (own // self.block * self.ranks + rank) * self.block + own % self.block
        return jnp.where(position <= newest[:, None], position, -1)

    def grown(self, capacity: int) -> Striped:
        raise ValueError(
            f"{self} cannot grow to {capacity} positions: other ranks would hold them; start with "
            "the capacity that is needed"
        )

    @property
    def _share(self) -> int:
        """Slots of a rank."""
        return self.size // self.ranks


@dataclasses.dataclass(frozen=True)
class Stripe:
    """The ``size`` slots that one of ``ranks`` devices holds of a `Striped` row.

    It is used inside a `jax.shard_map`, whose ``axis`` says which rank this is. Positions of other
    ranks have no slot. Slots hold positions in ascending order.
    """

    size: int
    ranks: int
    block: int
    axis: str | tuple[str, ...]

    @property
    def capacity(self) -> int:
        return self.size * self.ranks

    @property
    def whole(self) -> Striped:
        """The layout of all ranks."""
        return Striped(self.capacity, self.ranks, self.block)

    def slots(self, positions: Array) -> Array:
        turn, within = positions // self.block, positions % self.block
        own = (positions >= 0) & (turn % self.ranks == self._rank)
        return jnp.where(own, turn // self.ranks * self.block + within, self.size)

    def held(self, newest: Array) -> Array:
        position = self.at(jnp.arange(self.size, dtype=jnp.int32)[None])
        return jnp.where(position <= newest[:, None], position, -1)

    def at(self, slots: Array) -> Array:
        """The position that lives in each of ``slots``."""
        turn = slots // self.block * self.ranks + self._rank
        return turn * self.block + slots % self.block

    def seen(self, positions: Array) -> Array:
        """The slot of the last position up to each of ``positions``; -1 if none has a slot here.

        So a query sees the slots up to it, as if they were the positions of a `Linear` layout.
        """
        turn, within = positions // self.block, positions % self.block
        before = (turn - self._rank + self.ranks - 1) // self.ranks * self.block
        here = jnp.where(turn % self.ranks == self._rank, within + 1, 0)
        return jnp.where(positions >= 0, before + here - 1, -1)

    def grown(self, capacity: int) -> Stripe:
        raise ValueError(f"{self} cannot grow to {capacity} positions inside jax.shard_map")

    @property
    def _rank(self) -> Array:
        return lax.axis_index(self.axis)


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
) -> tuple[Layout, ...]:
    """A layout for each layer: a `Ring` where a sliding window is shorter than a row.

    ``longest``: the positions of a row in the end, where the capacity is to grow; None is
    ``capacity``. Without ``rings`` every layer has room for all positions.
    """
    longest = capacity if longest is None else longest
    found = {
        spec.window: Ring(spec.window + gamma + 1)
        for spec in specs
        if rings and spec.window is not None and spec.window + gamma + 1 < longest
    }
    whole = Linear(capacity)
    return tuple(whole if s.window is None else found.get(s.window, whole) for s in specs)


def check_rings(specs: Sequence[LayerSpec], layouts: Sequence[Layout], gamma: int) -> None:
    """Raise `ValueError` where a pass of ``gamma + 1`` tokens overwrites what is still seen."""
    for spec, layout in zip(specs, layouts, strict=True):
        if isinstance(layout, Ring) and spec.window is not None:
            room = layout.size - spec.window - 1
            if gamma > room:
                raise ValueError(
                    f"gamma={gamma} does not fit a cache whose rings were made for gamma={room}; "
                    "start decoding with the gamma of the longest step"
                )
