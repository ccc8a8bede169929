"""Packing on Mosaic GPU in one launch: every program computes its own offset."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec import tuned
from jspec.dispatch import Backend
from jspec.ops.packing import kv_sizes
from jspec.pallas.mosaic import Spread, floor_power, iota, load, refuses_pallas, starts, store
from jspec.sharding import opaque
from jspec.typing import Array

WORD = 16  # bytes a lane moves at once
MAX_ROWS = 4096  # of the batch: every program sums their counts
MAX_CHUNKS = 2**16 - 1  # of a batch row: the second axis of a grid

# Elements of these sizes in bytes are copied as integers, whatever their dtype.
CARRIERS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Block sizes: ``span`` bytes per program, a power of 2 and at least a word."""

    span: int


def blocks_for(sizes: Mapping[str, int]) -> Blocks:
    """Block sizes for KV rows of these sizes."""
    span = tuned.block("pack", "pallas", sizes)["span"]
    return Blocks(span=min(span, floor_power(sizes["run_bytes"])))


def pack_pallas(
    kv: Array, accepted: Array, *, blocks: Blocks | None = None
) -> tuple[Array, Array, Array]:
    """The Pallas backend of `jspec.ops.packing.pack`: the fields of `Packed`."""
    batch, gamma, width = kv.shape
    size = kv.dtype.itemsize
    span = (blocks or blocks_for(kv_sizes(kv))).span // size
    counted = Spread(min(256, floor_power(batch)))

    def pack(source, accepted, packed, offsets, total):
        row, chunk = lax.axis_index("row"), lax.axis_index("chunk")
        row_count = jnp.clip(accepted[row], 0, gamma)
        run = row_count * width

        @pl.when((chunk == 0) | (chunk * span < run))
        def _():
            # Summing the counts again costs each program less than a second launch would.
            offset = jnp.int32(0)
            summed_until = 0
            for start in starts(batch, counted.size) if batch > 1 else ():
                index = start + iota(counted)
                counts_slice = pl.ds(start, counted.size)
                counts = jnp.clip(load(accepted.at[counts_slice], counted), 0, gamma)
                counts = jnp.where((index >= summed_until) & (index < row), counts, 0)
                offset += jnp.sum(counts, dtype=jnp.int32)
                summed_until = start + counted.size

            copy_chunk((source.at[row], packed), offset, row_count, chunk, (gamma, width, span))

            @pl.when(chunk == 0)
            def _():
                offsets[row] = offset

                @pl.when(row == batch - 1)
                def _():
                    total[0] = offset + row_count

    carried = carry(kv)
    call = plgpu.kernel(
        pack,
        out_type=(
            jax.ShapeDtypeStruct((batch * gamma * width,), carried.dtype),
            jax.ShapeDtypeStruct((batch,), jnp.int32),
            jax.ShapeDtypeStruct((1,), jnp.int32),
        ),
        grid=(batch, -(-gamma * width // span)),
        grid_names=("row", "chunk"),
        # No memory is both read and written, so nothing has to wait for a write.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    packed, offsets, total = opaque(call, carried, accepted)
    return uncarry(packed, kv), offsets, total[0]


def carry(kv: Array) -> Array:
    """The elements of ``kv [B, gamma, D]`` as whole numbers ``[B, gamma * D]`` of their size."""
    batch, gamma, width = kv.shape
    return lax.bitcast_convert_type(kv, CARRIERS[kv.dtype.itemsize]).reshape(batch, gamma * width)


def uncarry(packed: Array, kv: Array) -> Array:
    """The packed elements ``[B * gamma * D]`` of `carry` as rows of the dtype of ``kv``."""
    return lax.bitcast_convert_type(packed.reshape(-1, kv.shape[2]), kv.dtype)


def copy_chunk(refs, offset, row_count, chunk, sizes: tuple[int, int, int]) -> None:
    """Copy chunk number ``chunk`` of the first ``row_count`` KV rows of a batch row.

    ``refs``: the batch row's elements ``[gamma * D]``, and where they go, from KV row ``offset``
    on. ``sizes``: gamma, D, and the elements of a chunk.
    """
    source, packed = refs
    gamma, width, span = sizes
    run, word = row_count * width, WORD // jnp.dtype(source.dtype).itemsize

    def copy(begin, length: int) -> None:
        """Move ``length`` elements of the run, from ``begin`` on."""
        piece = Spread(floor_power(length // word) * word, vector=word, warps=4)
        moved = []
        for start in starts(length, piece.size):
            at = begin + start
            moved.append((at, load(source.at[pl.ds(at, piece.size)], piece)))
        for at, elements in moved:
            store(packed.at[pl.ds(offset * width + at, piece.size)], elements)

    # The last chunk of a run is laid so that it ends with the run.
    @pl.when(run >= span)
    def _():
        copy(jnp.minimum(chunk * span, run - span), span)

    # A run shorter than a chunk is two copies of as many rows as the power of 2 below it.
    few = 1
    while few <= gamma and few * width < span:
        last = min(2 * few - 1, (span - 1) // width)

        @pl.when((row_count >= few) & (row_count <= last))
        def _(few=few):
            copy(0, few * width)
            copy((row_count - few) * width, few * width)

        few *= 2


def refuses_elements(kv: Array, name: str = "kv") -> str | None:
    """Why elements of this type cannot be copied as integers, or None."""
    if jax.dtypes.itemsize_bits(kv.dtype) not in (8, 16, 32) or kv.dtype == jnp.bool_:
        return f"{name} of {kv.dtype} does not have elements of 1, 2 or 4 bytes"
    return None


def refuses(kv: Array) -> str | None:
    """Why the kernel cannot take KV rows of this shape and type, or None."""
    batch, gamma, width = kv.shape
    if 0 in kv.shape:
        return f"kv {kv.shape} leaves nothing to launch"
    if batch > MAX_ROWS:
        return f"B={batch} is over {MAX_ROWS}"
    if reason := refuses_elements(kv):
        return reason
    if width * kv.dtype.itemsize % WORD:
        return f"D={width} of {kv.dtype} is {width * kv.dtype.itemsize} bytes, not words of {WORD}"
    if kv.size >= 2**31:
        return f"kv {kv.shape} has more elements than int32 counts"
    sizes = kv_sizes(kv)
    if -(-sizes["run_bytes"] // blocks_for(sizes).span) > MAX_CHUNKS:
        return f"gamma * D = {gamma * width} elements a batch row are over {MAX_CHUNKS} chunks"
    return None


def _supports(kv: Array, accepted: Array) -> str | None:
    return refuses(kv) or refuses_pallas()


PACK = Backend("pallas", pack_pallas, _supports)
