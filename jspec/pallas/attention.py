"""Attention of a few query tokens over a long cache on Mosaic GPU, at the speed of memory.

The queries that share a key-value head are the rows of a tile, T * G of them. A head's keys are
cut into chunks at positions that are the same for every row and capacity, so that a row's
arithmetic depends on neither, nor on its neighbours; they grow with the position, so that a short
row is read by many programs and a long one is merged from few parts. The programs stay and take
one chunk after the other: one warpgroup copies keys and values into shared memory, across chunks,
ahead of those that compute, and these compute the weights of a block beside the sum over the
values of the one before. What lies beyond a row's length is not read. Each chunk leaves an output
with its log-sum-exp, and a small second kernel merges them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.dispatch import Backend
from jspec.ops.attention.softmax import grouped, ungrouped
from jspec.pallas.attention_cut import (
    PART,
    Blocks,
    Items,
    Shape,
    blocks_for,
    plan,
    reach,
)
from jspec.pallas.attention_merge import LOG2E, LOWEST, Merge
from jspec.pallas.mosaic import refuses_pallas
from jspec.pallas.products import TILE, beside, both, plus, swizzled, times
from jspec.sharding import opaque
from jspec.typing import Array


def shape_of(q: Array, k: Array) -> Shape:
    """The sizes of queries ``[B, T, N, H]`` over keys ``[B, S, K, H]``."""
    batch, tokens, heads, size = q.shape
    slots, kv_heads = k.shape[1:3]
    rows = tokens * heads // kv_heads
    return Shape(batch, slots, kv_heads, rows, size, k.dtype.itemsize)


def attention_pallas(
    q: Array,
    k: Array,
    v: Array | None,
    positions: Array,
    *,
    key_positions: Array | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    value_size: int | None,
    blocks: Blocks | None = None,
) -> tuple[Array, Array]:
    """As `jspec.ops.attention.dense.attention`, for what `refuses` lets pass."""
    assert v is not None  # `refuses`
    batch, tokens = q.shape[:2]
    kv_heads, shape = k.shape[2], shape_of(q, k)
    blocks = blocks or blocks_for(shape)
    last, bounds = reach(positions, shape, window)
    items, until = plan(bounds, shape, blocks)
    partials = _Partials(shape, scale, window, softcap, blocks)
    out, lse = opaque(partials, grouped(q, kv_heads), k, v, last, items, until)
    if blocks.chunks.count > 1:
        merge = Merge(q.shape, q.dtype, kv_heads, blocks.chunks)
        return opaque(merge, out, lse, bounds)

    def only(x: Array) -> Array:
        x = jnp.moveaxis(x[:, :, :, 0, : shape.wide], 1, 2)
        x = x.reshape(batch, kv_heads, -1, *x.shape[4:])
        return ungrouped(x[:, :, : shape.rows], tokens)

    return only(out), only(lse) / LOG2E


NARROW = 64  # channels up to which two products beside each other take longer than in turn


@dataclasses.dataclass(frozen=True)
class _Partials:
    """Attention over each chunk of keys by itself."""

    shape: Shape
    scale: float
    window: int | None
    softcap: float | None
    blocks: Blocks

    def __call__(
        self, q: Array, k: Array, v: Array, last: Array, items: Items, until: Array
    ) -> tuple[Array, Array]:
        """``q [B, K, T * G, H]``, ``last`` as `reach` gives it, ``items, until`` as `plan` does.

        Returns the outputs ``[B, tiles, K, chunks, rows, H]``, float32 where they are to be merged,
        and the log-sum-exp of the scores, base 2, float32 ``[B, tiles, K, chunks, wide]``; a row
        that sees nothing gives -inf. Chunks that are not among the items are not written.
        """
        shape, blocks = self.shape, self.blocks
        batch, kv_heads, rows, size = q.shape
        tiles, wide, (ahead, behind) = shape.tiles, shape.wide, blocks.stages
        result = jnp.float32 if blocks.chunks.count > 1 else q.dtype
        q = jnp.pad(q, ((0, 0), (0, 0), (0, tiles * wide - rows), (0, 0)))
        q = q.reshape(batch, kv_heads, tiles, wide, size)

        def attention_chunks(*refs):
            pl.run_scoped(
                lambda *scratch: self._kernel(*refs, *scratch),
                swizzled((blocks.sides, wide, size), k.dtype),
                swizzled((ahead, blocks.keys, size), k.dtype),
                swizzled((behind, shape.halves, blocks.keys, shape.channels), k.dtype),
                plgpu.SMEM((2, shape.groups * TILE, shape.part), result),
                plgpu.SMEM((2, shape.groups * TILE), jnp.float32),
                plgpu.SMEM((blocks.sides, wide), jnp.int32),
                [plgpu.Barrier(num_arrivals=n, num_barriers=m) for n, m in full],
                [plgpu.Barrier(num_arrivals=shape.groups, num_barriers=m) for _, m in full],
                plgpu.Barrier(num_arrivals=shape.halves, num_barriers=behind),
                collective_axes="group",
            )

        # Of barriers that tell what has arrived: copies to wait for, and how many barriers.
        full = (2, blocks.sides), (1, ahead), (shape.halves, behind)
        kept = (batch, tiles, kv_heads, blocks.chunks.count, sum(shape.kept))
        call = plgpu.kernel(
            attention_chunks,
            out_type=(
                jax.ShapeDtypeStruct((*kept, size), result),
                jax.ShapeDtypeStruct((*kept[:-1], wide), jnp.float32),
            ),
            grid=(blocks.programs,),
            grid_names=("program",),
            num_threads=shape.groups + 1,
            thread_name="group",
            compiler_params=plgpu.CompilerParams(approx_math=True),
        )
        return call(q, k, v, last, items, until)

    def _kernel(self, q, k, v, last, items, until, out, lse, *scratch):
        *smem, full, free, clean = scratch
        group = lax.axis_index("group")
        count = until[until.shape[0] - 1]
        turns = lax.div(count, self.blocks.programs // self.blocks.gang)
        # The last turn is not whole.
        turns += (self._index(turns) < count).astype(jnp.int32)
        start = (jnp.int32(0), jnp.int32(0)), self._item(items, jnp.int32(0))

        @pl.when(group == self.shape.groups)
        def _():
            if self.shape.groups > 1:
                plgpu.set_max_registers(40, action="decrease")
            copy = self._copier((q, last, k, v), items, smem, full, free)
            (done, read), _ = lax.fori_loop(0, turns, copy, start)
            # Every barrier is seen to its end.
            for count, barrier in zip((read, done, done), free, strict=True):
                size = barrier.shape[0]

                @pl.loop(jnp.maximum(count - size, 0), count)
                def _(i, size=size, barrier=barrier):
                    plgpu.barrier_wait(barrier.at[lax.rem(i, size)])

        @pl.when(group < self.shape.groups)
        def _():
            if self.shape.groups > 1:
                plgpu.set_max_registers(232, action="increase")
            compute = self._computer(group, items, smem, (out, lse), full, free, clean)
            lax.fori_loop(0, turns, compute, start)
            plgpu.wait_smem_to_gmem(0)

    def _index(self, turn):
        """The item of a turn: gangs take them in order, and in every other turn backward."""
        gang = lax.div(lax.axis_index("program"), self.blocks.gang)
        gangs = self.blocks.programs // self.blocks.gang
        return turn * gangs + jnp.where(lax.rem(turn, 2) == 0, gang, gangs - 1 - gang)

    def _item(self, items, turn):
        """The item of a turn; read a turn ahead, since global memory is slow."""
        index = jnp.minimum(self._index(turn), items.row.shape[0] - 1)
        here = jax.tree.map(lambda x: x[index], items)
        own = lax.rem(lax.axis_index("program"), self.blocks.gang)
        return dataclasses.replace(here, head=here.head + own)

    def _at(self, here, i):
        """Where block ``i`` of an item is read: the last one ends with the cache."""
        begins = here.begin + i * self.blocks.keys
        return begins, pl.multiple_of(jnp.minimum(begins, self.shape.slots - self.blocks.keys), 8)

    def _copier(self, gmem, items, smem, full, free):
        q, last, k, v = gmem
        q_smem, k_smem, v_smem, _, _, last_smem = smem
        keys, sides, channels = self.blocks.keys, self.blocks.sides, self.shape.channels
        ahead, behind = self.blocks.stages

        def copy(turn, carry):
            (done, read), here = carry
            after = self._item(items, turn + 1)
            row, tile, head, side = here.row, here.tile, here.head, lax.rem(read, sides)
            pl.when(read >= sides)(lambda: plgpu.barrier_wait(free[0].at[side]))
            arrived = full[0].at[side]
            plgpu.copy_gmem_to_smem(q.at[row, head, tile], q_smem.at[side], arrived)
            plgpu.copy_gmem_to_smem(last.at[row, tile], last_smem.at[side], arrived)

            def key(i):
                _, at = self._at(here, i)
                slot = lax.rem(done + i, ahead)
                pl.when(done + i >= ahead)(lambda: plgpu.barrier_wait(free[1].at[slot]))
                source = k.at[row, pl.ds(at, keys), head]
                plgpu.copy_gmem_to_smem(source, k_smem.at[slot], full[1].at[slot])

            def value(i):
                _, at = self._at(here, i)
                slot = lax.rem(done + i, behind)
                pl.when(done + i >= behind)(lambda: plgpu.barrier_wait(free[2].at[slot]))
                for half in range(self.shape.halves):
                    source = v.at[row, pl.ds(at, keys), head, pl.ds(half * channels, channels)]
                    plgpu.copy_gmem_to_smem(source, v_smem.at[slot, half], full[2].at[slot])

            key(0)

            @pl.loop(0, here.blocks)
            def _(i):
                # In the order in which they are used.
                pl.when(i + 1 < here.blocks)(lambda: key(i + 1))
                value(i)

            return (done + here.blocks, read + 1), after

        return copy

    def _computer(self, group, items, smem, results, full, free, clean):
        q_smem, k_smem, v_smem, out_smem, row_smem, last_smem = smem
        shape, keys, (ahead, behind) = self.shape, self.blocks.keys, self.blocks.stages
        channels, part, piece = shape.channels, shape.part, beside(shape.channels)
        stack, half = lax.div(group, shape.halves), lax.rem(group, shape.halves)
        own, staged = pl.ds(stack * TILE, TILE), pl.ds(group * TILE, TILE)
        by_row = plgpu.Layout.WGMMA.reduce(1)
        # Scores are kept in the base of the exponential function that the GPU has.
        unit = 1.0 if self.softcap is not None else self.scale * LOG2E

        def vector(value):
            return plgpu.layout_cast(jnp.full((TILE,), value, jnp.float32), by_row)

        def wide(x, columns):
            return lax.broadcast_in_dim(x, (TILE, columns), [0])

        def index(shape, dimension):
            return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA)

        def fetch(ref, layout):
            return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]

        def without_junk(slot, at, end):
            # Slots beyond the length may hold anything, and 0 * NaN is NaN.
            @pl.when(stack == 0)
            def _():
                for channel in range(0, channels, piece):  # of few registers
                    here = v_smem.at[slot, half, :, pl.ds(channel, piece)]
                    held = fetch(here, plgpu.Layout.WGMMA)
                    here[...] = jnp.where(index((keys, piece), 0) + at < end, held, 0)
                plgpu.commit_smem()
                plgpu.barrier_arrive(clean.at[slot])

            plgpu.barrier_wait(clean.at[slot])

        def compute(turn, carry):
            (done, read), here = carry
            after = self._item(items, turn + 1)
            count, end, side = here.blocks, here.end, lax.rem(read, self.blocks.sides)
            plgpu.barrier_wait(full[0].at[side])
            limit = fetch(last_smem.at[side, own], by_row)

            def masked(scores, i):
                begins, at = self._at(here, i)
                position = index((TILE, keys), 1) + at
                seen = (position >= begins) & (position <= wide(limit, keys))
                if self.window is not None:
                    seen = seen & (position > wide(limit - self.window, keys))
                return jnp.where(seen, scores, -jnp.inf)

            def weigh(scores, i, top, total, mask):
                """The weights of block ``i``, and how much less those before it count from now."""
                if self.softcap is not None:
                    scores = jnp.tanh(scores * (self.scale / self.softcap)) * self.softcap * LOG2E
                if mask:
                    scores = masked(scores, i)
                higher = jnp.maximum(top, scores.max(axis=1) * unit)
                decay = jnp.exp2(top - higher)
                weights = jnp.exp2(scores * unit - wide(higher, keys))
                total = total * decay + weights.sum(axis=1)
                return higher, total, decay, weights

            def query_and_keys(slot):
                return q_smem.at[side, own], k_smem.at[slot].transpose((1, 0))

            def scores_of(i):
                slot = lax.rem(done + i, ahead)
                plgpu.barrier_wait(full[1].at[slot])
                scores = times(*query_and_keys(slot))
                plgpu.barrier_arrive(free[1].at[slot])
                return scores

            def block(i, carry, mask):
                acc, top, total = carry
                top, total, decay, weights = weigh(scores_of(i), i, top, total, mask)
                slot = lax.rem(done + i, behind)
                plgpu.barrier_wait(full[2].at[slot])
                weights = weights.astype(v_smem.dtype)
                acc = plus(acc * wide(decay, channels), weights, v_smem.at[slot, half])
                plgpu.barrier_arrive(free[2].at[slot])
                return acc, top, total

            def block_beside(i, carry, mask):
                """The scores of block ``i``, beside the sum over the values of the one before."""
                acc, top, total, weights = carry
                slot, before = lax.rem(done + i, ahead), lax.rem(done + i - 1, behind)
                plgpu.barrier_wait(full[1].at[slot])

                def between(scores):
                    plgpu.barrier_arrive(free[1].at[slot])
                    higher, sums, *rest = weigh(scores, i, top, total, mask)
                    # The compiler moves a wait ahead of arithmetic, not ahead of a store: with
                    # this one the arithmetic is done while the second product runs.
                    row_smem[1, staged] = sums
                    return higher, sums, *rest

                (higher, sums, decay, weights), acc = both(
                    *query_and_keys(slot),
                    lambda: plgpu.barrier_wait(full[2].at[before]),
                    (acc, weights, v_smem.at[before, half]),
                    between,
                )
                plgpu.barrier_arrive(free[2].at[before])
                return acc * wide(decay, channels), higher, sums, weights.astype(v_smem.dtype)

            def through(begin, end, block, carry):
                plain = jnp.clip(here.plain, begin, jnp.maximum(end, begin))
                carry = lax.fori_loop(begin, plain, lambda i, c: block(i, c, False), carry)
                return lax.fori_loop(plain, end, lambda i, c: block(i, c, True), carry)

            acc = plgpu.layout_cast(jnp.zeros((TILE, channels), jnp.float32), plgpu.Layout.WGMMA)
            top, total = vector(LOWEST), vector(0)
            if channels > NARROW:
                top, total, _decay, weights = weigh(scores_of(0), 0, top, total, True)
                carry = acc, top, total, weights.astype(v_smem.dtype)
                acc, top, total, weights = through(1, count, block_beside, carry)
            else:
                acc, top, total = through(0, count - 1, block, (acc, top, total))
                scores = scores_of(count - 1)
                top, total, decay, weights = weigh(scores, count - 1, top, total, True)
                acc, weights = acc * wide(decay, channels), weights.astype(v_smem.dtype)
            final = lax.rem(done + count - 1, behind)
            plgpu.barrier_arrive(free[0].at[side])
            plgpu.barrier_wait(full[2].at[final])
            _, at = self._at(here, count - 1)
            pl.when(at + keys > end)(lambda: without_junk(final, at, end))
            acc = plus(acc, weights, v_smem.at[final, half])
            plgpu.barrier_arrive(free[2].at[final])

            # Blocks that are not masked are seen by all queries, but not by padding.
            saw = (total > 0) & (limit >= 0)
            safe = jnp.where(saw, total, 1)
            place = here.row, here.tile, here.head, here.chunk
            out, lse = (x.at[*place] for x in results)
            acc = jnp.where(wide(saw, channels), acc * wide(1 / safe, channels), 0)
            for i, at in enumerate(range(0, channels, part)):
                # The buffer before is still being read.
                plgpu.wait_smem_to_gmem(min(i, 1), wait_read_only=True)
                out_smem[i % 2, staged] = acc[:, at : at + part].astype(out_smem.dtype)
                if i == 0:
                    row_smem[0, staged] = jnp.where(saw, top + jnp.log2(safe), -jnp.inf)
                plgpu.commit_smem()
                for j, kept in enumerate(shape.kept):

                    @pl.when(stack == j)
                    def _(i=i, at=at, j=j, kept=kept):
                        source = out_smem.at[i % 2, pl.ds(group * TILE, kept)]
                        columns = pl.ds(half * channels + at, part)
                        plgpu.copy_smem_to_gmem(source, out.at[pl.ds(j * TILE, kept), columns])

                if i == 0:
                    pl.when(half == 0)(
                        lambda: plgpu.copy_smem_to_gmem(row_smem.at[0, staged], lse.at[own])
                    )

            return (done + count, read + 1), after

        return compute


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


def _supports(
    q, k, v, positions, *, key_positions, scale, window, softcap, value_size
) -> str | None:
    return refuses(q, k, v, key_positions=key_positions) or refuses_pallas()


ATTENTION = Backend("pallas", attention_pallas, _supports)
