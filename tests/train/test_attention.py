"""Learning from attention: what a query sees, the loss by its formula, codes that get better."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from jspec import LayerSpec
from jspec.train.attention import RECENT, SINKS, attention_loss, learn_attention, views_of
from jspec.train.loss import HashTraining
from jspec.train.recall import compare, principal_axes
from tests.parameters import default_run

SPEC = LayerSpec(2, 8, 8)
POSITIONS = np.array([299, 170, SINKS + RECENT - 1])  # the last has no key to score


def sample(seed=0, asked=POSITIONS, count=300):
    """Queries that look at three channels of eight, so that bits of the others say nothing.

    Those of a group are alike.
    """
    rng = np.random.default_rng(seed)
    queries = rng.standard_normal((len(asked), 6, 8), np.float32)
    queries += 3 * np.repeat(rng.standard_normal((len(asked), 2, 8), np.float32), 3, axis=1)
    queries[..., 3:] *= 0.05
    return queries, asked, rng.standard_normal((count, 2, 8), np.float32)


def brute_weights(queries, position, keys, head):
    """Weights ``[n]`` over all keys of a KV head that are scored, mean over its group."""
    scored = np.zeros(len(keys), bool)
    scored[SINKS : position - RECENT + 1] = True
    logits = np.float64(keys[:, head]) @ np.float64(queries[3 * head : 3 * head + 3]).T / np.sqrt(8)
    weights = softmax(np.where(scored[:, None], logits, -np.inf), axis=0).mean(axis=1)
    return np.where(scored, weights, np.nan)


def test_a_query_sees_the_best_keys_and_others():
    views = views_of([sample()], SPEC, np.random.default_rng(1), max_keys=64)
    queries, _, keys = sample()
    np.testing.assert_allclose(views.queries[0], queries.reshape(3, 2, 3, 8), rtol=1e-5)
    assert np.isnan(views.weights[0, 2]).all()
    for head in range(2):
        sampled = np.asarray(views.keys[0, head])
        where = [int((keys[:, head] == key).all(axis=1).argmax()) for key in sampled]
        assert len(set(where)) == 64
        weights = np.stack([brute_weights(queries[m], POSITIONS[m], keys, head) for m in range(2)])
        best = np.argsort(-np.nan_to_num(weights).max(axis=0))[:32]
        assert set(best) <= set(where)
        mine = weights[:, where]
        mine /= np.nansum(mine, axis=1, keepdims=True)
        np.testing.assert_allclose(views.weights[0, :2, head], mine, rtol=1e-4)


def test_texts_of_other_lengths_share_a_shape():
    short = sample(1, np.array([40, 45, 49]), 50)
    views = views_of([sample(), short], SPEC, np.random.default_rng(1), max_keys=64)
    assert views.keys.shape == (2, 2, 64, 8)
    assert jnp.isfinite(views.weights[1]).sum(axis=2).tolist() == [[21] * 2, [26] * 2, [30] * 2]


def test_the_loss_is_the_cross_entropy_of_scores_by_bits():
    views = jax.device_get(views_of([sample()], SPEC, np.random.default_rng(1), max_keys=64))
    text = jax.tree.map(lambda x: x[0], views)
    rng = np.random.default_rng(2)
    w = rng.standard_normal((2, 8, 32), np.float32)
    scale = np.float32([-1.5, -2.0])
    losses_of = jax.jit(attention_loss)(w, scale, text)
    for head in range(2):
        bits = np.where(np.asarray(text.keys[head]) @ w[head] > 0, 1.0, -1.0)
        losses = [0.0]  # of the query without keys
        for query in range(2):
            asked = np.where(np.asarray(text.queries[query, head]) @ w[head] > 0, 1.0, -1.0)
            weights = np.float64(text.weights[query, head])
            scored = np.isfinite(weights)
            scores = np.exp(scale[head]) * (bits[scored] @ asked.T).mean(axis=1)
            losses.append(-(weights[scored] * log_softmax(scores)).sum())
        np.testing.assert_allclose(losses_of[head], np.sum(losses) / 3, rtol=1e-4)


@pytest.mark.parametrize("bits", default_run([32, 64], "32"))
def test_learned_codes_keep_more_attention_than_those_they_began_as(bits):
    asked = np.arange(600, 1200, 40)
    texts = [sample(seed, asked, 1200) for seed in range(4)]
    first = np.random.default_rng(3).standard_normal((2, 8, bits)).astype(np.float32)
    settings = HashTraining(bits=bits, variant="attention", epochs=5, iterations=20)
    views = views_of(texts, SPEC, np.random.default_rng(1), max_keys=512)
    learned = learn_attention(jnp.asarray(first), views, settings)
    loss = np.asarray(learned.loss.cross_entropy)
    assert loss.shape == (100,)
    assert loss[-8:].mean() < loss[:8].mean()
    np.testing.assert_allclose(jnp.linalg.norm(learned.weights, axis=1), 1, rtol=1e-5)
    queries, _, keys = sample(9, asked, 1200)
    hashes = {"first": jnp.asarray(first), "learned": learned.weights}
    compared = compare(queries, asked, keys, hashes, principal_axes(keys), keys.mean(axis=0), SPEC)
    for before, after in zip(compared["first"], compared["learned"], strict=True):
        assert after.recall > before.recall + 0.01
        assert after.mass > before.mass
