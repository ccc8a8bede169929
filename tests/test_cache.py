"""The key-value cache and its window against plain numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cache import KVCache, Window, dense, windowed
from jspec.ops.attention import attention
from tests.conftest import TINY

BATCH, CAPACITY, HEADS, SIZE = 3, 20, TINY.layers[0].kv_heads, TINY.layers[0].key_size


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture
def empty() -> KVCache:
    return KVCache.create(TINY, BATCH, CAPACITY, jnp.float32)


@pytest.fixture
def full(empty) -> KVCache:
    """Every slot of every layer random, of lengths 20, 3 and 0."""
    keys, values = (
        tuple(jnp.asarray(random(*x.shape, seed=seed + i)) for i, x in enumerate(empty.keys))
        for seed in (10, 20)
    )
    return KVCache(keys, values, jnp.asarray([20, 3, 0], jnp.int32))


def test_a_new_cache_is_empty(empty):
    assert len(empty.keys) == len(empty.values) == TINY.num_layers
    assert empty.keys[0].shape == (BATCH, CAPACITY, HEADS, SIZE)
    assert empty.lengths.tolist() == [0] * BATCH
    assert empty.capacity == CAPACITY
    assert empty.nbytes == 2 * TINY.num_layers * BATCH * CAPACITY * HEADS * SIZE * 4


def test_a_cache_has_the_dtype_it_was_asked_for():
    cache = KVCache.create(TINY, 1, 4, jnp.bfloat16)
    assert cache.values[1].dtype == jnp.bfloat16
    assert cache.nbytes == 2 * TINY.num_layers * 4 * HEADS * SIZE * 2


def test_append_writes_ragged_positions_of_one_layer(full):
    positions = np.array([[5, 6, -1], [3, -1, 4], [-1, -1, -1]], np.int32)
    k, v = random(BATCH, 3, HEADS, SIZE, seed=1), random(BATCH, 3, HEADS, SIZE, seed=2)
    got = full.append(1, jnp.asarray(k), jnp.asarray(v), jnp.asarray(positions))
    keys, values = np.array(full.keys[1]), np.array(full.values[1])
    for row, t in np.argwhere(positions >= 0):
        keys[row, positions[row, t]] = k[row, t]
        values[row, positions[row, t]] = v[row, t]
    np.testing.assert_array_equal(got.keys[1], keys)
    np.testing.assert_array_equal(got.values[1], values)
    np.testing.assert_array_equal(got.keys[0], full.keys[0])
    np.testing.assert_array_equal(got.values[0], full.values[0])
    np.testing.assert_array_equal(got.lengths, full.lengths)


def test_append_casts_to_the_caches_dtype():
    cache = KVCache.create(TINY, 1, 4, jnp.bfloat16)
    k = jnp.asarray(random(1, 1, HEADS, SIZE))
    got = cache.append(0, k, k, jnp.asarray([[2]]))
    np.testing.assert_array_equal(got.keys[0][0, 2], k[0, 0].astype(jnp.bfloat16))


def test_a_roll_back_is_a_length(full):
    """What was appended and rolled back is overwritten by what comes next, and copies nothing."""
    k = jnp.asarray(random(BATCH, 2, HEADS, SIZE, seed=3))
    tried = full.append(0, k, k, jnp.asarray([[5, 6]] * BATCH))
    back = tried.with_lengths(jnp.asarray([5, 5, 5]))
    assert back.keys[0] is tried.keys[0]
    again = jnp.asarray(random(BATCH, 1, HEADS, SIZE, seed=4))
    once = back.append(0, again, again, jnp.asarray([[5]] * BATCH))
    np.testing.assert_array_equal(once.keys[0][:, 5], again[:, 0])


@pytest.mark.parametrize(
    ("sinks", "recent"),
    [(0, 1), (2, 3), (4, 30), (30, 2), (10, 10), (0, 20)],
    ids=lambda n: str(n),
)
@pytest.mark.parametrize("spare", [0, 3])
def test_a_window_holds_each_of_its_slots_once(sinks, recent, spare, full):
    window = Window.view(full, sinks, recent, spare)
    positions = np.asarray(window.positions)
    for row, length in enumerate([20, 3, 0]):
        held = [p for p in positions[row].tolist() if p >= 0]
        wanted = {*range(min(sinks, length)), *range(max(length - recent, 0), length)}
        assert sorted(held) == sorted(wanted)
        for slot in np.flatnonzero(positions[row] >= 0):
            for layer in range(TINY.num_layers):
                at = (row, positions[row, slot])
                np.testing.assert_array_equal(window.keys[layer][row, slot], full.keys[layer][at])
                np.testing.assert_array_equal(
                    window.values[layer][row, slot], full.values[layer][at]
                )
    if spare:
        assert (positions[:, -spare:] == -1).all()
    assert window.positions.shape == window.keys[0].shape[:2]


def test_a_window_appends_one_token_to_every_row(full):
    window = Window.view(full, 1, 2, 2)
    k, v = random(BATCH, 1, HEADS, SIZE, seed=5), random(BATCH, 1, HEADS, SIZE, seed=6)
    got = window.append(1, jnp.asarray(k), jnp.asarray(v), jnp.asarray(4))
    np.testing.assert_array_equal(got.keys[1][:, 4], k[:, 0])
    np.testing.assert_array_equal(got.values[1][:, 4], v[:, 0])
    np.testing.assert_array_equal(got.keys[1][:, :4], window.keys[1][:, :4])
    np.testing.assert_array_equal(got.keys[0], window.keys[0])


def new_token(seed: int):
    q = jnp.asarray(random(BATCH, 1, 2 * HEADS, SIZE, seed=seed))
    k, v = (jnp.asarray(random(BATCH, 1, HEADS, SIZE, seed=seed + i)) for i in (1, 2))
    return q, k, v


def test_dense_appends_then_reads_the_whole_cache(full):
    q, k, v = new_token(30)
    positions = jnp.asarray([[19], [3], [0]], jnp.int32)
    out, cache = dense(positions)(1, q, k, v, full)
    expected = full.append(1, k, v, positions)
    jax.tree.map(np.testing.assert_array_equal, cache, expected)
    wanted, _ = attention(q, expected.keys[1], expected.values[1], positions)
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_allclose(out[2, 0], jnp.repeat(v[2, 0], 2, axis=0), rtol=1e-6)


def test_windowed_equals_dense_where_the_window_holds_all(full):
    q, k, v = new_token(40)
    lengths = jnp.asarray([19, 3, 0], jnp.int32)
    positions = lengths[:, None]
    cache = full.with_lengths(lengths)
    window = Window.view(cache, 4, 19, spare=1)
    window = dataclasses.replace(window, positions=window.positions.at[:, -1:].set(positions))
    slot = jnp.asarray(window.positions.shape[1] - 1)
    out, _ = windowed(positions, slot)(0, q, k, v, window)
    expected, _ = dense(positions)(0, q, k, v, cache)
    np.testing.assert_allclose(out, expected, atol=1e-6)
