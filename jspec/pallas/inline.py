"""Inline code of kernels of hash codes: what Mosaic GPU does not lower, and forms to interpret.

`GPU` has the code for GPUs, `INTERPRETED` the same for the interpreter, which runs no inline code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.pallas.mosaic import LANES, WARPS
from jspec.typing import Array

TILE = WARPS * LANES  # elements of a vector that has one for each thread


@dataclasses.dataclass(frozen=True)
class Inline:
    """What a kernel calls where Mosaic lowers nothing.

    Attributes:
        count_bits: how many bits of each uint32 word are set, int32; the second argument is the
            layout of the words.
        store_at: ``store_at(ref, index, values)``: ``ref[index[i]] = values[i]`` where ``index[i]
            >= 0``. Both are int32 ``[TILE]``, the reference too has one axis.
        count_at: ``count_at(ref, index)``: adds 1 at each ``index[i] >= 0``, atomically; the
            reference is to shared memory.
        sync: waits for all threads of the warpgroup.
    """

    count_bits: Callable[[Array, Any], Array]
    store_at: Callable[[Any, Array, Array], None]
    count_at: Callable[[Any, Array], None]
    sync: Callable[[], None]


def code_layout(vector: int):
    """Of ``[TILE, columns]``: a row to each thread, ``vector`` columns loaded at once."""
    tiles = (TILE, vector), (LANES, vector)
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-4,), (-2,), vector_dim=-1)


def slot_layout():
    """Of ``[TILE]``: an element to each thread."""
    return code_layout(4).reduce(1)


def _count_bits(words: Array, layout: Any) -> Array:
    from jax.extend.mlir.dialects import math

    result = plgpu.ShapeDtypeStruct(words.shape, words.dtype, layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=result)
    def count(_, x):
        return x._pointwise(math.ctpop)

    return count(words).astype(jnp.int32)  # pyright: ignore[reportCallIssue]


def swar_count(words: Array, layout: Any = None) -> Array:
    """`Inline.count_bits` by arithmetic on parts of words: 12 instructions in place of one."""
    words = words - ((words >> jnp.uint32(1)) & jnp.uint32(0x55555555))
    words = (words & jnp.uint32(0x33333333)) + ((words >> jnp.uint32(2)) & jnp.uint32(0x33333333))
    words = (words + (words >> jnp.uint32(4))) & jnp.uint32(0x0F0F0F0F)
    return ((words * jnp.uint32(0x01010101)) >> jnp.uint32(24)).astype(jnp.int32)


def _store_at(ref, index: Array, values: Array) -> None:
    from jax.experimental.mosaic import gpu as mgpu
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import arith, memref

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), slot_layout(), slot_layout()))
    def store(_, ref, index, values):
        at, value = _element(index), _element(values)
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.sge, at, arith.constant(at.type, 0))):
            memref.store(value, ref, [arith.index_cast(ir.IndexType.get(), at)])

    store(ref, index, values)  # pyright: ignore[reportCallIssue]


def _count_at(ref, index: Array) -> None:
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import utils
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import arith

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), slot_layout()))
    def count(_, ref, index):
        at = _element(index)
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.sge, at, arith.constant(at.type, 0))):
            # `memref.atomic_rmw` would order all other memory accesses too.
            utils.llvm.inline_asm(  # pyright: ignore[reportPrivateImportUsage]
                ir.Type.parse("!llvm.void"),
                [
                    utils.getelementptr(utils.memref_ptr(ref), [at], at.type),
                    arith.constant(at.type, 1),
                ],
                "red.relaxed.cta.shared::cta.add.u32 [$0], $1;",
                "r,r",
                has_side_effects=True,
            )

    count(ref, index)  # pyright: ignore[reportCallIssue]


def _element(array) -> Any:
    """The only element of a thread."""
    from jax.extend.mlir.dialects import vector

    (register,) = array.registers.flat
    return vector.extract(register, [], [0])


def _sync() -> None:
    from jax.experimental.mosaic import gpu as mgpu

    @plgpu.inline_mgpu()
    def sync(_):
        mgpu.warpgroup_barrier()

    sync()  # pyright: ignore[reportCallIssue]


def _stored_at(ref, index: Array, values: Array) -> None:
    index = jnp.where(index < 0, ref.shape[-1], index)
    ref[...] = ref[...].at[index].set(values, mode="drop")


def _counted_at(ref, index: Array) -> None:
    index = jnp.where(index < 0, ref.shape[-1], index)
    ref[...] = ref[...].at[index].add(1, mode="drop")


GPU = Inline(_count_bits, _store_at, _count_at, _sync)
INTERPRETED = Inline(swar_count, _stored_at, _counted_at, lambda: None)
