"""The copying warpgroup of gathered attention on Mosaic GPU: blocks of selected keys and values.

The copy engine of Hopper has no gather. Where 8 KV heads are read together, a slot's keys are one
run of memory and one tile of 8 rows in the layout that matmuls read, and it copies a slot at a
time. Single heads are rows of such tiles, which it cannot copy: the threads copy them, 16 bytes
each, as the GPUs before Hopper do.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.pallas.matmul import swizzled_channels
from jspec.typing import Array

HEADS = 8  # KV heads that are read together: the rows of a tile in shared memory


@dataclasses.dataclass(frozen=True)
class Cut:
    """How lists of slots are cut.

    Attributes:
        together: KV heads that are read together, `HEADS` or 1.
        slots: of a block.
        stages: buffers for blocks of keys, and for those of values; as many where heads are single.
        chunks: of a list.
    """

    together: int
    slots: int
    stages: tuple[int, int]
    chunks: int

    @property
    def keys(self) -> int:
        """Keys of a block: those of all heads that are read together."""
        return self.slots * self.together

    @property
    def arrivals(self) -> tuple[int, int]:
        """How many times keys arrive in a buffer, and values."""
        copies = self.slots if self.together > 1 else 1
        return copies + 1, copies


class Sources(NamedTuple):
    """What is copied: queries and the positions of their rows, keys, values, and lists of slots
    with the positions from which on they are read."""

    q: Any
    last: Any
    k: Any
    v: Any
    slots: Any
    begins: Any


class Buffers(NamedTuple):
    """Shared memory for queries and the positions of their rows, for keys and the positions from
    which on they are read, and for values."""

    queries: tuple[Any, Any]
    keys: Any
    begins: Any
    values: Any


@dataclasses.dataclass(frozen=True)
class _Copier:
    """What both ways to copy share.

    Attributes:
        cut: how lists are cut.
        sources: what is copied.
        buffers: where to.
        full: barriers that say that a buffer was filled.
        free: barriers that say that it was read.
    """

    cut: Cut
    sources: Sources
    buffers: Buffers
    full: list[Any]
    free: list[Any]

    def queries(self, step: Any, place: Any) -> None:
        """Copy the queries of an item, once those of the item before the last were read."""
        q_smem, last_smem = self.buffers.queries
        row, group, _ = place
        side = lax.rem(step, 2)
        pl.when(step >= 2)(lambda: plgpu.barrier_wait(self.free[0].at[side]))
        plgpu.copy_gmem_to_smem(
            self.sources.q.at[row, group], q_smem.at[side], self.full[0].at[side]
        )
        plgpu.copy_gmem_to_smem(
            self.sources.last.at[row], last_smem.at[side], self.full[0].at[side]
        )

    def listed(self, place: Any) -> tuple[Any, Any]:
        """Which list of slots an item reads."""
        row, group, _ = place
        return row, group if self.sources.slots.shape[1] > 1 else 0

    def begins(self, place: Any, first: Any, stage: Any) -> None:
        """Copy where the slots of a block begin to be read, ``first`` the first of them."""
        columns = pl.ds(pl.multiple_of(first * self.cut.together, 8), self.cut.keys)
        source = self.sources.begins.at[*self.listed(place), columns]
        plgpu.copy_gmem_to_smem(source, self.buffers.begins.at[stage], self.full[1].at[stage])

    def wait_free(self, which: int, block: Any) -> Any:
        """Wait until the buffer of a block of keys (1) or of values (2) was read; returns it."""
        barrier = self.free[which]
        stages = barrier.shape[0]
        stage = lax.rem(block, stages)
        pl.when(block >= stages)(lambda: plgpu.barrier_wait(barrier.at[stage]))
        return stage

    def wait_all_free(self, steps: Any, done: Any) -> None:
        """Wait for the last arrivals, so that no barrier is left pending."""
        for count, barrier in zip((steps, done, done), self.free, strict=True):
            size = barrier.shape[0]

            @pl.loop(jnp.maximum(count - size, 0), count)
            def _(i, size=size, barrier=barrier):
                plgpu.barrier_wait(barrier.at[lax.rem(i, size)])


class SlotCopier(_Copier):
    """Copies slots of `HEADS` heads by the copy engine."""

    def start(self) -> Any:
        """The carry before the first item: how many blocks were copied."""
        return jnp.int32(0)

    def item(self, step: Any, place: Any, first: Any, count: Any, done: Any) -> Any:
        """Copy an item's queries, and its ``count`` blocks from number ``first`` on."""
        _, _, k, v, slots, _ = self.sources
        k_smem, v_smem = self.buffers.keys, self.buffers.values
        row, group, _ = place
        heads = pl.ds(group * HEADS, HEADS)
        self.queries(step, place)

        @pl.loop(0, count)
        def _(i):
            begin = (first + i) * self.cut.slots
            block = [slots[*self.listed(place), begin + j] for j in range(self.cut.slots)]

            def fetch(source, target_ref, filled):
                for j, slot in enumerate(block):
                    target = target_ref.at[pl.ds(j * HEADS, HEADS)]
                    plgpu.copy_gmem_to_smem(source.at[row, slot, heads], target, filled)

            stage = self.wait_free(1, done + i)
            self.begins(place, begin, stage)
            fetch(k, k_smem.at[stage], self.full[1].at[stage])
            stage = self.wait_free(2, done + i)
            fetch(v, v_smem.at[stage], self.full[2].at[stage])

        return done + count

    def finish(self, steps: Any, done: Any) -> None:
        """Wait for all that was copied."""
        self.wait_all_free(steps, done)


class RowCopier(_Copier):
    """Copies slots of single heads by the threads, which signal later that a block has arrived.

    A block is signalled when as many more as `in_flight` have been begun. That is two less than
    there are buffers: a buffer is waited for only after the block in it was signalled.
    """

    @property
    def in_flight(self) -> int:
        """Blocks that are still being copied when one is signalled."""
        return max(self.cut.stages[0] - 2, 0)

    def start(self) -> Any:
        """The carry before the first item: how many blocks were begun, how many of them were
        signalled, and the blocks of the item before."""
        return jnp.int32(0), jnp.int32(0), jnp.int32(0)

    def item(self, step: Any, place: Any, first: Any, count: Any, carry: Any) -> Any:
        """Copy an item's queries, and its ``count`` blocks from number ``first`` on."""
        done, signalled, before = carry
        _, _, k, v, slots, _ = self.sources
        k_smem, v_smem = self.buffers.keys, self.buffers.values
        row, group, _ = place
        # The item before the last has to end before its queries can be replaced.
        signalled = self._signal_all(done, signalled, done - signalled > before)
        self.queries(step, place)
        layout = row_layout(k_smem.shape[1:], k_smem.dtype)

        def block(i, signalled):
            begin = (first + i) * self.cut.slots
            block_ref = slots.at[*self.listed(place), pl.ds(begin, self.cut.slots)]
            rows = plgpu.load(block_ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]
            stage = self.wait_free(1, done + i)
            self.begins(place, begin, stage)
            copy_rows(k.at[row], k_smem.at[stage], rows, group)
            stage = self.wait_free(2, done + i)
            copy_rows(v.at[row], v_smem.at[stage], rows, group)
            commit_copies()
            is_oldest = done + i + 1 - signalled > self.in_flight

            @pl.when(is_oldest)
            def _():
                wait_copies(self.in_flight)
                plgpu.commit_smem()
                self._signal(signalled)

            return signalled + is_oldest.astype(jnp.int32)

        signalled = lax.fori_loop(0, count, block, signalled)
        return done + count, signalled, count

    def finish(self, steps: Any, carry: Any) -> None:
        """Wait for all that was copied."""
        done, signalled, _ = carry
        self._signal_all(done, signalled, done > signalled)
        self.wait_all_free(steps, done)

    def _signal(self, block: Any) -> None:
        """Signal that a block has arrived."""
        stage = lax.rem(block, self.cut.stages[0])
        plgpu.barrier_arrive(self.full[1].at[stage])
        plgpu.barrier_arrive(self.full[2].at[stage])

    def _signal_all(self, done: Any, signalled: Any, is_needed: Any) -> Any:
        """Wait for all copies and signal their blocks; returns how many were signalled."""

        @pl.when(is_needed)
        def _():
            wait_copies(0)
            plgpu.commit_smem()

            @pl.loop(signalled, done)
            def _(block):
                self._signal(block)

        return jnp.where(is_needed, done, signalled)


def _copy_layout(shape: tuple[int, ...], dtype: jnp.dtype):
    """How the threads share a tile that they copy."""
    swizzle = swizzled_channels(shape[-1]) * jnp.dtype(dtype).itemsize
    return plgpu.Layout.SMEM_GMEM_COPY(shape, dtype, swizzle)


def row_layout(shape: tuple[int, ...], dtype: jnp.dtype):
    """How the rows of such a tile lie: each thread has those that it copies."""
    return _copy_layout(shape, dtype).reduce((1,))


# The three functions below are for inline code, which the interpreter does not run.


def copy_rows(source: Any, target: Any, slots: Array, head: Any) -> None:
    """Begin to copy ``source[slots[i], head]`` to ``target[i]``, in shared memory for matmuls.

    ``source [S, K, H]`` in global memory; ``slots`` lie as `row_layout` says. Mosaic lowers neither
    a load by a vector of indices, nor a copy into a row of a swizzled tile.
    """
    from jax.experimental.mosaic import gpu as mgpu
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import arith

    llvm, nvvm = _dialects()
    _, kv_heads, size = source.shape
    shape, dtype = target.shape, target.dtype
    layout, channels = _copy_layout(shape, dtype), swizzled_channels(size)
    swizzle = channels * jnp.dtype(dtype).itemsize
    transforms = plgpu.TilingTransform((8, channels)), plgpu.SwizzleTransform(swizzle)
    row_begins = slots * (kv_heads * size) + head * size
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
    offsets = lax.broadcast_in_dim(row_begins, shape, [0]) + column

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(transforms), layout))
    def copy(_, source, target, offsets):
        element = ir.MemRefType(source.type).element_type
        in_global_memory = llvm.PointerType.get(address_space=1)
        base = llvm.addrspacecast(in_global_memory, mgpu.utils.memref_ptr(source))
        size = offsets.layout.vector_length * mgpu.utils.bitwidth(element) // 8
        modifiers = nvvm.LoadCacheModifierKind
        transfers = mgpu.FragmentedArray.transfer_tiled(
            target, swizzle, offsets.layout, shape, optimized=False
        )
        first = arith.constant(ir.IntegerType.get_signless(32), 0)
        for get, _update, _index, to in transfers:
            offset = llvm.extractelement(get(offsets.registers), first)
            at = mgpu.utils.getelementptr(base, [offset], element)
            # Only accesses of 16 bytes can bypass the first cache.
            nvvm.cp_async_shared_global(to, at, size, modifiers.CG if size == 16 else modifiers.CA)

    copy(source, target, offsets)  # pyright: ignore[reportCallIssue]


def commit_copies() -> None:
    """Make a group of the copies that were begun since the last one."""
    _, nvvm = _dialects()

    @plgpu.inline_mgpu()
    def commit(_):
        nvvm.cp_async_commit_group()

    commit()  # pyright: ignore[reportCallIssue]


def wait_copies(groups: int) -> None:
    """Wait until at most so many groups of this thread's copies are on their way."""
    _, nvvm = _dialects()

    @plgpu.inline_mgpu()
    def wait(_):
        nvvm.cp_async_wait_group(groups)

    wait()  # pyright: ignore[reportCallIssue]


def _dialects() -> tuple[Any, Any]:
    """MLIR's dialects of LLVM and of NVIDIA GPUs, which `jax.extend.mlir` lacks."""
    from jax.experimental.mosaic import gpu as mgpu

    utils: Any = mgpu.utils
    return utils.llvm, utils.nvvm
