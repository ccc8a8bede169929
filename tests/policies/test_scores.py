"""Scores of positions that several devices share: those of one device, whatever holds them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jspec.cache import LinearLayout, StripedLayout
from jspec.policies.scores import max_with_previous, softmax

SIZE, LENGTHS = 48, (48, 0, 1, 17)
pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")


def shared(of, scores: np.ndarray, ranks: int) -> np.ndarray:
    """What ``of(scores, layout)`` gives of ``scores [B, K, S]`` by position, on ``ranks`` devices
    that have blocks of 4 positions in turn."""
    whole = StripedLayout(SIZE, ranks, block=4)
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("kvp",))
    by_slot = np.zeros_like(scores)
    slots = np.asarray(whole.slots(jnp.arange(SIZE, dtype=jnp.int32)))
    by_slot[..., slots] = scores
    place = P(None, None, "kvp")
    run = jax.shard_map(
        lambda x: of(x, whole.part("kvp")), mesh=mesh, in_specs=place, out_specs=place
    )
    return np.asarray(jax.jit(run)(by_slot))[..., slots]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("ahead", [1, 3, 4])
def test_the_best_of_those_before_cross_devices(ranks, ahead):
    scores = np.random.default_rng(ahead).normal(size=(4, 2, SIZE)).astype(np.float32)
    context_len = jnp.asarray(LENGTHS, jnp.int32)
    result = shared(
        lambda x, layout: max_with_previous(x, layout, ahead, context_len)[0], scores, ranks
    )
    alone, layout = max_with_previous(jnp.asarray(scores), LinearLayout(SIZE), ahead, context_len)
    assert layout == LinearLayout(SIZE)
    np.testing.assert_array_equal(result, alone)
    for row, length in enumerate(LENGTHS):
        for p in range(length):
            best = scores[row, :, max(p - ahead, 0) : p + 1].max(axis=-1)
            np.testing.assert_array_equal(result[row, :, p], best)


def test_more_than_a_block_ahead_is_refused():
    context_len = jnp.asarray(LENGTHS, jnp.int32)
    with pytest.raises(ValueError, match="ahead=5 must be at most 4, the block of positions"):
        shared(
            lambda x, layout: max_with_previous(x, layout, 5, context_len)[0],
            np.zeros((4, 2, SIZE)),
            2,
        )


@pytest.mark.parametrize("ranks", [1, 4])
def test_weights_are_of_the_positions_of_all_devices(ranks):
    rng = np.random.default_rng(0)
    scores = (30 * rng.normal(size=(4, 2, SIZE))).astype(np.float32)
    scores[1], scores[3, :, 17:] = np.nan, np.nan  # what no position holds
    context_len = jnp.asarray(LENGTHS, jnp.int32)
    result = shared(functools.partial(softmax, context_len=context_len), scores, ranks)
    for row, length in enumerate(LENGTHS):
        known = scores[row, :, :length].astype(np.float64)
        weights = np.exp(known - known.max(axis=-1, keepdims=True, initial=-np.inf))
        weights /= weights.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(result[row, :, :length], weights, rtol=1e-5, atol=1e-12)
        assert not result[row, :, length:].any()
