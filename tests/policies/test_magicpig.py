"""MagicPIG's importance weights, against the paper's estimator in float64 and by their law."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jspec.cache import LinearLayout
from jspec.policies.attend import SelectedAttend
from jspec.policies.magicpig import log_probability
from tests.policies.common import (
    BATCH,
    CAPACITY,
    LENGTHS,
    MATRIX,
    arrays_of,
    filled,
    query,
    random,
)

WEIGHTED = dataclasses.replace(MATRIX["magicpig"], weights=True)


@pytest.mark.parametrize(("bits", "tables"), [(10, 150), (9, 120), (1, 2), (16, 300), (3, 12)])
def test_a_probability_is_that_of_two_collisions_or_more(bits, tables):
    """Down to 1e-12; below, the sampling of float32 angles says no more."""
    p = np.linspace(0.02, 1, 200)
    expected = stats.binom.logsf(1, tables, p**bits)
    got = log_probability(jnp.asarray(-np.cos(np.pi * p), jnp.float32), bits, tables)
    there = expected > np.log(1e-12)
    assert there.sum() > 50
    np.testing.assert_allclose(np.asarray(got)[there], expected[there], atol=1e-3)
    assert np.isfinite(got).all()


def sampled(policy, policy_params, keys, q) -> tuple[np.ndarray, np.ndarray]:
    """Which ``keys [n, H]`` a query finds, and with which probability; keys are centred."""
    planes = np.float64(policy_params["projections"]).reshape(-1, policy.tables, policy.bits)
    sides = np.einsum("nh,htb->ntb", keys, planes) > 0
    same = (sides == (np.einsum("h,htb->tb", q, planes) > 0)).all(axis=-1)
    cosine = keys @ q / np.linalg.norm(keys, axis=-1) / np.linalg.norm(q)
    p = 1 - np.arccos(cosine) / np.pi
    return same.sum(axis=-1) >= 2, stats.binom.sf(1, policy.tables, p**policy.bits)


@pytest.mark.parametrize("junk", [0.0, np.nan], ids=["clean", "poisoned"])
def test_a_query_weights_what_it_sampled_by_the_inverse_of_its_probability(junk):
    """In the second of two layers, of which the first has other projections."""
    policy = dataclasses.replace(WEIGHTED, budget=20)
    cache = filled(policy, LinearLayout(CAPACITY), junk=junk)
    twice = {name: getattr(cache, name) * 2 for name in ("columns", "specs", "layouts", "pages")}
    cache = dataclasses.replace(cache, **twice)
    policy_params = arrays_of(dataclasses.replace(policy, seed=1)) + arrays_of(policy)
    q, k, v = query()
    positions = jnp.asarray(LENGTHS)[:, None]
    attend = SelectedAttend(positions, cache.lengths, 3, policy=policy, policy_params=policy_params)
    out, after = jax.jit(lambda q, k, v, c: attend(1, q, k, v, c))(q, k, v, cache)
    sampled_positions = 0
    for row, head in np.ndindex(BATCH, 4):
        position, group = LENGTHS[row], head // 2
        keys, values = (
            np.float64(x[row, : position + 1, group]) for x in (after.keys(1), after.values(1))
        )
        one = np.float64(q[row, 0, head])
        centre = np.float64(policy_params[1]["center"])[group]
        in_bucket, u = sampled(policy, policy_params[1], keys - centre, one)
        index = np.arange(position + 1)
        always = (index < policy.sinks) | (index >= position - policy.recent)
        factor = np.where(always, 1, in_bucket / u)
        weights = factor * np.exp(keys @ one / np.sqrt(8))
        np.testing.assert_allclose(out[row, 0, head], weights @ values / weights.sum(), atol=2e-5)
        sampled_positions += (in_bucket & ~always).sum()
    assert sampled_positions > 5


def test_each_key_counts_once_in_the_mean_over_projections():
    """1 / u for a key that is found, 0 for one that is not, has the mean 1, the variance 1 / u - 1.

    Seed 1; the largest of 2 x 17 deviations from the normal law has p > 1e-4.
    """
    seeds = 1500
    policy = dataclasses.replace(WEIGHTED, budget=1.0, sinks=0, recent=0)
    (arrays,), cache = arrays_of(policy), filled(policy, LinearLayout(CAPACITY), [17])
    q, keys = query(1)[0], cache.keys(0)

    @jax.jit
    @jax.vmap
    def weights(projections):
        policy_params = ({"center": arrays["center"], "projections": projections},)
        again = cache.replaced(0, **policy.encoder(policy_params, 0)(keys, None))
        selection = policy.select(policy_params, 0, again, q, cache.lengths)
        assert selection.log_weights is not None
        # Of the 17 positions in order; -1 where no query of the group found one.
        is_left_out = jnp.repeat(selection.positions[0] < 0, 2, axis=0)
        return jnp.where(is_left_out, 0, jnp.exp(selection.log_weights(q)[0, 0]))[:, :17]

    means = np.float64(weights(random(seeds, *arrays["projections"].shape, seed=1))).mean(axis=0)
    deviations = []
    for head in (0, 2):
        centre = np.float64(arrays["center"])[head // 2]
        _, u = sampled(
            policy, arrays, np.float64(keys)[0, :17, head // 2] - centre, np.float64(q[0, 0, head])
        )
        usual = u > 0.02  # of rarer ones there are too few for a normal law
        assert usual.sum() > 10
        deviations += list((means[head] - 1)[usual] / np.sqrt((1 / u[usual] - 1) / seeds))
    assert np.abs(deviations).max() < stats.norm.isf(1e-4 / len(deviations) / 2)
