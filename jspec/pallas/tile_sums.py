"""The pass over the logits of a draw on Mosaic GPU: what the tiles of each position sum to.

A warp has a tile of its own, so that only one bit crosses between the warps of a program: whether
its tiles are near 0.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec import tuned
from jspec.ops.vocabulary import TILE
from jspec.pallas.distribution import (
    LARGEST_LOGIT,
    Cells,
    NearWeights,
    cleaned,
    far_weights,
    first_token,
    launch,
    padded,
    power,
    tile_spread,
    width_of,
)
from jspec.pallas.mosaic import LANES, WARPS, store, tile_layout
from jspec.typing import Array


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Block sizes of the kernel.

    Attributes:
        warp_tiles: tiles of a position that each warp of a program sums, a power of 2.
        ptx: whether `NearWeights` come from PTX.
    """

    warp_tiles: int
    ptx: bool = False


def blocks_for(logits: Array) -> Blocks:
    """Block sizes for logits of this shape, searched with `verify_stochastic`."""
    batch, positions, vocabulary = logits.shape
    sizes = {"batch": batch, "gamma": positions - 1, "vocabulary": vocabulary}
    return Blocks(**tuned.block("verify_stochastic", "pallas", sizes))


def sum_tiles(
    logits: Array, rates: Array, lengths: Array, bonus_positions: int, blocks: Blocks
) -> Cells:
    """The tiles of the first ``lengths [B] + bonus_positions`` positions of each row."""
    batch, positions, vocabulary = logits.shape
    tiles, width, flat = -(-vocabulary // TILE), width_of(vocabulary), padded(logits)
    count = min(WARPS * blocks.warp_tiles, max(WARPS, 1 << (tiles - 1).bit_length()))
    groups = -(-tiles // count)
    vector = tile_spread(flat).vector
    layout = tile_layout(WARPS, LANES * vector, vector)
    near_weights = NearWeights(logits.dtype, layout, blocks.ptx)

    def body(logits_ref, rates_ref, lengths_ref, *refs):
        cells = Cells(*refs)
        program = lax.axis_index("program")
        at = program // groups
        row, position = at // positions, at % positions

        @pl.when(position < lengths_ref[row] + bonus_positions)
        def _():
            for i in range(0, count, WARPS):
                begin = program % groups * count + i
                # Warps after the last tile sum that one again, into cells that nobody reads.
                tile = jnp.minimum(begin + _indices(layout), tiles - 1)
                first = first_token(tile, vocabulary)
                x = cleaned(load_runs(logits_ref.at[at], first, TILE, layout))
                sums = _sums_of(x, first - tile * TILE, rates_ref[row], near_weights)
                for ref, values in zip(cells, sums, strict=True):
                    store(ref.at[at, pl.ds(begin, WARPS)], values)

    shape = (batch * positions, width)
    dtypes = (jnp.uint32, jnp.uint32, jnp.float32, jnp.int32)
    out = [jax.ShapeDtypeStruct(shape, dtype) for dtype in dtypes]
    programs = batch * positions * groups
    return Cells(*launch(body, out, programs, flat, rates, lengths))


def load_runs(ref: Any, begins: Array, size: int, layout: Any) -> Array:
    """``[WARPS, size]``, of which warp ``i`` has what ``ref`` holds from ``begins[i]`` on.

    ``begins [WARPS]`` lies as the rows of ``layout`` do. The interpreter runs no inline code.
    """
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import utils
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import arith, vector

    shape = WARPS, size
    result = plgpu.ShapeDtypeStruct(shape, ref.dtype, layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout.reduce(1)), return_type=result)
    def run(_, ref, begins):
        # Each warp addresses its own row of a window in which all rows follow one another.
        (register,) = begins.registers.flat
        begin = arith.index_cast(ir.IndexType.get(), vector.extract(register, [], [0]))
        window = utils.memref_slice(ref, (utils.ds(begin, math.prod(shape)),))
        rows = utils.memref_reshape(window, shape)
        return mgpu.FragmentedArray.load_untiled(rows, layout=layout.to_mgpu(), optimized=False)

    return run(ref, begins - size * _indices(layout))  # pyright: ignore[reportCallIssue]


def _indices(layout: Any) -> Array:
    """The numbers of the warps, int32 ``[WARPS]``, as the rows of ``layout`` lie."""
    return plgpu.broadcasted_iota(jnp.int32, (WARPS,), 0, layout=layout.reduce(1))


def _sums_of(x: Array, offset: Array, rate: Array, near_weights: NearWeights) -> Cells:
    """The cells of tiles.

    Args:
        x: clean logits, float32 ``[WARPS, TILE]``.
        offset: int32 ``[WARPS]``, of the first logit of each in its tile: those before the tile, at
            a negative index, are not its own.
        rate: of the position, a scalar.
        near_weights: in the layout of ``x``.
    """

    def over_columns(values: Array) -> Array:
        return lax.broadcast_in_dim(values, x.shape, [0])

    index = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=near_weights.layout)
    index = index + over_columns(offset)
    x = jnp.where(index >= 0, x, -jnp.inf)
    top = jnp.clip(x.max(axis=1), -LARGEST_LOGIT, LARGEST_LOGIT)

    def greedy() -> tuple[Array, Array]:
        first = jnp.where(x >= over_columns(top), index, TILE).min(axis=1)
        return first.astype(jnp.uint64), jnp.zeros_like(first)

    def near() -> tuple[Array, Array]:
        exponent = near_weights.exponent(top, rate)
        weights = near_weights(x, rate, over_columns(exponent))
        return weights.sum(axis=1, dtype=jnp.uint64), exponent

    def far() -> tuple[Array, Array]:
        exponent, _ = power(top, rate)
        weights = far_weights(x, rate, over_columns(exponent))
        return weights.sum(axis=1, dtype=jnp.uint64), exponent

    def sampled() -> tuple[Array, Array]:
        if not near_weights.serve:
            return far()
        return lax.cond(near_weights.serve_at(rate, jnp.max(jnp.abs(top * rate))), near, far)

    total, exponent = lax.cond(rate == 0, greedy, sampled)
    return Cells(total.astype(jnp.uint32), (total >> 32).astype(jnp.uint32), top, exponent)
