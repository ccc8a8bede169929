"""Scores of positions that several devices share: those of one device, whatever holds them."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jspec.cache import LinearLayout, StripedLayout
from jspec.policies import Vegas
from jspec.policies.scores import SLOTS_PER_PICK, best_positions, max_with_previous, softmax

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


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("k", [1, 2, 3, 20])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_each_device_has_its_own_of_the_best_of_all(ranks, k, dtype):
    """Whether devices exchange all scores or those of their best; many scores are equal."""
    assert SIZE // 4 > SLOTS_PER_PICK  # for one pick
    none = -1 if dtype == "int32" else -np.inf
    scores = np.random.default_rng(k).integers(-1, 4, (4, 2, SIZE)).astype(dtype)
    scores[scores < 0] = none
    scores[3, :, 17:] = 9  # beyond the row's end
    budget = {"lengths": jnp.asarray(LENGTHS, jnp.int32), "sinks": 0, "recent": 0}
    budget |= {"highest": 9} if dtype == "int32" else {}
    local = shared(
        lambda x, layout: _marked(best_positions(x, layout, k, **budget), layout), scores, ranks
    )
    for row, length in enumerate(LENGTHS):
        for head in range(2):
            known = scores[row, head, :length]
            best = np.argsort(-known, stable=True)[:k]
            best = set(best[known[best] > none].tolist())
            assert set(np.flatnonzero(local[row, head]).tolist()) == best
            # Each device lists its own in ascending order, from 1 on.
            for rank in range(ranks):
                mine = [p for p in sorted(best) if p // 4 % ranks == rank]
                numbers = local[row, head, mine].tolist()
                assert numbers == list(range(1, len(mine) + 1))


SELECTS: dict[str, Any] = {"budget": 2, "least": 0, "per_head": True}


@pytest.mark.parametrize(
    "policy", [Vegas(**SELECTS), Vegas(**SELECTS, score="softmax", ahead=2)], ids=["logit", "ahead"]
)
def test_layers_that_share_rows_select_together(policy):
    """Three layers of two heads: each device has its own of what each layer selects by itself."""
    scores = np.random.default_rng(0).normal(size=(4, 6, SIZE)).astype(np.float32)
    ends = jnp.asarray(LENGTHS, jnp.int32)

    def picked(x, layout, layers=range(3)):
        cache: Any = types.SimpleNamespace(layouts=[layout] * 3, shards=None)
        picks = policy.pick({i: x[:, 2 * i : 2 * i + 2] for i in layers}, cache, ends)
        return jnp.concatenate([_marked(picks[i], layout) for i in layers], axis=1) > 0

    alone = np.concatenate(
        [picked(jnp.asarray(scores), LinearLayout(SIZE), [layer]) for layer in range(3)], axis=1
    )
    assert alone.sum(axis=2).tolist() == [[min(length, 2)] * 6 for length in LENGTHS]
    np.testing.assert_array_equal(shared(picked, scores, 4), alone)


def _marked(positions, layout):
    """The place in the list ``positions [B, K, n]``, from 1 on, of each slot of a device."""
    places = jnp.broadcast_to(jnp.arange(1, positions.shape[2] + 1), positions.shape)
    slots = jnp.where(positions >= 0, layout.slots(positions), layout.size)
    index = jnp.arange(positions.shape[0])[:, None, None], jnp.arange(positions.shape[1])[:, None]
    zeros = jnp.zeros((*positions.shape[:2], layout.size), jnp.int32)
    return zeros.at[*index, slots].set(places, mode="drop")
