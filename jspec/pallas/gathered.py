"""Gathered attention on Mosaic GPU: selected slots are copied to shared memory one by one.

The copy engine of Hopper has no gather, but a slot's keys of 8 KV heads are one run of memory and
one tile of 8 rows in the layout that matmuls read: a copy takes a slot. So lists are shared by the
heads, and a tile of queries holds those of 8 KV heads. It is multiplied with the keys of all of
them, and each query sees its own head's alone; a tile with fewer rows would cost the same. A row's
list is cut into chunks, each of which gives an output with its log-sum-exp, and `Merge` joins them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec import tuned
from jspec.dispatch import Backend
from jspec.gpu import multiprocessors
from jspec.ops.attention.gathered import gathered_sizes
from jspec.ops.attention.softmax import grouped
from jspec.pallas.attention import lowered_once
from jspec.pallas.attention_cut import EVERYTHING, PART, SHARED, Chunks
from jspec.pallas.attention_merge import LOG2E, LOWEST, Merge
from jspec.pallas.matmul import TILE, add_matmul, matmul, swizzled
from jspec.pallas.mosaic import refuses_pallas
from jspec.sharding import opaque
from jspec.typing import Array

HEADS = 8  # KV heads that are read together: the rows of a tile in shared memory
LEAST_BLOCKS = 4  # of a chunk, where there are several
COLUMNS = 16  # channels of a result that are on their way to global memory at a time


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Block sizes of the kernel.

    They follow from the sizes of a batch row, never from the batch or counts: a row's arithmetic
    must not depend on its neighbours.

    Attributes:
        slots: of a block.
        buffers: for blocks of keys and of values together, at most.
        chunks: of a row's list, at most.
    """

    slots: int
    buffers: int
    chunks: int

    @property
    def keys(self) -> int:
        """Keys of a block: those of all heads that are read together."""
        return self.slots * HEADS

    def stages(self, size: int, itemsize: int) -> tuple[int, int]:
        """Buffers for blocks of keys of ``size`` channels, and of values, that fit."""
        queries, staged = 2 * TILE * size * itemsize, 2 * TILE * COLUMNS * 4
        count = (SHARED - queries - staged) // (self.keys * size * itemsize + self.keys * 4)
        count = min(count, self.buffers)
        return (count + 1) // 2, count // 2


def blocks_for(sizes: Mapping[str, int]) -> Blocks:
    """Block sizes for a selection of these sizes."""
    return Blocks(**tuned.block("gathered_attention", "pallas", sizes))


def gathered_pallas(
    q: Array,
    k: Array,
    v: Array | None,
    positions: Array,
    selected: Array,
    tail: Array,
    context_len: Array,
    *,
    counts: Array | None,
    log_weights: Array | None = None,
    scale: float,
    softcap: float | None,
    value_size: int | None,
    blocks: Blocks | None = None,
) -> tuple[Array, Array]:
    """The Pallas backend of `jspec.ops.gathered_attention`."""
    assert log_weights is None  # `refuses`
    assert v is not None
    blocks = blocks or blocks_for(gathered_sizes(q, k, v, positions, selected))
    groups = k.shape[2] // HEADS
    slots, begins, counts = _listed(positions, selected, tail, context_len, counts, blocks.slots)
    chunks = max(1, min(blocks.chunks, slots.shape[1] // blocks.slots // LEAST_BLOCKS))
    kernel = _Partials(q.shape[2] // groups, chunks, scale, softcap, blocks)
    rows = grouped(q, groups)
    last = jnp.repeat(positions, q.shape[2] // groups, axis=1)
    out, lse = opaque(
        functools.partial(lowered_once, kernel), rows, last, k, v, slots, begins, counts
    )
    merge = Merge(q.shape, q.dtype, groups, Chunks(((chunks, 1),)))
    bounds = jnp.broadcast_to(jnp.array([0, 0, chunks], jnp.int32), (len(q), 1, 3))
    return opaque(functools.partial(lowered_once, merge), out, lse, bounds)


def _listed(
    positions: Array,
    selected: Array,
    tail: Array,
    context_len: Array,
    counts: Array | None,
    multiple: int,
) -> tuple[Array, Array, Array]:
    """The slots of each row, those of the tail first.

    Returns int32 ``[B, L]``, L a multiple of ``multiple``: the slots, and in place of one that no
    query reads one that is read, as what it holds is multiplied with 0; int32 ``[B, L * HEADS]``,
    for each head of a slot, the position from which on it is read; and int32 ``[B]``, how many of
    the slots are to be looked at.
    """
    index = jnp.arange(selected.shape[1], dtype=jnp.int32)[None]
    is_selected = selected >= 0
    if counts is not None:
        is_selected &= index < counts[:, None]
    after = context_len[:, None] + jnp.arange(tail.shape[1], dtype=jnp.int32)[None]
    slots = jnp.concatenate([tail, selected], axis=1)
    begins = jnp.concatenate(
        [jnp.where(tail >= 0, after, EVERYTHING), jnp.where(is_selected, 0, EVERYTHING)], axis=1
    )
    is_read = begins <= positions.max(axis=1, keepdims=True)
    slots = jnp.where(is_read, slots, jnp.where(is_read, slots, 0).max(axis=1, keepdims=True))
    index = jnp.arange(1, slots.shape[1] + 1, dtype=jnp.int32)[None]
    counts = jnp.where(is_read, index, 0).max(axis=1)
    spare = ((0, 0), (0, -slots.shape[1] % multiple))
    slots = jnp.pad(slots, spare, mode="edge")
    begins = jnp.pad(jnp.where(is_read, begins, EVERYTHING), spare, constant_values=EVERYTHING)
    return slots, jnp.repeat(begins, HEADS, axis=1), counts


@dataclasses.dataclass(frozen=True)
class _Partials:
    """Attention over each chunk of a row's list separately."""

    heads: int  # query heads of a group of KV heads
    chunks: int
    scale: float
    softcap: float | None
    blocks: Blocks

    def __call__(
        self, q: Array, last: Array, k: Array, v: Array, slots: Array, begins: Array, counts: Array
    ) -> tuple[Array, Array]:
        """``q [B, groups, T * heads, H]``, ``last [B, T * heads]`` the positions of its rows, and
        what `_listed` gives.

        Returns float32 outputs ``[B, 1, groups, chunks, rows, H]`` and the log-sum-exp of the
        scores, base 2, float32 ``[B, 1, groups, chunks, rows]``.
        """
        batch, groups, count, size = q.shape
        rows = -(-count // 8) * 8
        q = jnp.pad(q, ((0, 0), (0, 0), (0, TILE - count), (0, 0)))
        last = jnp.pad(last, ((0, 0), (0, TILE - count)), constant_values=-1)
        keys, stages = self.blocks.keys, self.blocks.stages(size, k.dtype.itemsize)
        items = batch * groups * self.chunks
        parts = (batch, 1, groups, self.chunks, rows)

        def gathered_chunks(*refs):
            pl.run_scoped(
                lambda *scratch: self._kernel(refs, scratch, (groups, items, rows)),
                (swizzled((2, TILE, size), k.dtype), plgpu.SMEM((2, TILE), jnp.int32)),
                swizzled((stages[0], keys, size), k.dtype),
                plgpu.SMEM((stages[0], keys), jnp.int32),
                swizzled((stages[1], keys, size), k.dtype),
                (plgpu.SMEM((2, TILE, COLUMNS), jnp.float32), plgpu.SMEM((TILE,), jnp.float32)),
                # Of queries, keys and values: filled by so many copies, and read.
                [
                    plgpu.Barrier(num_arrivals=2, num_barriers=2),
                    plgpu.Barrier(num_arrivals=self.blocks.slots + 1, num_barriers=stages[0]),
                    plgpu.Barrier(num_arrivals=self.blocks.slots, num_barriers=stages[1]),
                ],
                [plgpu.Barrier(num_barriers=n) for n in (2, *stages)],
                collective_axes="group",
            )

        call = plgpu.kernel(
            gathered_chunks,
            out_type=(
                jax.ShapeDtypeStruct((*parts, size), jnp.float32),
                jax.ShapeDtypeStruct(parts, jnp.float32),
            ),
            grid=(min(multiprocessors(), items),),
            grid_names=("program",),
            num_threads=2,
            thread_name="group",
            compiler_params=plgpu.CompilerParams(approx_math=True),
        )
        return call(q, last, k, v, slots, begins, counts)

    def _kernel(self, refs, scratch, sizes):
        """A warpgroup that computes, and one that copies; both take the same items in order."""
        groups, items, rows = sizes
        *sources, counts, out, lse = refs
        *smem, staged, full, free = scratch
        program = lax.axis_index("program")
        programs = min(multiprocessors(), items)
        steps = lax.div(items - program + programs - 1, programs)

        def each_item(body):
            """Run ``body(step, done, place, first, count)`` for each item: where it lies, and its
            blocks; ``done``: the blocks of those before it."""

            def step(i, done):
                item = program + i * programs
                group, rest = lax.rem(item, groups), lax.div(item, groups)
                chunk, row = lax.rem(rest, self.chunks), lax.div(rest, self.chunks)
                blocks = lax.div(counts[row] + self.blocks.slots - 1, self.blocks.slots)
                first = lax.div(chunk * blocks, self.chunks)
                count = lax.div((chunk + 1) * blocks, self.chunks) - first
                body(i, done, (row, group, chunk), first, count)
                return done + count

            return lax.fori_loop(0, steps, step, jnp.int32(0))

        @pl.when(lax.axis_index("group") == 0)
        def _():
            each_item(self._computer(smem, staged, (out, lse), full, free, rows))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(lax.axis_index("group") == 1)
        def _():
            done = each_item(self._copier(sources, smem, full, free))
            # Wait for the last arrivals, so that no barrier is left pending.
            for count, barrier in zip((steps, done, done), free, strict=True):
                size = barrier.shape[0]

                @pl.loop(jnp.maximum(count - size, 0), count)
                def _(i, size=size, barrier=barrier):
                    plgpu.barrier_wait(barrier.at[lax.rem(i, size)])

    def _copier(self, sources, smem, full, free):
        """Copies an item's queries, keys and values to shared memory."""
        q, last, k, v, slots, begins = sources
        (q_smem, last_smem), k_smem, begin_smem, v_smem = smem
        size, key_stages, value_stages = self.blocks.slots, k_smem.shape[0], v_smem.shape[0]

        def copy(step, done, place, first, count):
            row, group, _ = place
            side, heads = lax.rem(step, 2), pl.ds(group * HEADS, HEADS)
            pl.when(step >= 2)(lambda: plgpu.barrier_wait(free[0].at[side]))
            plgpu.copy_gmem_to_smem(q.at[row, group], q_smem.at[side], full[0].at[side])
            plgpu.copy_gmem_to_smem(last.at[row], last_smem.at[side], full[0].at[side])

            @pl.loop(0, count)
            def _(i):
                key_stage, value_stage = (lax.rem(done + i, n) for n in (key_stages, value_stages))
                begin = (first + i) * size
                block = [slots[row, begin + j] for j in range(size)]

                def fetch(source, target_ref, filled):
                    for j, slot in enumerate(block):
                        target = target_ref.at[pl.ds(j * HEADS, HEADS)]
                        plgpu.copy_gmem_to_smem(source.at[row, slot, heads], target, filled)

                filled = full[1].at[key_stage]
                columns = pl.ds(pl.multiple_of(begin * HEADS, HEADS), self.blocks.keys)
                pl.when(done + i >= key_stages)(lambda: plgpu.barrier_wait(free[1].at[key_stage]))
                plgpu.copy_gmem_to_smem(begins.at[row, columns], begin_smem.at[key_stage], filled)
                fetch(k, k_smem.at[key_stage], filled)
                pl.when(done + i >= value_stages)(
                    lambda: plgpu.barrier_wait(free[2].at[value_stage])
                )
                fetch(v, v_smem.at[value_stage], full[2].at[value_stage])

        return copy

    def _computer(self, smem, staged, results, full, free, rows):
        """Attends an item's queries to its blocks as they arrive, and writes the result."""
        (q_smem, last_smem), k_smem, begin_smem, v_smem = smem
        out_smem, lse_smem = staged
        keys, channels = self.blocks.keys, v_smem.shape[2]
        by_row, by_column = plgpu.Layout.WGMMA.reduce((1,)), plgpu.Layout.WGMMA.reduce((0,))
        # Scores are in the base of the exponential function that the GPU has.
        unit = 1.0 if self.softcap is not None else self.scale * LOG2E

        def fetch(ref, layout):
            return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]

        def vector(value):
            return plgpu.layout_cast(jnp.full((TILE,), value, jnp.float32), by_row)

        def over_columns(x, columns=keys):
            return lax.broadcast_in_dim(x, (TILE, columns), [0])

        def index(dimension):
            shape = (TILE, keys)
            return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA)

        def compute(step, done, place, first, count):
            side = lax.rem(step, 2)
            plgpu.barrier_wait(full[0].at[side])
            position = fetch(last_smem.at[side], by_row)
            group = self.heads // HEADS
            # Rows are by token, then by head; columns by slot, then by head.
            same_head = lax.div(lax.rem(index(0), self.heads), group) == lax.rem(index(1), HEADS)

            def block(i, carry):
                acc, top, total = carry
                stage = lax.rem(done + i, k_smem.shape[0])
                plgpu.barrier_wait(full[1].at[stage])
                scores = matmul(q_smem.at[side], k_smem.at[stage].transpose((1, 0)))
                begins = lax.broadcast_in_dim(
                    fetch(begin_smem.at[stage], by_column), (TILE, keys), [1]
                )
                plgpu.barrier_arrive(free[1].at[stage])
                if self.softcap is not None:
                    scores = jnp.tanh(scores * (self.scale / self.softcap)) * self.softcap * LOG2E
                visible = same_head & (begins <= over_columns(position))
                scores = jnp.where(visible, scores, -jnp.inf)
                higher = jnp.maximum(top, scores.max(axis=1) * unit)
                decay = jnp.exp2(top - higher)
                weights = jnp.exp2(scores * unit - over_columns(higher))
                total = total * decay + weights.sum(axis=1)
                stage = lax.rem(done + i, v_smem.shape[0])
                plgpu.barrier_wait(full[2].at[stage])
                acc = acc * over_columns(decay, channels)
                acc = add_matmul(acc, weights.astype(v_smem.dtype), v_smem.at[stage])
                plgpu.barrier_arrive(free[2].at[stage])
                return acc, higher, total

            zero = jnp.zeros((TILE, channels), jnp.float32)
            carry = plgpu.layout_cast(zero, plgpu.Layout.WGMMA), vector(LOWEST), vector(0)
            acc, top, total = lax.fori_loop(0, count, block, carry)
            plgpu.barrier_arrive(free[0].at[side])
            saw = total > 0
            safe = jnp.where(saw, total, 1)
            acc = acc * over_columns(1 / safe, channels)
            row, group, chunk = place
            out, lse = (x.at[row, 0, group, chunk] for x in results)
            for i, at in enumerate(range(0, channels, COLUMNS)):
                # The other buffer is still being read.
                plgpu.wait_smem_to_gmem(min(i, 1), wait_read_only=True)
                out_smem[i % 2] = acc[:, at : at + COLUMNS]
                if i == 0:
                    lse_smem[...] = jnp.where(saw, top + jnp.log2(safe), -jnp.inf)
                plgpu.commit_smem()
                target = out.at[:, pl.ds(at, COLUMNS)]
                plgpu.copy_smem_to_gmem(out_smem.at[i % 2, pl.ds(0, rows)], target)
                if i == 0:
                    plgpu.copy_smem_to_gmem(lse_smem.at[pl.ds(0, rows)], lse)

        return compute


def refuses(
    q: Array, k: Array, v: Array | None, selected: Array, log_weights: Array | None
) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    rows, size = q.shape[1] * q.shape[2] // k.shape[2], k.shape[3]
    if v is None:
        return "the values are in the keys"
    if q.dtype != k.dtype or q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"q of {q.dtype}, k and v of {k.dtype} are not all bfloat16 or float16"
    if selected.ndim != 2:
        return (
            f"selected {selected.shape} has a list for each KV head; a copy takes the {HEADS} rows "
            "of a tile, and a slot has one for each head"
        )
    if log_weights is not None:
        return "log_weights are given; it adds none"
    if k.shape[2] % HEADS:
        return f"K={k.shape[2]} KV heads are not a multiple of {HEADS}, the rows of a tile"
    if rows * HEADS > TILE:
        return (
            f"T * G = {rows} query rows of a KV head are over {TILE // HEADS}: {HEADS} heads a tile"
        )
    if size % 16 or size > PART or v.shape[3] != size:
        return f"H={size} and H'={v.shape[3]} are not one multiple of 16 up to {PART}"
    if 0 in selected.shape or q.size == 0:
        return f"selected {selected.shape} leaves nothing to gather"
    return None


def _supports(q, k, v, positions, selected, *args, log_weights=None, **kwargs) -> str | None:
    return refuses(q, k, v, selected, log_weights) or refuses_pallas()


GATHERED = Backend("pallas", gathered_pallas, _supports)
