"""The loss and its descent, against Eq. 9 written out and SGD by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import LayerSpec
from jspec.train.learn import learn
from jspec.train.loss import HashTraining, hash_loss
from jspec.train.samples import Pairs, pairs_of

SETTINGS = HashTraining(bits=32, epochs=1, iterations=3, pairs=64)


def samples(rng, counts=(13, 30)):
    return [
        (rng.standard_normal((6, 4), np.float32), rng.standard_normal((n, 2, 4), np.float32))
        for n in counts
    ]


@pytest.fixture
def pairs() -> Pairs:
    blocks = pairs_of(
        samples(np.random.default_rng(0)), LayerSpec(2, 4, 4), np.random.default_rng(1), block=16
    )
    return Pairs(*(x.astype(jnp.float32) for x in blocks))


def weights(seed=0, bits=32):
    return np.random.default_rng(seed).standard_normal((2, 4, bits)).astype(np.float32)


def written_out(w, pairs, settings):
    """The loss of one KV head after another, a pair at a time, in float64."""
    queries, keys, labels, counts = (np.asarray(x, np.float64) for x in pairs)

    def h(x, head):
        return 2 / (1 + np.exp(-settings.sigma * (x @ w[head].astype(np.float64)))) - 1

    bits, terms = w.shape[2], []
    for head in range(2):
        similarity, total = 0.0, np.zeros((3, bits))
        for block, count in enumerate(counts.astype(int)):
            for row in range(count):
                code = h(keys[block, row, head], head)
                for g in range(3):
                    other = h(queries[block, head, g], head)
                    similarity += labels[block, row, head, g] * ((other - code) ** 2).sum()
                    total[g] += code + (other if settings.variant == "authors" else 0)
        n = counts.sum()
        gram = w[head].T.astype(np.float64) @ w[head] - np.eye(bits)
        norm = np.sqrt((gram**2).sum())
        if settings.variant == "paper":
            balance, norm = settings.eta * ((total[0] / n) ** 2).sum(), settings.lambda_ * norm
        else:
            balance = settings.lambda_ * ((total / n / bits) ** 2).sum()
            norm = settings.eta * norm
        terms.append((settings.epsilon * similarity / n, balance, norm))
    return np.transpose(terms)


@pytest.mark.parametrize("variant", ["paper", "authors"])
def test_the_loss_is_the_one_written_out(pairs, variant):
    settings = dataclasses.replace(SETTINGS, variant=variant, eta=1.7, lambda_=0.6, sigma=0.4)
    w = weights()
    terms = np.stack(jax.jit(hash_loss, static_argnums=2)(w, pairs, settings))
    np.testing.assert_allclose(terms, written_out(w, pairs, settings), rtol=2e-5)


def test_learning_is_sgd_with_momentum_and_decay(pairs):
    settings = dataclasses.replace(SETTINGS, decay=0.01)
    w, speed = weights(), 0.0
    slope = jax.jit(jax.grad(lambda w: jnp.stack(hash_loss(w, pairs, settings)).sum()))
    for _ in range(3):
        speed = 0.9 * speed + np.asarray(slope(w)) + 0.01 * w
        w = w - 0.1 * speed
    learned = learn(weights(), pairs, settings)
    np.testing.assert_allclose(learned.weights, w, rtol=1e-3, atol=1e-4)
    first = np.stack(hash_loss(weights(), pairs, settings)).mean(axis=1)
    np.testing.assert_allclose(np.stack(learned.loss)[:, 0], first, rtol=1e-4)
    assert np.stack(learned.loss).shape == (3, 3)


def test_a_head_is_learned_by_itself(pairs):
    settings = dataclasses.replace(SETTINGS, epochs=2, iterations=5)
    both = learn(weights(), pairs, settings).weights
    for head in range(2):
        one_head = Pairs(
            pairs.queries[:, head : head + 1],
            pairs.keys[:, :, head : head + 1],
            pairs.labels[:, :, head : head + 1],
            pairs.counts,
        )
        alone = learn(weights()[head : head + 1], one_head, settings).weights
        np.testing.assert_allclose(alone[0], both[head], rtol=1e-3, atol=1e-4)


def test_each_epoch_draws_its_blocks(pairs):
    """Of 3 blocks, epochs of one: other seeds draw others, the same seed the same."""
    drawn = dataclasses.replace(SETTINGS, pairs=16, epochs=2)
    results = [
        learn(weights(), pairs, dataclasses.replace(drawn, seed=s)).weights for s in (0, 0, 5)
    ]
    np.testing.assert_array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("bits", 100, "bits=100 must be one of 32, 64, 128, 256"),
        ("variant", "mine", "variant='mine' must be one of attention, paper, authors"),
        ("epochs", 0, "epochs=0 must be a whole number of at least 1"),
        ("iterations", 2.5, "iterations=2.5 must be a whole number"),
        ("rate", float("nan"), "rate=nan must be a finite number of at least 0"),
        ("seed", -1, "seed=-1 must be a whole number of at least 0"),
    ],
)
def test_settings_are_checked(field, value, message):
    with pytest.raises(ValueError, match=message):
        HashTraining(**{field: value})
