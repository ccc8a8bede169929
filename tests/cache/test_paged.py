"""A cache in blocks against one whose rows have their positions in one piece."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cache import Cache, LinearLayout, PagedLayout
from jspec.cache.paged import rows_into_blocks
from jspec.config import LayerSpec
from jspec.policies.read import gather_columns, selected_columns
from jspec.policies.selection import Selection

SPEC = LayerSpec(kv_heads=2, key_size=4, value_size=4)
LAYOUT = PagedLayout(12, 7, 4)
# The second row has two blocks of three, the third one none.
TABLE = np.array([[5, 0, 3], [6, 2, -1], [-1, -1, -1]], np.int32)


def both() -> tuple[Cache, Cache]:
    """Three rows in blocks of 4, and in one piece; what nobody wrote is NaN."""
    caches = [Cache.create([SPEC], [x], 3, jnp.float32) for x in (LAYOUT, LinearLayout(12))]
    nan = [
        {name: jnp.full_like(x, jnp.nan) for name, x in cache.columns[0].items()}
        for cache in caches
    ]
    paged, plain = (cache.replaced(0, **x) for cache, x in zip(caches, nan, strict=True))
    return dataclasses.replace(paged, table=jnp.asarray(TABLE)), plain


def in_one_piece(cache: Cache, name: str = "keys") -> np.ndarray:
    """Rows of a cache in blocks; NaN where they have none."""
    rows = np.asarray(cache.columns[0][name])[TABLE]
    rows[TABLE < 0] = np.nan
    return rows.reshape(3, 12, 2, 4)


def test_a_new_cache_in_blocks_has_none_in_its_table():
    cache = Cache.create([SPEC], [LAYOUT], 3, jnp.float32)
    assert cache.columns[0]["keys"].shape == (7, 4, 2, 4)
    assert cache.nbytes == 2 * 7 * 4 * 2 * 4 * 4
    np.testing.assert_array_equal(cache.table, np.full((3, 3), -1))


def test_positions_are_written_where_the_table_says_and_dropped_where_there_is_no_block():
    rng = np.random.default_rng(0)
    positions = jnp.array([[3, 4, 11, 12], [7, 8, -1, 0], [0, 1, 5, -1]], jnp.int32)
    k, v = (jnp.asarray(rng.standard_normal((3, 4, 2, 4)), jnp.float32) for _ in range(2))
    paged, plain = (x.append(0, positions, keys=k, values=v) for x in both())
    for name in ("keys", "values"):
        expected = np.array(plain.columns[0][name])
        expected[np.repeat(TABLE < 0, 4, axis=1)] = np.nan
        np.testing.assert_array_equal(in_one_piece(paged, name), expected)
    assert np.isfinite(np.asarray(paged.columns[0]["keys"])).any(axis=(2, 3)).sum() == 5


def test_positions_are_read_where_the_table_says():
    paged, plain = both()
    rows = jnp.arange(3 * 12 * 8, dtype=jnp.float32).reshape(3, 12, 2, 4)
    paged = paged.replaced(
        0, **{n: rows_into_blocks(x, rows, paged.table) for n, x in paged.columns[0].items()}
    )
    plain = plain.replaced(0, keys=rows, values=rows)
    shared = jnp.array([[11, 0, 5], [6, 1, 7], [0, 0, 0]], jnp.int32)
    per_head = jnp.stack([shared, shared[:, ::-1]], axis=1)
    for positions in (shared, per_head):
        got, want = (gather_columns(x, 0, positions, ["keys"])["keys"] for x in (paged, plain))
        np.testing.assert_array_equal(got[:2], want[:2])
        columns, slots = selected_columns(paged, 0, Selection(positions), shared)
        assert columns["keys"].shape == (1, 28, 2, 4)
        assert slots.selected[0].ravel()[0] == 3 * 4 + 3
        assert (slots.selected[2] == -1).all()
        assert (slots.new[2] == -1).all()
    assert (
        selected_columns(paged, 0, Selection(jnp.full((3, 2), -1)), shared)[1].selected.max() == -1
    )


@pytest.mark.parametrize("size", [3, 4, 9, 12])
def test_rows_are_copied_into_whole_blocks(size):
    rows = np.arange(1, 2 * size + 1, dtype=np.float32).reshape(2, size)
    pool = rows_into_blocks(jnp.full((7, 4), -1.0), jnp.asarray(rows), jnp.asarray(TABLE[:2]))
    expected = np.full((7, 4), -1.0, np.float32)
    for row, i in np.argwhere(TABLE[:2] >= 0):
        if i * 4 < size:
            part = rows[row, i * 4 : i * 4 + 4]
            expected[TABLE[row, i]] = np.pad(part, (0, 4 - len(part)))
    np.testing.assert_array_equal(pool, expected)


def test_what_blocks_cannot_hold_or_do_is_refused():
    for name in ("extra", "pages"):
        more = {name: lambda layer, spec: {"codes": ((2, 1), jnp.uint32)}}
        with pytest.raises(ValueError, match="layer 0 keeps codes for a policy, and a cache in bl"):
            Cache.create([SPEC], [LAYOUT], 3, jnp.float32, **more)
    paged, _ = both()
    for read in (paged.keys, paged.values):
        with pytest.raises(ValueError, match=r"layer 0 is in blocks, .* leave out cache_blocks"):
            read(0)
    moves = jnp.zeros((3, 1), jnp.int32)
    with pytest.raises(ValueError, match="layer 0 is in blocks"):
        paged.moved(moves, moves, moves[:, 0])
    with pytest.raises(ValueError, match="cannot grow to 24 positions"):
        paged.grown(24)
