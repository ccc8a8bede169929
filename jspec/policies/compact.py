"""A copy of what a policy selects, for a draft that reads one selection many times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jspec.cache import Cache
from jspec.config import LayerSpec
from jspec.ops.append import QKRope
from jspec.policies.append import rotate_into
from jspec.policies.policy import Policy, select_with
from jspec.policies.read import picked_columns, read_columns
from jspec.policies.selection import NewTokens, Selection
from jspec.typing import Array, Attend


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Compact:
    """A small copy of what a policy selected, with room for a draft after it.

    A loop that reads one selection many times reads the copy at the full speed of memory.

    Attributes:
        columns: Keys and values of each layer, ``[B, n + spare, K, H]``.
        positions: Their positions in each layer, int32 ``[B, n + spare]``, -1 for none.
        specs: The `LayerSpec` of each layer, static.
    """

    columns: tuple[dict[str, Array], ...]
    positions: tuple[Array, ...]
    specs: tuple[LayerSpec, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    @jax.named_scope("compaction")
    def of(cls, cache: Cache, policy: Policy, policy_params: Any, spare: int) -> Compact:
        """Copy what ``policy`` selects of the committed positions; ``spare`` slots follow."""
        new_positions = cache.lengths[:, None] + jnp.arange(spare, dtype=jnp.int32)[None]
        columns, positions = [], []
        for layer, spec in enumerate(cache.specs):
            selection = Selection()
            if spec.window is None:
                selection = select_with(policy, policy_params, layer, cache, None, cache.lengths)
            if selection.positions is None:
                all_positions = cache.layouts[layer].slot_positions(cache.lengths - 1)
                selection = dataclasses.replace(selection, positions=all_positions)
            assert selection.positions is not None
            picked = picked_columns(cache, layer, selection)
            pad = ((0, 0), (0, spare), (0, 0), (0, 0))
            columns.append({name: jnp.pad(x, pad) for name, x in picked.items()})
            positions.append(jnp.concatenate([selection.positions, new_positions], axis=1))
        return cls(tuple(columns), tuple(positions), cache.specs)

    def append(self, layer: int, slot: Array, **columns: Array) -> Compact:
        """Write one token's ``columns [B, 1, K, H]`` of one layer into ``slot`` of every row."""
        return self.replaced(
            layer,
            **{
                name: jax.lax.dynamic_update_slice_in_dim(
                    x, columns[name].astype(x.dtype), slot, axis=1
                )
                for name, x in self.columns[layer].items()
            },
        )

    def replaced(self, layer: int, **columns: Array) -> Compact:
        """The copy with these columns of a layer replaced."""
        after = (*self.columns[:layer], columns, *self.columns[layer + 1 :])
        return dataclasses.replace(self, columns=after)


@dataclasses.dataclass(frozen=True, eq=False)
class CompactAttend(Attend):
    """Writes one token into a `Compact` and reads it.

    Attributes:
        positions: int32 ``[B, 1]``: positions of the token.
        slots_left: The distance of the token's slot from the end, 1 for the last slot.
    """

    positions: Array
    slots_left: Array

    accepts_qk_rope = True

    def __call__(
        self,
        layer: int,
        q: Array,
        k: Array,
        v: Array | None,
        cache: Compact,
        /,
        *,
        sinks: Array | None = None,
        up: Array | None = None,
        qk_rope: QKRope | None = None,
        next_queries: Callable[[], Array] | None = None,
    ) -> tuple[Array, Compact]:
        tokens, where = NewTokens(q, k, v, qk_rope, self.positions), cache.positions[layer]
        slot = where.shape[1] - self.slots_left
        if qk_rope is not None and v is not None:
            slots = jnp.full(self.positions.shape, slot, jnp.int32)
            q, cache = rotate_into(cache, layer, tokens, slots)
        else:
            tokens = tokens.rotated()
            q, cache = tokens.q, cache.append(layer, slot, **tokens.columns)
        spec, columns = cache.specs[layer], cache.columns[layer]
        return read_columns(spec, q, columns, self.positions, where, sinks, up), cache
