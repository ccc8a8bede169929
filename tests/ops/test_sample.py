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
from jspec.ops import vocabulary as module
from jspec.ops.distribution import WEIGHT, Distribution, distribution, draw, exp2
from jspec.ops.sample import Role, sample, settings_of, uniform
from jspec.ops.vocabulary import Vocabulary
from tests.ops.laws import (
    GREEDY,
    P_VALUE,
    SAMPLED,
    check_counts,
    filtered_law,
    probabilities,
    rate_of,
    sampling_of,
)

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
    with jax.default_prng_impl("rbg"), jax.threefry_partitionable(False):
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
    """A token is lost where its mass is below the units of 2**-26 alone."""
    logits = tied_logits(37)
    got = probabilities(jnp.asarray(logits), sampling_of(SETTINGS), filtered=True)
    for row, params in enumerate(SETTINGS):
        for t in range(2):
            expected = filtered_law(logits[row, t], params)
            certain = (expected == 0) | (expected > 2**-25)
            np.testing.assert_array_equal(
                got[row, t][certain] > 0, expected[certain] > 0, err_msg=str(params)
            )
            np.testing.assert_allclose(
                got[row, t], expected, rtol=2e-5, atol=2**-26, err_msg=str(params)
            )


def kept(logits: list[float], **settings) -> list[int]:
    rows = sampling_of([SamplingParams(**{"temperature": 1.0, **settings})])
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
    plain, filtered = (
        probabilities(logits, sampling_of(params), filtered=f) for f in (False, True)
    )
    assert len(params) > 20
    np.testing.assert_array_equal(plain, filtered)


def test_temperature_zero_takes_the_first_largest():
    rows = sampling_of([SamplingParams(top_k=3)])
    weights = probabilities(jnp.asarray([[[1.0, 5.0, 5.0, 0.0]]]), rows, filtered=True)
    np.testing.assert_array_equal(weights[0, 0], [0, 1, 0, 0])


@pytest.mark.parametrize("filtered", [False, True])
def test_extreme_temperatures_stay_finite(filtered):
    params = [SamplingParams(temperature=t) for t in (1e-45, 2e-38, 1e-30, 1e38)]
    logits = jnp.tile(jnp.asarray([[30.0, -40.0, 20.0, 30.0]]), (4, 1))[:, None]
    weights = probabilities(logits, sampling_of(params), filtered=filtered)[:, 0]
    np.testing.assert_array_equal(weights[1:3], [[0.5, 0, 0, 0.5]] * 2)
    np.testing.assert_allclose(weights[3], 0.25, rtol=1e-6)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-6)


def test_minus_infinity_has_no_mass():
    weights = probabilities(
        jnp.asarray([[[-np.inf, 0.0, -np.inf, 0.0]]]),
        sampling_of([SamplingParams(temperature=0.7, top_k=3)]),
        filtered=True,
    )
    np.testing.assert_array_equal(weights[0, 0], [0, 0.5, 0, 0.5])


def test_logits_that_are_no_numbers():
    """NaN counts as minus infinity, plus infinity as the largest number, in any tile."""
    logits = np.zeros((4, 1, 2100), np.float32)
    logits[0, 0, [3, 2000]] = np.nan
    logits[1, 0, [7, 2050]] = np.inf
    logits[2] = -np.inf
    logits[3, 0, 5:] = -np.inf
    got = probabilities(jnp.asarray(logits), sampling_of([SAMPLED] * 4), filtered=False)[:, 0]
    np.testing.assert_allclose(got[0], np.where(np.isnan(logits[0, 0]), 0, 1 / 2098), atol=2**-29)
    np.testing.assert_array_equal(np.flatnonzero(got[1]), [7, 2050])
    assert not got[2].any()
    np.testing.assert_array_equal(np.flatnonzero(got[3]), range(5))
    for params in (SAMPLED, GREEDY):
        positions = jnp.zeros((4, 1), jnp.int32)
        token = sample(
            jnp.asarray(logits), sampling_of([params] * 4), positions, Role.BONUS, filtered=False
        )
        assert token[2, 0] == 0


@pytest.mark.parametrize("vocabulary", [7, 1024, 2500])
def test_minus_infinity_is_nothing_beside_any_number(vocabulary):
    """Rows whose tiles are empty or hold the smallest float32, at all temperatures."""
    logits = np.full((3, 1, vocabulary), -np.inf, np.float32)
    logits[:, 0, 5] = [-3e38, 0, 3e38]
    for temperature in (1e-30, 1.0, 1e38):
        rows = sampling_of([SamplingParams(temperature=temperature)] * 3)
        got = probabilities(jnp.asarray(logits), rows, filtered=False)[:, 0]
        expected = np.tile(np.arange(vocabulary) == 5, (3, 1))
        np.testing.assert_array_equal(got > 0, expected)
        np.testing.assert_allclose(got, expected, atol=2**-28)


# --- weights in whole numbers ------------------------------------------------------------------


def test_exp2_is_near_the_real_one_and_never_falls():
    """At every fraction there is, and from 2**-40 to 2**40."""
    fractions = np.arange(2**23, dtype=np.float32) / 2**23
    y = np.geomspace(1e-9, 40, 200_001)
    y = np.sort(np.concatenate([-y, y, [-1.0, -39.0], fractions]).astype(np.float32))
    mantissa, whole = (np.asarray(x, np.float64) for x in exp2(jnp.asarray(y)))
    got = mantissa * 2.0 ** (whole - 23)
    np.testing.assert_allclose(got, 2.0 ** y.astype(np.float64), rtol=4e-7)
    assert (np.diff(got) >= 0).all()
    assert got[y == 0] == 1


def test_exp2_has_the_bits_of_a_float32_kernel():
    """The polynomial again, in float32 with fused products rounded towards zero, below 2**-125."""

    def fused(a, b, c):
        # float64 holds the product of two float32 exactly, and these sums too.
        exact = np.float64(a) * b + c
        down = exact.astype(np.float32)
        return np.where(down > exact, np.nextafter(down, np.float32(0)), down)

    rng = np.random.default_rng(0)
    y = (rng.gamma(0.7, 6, 200_000) * rng.choice([-1, 1], 200_000)).astype(np.float32)
    floor = np.floor(y)
    u = fused(y / 2, np.float32(1), (1 - floor) / 2)
    p = np.zeros_like(u)
    for c in (489975, 0, 2512872, 3678130, 5913167, 4183072):
        p = fused(p, u, np.float32(c * 2.0**-149))
    mantissa, whole = exp2(jnp.asarray(y))
    np.testing.assert_array_equal(mantissa, p.view(np.uint32))
    np.testing.assert_array_equal(whole, floor)


def test_a_rate_times_a_bfloat16_is_exact():
    """For any temperature, which is met to 2**-16 of itself; beyond the bounds, these serve."""
    temperature = np.concatenate([np.geomspace(1e-17, 1e30, 999), [1e-30, 1e38, 0]])
    rows = sampling_of([SamplingParams(temperature=t) for t in temperature])
    rate = np.asarray(settings_of(rows).rate, np.float64)
    np.testing.assert_allclose(rate[:-3] * temperature[:-3], np.log2(np.e), rtol=1.01 * 2**-16)
    np.testing.assert_array_equal(rate[-3:], [2.0**60, 2.0**-100, 0])
    logits = np.asarray(jnp.linspace(-90, 90, 999, dtype=jnp.bfloat16), np.float64)
    products = rate[:, None] * logits
    np.testing.assert_array_equal(products, products.astype(np.float32))


# --- inverse CDF -----------------------------------------------------------------------------


def pick(weights: np.ndarray, u: np.ndarray, scale: int = WEIGHT) -> np.ndarray:
    """Draw from ``weights [N, V]``, whole numbers, by ``u [N]``."""
    vocabulary = Vocabulary(weights.shape[-1])
    tiles = vocabulary.tiles(jnp.asarray(weights, jnp.uint32), 0)
    rows = Distribution(tiles, jnp.full(tiles.shape[:-1], scale, jnp.uint32))
    return np.asarray(draw(rows, jnp.asarray(u * 2**23, jnp.uint32), vocabulary))


@pytest.mark.parametrize("vocabulary", [1, 5, 1023, 1024, 1025, 3000])
def test_a_draw_is_a_search_in_the_sums(vocabulary):
    """``u`` in 1/1024 meets the borders between tokens, and must find the later one."""
    rng = np.random.default_rng(vocabulary)
    weights = rng.integers(0, 4, (512, vocabulary)) * (rng.random((512, 1)) < 0.8)
    weights[:, rng.integers(vocabulary)] += 1
    u = rng.integers(0, 1024, 512) / 1024
    sums = np.cumsum(weights, axis=-1)
    targets = np.floor(u * sums[:, -1])
    expected = [np.searchsorted(s, x, side="right") for s, x in zip(sums, targets, strict=True)]
    got = pick(weights, u)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, expected)


def test_a_draw_from_scaled_tiles_is_near_the_float64_one():
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((256, 1, 2600)) * 3 + np.arange(2600) / 600
    rows = sampling_of([SAMPLED] * 256)
    vocabulary = Vocabulary(2600)
    p = distribution(
        jnp.asarray(logits, jnp.float32), settings_of(rows), vocabulary, filtered=False
    )
    u = rng.random(256).astype(np.float32)
    number = jnp.asarray(u * 2**23, jnp.uint32)
    got = np.asarray(draw(p, number[:, None], vocabulary))[:, 0]
    sums = np.cumsum(np.exp2(logits[:, 0] * rate_of(1.0)), axis=-1)
    sums /= sums[:, -1:]
    row = np.arange(256)
    assert (u < sums[row, got] + 1e-6).all()
    assert (u >= np.where(got > 0, sums[row, got - 1], 0) - 1e-6).all()
    assert len(set((got // 1024).tolist())) == 3


@pytest.mark.parametrize("vocabulary", [7, 2500])
def test_the_ends_of_u_pick_the_ends_of_the_mass(vocabulary):
    weights = np.zeros((3, vocabulary), np.int64)
    weights[0, [2, 4]] = WEIGHT // 3
    weights[1, 5] = 1
    weights[2, [0, vocabulary - 1]] = WEIGHT // 2
    for u, expected in ((0.0, [2, 5, 0]), (1 - 2**-23, [4, 5, vocabulary - 1])):
        np.testing.assert_array_equal(pick(weights, np.full(3, u)), expected)


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    weights=hnp.arrays(
        np.int64, (8, 11), elements=st.one_of(st.just(0), st.integers(0, WEIGHT // 11), st.just(1))
    ),
    u=hnp.arrays(np.int64, 8, elements=st.integers(0, 2**23 - 1)),
    scale=st.sampled_from([WEIGHT, WEIGHT - 1, WEIGHT // 3, 12345]),
)
def test_a_token_without_mass_is_never_picked(weights, u, scale):
    """Tiles of 4, the last one ragged; a row whose whole mass is below a unit gives token 0."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TILE", 4)
        got = pick(weights, u / 2**23, scale)
    tiles = np.pad(weights, ((0, 0), (0, 1))).reshape(8, 3, 4)
    mass = (tiles.sum(axis=-1) * scale // WEIGHT).sum(axis=-1)
    picked = weights[np.arange(8), got]
    np.testing.assert_array_equal(picked[mass > 0] > 0, True)
    np.testing.assert_array_equal(got[mass == 0], 0)


def test_sample_draws_from_the_filtered_law(monkeypatch):
    """200,000 rows with seeds 0, 1, ..., two settings in one batch, tiles of 4."""
    logits = np.array([0.5, -1.0, 2.0, 1.5, 0.0, -3.0], np.float32)
    params = [
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.5, top_k=4, top_p=0.9, min_p=0.1),
    ]
    half = 100_000
    rows = sampling_of([p for p in params for _ in range(half)])
    stacked = jnp.tile(jnp.asarray(logits), (2 * half, 1, 1))
    positions = jnp.full((2 * half, 1), 9, jnp.int32)
    monkeypatch.setattr(module, "TILE", 4)
    drawn = np.asarray(sample(stacked, rows, positions, Role.BONUS, filtered=True))[:, 0]
    for part, settings in zip(np.split(drawn, 2), params, strict=True):
        check_counts(Counter(part.tolist()), dict(enumerate(filtered_law(logits, settings))))
