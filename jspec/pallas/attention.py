"""Attention of a few query tokens over a long cache on Mosaic GPU, bound by memory bandwidth.

The T * G queries that share a key-value head are the rows of a tile. A head's keys are cut into
chunks at positions that are the same for every row and capacity, so that a row's arithmetic depends
neither on them nor on its neighbours. Chunks grow with the position: a short row is read by many
programs, and a long one is merged from few parts. Programs are persistent and take one chunk after
the other. One warpgroup copies keys and values into shared memory, across chunks, ahead of the
warpgroups that compute; these compute the weights of a block while they sum the values of the block
before. Keys past a row's length are not read. Each chunk gives an output with its log-sum-exp, and
a small second kernel merges them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.dispatch import Backend
from jspec.ops.attention.dense import IN_BLOCKS
from jspec.ops.attention.softmax import grouped, ungrouped
from jspec.pallas.attention_compute import Compute
from jspec.pallas.attention_cut import (
    PART,
    PROBES,
    Blocks,
    Items,
    Schedule,
    Shape,
    blocks_for,
    plan,
    reach,
)
from jspec.pallas.attention_merge import LOG2E, Merge
from jspec.pallas.matmul import TILE, matmul, swizzled
from jspec.pallas.mosaic import refuses_pallas
from jspec.sharding import opaque
from jspec.typing import Array


def shape_of(q: Array, k: Array, *, scored: bool = False) -> Shape:
    """The sizes of queries ``[B, T, N, H]`` over keys ``[B, S, K, H]``."""
    batch, tokens, heads, size = q.shape
    slots, kv_heads = k.shape[1:3]
    rows = tokens * heads // kv_heads
    return Shape(batch, slots, kv_heads, rows, size, k.dtype.itemsize, scored)


def attention_pallas(
    q: Array, k: Array, v: Array | None, positions: Array, **settings: Any
) -> tuple[Array, Array]:
    """The Pallas backend of `jspec.ops.attention`.

    ``settings``: those of the operation, and ``blocks`` for other sizes than `blocks_for` gives.
    """
    out, lse, _ = _attended(q, k, v, positions, None, **settings)
    return out, lse


def scored_attention_pallas(
    q: Array, k: Array, v: Array | None, positions: Array, probe: Array, **settings: Any
) -> tuple[Array, Array, Array]:
    """The Pallas backend of `jspec.ops.scored_attention`.

    ``settings``: those of the operation, and ``blocks`` for other sizes than `blocks_for` gives.
    """
    out, lse, scores = _attended(q, k, v, positions, probe, **settings)
    assert scores is not None
    return out, lse, scores


def _attended(
    q: Array,
    k: Array,
    v: Array | None,
    positions: Array,
    probe: Array | None,
    *,
    key_positions: Array | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    value_size: int | None,
    table: None = None,
    blocks: Blocks | None = None,
) -> tuple[Array, Array, Array | None]:
    """Output, log-sum-exp, and the scores of ``probe``, None without one."""
    assert v is not None  # `refuses`
    batch, tokens = q.shape[:2]
    kv_heads, shape = k.shape[2], shape_of(q, k, scored=probe is not None)
    blocks = blocks or blocks_for(shape)
    last, bounds = reach(positions, shape, window)
    items, until = plan(bounds, shape, blocks)
    partials = _Partials(shape, scale, window, softcap, blocks)
    attend = functools.partial(lowered_once, partials)
    out, lse, scores = opaque(attend, grouped(q, kv_heads), probe, k, v, last, items, until)
    if blocks.chunks.count > 1:
        merge = Merge(q.shape, q.dtype, kv_heads, blocks.chunks)
        return *opaque(functools.partial(lowered_once, merge), out, lse, bounds), scores

    def only(x: Array) -> Array:
        x = jnp.moveaxis(x[:, :, :, 0, : shape.program_rows], 1, 2)
        x = x.reshape(batch, kv_heads, -1, *x.shape[4:])
        return ungrouped(x[:, :, : shape.rows], tokens)

    return only(out), only(lse) / LOG2E, scores


@functools.partial(jax.jit, static_argnums=0)
def lowered_once(kernel: Callable[..., Any], *arrays: Any) -> Any:
    """``kernel(*arrays)``, lowered once for all layers of a program.

    JAX writes a new number into a Mosaic kernel each time it is lowered. If each layer lowered it,
    the kernels would differ, and XLA would compile every one of them.
    """
    return kernel(*arrays)


@dataclasses.dataclass(frozen=True)
class _Partials:
    """Attention over each chunk of keys separately."""

    shape: Shape
    scale: float
    window: int | None
    softcap: float | None
    blocks: Blocks

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.blocks, self.shape.slots)

    def __call__(
        self,
        q: Array,
        probe: Array | None,
        k: Array,
        v: Array,
        last: Array,
        items: Items,
        until: Array,
    ) -> tuple[Array, Array, Array | None]:
        """``q [B, K, T * G, H]``, ``probe [B, K, H]`` or None, ``last`` as `reach` gives it,
        ``items, until`` as `plan` does.

        Returns the outputs ``[B, tiles, K, chunks, rows, H]``, float32 where they are to be merged,
        the log-sum-exp of the scores, base 2, float32 ``[B, tiles, K, chunks, wide]``, and what
        ``probe`` scores, float32 ``[B, K, S]``, or None; a row that sees nothing gives -inf. Chunks
        that are not among the items are not written.
        """
        shape, blocks = self.shape, self.blocks
        batch, kv_heads, rows, size = q.shape
        tiles, program_rows, (key_stages, value_stages) = (
            shape.tiles,
            shape.program_rows,
            blocks.stages,
        )
        result = jnp.float32 if blocks.chunks.count > 1 else q.dtype
        q = jnp.pad(q, ((0, 0), (0, 0), (0, tiles * program_rows - rows), (0, 0)))
        queries = [q.reshape(batch, kv_heads, tiles, program_rows, size), last]
        query_buffers = [
            swizzled((blocks.sides, program_rows, size), k.dtype),
            plgpu.SMEM((blocks.sides, program_rows), jnp.int32),
        ]
        staged = [
            plgpu.SMEM((2, shape.groups * TILE, shape.part), result),
            plgpu.SMEM((2, shape.groups * TILE), jnp.float32),
        ]
        parts_shape = (batch, tiles, kv_heads, blocks.chunks.count, sum(shape.stored_rows))
        results = [
            jax.ShapeDtypeStruct((*parts_shape, size), result),
            jax.ShapeDtypeStruct((*parts_shape[:-1], program_rows), jnp.float32),
        ]
        if probe is not None:
            repeated = (batch, kv_heads, PROBES, size)
            queries.append(jnp.broadcast_to(probe[:, :, None].astype(k.dtype), repeated))
            query_buffers.append(swizzled((blocks.sides, PROBES, size), k.dtype))
            staged.append(plgpu.SMEM((2, blocks.keys), jnp.float32))
            results.append(jax.ShapeDtypeStruct((batch, kv_heads, shape.slots), jnp.float32))
        # Barriers of arrived data: (copies to wait for, number of barriers); and how many
        # warpgroups wait for each.
        full = (len(queries), blocks.sides), (1, key_stages), (shape.halves, value_stages)
        readers = shape.groups + shape.scored, shape.groups + shape.scored, shape.groups

        def attention_chunks(queries, k, v, items, until, *rest):
            results, rest = rest[: len(staged)], rest[len(staged) :]
            pl.run_scoped(
                lambda *scratch: self._kernel((queries, k, v), items, until, results, *scratch),
                query_buffers,
                swizzled((key_stages, blocks.keys, size), k.dtype),
                swizzled((value_stages, shape.halves, blocks.keys, shape.channels), k.dtype),
                staged,
                [plgpu.Barrier(num_arrivals=n, num_barriers=m) for n, m in full],
                [
                    plgpu.Barrier(num_arrivals=n, num_barriers=m)
                    for n, (_, m) in zip(readers, full, strict=True)
                ],
                plgpu.Barrier(num_arrivals=shape.halves, num_barriers=value_stages),
                collective_axes="group",
            )

        call = plgpu.kernel(
            attention_chunks,
            out_type=tuple(results),
            grid=(blocks.programs,),
            grid_names=("program",),
            num_threads=shape.warpgroups,
            thread_name="group",
            compiler_params=plgpu.CompilerParams(approx_math=True),
        )
        out, lse, *scores = call(queries, k, v, items, until)
        return out, lse, scores[0] if scores else None

    def _kernel(
        self, sources, items, until, results, query_buffers, k, v, staged, full, free, clean
    ):
        group, shape = lax.axis_index("group"), self.shape
        out, lse, *scores = results
        steps = self.schedule.count(until[until.shape[0] - 1])
        start = (jnp.int32(0), jnp.int32(0)), self.schedule.item(items, jnp.int32(0))

        @pl.when(group < shape.groups)
        def _():
            if shape.registers is not None:
                plgpu.set_max_registers(shape.registers[0], action="increase")
            compute = Compute(shape, self.scale, self.window, self.softcap, self.blocks)
            smem = *query_buffers[:2], k, v, *staged[:2]
            compute = compute(group, items, smem, (out, lse), full, free, clean)
            lax.fori_loop(0, steps, compute, start)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(group == shape.groups)
        def _():
            if shape.registers is not None:
                plgpu.set_max_registers(shape.registers[1], action="decrease")
            copy = self._copier(sources, items, (query_buffers, k, v), full, free)
            (done, read), _ = lax.fori_loop(0, steps, copy, start)
            # Wait for the last arrivals, so that no barrier is left pending.
            for count, barrier in zip((read, done, done), free, strict=True):
                size = barrier.shape[0]

                @pl.loop(jnp.maximum(count - size, 0), count)
                def _(i, size=size, barrier=barrier):
                    plgpu.barrier_wait(barrier.at[lax.rem(i, size)])

        if shape.scored:

            @pl.when(group == shape.groups + 1)
            def _():
                if shape.registers is not None:
                    plgpu.set_max_registers(shape.registers[1], action="decrease")
                score = self._scorer(items, (query_buffers[2], k, staged[2]), scores[0], full, free)
                lax.fori_loop(0, steps, score, start)
                plgpu.wait_smem_to_gmem(0)

    def _copier(self, sources, items, smem, full, free):
        """The body of a loop that copies an item's queries, keys and values to shared memory.

        ``full``: barriers that say that a buffer was filled; ``free``: that all have read it. The
        carry: blocks copied and items read so far, and the item.
        """
        (q, last, *probe), k, v = sources
        (q_smem, last_smem, *probe_smem), k_smem, v_smem = smem
        keys, sides, channels = self.blocks.keys, self.blocks.sides, self.shape.channels
        key_stages, value_stages = self.blocks.stages

        def copy(step, carry):
            (done, read), item = carry
            after = self.schedule.item(items, step + 1)
            row, tile, head, side = item.row, item.tile, item.head, lax.rem(read, sides)
            pl.when(read >= sides)(lambda: plgpu.barrier_wait(free[0].at[side]))
            arrived = full[0].at[side]
            plgpu.copy_gmem_to_smem(q.at[row, head, tile], q_smem.at[side], arrived)
            plgpu.copy_gmem_to_smem(last.at[row, tile], last_smem.at[side], arrived)
            for source, target in zip(probe, probe_smem, strict=True):
                plgpu.copy_gmem_to_smem(source.at[row, head], target.at[side], arrived)

            def key(i):
                _, at = self.schedule.at(item, i)
                slot = lax.rem(done + i, key_stages)
                pl.when(done + i >= key_stages)(lambda: plgpu.barrier_wait(free[1].at[slot]))
                source = k.at[row, pl.ds(at, keys), head]
                plgpu.copy_gmem_to_smem(source, k_smem.at[slot], full[1].at[slot])

            def value(i):
                _, at = self.schedule.at(item, i)
                slot = lax.rem(done + i, value_stages)
                pl.when(done + i >= value_stages)(lambda: plgpu.barrier_wait(free[2].at[slot]))
                for half in range(self.shape.halves):
                    source = v.at[row, pl.ds(at, keys), head, pl.ds(half * channels, channels)]
                    plgpu.copy_gmem_to_smem(source, v_smem.at[slot, half], full[2].at[slot])

            key(0)

            @pl.loop(0, item.blocks)
            def _(i):
                # In the order in which they are used.
                pl.when(i + 1 < item.blocks)(lambda: key(i + 1))
                value(i)

            return (done + item.blocks, read + 1), after

        return copy

    def _scorer(self, items, smem, scores, full, free):
        """The body of a loop that scores an item's keys; tiles that share keys write the same."""
        probe_smem, k_smem, score_smem = smem
        keys, (key_stages, _) = self.blocks.keys, self.blocks.stages

        def score(step, carry):
            (done, read), item = carry
            after = self.schedule.item(items, step + 1)
            side = lax.rem(read, self.blocks.sides)
            plgpu.barrier_wait(full[0].at[side])

            @pl.loop(0, item.blocks)
            def _(i):
                _, at = self.schedule.at(item, i)
                slot, staged = lax.rem(done + i, key_stages), lax.rem(done + i, 2)
                plgpu.barrier_wait(full[1].at[slot])
                # The buffer before the last one is no longer read.
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                for first in range(0, keys, TILE):
                    rows = pl.ds(first, TILE)
                    query = probe_smem.at[side].transpose((1, 0))
                    products = matmul(k_smem.at[slot, rows], query)
                    score_smem[staged, rows] = products.max(axis=1) * self.scale
                plgpu.barrier_arrive(free[1].at[slot])
                plgpu.commit_smem()
                target = scores.at[item.row, item.head, pl.ds(at, keys)]
                plgpu.copy_smem_to_gmem(score_smem.at[staged], target)

            plgpu.barrier_arrive(free[0].at[side])
            return (done + item.blocks, read + 1), after

        return score


def refuses(
    q: Array,
    k: Array,
    v: Array | None,
    *,
    key_positions: Array | None,
) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    batch, tokens, _, size = q.shape
    slots, kv_heads = k.shape[1:3]
    if key_positions is not None:
        return "key_positions are given, and the kernel takes slots for positions"
    if v is None:
        return "the values are in the keys"
    if q.dtype != k.dtype or q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"q of {q.dtype}, k and v of {k.dtype} are not all bfloat16 or float16"
    if size % (16 if size <= PART else 32) or size > 256 or v.shape[3] != size:
        sizes = "multiple of 16 up to 128, or of 32 up to 256"
        return f"H={size} and H'={v.shape[3]} are not one {sizes}"
    if batch * tokens * kv_heads == 0 or slots < TILE:
        return f"q {q.shape} over S={slots} is too small"
    if slots % 8:
        return f"S={slots} is not a multiple of 8; round the capacity up"
    return None


def _supports(q, k, v, *_positions, key_positions, table=None, **_settings) -> str | None:
    if table is not None:
        return IN_BLOCKS
    return refuses(q, k, v, key_positions=key_positions) or refuses_pallas()


ATTENTION = Backend("pallas", attention_pallas, _supports)
SCORED = Backend("pallas", scored_attention_pallas, _supports)
