"""The programs of prefill for the slots of a running batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jspec.cache import Cache, PagedLayout
from jspec.cache.paged import in_one_piece
from jspec.decode.on_mesh import on_mesh_of
from jspec.decode.prefill_pass import init_drafter_state, prefill_chunk
from jspec.decode.rows import PackedRows, insert_rows
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState, FlatModels, Models
from jspec.ops.attention.dense import rows_of_blocks
from jspec.sharding import with_auto_axes
from jspec.typing import Array


@jax.jit
def sum_of(done: Array, lengths: Array) -> Array:
    return done.sum() + lengths.sum()


@functools.partial(jax.jit, static_argnames=("rows", "size", "config"), donate_argnames="state")
def prefill_slots(
    models: FlatModels,
    state: DecodeState,
    packed: PackedRows,
    rows: int,
    size: int,
    config: StepConfig,
) -> DecodeState:
    """``state`` with the requests of ``packed``, of at most ``size + 1`` tokens, in their slots.

    ``packed`` has no keys and values yet. The prompts of its first ``rows`` requests are prefilled;
    each request takes what the first equal one of them gives. A slot is written only as far as a
    prompt may reach.
    """
    requests, slots = packed.unpacked(state)
    tokens, lengths = requests.tokens[:rows], requests.cache.lengths[:rows]
    equal = (requests.tokens[:, None] == tokens[None]).all(axis=2)
    index = jnp.argmax(equal, axis=1)
    count, capacity = tokens.shape
    drafter_state = init_drafter_state(models, config=config, batch=count, capacity=capacity)
    cache, drafter_state = jax.tree.map(
        lambda x: short_cache(x, count, size) if isinstance(x, Cache) else x,
        (dataclasses.replace(state.cache, lengths=lengths), drafter_state),
        is_leaf=lambda x: isinstance(x, Cache),
    )
    args = (models, cache, drafter_state, tokens, jnp.int32(0))
    cache, drafter_state, _ = prefill_chunk(
        *args, config=config, size=size, selects=config.selects_in_prefill
    )
    cache, drafter_state = jax.tree.map(lambda x: x[index], (cache, drafter_state))
    requests = dataclasses.replace(requests, cache=cache, draft=drafter_state)
    return insert_rows(state, requests, slots, lambda whole, rows: _written(whole, rows, slots))


@jax.jit
def row_of(cache: Cache, slot: Array) -> Cache:
    """A copy of the row ``slot`` of ``cache``."""

    def copy(cache: Cache, slot: Array) -> Cache:
        def row(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, slot, 1)

        columns = cache.columns
        if cache.table is not None:
            table = row(cache.table)
            columns = tuple(
                jax.tree.map(lambda x: rows_of_blocks(x, table), layer_columns)
                if isinstance(layout, PagedLayout)
                else jax.tree.map(row, layer_columns)
                for layout, layer_columns in zip(cache.layouts, columns, strict=True)
            )
            layouts = tuple(map(in_one_piece, cache.layouts))
            others = dataclasses.replace(cache, columns=(), layouts=layouts, table=None)
            return dataclasses.replace(jax.tree.map(row, others), columns=columns)
        return jax.tree.map(row, cache)

    return with_auto_axes(copy, cache, slot, like=cache)


@functools.partial(
    jax.jit, static_argnames=("config", "max_tokens"), donate_argnames="drafter_state"
)
def synced_drafter(
    models: FlatModels,
    drafter_state: Any,
    tokens: Array,
    lengths: Array,
    config: StepConfig,
    max_tokens: int,
) -> Any:
    """``drafter_state``, which is donated, with up to ``max_tokens`` more of ``tokens``."""

    def sync(models: Models, drafter_state: Any, tokens: Array, lengths: Array) -> Any:
        return config.draft.sync(models, drafter_state, tokens, lengths, max_tokens)

    whole = models.whole
    with config.of_models():
        args = (whole, drafter_state, tokens, lengths)
        return on_mesh_of(whole.target, config, sync, *args, like=drafter_state)


def _written(whole: Array, rows: Array, slots: Array) -> Array:
    """``whole [B, ...]`` with ``rows [n, ...]``, which may be shorter, in ``slots [n]``."""
    part = tuple(slice(width) for width in rows.shape[1:])
    return whole.at[(slots, *part)].set(rows, mode="drop")


def short_cache(cache: Cache, rows: int, size: int) -> Cache:
    """An empty cache as ``cache``, with so many rows of at most ``size`` positions."""
    rows_layouts = map(in_one_piece, cache.layouts)
    layouts = tuple(layout.grown(min(size, layout.size)) for layout in rows_layouts)

    def zeros(layers: Sequence[dict[str, Array]], page: int) -> tuple[dict[str, Array], ...]:
        sizes = [-(-layout.size // page) for layout in layouts]
        return tuple(
            {name: jnp.zeros((rows, n, *x.shape[2:]), x.dtype) for name, x in arrays.items()}
            for n, arrays in zip(sizes, layers, strict=True)
        )

    columns, pages = zeros(cache.columns, 1), zeros(cache.pages, cache.page)
    return dataclasses.replace(cache, columns=columns, layouts=layouts, pages=pages, table=None)
