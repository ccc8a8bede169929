"""How attention on Mosaic GPU is cut into items of work, and which program takes which.

A cache's keys are cut into chunks at positions that are the same for every row and capacity. An
item is a chunk of a key-value head of a batch row, for a tile of its queries. Only chunks that some
query reads are items. Items are sorted by size, largest first, and programs take them in forward
and backward order alternately, so that all have about the same work. Programs are in gangs, which
take neighbouring heads, adjacent in memory, at the same time.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jspec.gpu import multiprocessors
from jspec.pallas.matmul import TILE
from jspec.pallas.mosaic import floor_power
from jspec.typing import Array

PART = 128  # channels that a warpgroup sums at most
REGISTERS = 65536  # of a multiprocessor
PROBES = 8  # copies of the probe query: a matmul has at least 8 columns
SHARED = 223 * 1024  # bytes of shared memory for the large buffers
FIRST, LARGEST = 512, 4096  # keys of the first chunk and of the largest, for few query rows
FEW = 16  # query rows
MULTIPROCESSORS = 132  # that should read a row, those of an H200; the same on every GPU
EVERYTHING = jnp.iinfo(jnp.int32).max  # a position after all others


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Positions in chunks, which grow with the position.

    ``levels``: up to which position, and how many keys a chunk; all but the last position are
    multiples of the sizes on both sides.
    """

    levels: tuple[tuple[int, int], ...]

    def each(self) -> list[tuple[int, int, int, int]]:
        """Of each level: its first chunk, its first position, a chunk's size, and how many."""
        spans, chunk, begin = [], 0, 0
        for until, size in self.levels:
            count = -(-(until - begin) // size)
            spans.append((chunk, begin, size, count))
            chunk, begin = chunk + count, until
        return spans

    @property
    def count(self) -> int:
        chunk, _, _, count = self.each()[-1]
        return chunk + count

    def place(self, index):
        """Where a chunk begins, and its size."""
        where = jnp.int32(0), jnp.int32(0)
        for chunk, begin, size, _ in self.each():
            candidate = begin + (index - chunk) * size, size
            where = tuple(
                jnp.where(index >= chunk, x, y) for x, y in zip(candidate, where, strict=True)
            )
        return where

    def holding(self, position):
        """The chunk that a position is in."""
        index = jnp.int32(0)
        for chunk, begin, size, _ in self.each():
            candidate = chunk + lax.div(position - begin, jnp.int32(size))
            index = jnp.where(position >= begin, candidate, index)
        return index


def chunks_for(slots: int, streams: int, rows: int) -> Chunks:
    """Chunks of which a row of any length has about as many as an H200 has multiprocessors.

    ``streams``: how many tiles of query rows read a row's keys. The size of a chunk doubles with
    the position. The more ``rows`` share a head, the more time partial results take in comparison
    with the keys: chunks are larger then.
    """
    factor = 1 if rows <= FEW else 2
    smallest, largest = FIRST * (1 if rows <= TILE else 2), LARGEST * factor
    levels, begin, until = [], 0, 8 * FIRST
    while begin < slots:
        even = 2 * floor_power(max(begin * streams // MULTIPROCESSORS, 2) - 1)
        levels.append((min(until, slots), min(max(even * factor, smallest), largest)))
        begin, until = until, 2 * until
    return Chunks(tuple(levels))


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of an attention, and how its queries are laid into tiles.

    ``scored``: one more query of each head scores every key, by a warpgroup of its own.
    """

    batch: int
    slots: int
    kv_heads: int
    rows: int  # T * G
    size: int
    itemsize: int  # bytes of an element
    scored: bool = False

    @property
    def halves(self) -> int:
        """Warpgroups that share a tile's values: each sums half of the channels."""
        return 2 if self.size > PART else 1

    @property
    def channels(self) -> int:
        """Channels that a warpgroup sums."""
        return self.size // self.halves

    @property
    def stacked(self) -> int:
        """Tiles of 64 rows that a program holds."""
        return 1 if self.rows <= TILE or self.halves > 1 else 2

    @property
    def groups(self) -> int:
        """Warpgroups that compute."""
        return self.stacked * self.halves

    @property
    def warpgroups(self) -> int:
        """Those that compute, the one that copies, and the one that scores."""
        return self.groups + 1 + self.scored

    @property
    def registers(self) -> tuple[int, int] | None:
        """Of a thread that computes, and of all others, where some take what others need not."""
        if self.warpgroups == 2:
            return None
        others = 40 if self.warpgroups == 3 else 32
        # What a program of so many threads begins with.
        even = REGISTERS // (self.warpgroups * 128) // 8 * 8
        free = even * self.warpgroups - others * (self.warpgroups - self.groups)
        return min(free // self.groups // 8 * 8, 232), others

    @property
    def program_rows(self) -> int:
        """Rows that a program holds."""
        return self.stacked * TILE

    @property
    def tiles(self) -> int:
        """How many times that is of the queries that share a head."""
        return -(-self.rows // self.program_rows)

    @property
    def stored_rows(self) -> tuple[int, ...]:
        """Rows that are written of each tile of 64 rows of a program, multiples of 8."""
        rows = self.program_rows if self.tiles > 1 else -(-self.rows // 8) * 8
        return tuple(min(rows - i, TILE) for i in range(0, self.program_rows, TILE))

    @property
    def part(self) -> int:
        """Channels of results that are on their way to global memory at a time."""
        return 16 if self.channels % 16 == 0 else 8

    def stages(self, keys: int, sides: int) -> tuple[int, int]:
        """How many blocks of keys and of values fit into shared memory with all else."""
        queries = self.program_rows + PROBES * self.scored
        other_bytes = (
            sides * queries * self.size * self.itemsize + 2 * self.groups * TILE * self.part * 4
        )
        other_bytes += 2 * keys * 4 * self.scored
        block_count = min((SHARED - other_bytes) // (keys * self.size * self.itemsize), 12)
        return (block_count + 1) // 2, block_count // 2


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Block sizes of the kernel.

    Attributes:
        keys: of a block.
        stages: buffers for a block of keys, and for one of values.
        sides: buffers for the queries of an item.
        chunks: how positions are cut into chunks, whose sizes are multiples of ``keys``.
        programs: persistent programs.
        gang: programs that take neighbouring heads together; it divides ``programs`` and the heads.
    """

    keys: int
    stages: tuple[int, int]
    sides: int
    chunks: Chunks
    programs: int
    gang: int


def blocks_for(shape: Shape) -> Blocks:
    """Block sizes for a shape."""
    streams = shape.tiles * shape.kv_heads
    # Where there are enough streams, each reads all keys, and nothing is merged.
    if shape.tiles > 1 and streams > MULTIPROCESSORS // 2:
        chunks = Chunks(((shape.slots, -(-shape.slots // 128) * 128),))
    else:
        chunks = chunks_for(shape.slots, streams, shape.rows)
    keys = TILE if shape.halves > 1 or shape.slots < 2 * TILE else 2 * TILE
    # The queries of the next item are copied early where that leaves blocks enough.
    sides = 2 if sum(shape.stages(keys, 2)) >= min(sum(shape.stages(keys, 1)), 8) else 1
    stages, programs = shape.stages(keys, sides), multiprocessors()
    return Blocks(keys, stages, sides, chunks, programs, math.gcd(shape.kv_heads, programs))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which item a program of the kernel takes in each step, and where it reads its blocks."""

    blocks: Blocks
    slots: int

    def count(self, items: Array):
        """The number of steps of this program, for so many items of all programs."""
        whole = lax.div(items, self.blocks.programs // self.blocks.gang)
        # In the last step only some programs have an item.
        return whole + (self._index(whole) < items).astype(jnp.int32)

    def item(self, items: Items, step) -> Items:
        """The item of a step, which is read one step ahead, since global memory is slow."""
        index = jnp.minimum(self._index(step), items.row.shape[0] - 1)
        item = jax.tree.map(lambda x: x[index], items)
        head_offset = lax.rem(lax.axis_index("program"), self.blocks.gang)
        return dataclasses.replace(item, head=item.head + head_offset)

    def at(self, item: Items, i):
        """Where block ``i`` of an item begins and is read: the last one ends with the cache."""
        begins = item.begin + i * self.blocks.keys
        return begins, pl.multiple_of(jnp.minimum(begins, self.slots - self.blocks.keys), 8)

    def _index(self, step):
        """Gangs take the items in order, and in reverse order in every second step."""
        gang = lax.div(lax.axis_index("program"), self.blocks.gang)
        gangs = self.blocks.programs // self.blocks.gang
        return step * gangs + jnp.where(lax.rem(step, 2) == 0, gang, gangs - 1 - gang)


def reach(positions: Array, shape: Shape, window: int | None) -> tuple[Array, Array]:
    """Which keys the queries at ``positions [B, T]`` see.

    int32 ``[B, tiles, wide]``: the last position that each query of a tile sees, -1 for none; and
    ``[B, tiles, 3]``: where those begin that any of them sees, where those end that all of them see
    (or those that begin, with a window), and where the last of them ends.
    """
    group = shape.rows // positions.shape[1]
    spare = shape.tiles * shape.program_rows - shape.rows
    last = jnp.pad(jnp.repeat(positions, group, axis=1), ((0, 0), (0, spare)), constant_values=-1)
    last = last.reshape(shape.batch, shape.tiles, shape.program_rows)
    first = jnp.where(last >= 0, last, EVERYTHING).min(axis=2)
    end = last.max(axis=2) + 1
    begin, common = jnp.zeros_like(end), jnp.minimum(first, end - 1) + 1
    if window is not None:
        begin = common = jnp.maximum(jnp.minimum(first, end) - window + 1, 0)
    return last, jnp.stack([begin, common, end], axis=2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Items:
    """The items of work; int32 arrays with an element for each item.

    Batch row, tile, the first of the gang's heads, and the chunk; where the item's keys ``begin``,
    how many of its ``blocks`` of keys there are, and how many of the first are ``plain``, seen by
    all queries; and where the tile's keys ``end``.
    """

    row: Array
    tile: Array
    head: Array
    chunk: Array
    begin: Array
    plain: Array
    blocks: Array
    end: Array


def plan(bounds: Array, shape: Shape, blocks: Blocks) -> tuple[Items, Array]:
    """The items of ``bounds`` as `reach` gives them, large ones first. The last of the second array
    says how many."""
    merged = blocks.chunks.count > 1
    row, tile, first, counts = _chunks(bounds, blocks) if merged else _tiles(bounds)
    parts = shape.kv_heads // blocks.gang
    counts *= parts
    index = jnp.arange(len(counts))
    until = jnp.where(index[:, None] >= index[None], counts[None], 0).sum(axis=1, dtype=jnp.int32)
    max_items = shape.batch * shape.tiles * blocks.chunks.count * parts
    index = jnp.arange(max_items, dtype=jnp.int32)
    entry = (index[:, None] >= until[None]).sum(axis=1, dtype=jnp.int32)
    entry = jnp.minimum(entry, len(counts) - 1)
    within = index - (until - counts)[entry]
    chunk = first[entry] + lax.div(within, jnp.int32(parts))
    head = lax.rem(within, jnp.int32(parts)) * blocks.gang
    row, tile = row[entry], tile[entry]
    begin, common, end = (bounds[row, tile, i] for i in range(3))
    start, size = blocks.chunks.place(chunk)
    keys = jnp.int32(blocks.keys)

    def inside(position: Array) -> Array:
        return jnp.clip(position - start, 0, size)

    low = lax.div(inside(begin), keys)
    plain = lax.div(inside(common), keys)
    # A tile that sees nothing reads a block, and leaves a result that says so.
    high = jnp.maximum(lax.div(inside(end) + keys - 1, keys), low + 1)
    begin = start + low * keys
    return Items(row, tile, head, chunk, begin, plain - low, high - low, end), until


def _chunks(bounds: Array, blocks: Blocks) -> tuple[Array, ...]:
    """The chunks that are seen, of which some follow each other: row, tile, first chunk, and how
    many. Those that a tile sees in part come first, then the largest."""
    batch, tiles = bounds.shape[:2]
    rows = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), tiles)
    tile = jnp.tile(jnp.arange(tiles, dtype=jnp.int32), batch)
    begin, _, end = (bounds[:, :, i].reshape(-1) for i in range(3))
    low, last = blocks.chunks.holding(begin), blocks.chunks.holding(end - 1)
    start, size = blocks.chunks.place(last)
    cut = (end > begin) & (start + size > end)
    runs = [(rows, tile, last, cut.astype(jnp.int32))]
    for chunk, start, size, count in reversed(blocks.chunks.each()):
        first = jnp.maximum(low, chunk)
        whole = chunk + jnp.clip(lax.div(end - start, jnp.int32(size)), 0, count) - first
        runs.append((rows, tile, first, jnp.maximum(whole, 0)))
    return tuple(jnp.concatenate(x) for x in zip(*runs, strict=True))


def _tiles(bounds: Array) -> tuple[Array, ...]:
    """Row, tile, first chunk and how many, for tiles with one chunk each.

    The last ones come first, since they read most keys.
    """
    batch, tiles = bounds.shape[:2]
    tile = jnp.repeat(jnp.arange(tiles - 1, -1, -1, dtype=jnp.int32), batch)
    row = jnp.tile(jnp.arange(batch, dtype=jnp.int32), tiles)
    zero = jnp.zeros_like(row)
    return row, tile, zero, zero + 1
