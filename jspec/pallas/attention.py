"""Attention of a few query tokens over a long cache on Mosaic GPU, at the speed of memory.

The queries that share a key-value head are the rows of a tile, T * G of them. A head's keys are
cut into chunks at positions that are the same for every row and capacity, so that a row's
arithmetic depends on neither, nor on its neighbours; they grow with the position, so that a short
row is read by many programs and a long one is merged from few parts. The programs stay and take
one chunk after the other: one warpgroup copies keys and values into shared memory, across chunks,
ahead of those that compute. What lies beyond a row's length is not read. Each chunk leaves an
output with its log-sum-exp, and a small second kernel merges them.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.dispatch import Backend
from jspec.gpu import multiprocessors
from jspec.ops.attention.softmax import grouped, ungrouped
from jspec.pallas.mosaic import WARPS, Spread, floor_power, load, refuses_pallas, starts, store
from jspec.sharding import opaque
from jspec.typing import Array

TILE = 64  # rows that a warpgroup computes
PART = 128  # channels
GROUPS = 2  # most warpgroups that compute
SHARED = 227 * 1024 - 4096  # bytes of shared memory for arrays; the rest goes to their alignment
AT_ONCE = 16  # chunks whose loads are in flight together
REACHES = 8192, 32768, 131072  # up to which positions chunks have a size
LOWEST = -1e30  # the maximum of no score; finite, so that a difference of two is no NaN
LOG2E = math.log2(math.e)
EVERYTHING = jnp.iinfo(jnp.int32).max


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Positions in chunks, larger ones farther behind.

    ``levels``: up to which position, and how many keys a chunk; all but the last position are
    multiples of the sizes on both sides.
    """

    levels: tuple[tuple[int, int], ...]

    def _each(self):
        """Of each level: its first chunk, its first position, and its size."""
        chunk = begin = 0
        for until, size in self.levels:
            yield chunk, begin, size
            chunk, begin = chunk + -(-(until - begin) // size), until

    @property
    def count(self) -> int:
        chunk, begin, size = list(self._each())[-1]
        return chunk + -(-(self.levels[-1][0] - begin) // size)

    def place(self, index):
        """Where a chunk begins, and its size."""
        where = jnp.int32(0), jnp.int32(0)
        for chunk, begin, size in self._each():
            here = begin + (index - chunk) * size, size
            where = tuple(jnp.where(index >= chunk, x, y) for x, y in zip(here, where, strict=True))
        return where

    def holding(self, position):
        """The chunk that a position is in."""
        index = jnp.int32(0)
        for chunk, begin, size in self._each():
            here = chunk + lax.div(position - begin, jnp.int32(size))
            index = jnp.where(position >= begin, here, index)
        return index


def chunks_for(slots: int, kv_heads: int) -> Chunks:
    """Chunks of which a single row has about as many as an H200 has multiprocessors."""
    even = [max(until * kv_heads // 132, 256) for until in REACHES]
    sizes = [min(2 * floor_power(keys - 1), 8192) for keys in even]
    reached = [(u, s) for u, s in zip(REACHES, sizes, strict=True) if u < slots]
    last = sizes[min(len(reached), len(sizes) - 1)]
    return Chunks((*reached, (slots, last)))


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the work is cut: ``keys`` of a block, ``stages`` that hold a block each, ``sides`` that
    hold the queries of an item each, the ``chunks`` (of multiples of ``keys``), the ``programs``
    that stay, and their ``lanes``, which take items apart from each other."""

    keys: int
    stages: int
    sides: int
    chunks: Chunks
    programs: int
    lanes: int


def blocks_for(shape: Shape) -> Blocks:
    """The cut that serves a shape well."""
    if shape.tiles > 1:  # many queries: a tile reads all keys, and nothing is merged
        keys, chunks = 2 * TILE, Chunks(((shape.slots, -(-shape.slots // 128) * 128),))
    else:
        keys, chunks = TILE, chunks_for(shape.slots, shape.kv_heads)
    if shape.size <= TILE:
        keys = 2 * TILE  # a block of fewer bytes takes as long to compute as to wait for
    # The queries of the next item are copied early where that leaves room for enough blocks.
    for wide, sides, least in ((keys, 2, 2), (keys, 1, 1 if keys > TILE else 2), (TILE, 1, 1)):
        stages = min(shape.stages(wide, sides), 4)
        if wide <= shape.slots and stages >= least:
            return Blocks(wide, stages, sides, chunks, multiprocessors(), shape.lanes)
    raise AssertionError("two blocks of 64 keys of the largest head fit")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of an attention, and how its queries are laid into tiles."""

    batch: int
    slots: int
    kv_heads: int
    rows: int  # T * G
    size: int
    item: int  # bytes of an element

    @property
    def groups(self) -> int:
        """Warpgroups that compute, each a tile of 64 rows."""
        return 1 if self.rows <= TILE or self.size > PART else GROUPS

    @property
    def wide(self) -> int:
        """Rows that a program holds."""
        return self.groups * TILE

    @property
    def tiles(self) -> int:
        """How many times that is of the queries that share a head."""
        return -(-self.rows // self.wide)

    @property
    def kept(self) -> int:
        """Rows of a warpgroup that are written, a multiple of 8."""
        return min(-(-self.rows // 8) * 8, TILE)

    @property
    def lanes(self) -> int:
        """Items that a program works on at a time: while one is finished, another is read."""
        return 2 if self.groups == 1 and self.size <= PART else 1

    @property
    def part(self) -> int:
        """Most channels of an accumulator, and of results on their way to global memory."""
        return min(self.size, PART // self.lanes)

    def stages(self, keys: int, sides: int) -> int:
        """How many blocks fit into shared memory beside queries and results."""
        own = self.wide * (sides * (self.size * self.item + 4) + 4 * self.part + 4)
        return (SHARED // self.lanes - own) // (2 * keys * self.size * self.item)


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
    last, bounds = reach(positions, shape, window)
    partials = _Partials(shape, scale, window, softcap, blocks or blocks_for(shape))
    out, lse = opaque(partials, grouped(q, kv_heads), k, v, last, bounds)
    if partials.chunks > 1:
        merge = _Merge(q.shape, q.dtype, kv_heads, partials.blocks.chunks)
        return opaque(merge, out, lse, bounds)

    def only(x: Array) -> Array:
        x = jnp.moveaxis(x[:, :, :, 0, : shape.wide], 1, 2)
        x = x.reshape(batch, kv_heads, -1, *x.shape[4:])
        return ungrouped(x[:, :, : shape.rows], tokens)

    return only(out).astype(q.dtype), only(lse) / LOG2E


def reach(positions: Array, shape: Shape, window: int | None) -> tuple[Array, Array]:
    """Which keys the queries at ``positions [B, T]`` see.

    int32 ``[B, tiles, wide]``: the last position that each query of a tile sees, -1 for none; and
    ``[B, tiles, 3]``: where those begin that any of them sees, where those end that all of them see
    (or those that begin, with a window), and where the last of them ends.
    """
    group = shape.rows // positions.shape[1]
    spare = shape.tiles * shape.wide - shape.rows
    last = jnp.pad(jnp.repeat(positions, group, axis=1), ((0, 0), (0, spare)), constant_values=-1)
    last = last.reshape(shape.batch, shape.tiles, shape.wide)
    first = jnp.where(last >= 0, last, EVERYTHING).min(axis=2)
    end = last.max(axis=2) + 1
    begin, common = jnp.zeros_like(end), jnp.minimum(first, end - 1) + 1
    if window is not None:
        begin = common = jnp.maximum(jnp.minimum(first, end) - window + 1, 0)
    return last, jnp.stack([begin, common, end], axis=2)


@dataclasses.dataclass(frozen=True)
class _Partials:
    """Attention over each chunk of keys by itself."""

    shape: Shape
    scale: float
    window: int | None
    softcap: float | None
    blocks: Blocks

    @property
    def chunks(self) -> int:
        return self.blocks.chunks.count

    @property
    def items(self) -> int:
        """Chunks of all tiles of all heads of all rows."""
        return self.shape.batch * self.shape.tiles * self.shape.kv_heads * self.chunks

    @property
    def programs(self) -> int:
        return min(self.blocks.programs, self.items)

    @property
    def turns(self) -> int:
        """Items that a lane takes."""
        return -(-self.items // (self.programs * self.blocks.lanes))

    def __call__(
        self, q: Array, k: Array, v: Array, last: Array, bounds: Array
    ) -> tuple[Array, Array]:
        """``q [B, K, T * G, H]``, ``last [B, tiles, wide]`` and ``bounds`` as `reach` gives them.

        Returns the outputs, float32 ``[B, tiles, K, chunks, rows, H]``, and the log-sum-exp of the
        scores, base 2, float32 ``[B, tiles, K, chunks, wide]``; a row that sees nothing gives -inf.
        Where there are several chunks, those that no query of a tile sees are not written.
        """
        shape, lanes = self.shape, self.blocks.lanes
        stages, sides = lanes * self.blocks.stages, lanes * self.blocks.sides
        batch, kv_heads, rows, size = q.shape
        tiles, wide = shape.tiles, shape.wide
        spare = tiles * wide - rows
        q = jnp.pad(q, ((0, 0), (0, 0), (0, spare), (0, 0)))
        q = q.reshape(batch, kv_heads, tiles, wide, size)
        channels = 64 if size % 64 == 0 else 32 if size % 32 == 0 else 16
        swizzled = (
            plgpu.TilingTransform((8, channels)),
            plgpu.SwizzleTransform(channels * shape.item),
        )
        blocks = plgpu.SMEM((stages, self.blocks.keys, size), k.dtype, transforms=swizzled)

        def attention_chunks(*refs):
            pl.run_scoped(
                lambda *scratch: self._kernel(*refs, *scratch),
                plgpu.SMEM((sides, wide, size), k.dtype, transforms=swizzled),
                plgpu.SMEM((sides, wide), jnp.int32),
                blocks,
                blocks,
                plgpu.SMEM((lanes * wide, shape.part), jnp.float32),
                plgpu.SMEM((lanes * wide,), jnp.float32),
                [
                    plgpu.Barrier(num_arrivals=2, num_barriers=sides),
                    plgpu.Barrier(num_barriers=stages),
                    plgpu.Barrier(num_barriers=stages),
                ],
                [
                    plgpu.Barrier(num_arrivals=shape.groups, num_barriers=n)
                    for n in (sides, stages, stages)
                ],
                plgpu.Barrier(num_barriers=stages),
                collective_axes="group",
            )

        kept = (batch, tiles, kv_heads, self.chunks, shape.groups * shape.kept)
        call = plgpu.kernel(
            attention_chunks,
            out_type=(
                jax.ShapeDtypeStruct((*kept, size), jnp.float32),
                jax.ShapeDtypeStruct((*kept[:-1], wide), jnp.float32),
            ),
            grid=(self.programs,),
            grid_names=("program",),
            num_threads=lanes * (shape.groups + 1),
            thread_name="group",
            compiler_params=plgpu.CompilerParams(approx_math=True),
        )
        return call(q, k, v, last, bounds)

    def _item(self, lane, turn):
        """A lane's item of a turn: whether there is one, batch row, tile, head and chunk."""
        item = (turn * self.blocks.lanes + lane) * self.programs + lax.axis_index("program")
        there = item < self.items
        item = jnp.minimum(item, self.items - 1)
        # Heads go fastest: neighbours in memory are read at about the same time.
        item, head = lax.div(item, self.shape.kv_heads), lax.rem(item, self.shape.kv_heads)
        item, chunk = lax.div(item, self.chunks), lax.rem(item, self.chunks)
        row, tile = lax.div(item, self.shape.tiles), lax.rem(item, self.shape.tiles)
        return there, row, tile, head, chunk

    def _bounds(self, lane, turn, bounds):
        """The bounds of a turn's tile; read a turn ahead, since global memory is slow."""
        _, row, tile, _, _ = self._item(lane, turn)
        return tuple(bounds[row, tile, i] for i in range(3))

    def _range(self, there, chunk, bounds):
        """Of a chunk's blocks, those to read, ``low..high``, and from which on they are masked."""
        begin, common, end = bounds
        keys = self.blocks.keys
        start, size = self.blocks.chunks.place(chunk)

        def inside(position):
            return jnp.where(there, jnp.clip(position - start, 0, size), 0)

        low = lax.div(inside(begin), keys)
        plain = jnp.maximum(lax.div(inside(common), keys), low)
        high = lax.div(inside(end) + keys - 1, keys)
        return low, plain, jnp.maximum(high, low)

    def _place(self, start, i):
        """Where block ``i`` of a chunk that starts there begins, and where it is read: the last one
        ends with the cache."""
        begins = start + i * self.blocks.keys
        return begins, jnp.minimum(begins, self.shape.slots - self.blocks.keys)

    def _kernel(self, q, k, v, last, bounds, out, lse, *scratch):
        *smem, full, free, clean = scratch
        lanes, sides, stages = self.blocks.lanes, self.blocks.sides, self.blocks.stages
        index = lax.axis_index("group")
        group, lane = lax.div(index, lanes), lax.rem(index, lanes)
        start = (jnp.int32(0), jnp.int32(0)), self._bounds(lane, 0, bounds)

        @pl.when(group == self.shape.groups)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            copy = self._copier(lane, (q, last, k, v), bounds, smem[:4], full, free)
            (done, read), _ = lax.fori_loop(0, self.turns, copy, start)
            # Every barrier is seen to its end.
            for count, size, barriers in ((read, sides, free[:1]), (done, stages, free[1:])):

                @pl.loop(jnp.maximum(count - size, 0), count)
                def _(i, size=size, barriers=barriers):
                    for barrier in barriers:
                        plgpu.barrier_wait(barrier.at[lane * size + lax.rem(i, size)])

        @pl.when(group < self.shape.groups)
        def _():
            plgpu.set_max_registers(232 if lanes == 1 else 208, action="increase")
            compute = self._computer(lane, group, bounds, smem, (out, lse), full, free, clean)
            lax.fori_loop(0, self.turns, compute, start)
            plgpu.wait_smem_to_gmem(0)

    def _copier(self, lane, gmem, bounds, smem, full, free):
        q, last, k, v = gmem
        q_smem, last_smem, k_smem, v_smem = smem
        sides, stages = self.blocks.sides, self.blocks.stages

        def copy(turn, carry):
            (done, read), here = carry
            ahead = self._bounds(lane, turn + 1, bounds)
            there, row, tile, head, chunk = self._item(lane, turn)
            low, high = self._range(there, chunk, here)[::2]
            start = self.blocks.chunks.place(chunk)[0]

            @pl.when(high > low)
            def _():
                side = lane * sides + lax.rem(read, sides)

                @pl.when(read >= sides)
                def _():
                    plgpu.barrier_wait(free[0].at[side])

                arrived = full[0].at[side]
                plgpu.copy_gmem_to_smem(q.at[row, head, tile], q_smem.at[side], arrived)
                plgpu.copy_gmem_to_smem(last.at[row, tile], last_smem.at[side], arrived)

            def block(i, done):
                slot = lane * stages + lax.rem(done, stages)
                _, at = self._place(start, i)
                for which, held, target in ((1, k, k_smem), (2, v, v_smem)):

                    @pl.when(done >= stages)
                    def _(which=which):
                        plgpu.barrier_wait(free[which].at[slot])

                    source = held.at[row, pl.ds(at, self.blocks.keys), head]
                    plgpu.copy_gmem_to_smem(source, target.at[slot], full[which].at[slot])
                return done + 1

            done = lax.fori_loop(low, high, block, done)
            return (done, read + (high > low).astype(jnp.int32)), ahead

        return copy

    def _computer(self, lane, group, bounds, smem, results, full, free, clean):
        q_smem, last_smem, k_smem, v_smem, out_smem, lse_smem = smem
        keys, stages, size = self.blocks.keys, self.blocks.stages, self.shape.size
        own = pl.ds(group * TILE, TILE)
        staged = (lane * self.shape.groups + group) * TILE
        part_size = self.shape.part
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
            @pl.when(group == 0)
            def _():
                held = fetch(v_smem.at[slot], plgpu.Layout.WGMMA)
                v_smem[slot] = jnp.where(index((keys, size), 0) + at < end, held, 0)
                plgpu.commit_smem()
                plgpu.barrier_arrive(clean.at[slot])

            plgpu.barrier_wait(clean.at[slot])

        def compute(turn, carry):
            (done, read), here = carry
            ahead = self._bounds(lane, turn + 1, bounds)
            there, row, tile, head, chunk = self._item(lane, turn)
            low, plain, high = self._range(there, chunk, here)
            start = self.blocks.chunks.place(chunk)[0]
            side = lane * self.blocks.sides + lax.rem(read, self.blocks.sides)

            @pl.when(high > low)
            def _():
                plgpu.barrier_wait(full[0].at[side])

            limit = fetch(last_smem.at[side, own], by_row)

            def masked_scores(scores, begins, at):
                position = index((TILE, keys), 1) + at
                seen = (position >= begins) & (position <= wide(limit, keys))
                if self.window is not None:
                    seen = seen & (position > wide(limit - self.window, keys))
                return jnp.where(seen, scores, -jnp.inf)

            def block(i, carry, masked):
                acc, top, total, done = carry
                slot = lane * stages + lax.rem(done, stages)
                begins, at = self._place(start, i)
                plgpu.barrier_wait(full[1].at[slot])
                scores = times(q_smem.at[side, own], k_smem.at[slot].transpose((1, 0)), keys)
                plgpu.barrier_arrive(free[1].at[slot])
                if self.softcap is not None:
                    scores = jnp.tanh(scores * (self.scale / self.softcap)) * self.softcap * LOG2E
                if masked:
                    scores = masked_scores(scores, begins, at)
                higher = jnp.maximum(top, scores.max(axis=1) * unit)
                decay = jnp.exp2(top - higher)
                weights = jnp.exp2(scores * unit - wide(higher, keys))
                total = total * decay + weights.sum(axis=1)
                plgpu.barrier_wait(full[2].at[slot])
                if masked:
                    pl.when(at + keys > here[2])(lambda: without_junk(slot, at, here[2]))
                weights = weights.astype(v_smem.dtype)
                acc = tuple(
                    a * wide(decay, width)
                    + times(weights, v_smem.at[slot, :, pl.ds(at, width)], width)
                    for a, (at, width) in zip(acc, parts, strict=True)
                )
                plgpu.barrier_arrive(free[2].at[slot])
                return acc, higher, total, done + 1

            # Each product has an accumulator of its own, so that many channels go in parts.
            parts = [(i, min(part_size, size - i)) for i in range(0, size, part_size)]
            acc = tuple(
                plgpu.layout_cast(jnp.zeros((TILE, width), jnp.float32), plgpu.Layout.WGMMA)
                for _, width in parts
            )
            carry = acc, vector(LOWEST), vector(0), done
            carry = lax.fori_loop(low, plain, lambda i, c: block(i, c, False), carry)
            acc, top, total, done = lax.fori_loop(
                plain, high, lambda i, c: block(i, c, True), carry
            )

            @pl.when(high > low)
            def _():
                plgpu.barrier_arrive(free[0].at[side])

            # Of several chunks, the merge leaves out those that the row does not reach.
            @pl.when(there if self.chunks == 1 else high > low)
            def _():
                # Blocks that are not masked are seen by all queries, but not by padding.
                saw = (total > 0) & (limit >= 0)
                safe = jnp.where(saw, total, 1)
                out, lse = (x.at[row, tile, head, chunk] for x in results)
                kept = self.shape.kept
                rows = pl.ds(group * kept, kept)
                for a, (at, width) in zip(acc, parts, strict=True):
                    plgpu.wait_smem_to_gmem(0)
                    a = jnp.where(wide(saw, width), a / wide(safe, width), 0)
                    out_smem[pl.ds(staged, TILE), pl.ds(0, width)] = a
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(
                        out_smem.at[pl.ds(staged, kept), pl.ds(0, width)],
                        out.at[rows, pl.ds(at, width)],
                    )
                lse_smem[pl.ds(staged, TILE)] = jnp.where(saw, top + jnp.log2(safe), -jnp.inf)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(lse_smem.at[pl.ds(staged, TILE)], lse.at[own])

            return (done, read + (high > low).astype(jnp.int32)), ahead

        return compute


def times(a, b, columns: int):
    """The product of a tile, in shared memory or in registers, and of one in shared memory."""

    def multiply(accumulator):
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    accumulator = plgpu.ACC((TILE, columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(multiply, accumulator)


@dataclasses.dataclass(frozen=True)
class _Merge:
    """The merge of what the chunks left, a query head at a time."""

    queries: tuple[int, ...]  # [B, T, N, H]
    dtype: jnp.dtype
    kv_heads: int
    chunks: Chunks

    def __call__(self, outs: Array, lses: Array, bounds: Array) -> tuple[Array, Array]:
        """What `_Partials` returns as output ``[B, T, N, H]`` and natural ``[B, T, N]``."""
        batch, tokens, heads, size = self.queries
        piece = Spread(min(floor_power(size), PART), warps=WARPS)
        group, wide = heads // self.kv_heads, lses.shape[4]

        def attention_merge(outs, lses, bounds, out, lse):
            program = lax.axis_index("program")
            before, head = lax.div(program, heads), lax.rem(program, heads)
            row, token = lax.div(before, tokens), lax.rem(before, tokens)
            query = token * group + lax.rem(head, group)
            where = row, lax.div(query, wide), lax.div(head, group)
            own = lax.rem(query, wide)
            begin, end = bounds[where[0], where[1], 0], bounds[where[0], where[1], 2]
            low = self.chunks.holding(begin)
            last = jnp.maximum(self.chunks.holding(end - 1), low)

            def join(first, carry):
                """Add the chunks from ``first`` on, `AT_ONCE` of them."""
                top, total, sums = carry
                index = [first + i for i in range(min(AT_ONCE, self.chunks.count))]
                held = [jnp.minimum(c, last) for c in index]
                values = [
                    [load(outs.at[*where, c, own, pl.ds(at, piece.size)], piece) for c in held]
                    for at in starts(size, piece.size)
                ]
                scores = [
                    jnp.where(i <= last, lses[*where, c, own], -jnp.inf)
                    for i, c in zip(index, held, strict=True)
                ]
                higher = functools.reduce(jnp.maximum, scores, top)
                weights = [jnp.exp2(score - higher) for score in scores]
                decay = jnp.exp2(top - higher)
                sums = [
                    sum((w * x for w, x in zip(weights, of, strict=True)), start=old * decay)
                    for old, of in zip(sums, values, strict=True)
                ]
                return higher, sum(weights, start=total * decay), sums

            zero = plgpu.layout_cast(jnp.zeros((piece.size,), jnp.float32), piece.layout())
            carry = jnp.float32(LOWEST), jnp.float32(0), [zero] * len(starts(size, piece.size))
            turns = jnp.where(end > begin, lax.div(last - low, AT_ONCE) + 1, 0)
            carry = lax.fori_loop(0, turns, lambda i, c: join(low + i * AT_ONCE, c), carry)
            top, total, sums = carry
            safe = jnp.where(total > 0, total, 1)
            lse[row, token, head] = jnp.where(total > 0, (top + jnp.log2(safe)) / LOG2E, -jnp.inf)
            for at, x in zip(starts(size, piece.size), sums, strict=True):
                here = out.at[row, token, head, pl.ds(at, piece.size)]
                store(here, (x / safe).astype(self.dtype))

        call = plgpu.kernel(
            attention_merge,
            out_type=(
                jax.ShapeDtypeStruct(self.queries, self.dtype),
                jax.ShapeDtypeStruct(self.queries[:3], jnp.float32),
            ),
            grid=(batch * tokens * heads,),
            grid_names=("program",),
            compiler_params=plgpu.CompilerParams(approx_math=True),
        )
        return call(outs, lses, bounds)


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
    if size % 16 or size > 256 or v.shape[3] != size:
        return f"H={size} and H'={v.shape[3]} are not one multiple of 16 up to 256"
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
