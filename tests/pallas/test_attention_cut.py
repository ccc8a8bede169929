"""How attention on Mosaic GPU is cut: chunks, items, and what each program takes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas.attention_cut import (
    Blocks,
    Chunks,
    Shape,
    blocks_for,
    chunks_for,
    plan,
    reach,
)
from tests.parameters import default_run

CAPACITIES = itertools.product([100, 8192, 8448, 40_000, 300_000], [1, 2, 8, 32])


@pytest.mark.parametrize(
    ("slots", "kv_heads", "rows"),
    default_run(
        [(*x, rows) for x, rows in zip(CAPACITIES, itertools.cycle([16, 17, 65]), strict=False)],
        *("100-1-16", "8192-2-65", "8448-1-65", "40000-8-65", "300000-32-17"),
    ),
)
def test_chunks_cover_a_capacity_once_and_begin_alike_in_every_other(slots, kv_heads, rows):
    chunks, longest = chunks_for(slots, kv_heads, rows), chunks_for(1_000_000, kv_heads, rows)
    index = np.arange(chunks.count)
    begin, size = map(np.asarray, jax.jit(chunks.place)(index))
    np.testing.assert_array_equal(begin[1:], (begin + size)[:-1])
    assert begin[0] == 0
    assert begin[-1] < slots <= begin[-1] + size[-1]
    assert (size % 128 == 0).all()
    last = np.minimum(begin + size, slots) - 1
    for holding in (jax.jit(chunks.holding), jax.jit(longest.holding)):
        for positions in (begin, last):
            np.testing.assert_array_equal(holding(positions), index)


def shape(batch: int, slots: int, rows: int, kv_heads: int = 8, size: int = 128) -> Shape:
    return Shape(batch, slots, kv_heads, rows, size, 2)


def planned(lengths, tokens, window, shape, blocks):
    """The items that there are, and the positions that they are of."""
    positions = np.array(lengths)[:, None] - tokens + np.arange(tokens)
    positions = jnp.asarray(np.maximum(positions, -1), jnp.int32)
    call = jax.jit(lambda x: plan(reach(x, shape, window)[1], shape, blocks))
    items, until = call(positions)
    return jax.tree.map(lambda x: np.asarray(x)[: until[-1]], items), np.asarray(positions)


CHUNKED = [
    ((40_000, 0, 8193, 1, 8192), 1, None),
    ((40_000, 0, 8193, 1, 8192), 3, 9000),
    ((300, 200), 2, 5),
    ((0, 0), 1, None),
]


@pytest.mark.parametrize(("lengths", "tokens", "window"), CHUNKED)
def test_items_are_the_chunks_that_queries_read(lengths, tokens, window):
    sizes = shape(len(lengths), 40_960, 4 * tokens)
    blocks = blocks_for(sizes)
    items, positions = planned(lengths, tokens, window, sizes, blocks)
    chunk_of = np.asarray(jax.jit(blocks.chunks.holding)(np.arange(40_960)))
    starts = [np.asarray(x) for x in jax.jit(blocks.chunks.place)(items.chunk)]
    expected = []
    for row, of_row in enumerate(positions):
        of_row = of_row[of_row >= 0]
        end = of_row.max(initial=-1) + 1
        begin = 0 if window is None or not of_row.size else max(of_row.min() - window + 1, 0)
        observed = np.unique(chunk_of[begin:end])
        heads = range(0, sizes.kv_heads, blocks.gang)
        expected += itertools.product([row], heads, observed)
        mine = jax.tree.map(lambda x, row=row: x[items.row == row], items)
        start, size = (np.broadcast_to(x, items.row.shape)[items.row == row] for x in starts)
        low, high = np.maximum(start, begin), np.minimum(start + size, end)
        final = mine.begin + (mine.blocks - 1) * blocks.keys
        assert ((mine.begin <= low) & (low < mine.begin + blocks.keys)).all()
        assert ((final < high) & (high <= final + blocks.keys)).all()
        assert (mine.end == end).all()
        # Blocks that are not masked are seen by all queries.
        plain = mine.begin + mine.plain * blocks.keys
        assert ((mine.plain == 0) | (plain <= of_row.min(initial=end) + 1)).all()
        assert window is None or not mine.plain.any()
    got = zip(items.row, items.head, items.chunk, strict=True)
    assert sorted(got) == sorted(expected)
    assert not items.tile.any()


@pytest.mark.parametrize("slots", default_run([32_768, 131_072], "32768"))
@pytest.mark.parametrize("rows", default_run([4, 40], "40"))
@pytest.mark.parametrize("lengths", [(32_768,) * 8, (30_000, 9000, 17_777, 32_768), (32_000,)])
def test_gangs_share_the_work_evenly(lengths, rows, slots):
    sizes = shape(len(lengths), slots, rows)
    blocks = blocks_for(sizes)
    items, _ = planned(lengths, 1, None, sizes, blocks)
    gangs = blocks.programs // blocks.gang
    dealt = np.zeros(-(-len(items.blocks) // gangs) * gangs, int)
    dealt[: len(items.blocks)] = items.blocks
    dealt = dealt.reshape(-1, gangs)
    dealt[1::2] = dealt[1::2, ::-1]
    loads = dealt.sum(axis=0)
    assert loads.max() <= loads.mean() + items.blocks.max()
    assert loads.max() <= 1.4 * loads.mean()


def test_every_tile_is_an_item_where_nothing_is_merged():
    sizes = shape(2, 1024, 300)
    blocks = Blocks(64, (2, 2), 1, Chunks(((1024, 1024),)), programs=16, gang=8)
    items, _ = planned((0, 700), 75, None, sizes, blocks)
    got = sorted(zip(items.row, items.tile, strict=True))
    assert got == list(itertools.product((0, 1), (0, 1, 2)))
    assert (items.blocks[items.row == 0] == 1).all()  # a block, to leave zeros
