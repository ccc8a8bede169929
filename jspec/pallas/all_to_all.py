"""The all-to-all of `jspec.ops.all_to_all` on Mosaic GPU, by references to the peers' memory.

XLA tells each kernel where its peers have its arguments and results, and lets none begin before all
devices have come to it: until then a result may still be the memory of something else.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.gpu import unreached
from jspec.ops.all_to_all import OneSided
from jspec.ops.vocabulary import Axes
from jspec.pallas.mosaic import LANES, WARPS, Spread, load, refuses_pallas, store
from jspec.sharding import opaque
from jspec.typing import Array

WORD = 16  # bytes a lane moves at once
TILE = WARPS * LANES * WORD  # bytes a program moves at once
MAX_BLOCKS = 64


def all_to_all_pallas(pieces: Array, axes: Axes) -> Array:
    """Exchange ``pieces [ranks, ...]`` between the ranks of ``axes``: ``run`` of an `OneSided`."""
    shape, ranks = pieces.shape, pieces.shape[0]
    flat = pieces.reshape(ranks, math.prod(shape[1:]))
    size = flat.shape[1]
    tile = TILE // flat.dtype.itemsize
    tiles = -(-size // tile)
    spread = Spread(tile, vector=WORD // flat.dtype.itemsize, warps=WARPS)
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    sizes = [lax.axis_size(name) for name in names]

    def place(rank: Array) -> Any:
        """Where ``rank`` is on each axis of the mesh."""
        coordinates = {}
        for name, length in zip(reversed(names), reversed(sizes), strict=True):
            coordinates[name], rank = (
                lax.rem(rank, jnp.int32(length)),
                lax.div(rank, jnp.int32(length)),
            )
        return coordinates

    def exchange(source, target, arrived):
        me = lax.axis_index(names)

        @plgpu.nd_loop((ranks, tiles), collective_axes="block")
        def _(loop):
            step, at = loop.index
            peer = lax.rem(me + step, jnp.int32(ranks))
            tile_slice = pl.ds(at * tile, tile)
            there = plgpu.remote_ref(target, place(peer))
            store(there.at[me, tile_slice], load(source.at[peer, tile_slice], spread))

        # Each block has a semaphore of its own, which the same blocks of the peers signal.
        for step in range(1, ranks):
            pl.semaphore_signal(arrived, device_id=place(lax.rem(me + step, jnp.int32(ranks))))
        pl.semaphore_wait(arrived, ranks - 1)

    call = plgpu.kernel(
        exchange,
        out_type=jax.ShapeDtypeStruct((ranks, tiles * tile), flat.dtype),
        scratch_types=[plgpu.SemaphoreType.REGULAR],
        grid=(min(MAX_BLOCKS, ranks * tiles),),
        grid_names=("block",),
    )
    received = opaque(call, jnp.pad(flat, ((0, 0), (0, tiles * tile - size))))
    return received[:, :size].reshape(shape)


def _refuses(devices: int) -> str | None:
    return refuses_pallas() or unreached(devices)


ALL_TO_ALL = OneSided(all_to_all_pallas, _refuses)
