"""Rows of a cache in one piece, and the blocks that have the same positions."""

from __future__ import annotations

import jax.numpy as jnp

from jspec.cache.layout import Layout, PagedLayout
from jspec.typing import Array


def in_one_piece(layout: Layout) -> Layout:
    """The layout of a row with memory of its own."""
    return layout.in_one_piece if isinstance(layout, PagedLayout) else layout


def rows_into_blocks(blocks: Array, rows: Array, table: Array) -> Array:
    """``blocks [blocks, block, ...]`` with the positions of ``rows [n, m, ...]`` from 0 on.

    ``table`` int32 ``[n, W]``: as in `Cache`. Blocks are written whole, past m with zeros; what a
    row has no block for is dropped.
    """
    block, (count, size) = blocks.shape[1], rows.shape[:2]
    width = -(-size // block)
    pad = [(0, 0), (0, width * block - size), *[(0, 0)] * (rows.ndim - 2)]
    rows = jnp.pad(rows, pad).reshape(count, width, *blocks.shape[1:])
    numbers = jnp.where(table >= 0, table, len(blocks))[:, :width]
    return blocks.at[numbers].set(rows, mode="drop")
