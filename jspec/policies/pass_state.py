"""What a pass carries from layer to layer in addition to the cache."""

from __future__ import annotations

import dataclasses

import jax

from jspec.cache import Cache
from jspec.ops.host_rows import PrefetchedRows
from jspec.policies.selection import Selection
from jspec.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PassState:
    """The state of a pass between two layers.

    Attributes:
        cache: The cache.
        positions: The selected positions that the next ``layers_left`` layers read too.
        layers_left: Static.
        prefetched: Rows of the next layer whose fetch has begun.
        selections: The positions that each layer so far has read, None for all.
    """

    cache: Cache
    positions: Array | None = None
    layers_left: int = dataclasses.field(default=0, metadata={"static": True})
    prefetched: PrefetchedRows | None = None
    selections: tuple[Array | None, ...] = ()

    def shared_positions(self, layer: int) -> Array | None:
        """The positions that a layer reads, where an earlier one selected them."""
        if layer >= len(self.cache.specs) or not self.layers_left or self.positions is None:
            return None
        spec, positions = self.cache.specs[layer], self.positions
        if spec.window is not None:
            return None
        fits = positions.ndim == 2 or positions.shape[1] == spec.kv_heads
        return positions if fits else None

    def after_layer(self, cache: Cache, selection: Selection) -> PassState:
        """The state for the next layer, after one that read its own ``selection``."""
        selections = (*self.selections, selection.positions)
        if selection.positions is None:
            return dataclasses.replace(self, cache=cache, prefetched=None, selections=selections)
        return PassState(
            cache, selection.positions, selection.num_layers - 1, selections=selections
        )

    def after_shared(self, cache: Cache) -> PassState:
        """The state for the next layer, after one that read `positions`."""
        return PassState(
            cache,
            self.positions,
            self.layers_left - 1,
            selections=(*self.selections, self.positions),
        )
