"""Keyed numbers, filtered distributions and the inverse CDF."""

import itertools
from collections import Counter

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jspec.config import SamplingParams
from jspec.ops import sample as module
from jspec.ops.sample import Role, inverse_cdf, probabilities, sample, uniform
from tests.ops.laws import BELOW_ONE, P_VALUE, check_counts, filtered_law, rows_of

# --- uniform ---------------------------------------------------------------------------------


def numbers(seeds, positions, role=Role.ACCEPT) -> np.ndarray:
    return np.asarray(
        uniform(jnp.asarray(seeds, jnp.uint32), jnp.asarray(positions, jnp.int32), role)
    )


def test_a_number_belongs_to_seed_position_and_role_alone():
    seeds, positions = np.array([7, 2**32 - 1, 0, 7]), np.arange(4 * 6).reshape(4, 6) * 1000
    whole = numbers(seeds, positions)
    order = [2, 0, 3, 1]
    np.testing.assert_array_equal(numbers(seeds[order], positions[order]), whole[order])
    np.testing.assert_array_equal(numbers(seeds[1:2], positions[1:2]), whole[1:2])
    np.testing.assert_array_equal(numbers(seeds, positions[:, 2:5]), whole[:, 2:5])
    np.testing.assert_array_equal(numbers(seeds, positions[:, 3]), whole[:, 3])
    assert np.unique(whole).size == whole.size


def test_numbers_do_not_follow_the_default_generator():
    expected = numbers([3], [[5]])
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(numbers([3], [[5]]), expected)


def test_the_documented_key():
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(11), 5), int(Role.BONUS))
    assert numbers([11], [[5]], Role.BONUS)[0, 0] == jax.random.uniform(key)


@pytest.fixture(scope="module")
def many() -> dict[Role, np.ndarray]:
    """For each role, numbers ``[100_000 seeds, 2 positions]``."""
    seeds = np.arange(100_000)
    positions = np.tile([40, 41], (seeds.size, 1))
    return {role: numbers(seeds, positions, role) for role in Role}


def test_numbers_are_uniform(many):
    """Kolmogorov-Smirnov over seeds 0..99,999, for each role and position."""
    for role, position in itertools.product(Role, range(2)):
        drawn = many[role][:, position]
        assert drawn.dtype == np.float32
        assert drawn.min() >= 0
        assert drawn.max() < 1
        assert stats.kstest(drawn, "uniform").pvalue > P_VALUE


def test_roles_positions_and_seeds_are_independent(many):
    """Chi-square of each pair over an 8 x 8 grid, against independence."""
    columns = [many[role][:, position] for role in Role for position in range(2)]
    pairs = list(itertools.combinations(columns, 2))
    pairs += [(column[:-1], column[1:]) for column in columns]
    assert len(pairs) == 36
    for left, right in pairs:
        grid = np.histogram2d(left, right, bins=8, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(grid.ravel()).pvalue > P_VALUE


# --- probabilities ---------------------------------------------------------------------------

SETTINGS = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.0, 0.3, 1.0, 2.5), (0, 1, 3, 8, 100), (1.0, 0.9, 0.5, 0.01), (0.0, 0.02, 0.3, 1.0)
    )
]


def tied_logits(vocabulary: int) -> np.ndarray:
    """Logits in steps of a half, ``[settings, 2, V]``: most tokens share theirs with others."""
    rng = np.random.default_rng(0)
    drawn = 2 * rng.standard_normal((len(SETTINGS), 2, vocabulary))
    return (np.round(drawn * 2) / 2).astype(np.float32)


def test_filters_follow_their_definition():
    logits = tied_logits(37)
    got = np.asarray(probabilities(jnp.asarray(logits), rows_of(SETTINGS), filtered=True))
    for row, params in enumerate(SETTINGS):
        for t in range(2):
            expected = filtered_law(logits[row, t], params)
            np.testing.assert_array_equal(got[row, t] > 0, expected > 0, err_msg=str(params))
            np.testing.assert_allclose(got[row, t], expected, rtol=2e-5, err_msg=str(params))


def kept(logits: list[float], **settings) -> list[int]:
    rows = rows_of([SamplingParams(**{"temperature": 1.0, **settings})])
    weights = probabilities(jnp.asarray(logits, jnp.float32)[None, None], rows, filtered=True)
    return np.flatnonzero(weights[0, 0]).tolist()


def test_a_tie_at_a_threshold_stays_whole():
    assert kept([1, 3, 2, 2, 0], top_k=2) == [1, 2, 3]
    assert kept([1, 1, 1, 1], top_p=0.3) == [0, 1, 2, 3]
    assert kept([0, 1, 1, 0], min_p=1.0) == [1, 2]


def test_top_p_counts_over_what_top_k_left():
    # Masses 4, 3, 2, 1: the first is 0.4 of all, but 0.57 of the two that top-k leaves.
    logits = np.log([4, 3, 2, 1]).tolist()
    assert kept(logits, top_p=0.5) == [0, 1]
    assert kept(logits, top_k=2, top_p=0.5) == [0]


def test_filters_come_after_the_temperature():
    logits = np.log([4, 3, 2, 1]).tolist()
    assert kept(logits, min_p=0.6) == [0, 1]
    assert kept(logits, min_p=0.6, temperature=4.0) == [0, 1, 2, 3]


def test_rows_without_filters_are_the_same_bits_in_a_filtered_batch():
    params = [p for p in SETTINGS if p.sampling != "filtered"]
    logits = jnp.asarray(tied_logits(37)[: len(params)] * 1.37)
    run = jax.jit(probabilities, static_argnames="filtered")
    plain, filtered = (run(logits, rows_of(params), filtered=f) for f in (False, True))
    assert len(params) > 20
    np.testing.assert_array_equal(plain, filtered)


def test_temperature_zero_takes_the_first_largest():
    rows = rows_of([SamplingParams(top_k=3)])
    weights = probabilities(jnp.asarray([[[1.0, 5.0, 5.0, 0.0]]]), rows, filtered=True)
    np.testing.assert_array_equal(weights[0, 0], [0, 1, 0, 0])


@pytest.mark.parametrize("filtered", [False, True])
def test_extreme_temperatures_stay_finite(filtered):
    params = [SamplingParams(temperature=t) for t in (1e-45, 2e-38, 1e-30, 1e38)]
    logits = jnp.tile(jnp.asarray([[30.0, -40.0, 20.0, 30.0]]), (4, 1))[:, None]
    weights = np.asarray(probabilities(logits, rows_of(params), filtered=filtered))[:, 0]
    np.testing.assert_array_equal(weights[1:3], [[0.5, 0, 0, 0.5]] * 2)
    np.testing.assert_allclose(weights[3], 0.25, rtol=1e-6)
    assert np.isfinite(weights).all()


def test_minus_infinity_has_no_mass():
    weights = probabilities(
        jnp.asarray([[[-np.inf, 0.0, -np.inf, 0.0]]]),
        rows_of([SamplingParams(temperature=0.7, top_k=3)]),
        filtered=True,
    )
    np.testing.assert_array_equal(weights[0, 0], [0, 0.5, 0, 0.5])


# --- inverse CDF -----------------------------------------------------------------------------

pick = jax.jit(inverse_cdf)


@pytest.mark.parametrize("vocabulary", [1, 5, 1023, 1024, 1025, 3000])
def test_inverse_cdf_is_a_search_in_the_sums(vocabulary):
    """Whole weights and ``u`` in 1/1024 make every sum exact: borders are hit, and must agree."""
    rng = np.random.default_rng(vocabulary)
    weights = rng.integers(0, 4, (512, vocabulary)) * (rng.random((512, 1)) < 0.8)
    weights[:, rng.integers(vocabulary)] += 1
    u = rng.integers(0, 1024, 512) / 1024
    sums = np.cumsum(weights, axis=-1, dtype=np.float64)
    expected = [np.searchsorted(s, x * s[-1], side="right") for s, x in zip(sums, u, strict=True)]
    got = pick(jnp.asarray(weights, jnp.float32), jnp.asarray(u, jnp.float32))
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, expected)


def test_inverse_cdf_of_real_weights_is_near_the_float64_one():
    rng = np.random.default_rng(1)
    weights = rng.gamma(0.1, size=(256, 2600)).astype(np.float32)
    u = rng.random(256).astype(np.float32)
    got = np.asarray(pick(jnp.asarray(weights), jnp.asarray(u)))
    sums = np.cumsum(weights, axis=-1, dtype=np.float64)
    sums /= sums[:, -1:]
    row = np.arange(256)
    assert (u < sums[row, got] + 1e-6).all()
    assert (u >= np.where(got > 0, sums[row, got - 1], 0) - 1e-6).all()


@pytest.mark.parametrize("vocabulary", [7, 2500])
def test_the_ends_of_u_pick_the_ends_of_the_mass(vocabulary):
    weights = np.zeros((3, vocabulary), np.float32)
    weights[0, [2, 4]] = 0.3
    weights[1, 5] = 1e-20
    weights[2, [0, vocabulary - 1]] = 1 / 3
    for u, expected in ((0.0, [2, 5, 0]), (BELOW_ONE, [4, 5, vocabulary - 1])):
        got = pick(jnp.asarray(weights), jnp.full((3,), u, jnp.float32))
        np.testing.assert_array_equal(got, expected)


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    weights=hnp.arrays(
        np.float32,
        (8, 11),
        elements=st.one_of(
            st.just(0.0), st.floats(0, 2.0**90, width=32, allow_subnormal=False), st.just(1.0)
        ),
    ),
    u=hnp.arrays(
        np.float32,
        8,
        elements=st.one_of(
            st.floats(0, 1, width=32, exclude_max=True), st.just(BELOW_ONE), st.just(1.0)
        ),
    ),
)
def test_a_token_without_mass_is_never_picked(weights, u):
    """Tiles of 4, the last one ragged; ``u`` = 1 stands for a product that rounded up."""
    weights[~(weights > 0).any(axis=1), 6] = 1.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TILE", 4)
        got = np.asarray(inverse_cdf(jnp.asarray(weights), jnp.asarray(u)))
    assert (weights[np.arange(8), got] > 0).all()


def test_sample_draws_from_the_filtered_law(monkeypatch):
    """200,000 rows with seeds 0, 1, ..., two settings in one batch, tiles of 4."""
    logits = np.array([0.5, -1.0, 2.0, 1.5, 0.0, -3.0], np.float32)
    params = [
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.5, top_k=4, top_p=0.9, min_p=0.1),
    ]
    half = 100_000
    rows = rows_of([p for p in params for _ in range(half)])
    stacked = jnp.tile(jnp.asarray(logits), (2 * half, 1, 1))
    positions = jnp.full((2 * half, 1), 9, jnp.int32)
    monkeypatch.setattr(module, "TILE", 4)
    drawn = np.asarray(sample(stacked, rows, positions, Role.BONUS, filtered=True))[:, 0]
    for part, settings in zip(np.split(drawn, 2), params, strict=True):
        check_counts(Counter(part.tolist()), dict(enumerate(filtered_law(logits, settings))))
