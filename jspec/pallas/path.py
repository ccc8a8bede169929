"""Packing of a path on Mosaic GPU: one launch for all columns, a program a row of a column."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.dispatch import Backend
from jspec.pallas.mosaic import LANES, WARPS, Spread, floor_power, load, refuses_pallas, starts
from jspec.pallas.mosaic import store as store_vector
from jspec.pallas.pack import CARRIERS, WORD, refuses_elements
from jspec.sharding import opaque, varying_axes
from jspec.typing import Array


def pack_path_pallas(
    columns: tuple[Array, ...], source_slots: Array, target_slots: Array, counts: Array
) -> tuple[Array, ...]:
    """The Pallas backend of `jspec.ops.path.pack_path`."""
    batch, moves = source_slots.shape

    def pack_path(source, target, counts, *refs):
        row, column = lax.axis_index("row"), lax.axis_index("column")
        count = jnp.clip(counts[row], 0, moves)

        def move(index, carry):
            source_slot, target_slot = source[row, index], target[row, index]
            for i, ref in enumerate(refs):

                @pl.when((column == i) & (source_slot != target_slot))
                def _(ref=ref):
                    _copy(ref.at[row, source_slot], ref.at[row, target_slot])

            return carry

        lax.fori_loop(0, count, move, 0)

    # With barriers: a move may overwrite what another warp has read for the one before.
    call = plgpu.kernel(
        pack_path, out_type=(), grid=(batch, len(columns)), grid_names=("row", "column")
    )

    def update(columns, *arrays):
        """The columns are written in place: a `jax.Ref` is an input and an output in one."""
        refs = [jax.new_ref(x) for x in columns]
        call(*arrays, *refs)
        return tuple(jax.freeze(x) for x in refs)

    carried = tuple(
        lax.bitcast_convert_type(x, CARRIERS[x.dtype.itemsize]).reshape(*x.shape[:2], -1)
        for x in columns
    )
    moved = opaque(update, carried, source_slots, target_slots, counts)
    pairs = zip(moved, columns, strict=True)
    return tuple(lax.bitcast_convert_type(x.reshape(old.shape), old.dtype) for x, old in pairs)


def _copy(source, target) -> None:
    """Copy an entry ``[n]``, of whole words, in pieces of all lanes where it is long enough."""
    (size,), word = source.shape, WORD // jnp.dtype(source.dtype).itemsize
    words = min(size // word, WARPS * LANES)
    piece = Spread(floor_power(words) * word, vector=word, warps=WARPS)
    for start in starts(size, piece.size):
        part = pl.ds(start, piece.size)
        store_vector(target.at[part], load(source.at[part], piece))


def refuses(columns: tuple[Array, ...]) -> str | None:
    """Why the kernel cannot take columns of these shapes and types, or None."""
    for column in columns:
        if not math.prod(column.shape):
            return f"a column of {column.shape} is empty"
        if reason := refuses_elements(column, "a column"):
            return reason
        bytes_of_entry = math.prod(column.shape[2:]) * column.dtype.itemsize
        if bytes_of_entry % WORD:
            return f"entries of {bytes_of_entry} bytes are not words of {WORD}"
    return None


def _supports(columns: tuple[Array, ...], *rest: Array) -> str | None:
    if axes := varying_axes(columns):
        return f"arrays that vary over {sorted(axes)} of a mesh cannot be `jax.Ref`s of a kernel"
    return refuses(columns) or refuses_pallas()


PACK_PATH = Backend("pallas", pack_path_pallas, _supports)
