"""Queries and keys of a prefill, and their labelled pairs, against plain definitions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import LayerSpec
from jspec.train.samples import labels, pairs_of, prefill, query_position
from tests.conftest import TINY, make_decoder


def recorded(model, tokens):
    """Queries ``[T, N, H]`` and keys ``[T, K, H]`` of each layer, from one pass without a cache."""
    results = []
    positions = np.arange(len(tokens), dtype=np.int32)[None]

    def attend(layer, q, k, v, cache, *, sinks=None, up=None):
        results.append((q[0], k[0]))
        spec = model.config.layers[layer]
        group = q.shape[2] // k.shape[2]
        repeated_k, repeated_v = (jnp.repeat(x, group, axis=2) for x in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", q, repeated_k) * spec.key_size**-0.5
        distance = positions[0][:, None] - positions[0][None]
        observed = distance >= 0
        if spec.window is not None:
            observed &= distance < spec.window
        weights = jax.nn.softmax(jnp.where(observed[None, None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("bnts,bsnh->btnh", weights, repeated_v), cache

    @jax.jit
    def run(model, tokens):
        model(tokens, positions, attend, None)
        return results

    return jax.device_get(run(model, np.array([tokens], np.int32)))


@pytest.mark.parametrize("window", [None, 5])
def test_a_prefill_keeps_what_attention_compares(window):
    layers = (TINY.layers[0], dataclasses.replace(TINY.layers[1], window=window))
    model = make_decoder(dataclasses.replace(TINY, layers=layers))
    tokens = np.random.default_rng(0).integers(0, TINY.vocab_size, 21).tolist()
    positions = [0, 7, 8, 18]  # of three pieces, two of them at their edges
    observed = prefill(model, tokens, positions, chunk=8)
    for layer, (queries, keys) in enumerate(recorded(model, tokens)):
        np.testing.assert_allclose(observed.queries[layer], queries[positions], atol=1e-5)
        np.testing.assert_allclose(observed.keys(layer)[:19], keys[:19], atol=1e-5)


def test_a_prefill_tells_how_far_it_is_and_refuses_positions_outside(tiny):
    heard = []
    prefill(tiny, [1] * 20, [9], chunk=4, on_piece=lambda done, total: heard.append((done, total)))
    assert heard == [(4, 10), (8, 10), (10, 10)]
    for positions in ([20], [-1, 3]):
        with pytest.raises(ValueError, match="below the 20 tokens"):
            prefill(tiny, [1] * 20, positions)


def expected_labels(query, keys, kv_heads):
    """Appendix B.1, a head and a key at a time."""
    group = query.shape[0] // kv_heads
    result = np.empty((len(keys), kv_heads, group))
    for head in range(query.shape[0]):
        scores = keys[:, head // group] @ query[head]
        best = sorted(range(len(keys)), key=lambda i: (-scores[i], i))
        positive = max(1, len(keys) // 10)
        marks = np.linspace(20, 1, positive)
        for rank, i in enumerate(best):
            result[i, head // group, head % group] = marks[rank] if rank < positive else -1
    return result


@pytest.mark.parametrize("count", [1, 9, 20, 64])
def test_labels_are_those_of_the_appendix(count):
    rng = np.random.default_rng(count)
    query = rng.integers(-2, 3, (6, 4)).astype(np.float32)  # small integers: many ties
    keys = rng.integers(-2, 3, (count, 2, 4)).astype(np.float32)
    room = np.full((64, 2, 4), np.nan, np.float32)
    room[:count] = keys
    result = labels(query, room, np.int32(count), 2)
    np.testing.assert_allclose(result[:count], expected_labels(query, keys, 2), rtol=1e-6)
    assert not np.any(result[count:])


def test_blocks_hold_every_pair_once():
    rng = np.random.default_rng(0)
    spec = LayerSpec(2, 4, 4)
    samples = [
        (rng.standard_normal((6, 4), np.float32), rng.standard_normal((count, 2, 4), np.float32))
        for count in (7, 8, 21)
    ]
    pairs = jax.device_get(pairs_of(samples, spec, np.random.default_rng(1), block=8))
    assert pairs.counts.tolist() == [7, 8, 8, 8, 5]
    owner = [0, 1, 2, 2, 2]
    for text, (query, keys) in enumerate(samples):
        mine = [block for block in range(5) if owner[block] == text]
        rows = [(b, row) for b in mine for row in range(pairs.counts[b])]
        got = {pairs.keys[b, row].tobytes(): np.asarray(pairs.labels[b, row]) for b, row in rows}
        for key, label in zip(keys, expected_labels(query, keys, 2), strict=True):
            np.testing.assert_allclose(got.pop(key.tobytes()), label, rtol=1e-6)
        assert not got
        for block in mine:
            np.testing.assert_array_equal(pairs.queries[block], query.reshape(2, 3, 4))
    assert not np.any(pairs.keys[4, 5:])
    assert not np.any(pairs.labels[4, 5:])
    # Shuffled: the order of the text would have the first blocks hold its beginning.
    assert not np.array_equal(pairs.keys[1], samples[1][1])


def test_a_query_stands_in_the_second_half():
    drawn = {query_position(9, np.random.default_rng(seed)) for seed in range(60)}
    assert drawn == {4, 5, 6, 7, 8}
