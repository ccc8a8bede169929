"""The cache's columns against plain numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cache import Cache, LinearLayout, RingLayout, StripedLayout
from jspec.config import LayerSpec

BATCH, CAPACITY, HEADS, SIZE = 3, 20, 2, 16
PLAIN = LayerSpec(kv_heads=HEADS, key_size=SIZE, value_size=SIZE)
LINEAR = LinearLayout(CAPACITY)
LATENT = LayerSpec(kv_heads=1, key_size=24, value_size=16, values_in_keys=True)


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def create(specs=(PLAIN, PLAIN), layout=LINEAR, batch=BATCH, dtype=jnp.float32, **extra):
    return Cache.create(specs, [layout] * len(specs), batch, dtype, **extra)


@pytest.fixture
def full() -> Cache:
    """Every slot of every layer random, of lengths 20, 3 and 0."""
    empty = create()
    columns = tuple(
        {name: jnp.asarray(random(*x.shape, seed=10 * i + len(name))) for name, x in layer.items()}
        for i, layer in enumerate(empty.columns)
    )
    return dataclasses.replace(empty, columns=columns, lengths=jnp.asarray([20, 3, 0], jnp.int32))


def test_a_new_cache_is_empty():
    cache = create()
    assert len(cache.columns) == 2
    assert cache.keys(0).shape == cache.values(1).shape == (BATCH, CAPACITY, HEADS, SIZE)
    assert cache.lengths.tolist() == [0] * BATCH
    assert cache.nbytes == 2 * 2 * BATCH * CAPACITY * HEADS * SIZE * 4


def test_a_cache_has_the_dtype_it_was_asked_for():
    cache = create(dtype=jnp.bfloat16)
    assert cache.values(1).dtype == jnp.bfloat16
    assert cache.nbytes == 2 * 2 * BATCH * CAPACITY * HEADS * SIZE * 2


def test_layers_differ_in_sizes_and_columns():
    """A latent layer keeps keys alone; a policy's column has a shape and dtype of its own."""
    codes = {"codes": ((HEADS, 4), jnp.uint32)}
    cache = create((PLAIN, LATENT), extra=lambda layer, spec: codes if spec is PLAIN else {})
    assert set(cache.columns[0]) == {"keys", "values", "codes"}
    assert cache.columns[0]["codes"].shape == (BATCH, CAPACITY, HEADS, 4)
    assert cache.columns[0]["codes"].dtype == jnp.uint32
    assert set(cache.columns[1]) == {"keys"}
    k = jnp.asarray(random(BATCH, 1, 1, 24))
    cache = cache.append(1, jnp.full((BATCH, 1), 7), keys=k)
    np.testing.assert_array_equal(cache.values(1)[:, 7], k[:, 0, :, :16])


def test_append_writes_ragged_positions_of_one_layer(full):
    positions = np.array([[5, 6, -1], [3, -1, 4], [-1, -1, -1]], np.int32)
    k, v = random(BATCH, 3, HEADS, SIZE, seed=1), random(BATCH, 3, HEADS, SIZE, seed=2)
    got = full.append(1, jnp.asarray(positions), keys=jnp.asarray(k), values=jnp.asarray(v))
    keys, values = np.array(full.keys(1)), np.array(full.values(1))
    for row, t in np.argwhere(positions >= 0):
        keys[row, positions[row, t]] = k[row, t]
        values[row, positions[row, t]] = v[row, t]
    np.testing.assert_array_equal(got.keys(1), keys)
    np.testing.assert_array_equal(got.values(1), values)
    np.testing.assert_array_equal(got.keys(0), full.keys(0))
    np.testing.assert_array_equal(got.values(0), full.values(0))
    np.testing.assert_array_equal(got.lengths, full.lengths)


def test_append_casts_to_the_columns_dtype():
    cache = create(batch=1, dtype=jnp.bfloat16)
    k = jnp.asarray(random(1, 1, HEADS, SIZE))
    got = cache.append(0, jnp.asarray([[2]]), keys=k, values=k)
    np.testing.assert_array_equal(got.keys(0)[0, 2], k[0, 0].astype(jnp.bfloat16))


def test_append_wants_every_column(full):
    k = jnp.asarray(random(BATCH, 1, HEADS, SIZE))
    with pytest.raises(ValueError, match=r"layer 0 keeps \['keys', 'values'\], but \['keys'\]"):
        full.append(0, jnp.zeros((BATCH, 1), jnp.int32), keys=k)


def test_a_roll_back_is_a_length(full):
    """What was appended and rolled back is overwritten by what comes next, and copies nothing."""
    k = jnp.asarray(random(BATCH, 2, HEADS, SIZE, seed=3))
    tried = full.append(0, jnp.asarray([[5, 6]] * BATCH), keys=k, values=k)
    back = tried.with_lengths(jnp.asarray([5, 5, 5]))
    assert back.keys(0) is tried.keys(0)
    again = jnp.asarray(random(BATCH, 1, HEADS, SIZE, seed=4))
    once = back.append(0, jnp.asarray([[5]] * BATCH), keys=again, values=again)
    np.testing.assert_array_equal(once.keys(0)[:, 5], again[:, 0])


@pytest.mark.parametrize("layout", [RingLayout(6), StripedLayout(24, 3, 2)], ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 17])
def test_other_layouts_hold_what_they_say(layout, tokens):
    """Passes of ragged lengths, longer than a ring among them; the newest write of a slot wins."""
    cache = create((PLAIN,), layout)
    ends = np.array([20, 3, 9])
    texts = random(BATCH, 20, HEADS, SIZE, seed=6)
    for begin in range(0, 20, tokens):
        positions = begin + np.arange(tokens)[None] + np.zeros((BATCH, 1), int)
        positions = np.where(positions < ends[:, None], positions, -1).astype(np.int32)
        piece = np.take_along_axis(texts, np.maximum(positions, 0)[:, :, None, None], axis=1)
        piece = jnp.asarray(piece)
        # Of a slot that is written twice, a GPU may keep either token.
        slots = np.asarray(cache.slots(0, jnp.asarray(positions)))
        written = [row[row < layout.size].tolist() for row in slots]
        assert [len(set(row)) for row in written] == [len(row) for row in written]
        cache = cache.append(0, jnp.asarray(positions), keys=piece, values=-piece)
    stored = np.asarray(layout.slot_positions(jnp.asarray(ends - 1, jnp.int32)))
    for row, slot in np.argwhere(stored >= 0):
        np.testing.assert_array_equal(cache.keys(0)[row, slot], texts[row, stored[row, slot]])
        np.testing.assert_array_equal(cache.values(0)[row, slot], -texts[row, stored[row, slot]])
    assert (stored >= 0).sum(axis=1).tolist() == np.minimum(ends, layout.size).tolist()


def test_pages_grow_to_hold_every_position():
    """The last page of 5 positions has fewer of them; what the pages hold stays."""
    shapes = {"low": ((HEADS, SIZE), None)}
    cache = create((PLAIN,), LinearLayout(12), pages=lambda layer, spec: shapes, page=5)
    low = random(BATCH, 3, HEADS, SIZE)
    cache = dataclasses.replace(cache, pages=({"low": jnp.asarray(low)},))
    for capacity, count in ((24, 5), (44, 9)):
        cache = cache.grown(capacity)
        assert cache.pages[0]["low"].shape == (BATCH, count, HEADS, SIZE)
    np.testing.assert_array_equal(cache.pages[0]["low"][:, :3], low)


def test_a_cache_is_a_pytree_that_keeps_what_is_static(full):
    again = jax.tree.map(lambda x: x, full)
    assert (again.specs, again.layouts) == (full.specs, full.layouts)
    assert len(jax.tree.leaves(full)) == 5
