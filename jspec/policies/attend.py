"""Attention of a model over its cache: over all positions, or over what a policy selects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jspec.cache import Cache, LinearLayout
from jspec.ops.append import QKRope
from jspec.ops.host_rows import PrefetchedRows
from jspec.policies.append import append_tokens
from jspec.policies.offload import fetch_selected, is_offloaded, prefetch_next
from jspec.policies.pass_state import PassState
from jspec.policies.policy import Policy, TokenAttention, select_with
from jspec.policies.read import (
    finished,
    read_columns,
    read_slots,
    read_whole,
    rotated_columns,
    selected_columns,
)
from jspec.policies.selection import NewTokens, Selection
from jspec.typing import Array, Attend, Model


@dataclasses.dataclass(frozen=True, eq=False)
class SelectedAttend(Attend):
    """Appends new tokens and reads what a policy selects.

    The first query of the pass selects. A layer with a sliding window is read whole: it is small
    already. A model passes it a `Cache`, or a `PassState` where a selection serves several layers
    or rows are prefetched, and gets one of the same kind.

    Attributes:
        positions: int32 ``[B, T]``: positions of the new tokens, -1 for padding.
        context_len: int32 ``[B]``: committed positions per row, among which the policy selects.
        num_uncommitted: How many positions from ``context_len`` on are read, whatever is selected:
            those of this pass, and those that earlier passes of the draft wrote.
        policy: The policy that selects.
        policy_params: What `jspec.policies.prepare_params` made for it.
    """

    positions: Array
    context_len: Array
    num_uncommitted: int
    _: dataclasses.KW_ONLY
    policy: Policy
    policy_params: Any = None

    accepts_qk_rope = True
    accepts_next_queries = True

    def __call__(
        self,
        layer: int,
        q: Array,
        k: Array,
        v: Array | None,
        cache: Cache | PassState,
        /,
        *,
        sinks: Array | None = None,
        up: Array | None = None,
        qk_rope: QKRope | None = None,
        next_queries: Callable[[], Array] | None = None,
    ) -> tuple[Array, Any]:
        tokens = NewTokens(q, k, v, qk_rope, self.positions)
        if isinstance(cache, PassState):
            return self._attend(layer, tokens, cache, sinks, up, next_queries)
        out, state = self._attend(layer, tokens, PassState(cache), sinks, up, None)
        return out, state.cache

    def _attend(
        self,
        layer: int,
        tokens: NewTokens,
        state: PassState,
        sinks: Array | None,
        up: Array | None,
        next_queries: Callable[[], Array] | None,
    ) -> tuple[Array, PassState]:
        shared, prefetched = state.shared_positions(layer), state.prefetched
        if shared is None and (done := self._in_one_operation(layer, tokens, state.cache)):
            out = finished(done.out, done.lse, sinks, up)
            return out, state.after_layer(done.cache, done.selection)
        # Written before it is read: a cache that is read and then written would be copied whole.
        q, cache = append_tokens(state.cache, layer, tokens, self.policy, self.policy_params)
        if shared is None:
            selection = self._select(layer, cache, q)
            state = state.after_layer(cache, selection)
        else:
            selection = Selection(shared)
            state = state.after_shared(cache)
        if is_offloaded(cache, layer):
            # The next layer's rows are fetched after this layer's, while attention computes.
            return self._read_host(layer, q, state, selection, prefetched, sinks, up, next_queries)
        state, q = self._prefetch(layer, state, next_queries, q)
        return self._read(layer, q, cache, selection, sinks, up), state

    def _in_one_operation(
        self, layer: int, tokens: NewTokens, cache: Cache
    ) -> TokenAttention | None:
        """The result of the policy's `attend_token`, where this layer and pass may call it."""
        # Keys in host memory, on several devices, in blocks or in a ring are read in parts.
        is_local = cache.shards is None and not is_offloaded(cache, layer)
        is_linear = isinstance(cache.layouts[layer], LinearLayout)
        in_rows = is_linear and cache.table_of(layer) is None
        has_one_token = tokens.q.shape[1] == 1
        if not (is_local and in_rows and has_one_token) or cache.specs[layer].window is not None:
            return None
        if tokens.qk_rope is None or tokens.v is None:
            return None
        return self.policy.attend_token(
            self.policy_params, layer, cache, tokens, self.context_len, self.num_uncommitted
        )

    def _select(self, layer: int, cache: Cache, q: Array) -> Selection:
        if cache.specs[layer].window is not None:
            return Selection()
        # Later queries are of draft tokens: the selection, and with it the law of the tokens
        # before them, must not depend on these.
        args = (self.policy_params, layer, cache, q[:, :1], self.context_len)
        return select_with(self.policy, *args)

    def _prefetch(
        self, layer: int, state: PassState, next_queries: Callable[[], Array] | None, through: Array
    ) -> tuple[PassState, Array]:
        """Start to fetch the next layer's rows, where it lies in host memory.

        The result is what the rest of the layer computes with, so that a GPU is told to fetch
        before it is told to compute.
        """
        known = state.shared_positions(layer + 1)
        prefetched, through = prefetch_next(
            *(state.cache, layer, known, next_queries, through),
            *(self.context_len, self.policy, self.policy_params),
        )
        return dataclasses.replace(state, prefetched=prefetched), through

    @property
    def _new_positions(self) -> Array:
        """int32 ``[B, num_uncommitted]``: the positions that are read, whatever is selected."""
        return self.context_len[:, None] + jnp.arange(self.num_uncommitted, dtype=jnp.int32)[None]

    def _read(
        self,
        layer: int,
        q: Array,
        cache: Cache,
        selection: Selection,
        sinks: Array | None,
        up: Array | None,
    ) -> Array:
        """Attention over the selection and the new positions of a layer on the device."""
        if selection.positions is None:
            return read_whole(cache, layer, q, self.positions, sinks, up)
        if selection.key_rotation is not None:
            columns, where = rotated_columns(cache, layer, selection, self._new_positions)
            return read_columns(cache.specs[layer], q, columns, self.positions, where, sinks, up)
        columns, slots = selected_columns(cache, layer, selection, self._new_positions)
        weights = None if selection.log_weights is None else selection.log_weights(q)
        return read_slots(
            *(cache, layer, q, columns, self.positions, slots),
            *(self.context_len, weights, sinks, up),
        )

    def _read_host(
        self,
        layer: int,
        q: Array,
        state: PassState,
        selection: Selection,
        prefetched: PrefetchedRows | None,
        sinks: Array | None,
        up: Array | None,
        next_queries: Callable[[], Array] | None,
    ) -> tuple[Array, PassState]:
        """Attention over the selection and the new positions of a layer in host memory.

        Returns the output, and the state with this layer's rows and those of the next one, whose
        fetch has begun.
        """
        if selection.positions is None:
            raise ValueError(
                f"{type(self.policy).__name__} selects no positions in layer {layer}, which lies "
                "in host memory; leave it on the device by HostStorage(first_layer=)"
            )
        columns, slots, cache = fetch_selected(
            state.cache, layer, selection.positions, self._new_positions, prefetched
        )
        state = dataclasses.replace(state, cache=cache)
        state, columns["keys"] = self._prefetch(layer, state, next_queries, columns["keys"])
        weights = None if selection.log_weights is None else selection.log_weights(q)
        out = read_slots(
            *(cache, layer, q, columns, self.positions, slots),
            *(self.context_len, weights, sinks, up),
        )
        return out, state


def run_selected(
    model: Model,
    tokens: Array,
    positions: Array,
    cache: Cache,
    context_len: Array,
    num_uncommitted: int,
    *,
    policy: Policy,
    policy_params: Any = None,
) -> tuple[Array, Cache, tuple[Array | None, ...]]:
    """A pass of ``model`` over ``tokens [B, T]`` that reads what ``policy`` selects.

    Returns the hidden states ``[B, T, D]``, the cache with the tokens' columns, and the positions
    that each layer selected, None for all. Other arguments as in `SelectedAttend`.
    """
    attend = SelectedAttend(
        positions, context_len, num_uncommitted, policy=policy, policy_params=policy_params
    )
    hidden, state = model(tokens, positions, attend, PassState(cache))
    return hidden, state.cache, state.selections
