"""Dense: every query reads every position."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from jspec.cache import Cache
from jspec.ops.append import QKRope
from jspec.ops.tree import Tree
from jspec.policies.append import append_tokens
from jspec.policies.offload import attend_on_device, is_offloaded
from jspec.policies.policy import Policy
from jspec.policies.read import joined_columns, read_at, read_tree, read_whole
from jspec.policies.selection import NewTokens, Selection
from jspec.typing import Array, Attend


@dataclasses.dataclass(frozen=True)
class Dense(Policy):
    """No selection. As a drafter it is the model itself, whose greedy draft is always accepted."""

    runs_on_mesh: ClassVar[bool] = True

    def select(
        self,
        policy_params: Any,
        layer: int,
        cache: Cache,
        q: Array | None,
        context_len: Array,
        budget_share: float = 1.0,
    ) -> Selection:
        return Selection()


DENSE = Dense()


@dataclasses.dataclass(frozen=True, eq=False)
class DenseAttend(Attend):
    """Appends new tokens to a `Cache` and reads all positions.

    Attributes:
        positions: int32 ``[B, T]``: positions of the new tokens, -1 for padding.
        tree: The tree that the new tokens are, whose node i is written at position ``positions[:,
            0] + i``; None where each comes after the one before it.
        policy: The policy whose columns are appended with keys and values.
        policy_params: What `jspec.policies.prepare_params` made for it.
    """

    positions: Array
    _: dataclasses.KW_ONLY
    tree: Tree | None = None
    policy: Policy = DENSE
    policy_params: Any = None

    accepts_qk_rope = True

    def __call__(
        self,
        layer: int,
        q: Array,
        k: Array,
        v: Array | None,
        cache: Cache,
        /,
        *,
        sinks: Array | None = None,
        up: Array | None = None,
        qk_rope: QKRope | None = None,
        next_queries: Callable[[], Array] | None = None,
    ) -> tuple[Array, Cache]:
        tokens = NewTokens(q, k, v, qk_rope, self.positions)
        if is_offloaded(cache, layer):

            def attend(cache: Cache) -> tuple[Array, Cache]:
                return self._attend(layer, tokens, cache, sinks, up)

            return attend_on_device(attend, cache, layer, self.positions)
        return self._attend(layer, tokens, cache, sinks, up)

    def _attend(
        self, layer: int, tokens: NewTokens, cache: Cache, sinks: Array | None, up: Array | None
    ) -> tuple[Array, Cache]:
        spec, layout, before = cache.specs[layer], cache.layouts[layer], cache.columns[layer]
        positions, overwrites = self.positions, False
        if layout.wraps and spec.window is not None:
            overwrites = positions.shape[1] > layout.capacity - spec.window
        tokens = tokens.rotated() if overwrites else tokens
        q, cache = append_tokens(cache, layer, tokens, self.policy, self.policy_params)
        if self.tree is not None:
            return read_tree(cache, layer, q, self.tree, positions, sinks, up), cache
        if not overwrites:
            return read_whole(cache, layer, q, positions, sinks, up), cache
        # Such a pass overwrites what its first queries read: they read the columns of before.
        columns = joined_columns(before, tokens.columns)
        first = jnp.where(positions >= 0, positions, np.iinfo(np.int32).max).min(axis=1)
        # Of the new tokens, too, a device reads those that have a slot here.
        local_positions = jnp.where(layout.slots(positions) < layout.size, positions, -1)
        where = jnp.concatenate([layout.slot_positions(first - 1), local_positions], axis=1)
        return read_at(cache, layer, q, columns, positions, where, sinks, up), cache
