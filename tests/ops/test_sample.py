"""Keyed numbers, filtered distributions and the inverse CDF."""

import itertools
from collections import Counter
from functools import partial

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
from jspec.ops.distribution import ONE, draw
from jspec.ops.exact_probabilities import token_probabilities
from jspec.ops.sample import SAMPLE, Role, number, sample, settings_of
from jspec.ops.vocabulary import Vocabulary
from tests.ops.laws import (
    P_VALUE,
    check_counts,
    check_tail,
    filtered_law,
    probabilities,
    sampling_of,
    to_uint64,
)

# --- numbers -----------------------------------------------------------------------------------


_number = jax.jit(number, static_argnames="role")
_draw = jax.jit(draw, static_argnames="vocabulary")


def numbers(seeds, positions, role=Role.ACCEPT) -> np.ndarray:
    seeds, positions = np.asarray(seeds, np.uint32), np.asarray(positions, np.int32)
    return np.asarray(_number(seeds, positions, role))


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


@pytest.mark.parametrize("role", Role)
def test_the_documented_key(role):
    with jax.enable_x64(True):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(11), 5), int(role))
        expected = np.asarray(jax.random.bits(key, dtype=np.dtype("uint64")))
    assert numbers([11], [[5]], role)[0, 0] == expected


def test_each_block_has_another_seed():
    """Its start is the upper word, and no block begins inside a block."""
    rows = sampling_of([SamplingParams(temperature=1.0)] * 2, [11, 12])
    blocks = rows.in_block(jnp.array([3, 4], jnp.int32))
    with jax.enable_x64(True):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(3 * 2**32 + 11), 5), 1)
        expected = np.asarray(jax.random.bits(key, dtype=np.dtype("uint64")))
    got = numbers(blocks.seeds, [[5], [5]])
    assert got[0, 0] == expected
    assert got[1, 0] == numbers(blocks.seeds[1:], [[5]])[0, 0]
    of_request = numbers(settings_of(rows).seeds, [[5], [5]])
    assert of_request[0, 0] == numbers([11], [[5]])[0, 0]
    with pytest.raises(ValueError, match=r"seeds \(2, 2\) are those of a block"):
        blocks.in_block(jnp.array([5, 6], jnp.int32))


@pytest.fixture(scope="module")
def many() -> dict[Role, np.ndarray]:
    """For each role, numbers ``[100_000 seeds, 2 positions]``."""
    seeds = np.arange(100_000)
    positions = np.tile([40, 41], (seeds.size, 1))
    return {role: numbers(seeds, positions, role) for role in Role}


@pytest.mark.parametrize("bits", [0, 23, 40], ids=["all", "from-24", "from-41"])
def test_numbers_are_uniform(many, bits):
    """Kolmogorov-Smirnov over seeds 0..99,999, for each role and position; also of the lower bits,
    which a number of 23 bits does not have."""
    for role, position in itertools.product(Role, range(2)):
        drawn = (many[role][:, position] << np.uint64(bits)) / 2.0**64
        assert stats.kstest(drawn, "uniform").pvalue > P_VALUE


def test_roles_positions_and_seeds_are_independent(many):
    """Chi-square of each pair over an 8 x 8 grid, against independence."""
    columns = [many[role][:, position] / 2.0**64 for role in Role for position in range(2)]
    pairs = list(itertools.combinations(columns, 2))
    pairs += [(column[:-1], column[1:]) for column in columns]
    assert len(pairs) == 36
    for left, right in pairs:
        grid = np.histogram2d(left, right, bins=8, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(grid.ravel()).pvalue > P_VALUE


def test_the_tail_is_drawn_as_often_as_it_should_be(many):
    """Tokens that numbers of 23 bits cannot reach, at a real vocabulary; seeds 0..99,999."""
    check_tail(many[Role.BONUS].ravel())


@pytest.mark.parametrize("bits", [23, 24], ids=["float32-of-0.1.0", "float32"])
def test_the_tail_test_catches_numbers_of_few_bits(many, bits):
    coarse = many[Role.BONUS].ravel() >> np.uint64(64 - bits) << np.uint64(64 - bits)
    with pytest.raises(AssertionError, match="p-value"):
        check_tail(coarse)


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
    """A token is lost where its weight is below 2**-31 alone."""
    logits = tied_logits(37)
    got = probabilities(logits, sampling_of(SETTINGS), filtered=True)
    for row, params in enumerate(SETTINGS):
        for t in range(2):
            expected = filtered_law(logits[row, t], params)
            certain = (expected == 0) | (expected > 2**-30)
            np.testing.assert_array_equal(
                got[row, t][certain] > 0, expected[certain] > 0, err_msg=str(params)
            )
            np.testing.assert_allclose(
                got[row, t], expected, rtol=1e-6, atol=2**-31, err_msg=str(params)
            )


def filtered(logits: list[float], **settings) -> list[int]:
    rows = sampling_of([SamplingParams(**{"temperature": 1.0, **settings})])
    # With tokens that no filter keeps, so that one shape serves all.
    padded = np.pad(np.float32(logits), (0, 8 - len(logits)), constant_values=-np.inf)
    weights = probabilities(padded[None, None], rows, filtered=True)
    return np.flatnonzero(weights[0, 0]).tolist()


def test_a_tie_at_a_threshold_stays_whole():
    assert filtered([1, 3, 2, 2, 0], top_k=2) == [1, 2, 3]
    assert filtered([1, 1, 1, 1], top_p=0.3) == [0, 1, 2, 3]
    assert filtered([0, 1, 1, 0], min_p=1.0) == [1, 2]


ONE_BIT = float(np.float32(np.log2(np.e)))  # a temperature at which a logit is a power of two
# Logits and filters that are met exactly, or missed by a little, and the tokens that they keep.
BORDERS = [
    ([3, 2, 1, 1], {"top_p": 0.5}, {0}),
    ([3, 2, 1, 1], {"top_p": 0.75}, {0, 1}),
    ([3, 2, 1, 1], {"top_p": 0.75 + 2**-20}, {0, 1, 2, 3}),
    ([2, 3, 3, 1], {"top_p": 1e-12}, {1, 2}),
    ([3, 2, 1, 1], {"top_k": 2}, {0, 1}),
    ([3, 2, 1, 1], {"top_k": 3}, {0, 1, 2, 3}),
    ([2, 3, 1, 0], {"min_p": 0.5}, {0, 1}),
    ([2, 3, 1, 0], {"min_p": 0.5 + 2**-20}, {1}),
    ([2, 3, 1, 0], {"min_p": 1.0}, {1}),
    # No float32 lies between the first logit and those that are kept.
    ([2.875, 3, 2, 1], {"temperature": ONE_BIT / 8, "min_p": 0.5 + 2**-22}, {1}),
    # Two thirds of what top-k leaves, but half of all.
    ([3, 2, 1, 1], {"top_k": 2, "top_p": 0.6}, {0}),
]


def test_the_law_keeps_what_reaches_a_threshold():
    for logits, settings, expected in BORDERS:
        shares = token_probabilities(logits, SamplingParams(**{"temperature": ONE_BIT} | settings))
        assert set(np.flatnonzero(shares)) == expected, settings


@pytest.mark.parametrize("backend", SAMPLE.backends)
def test_every_backend_keeps_what_reaches_a_threshold(backend):
    """192 draws each: a token that is kept has a share of an eighth at least."""
    params = [SamplingParams(**{"temperature": ONE_BIT} | settings) for _, settings, _ in BORDERS]
    logits = np.array([[row] for row, *_ in BORDERS for _ in range(192)], np.float32)
    rows = settings_of(sampling_of([p for p in params for _ in range(192)]))
    positions = np.zeros((len(logits), 1), np.int32)
    static = {"role": Role.BONUS, "filtered": True, "axis_name": None}
    if reason := SAMPLE.backend(backend).supports(logits, rows, positions, **static):
        pytest.skip(reason)
    tokens = jax.jit(partial(SAMPLE.backend(backend).run, **static))(logits, rows, positions)
    drawn = np.split(np.asarray(tokens)[:, 0], len(BORDERS))
    assert [set(x.tolist()) for x in drawn] == [expected for *_, expected in BORDERS]


def test_filters_come_after_the_temperature():
    logits = np.log([4, 3, 2, 1]).tolist()
    assert filtered(logits, min_p=0.6) == [0, 1]
    assert filtered(logits, min_p=0.6, temperature=4.0) == [0, 1, 2, 3]


def test_rows_without_filters_are_the_same_bits_in_a_filtered_batch():
    free = np.array([p.mode != "filtered" for p in SETTINGS])
    logits, rows = tied_logits(37) * np.float32(1.37), sampling_of(SETTINGS)
    plain, filtered = (probabilities(logits, rows, filtered=f)[free] for f in (False, True))
    assert free.sum() > 20
    np.testing.assert_array_equal(plain, filtered)


def test_temperature_zero_takes_the_first_largest():
    rows = sampling_of([SamplingParams(top_k=3)])
    weights = probabilities(jnp.asarray([[[1.0, 5.0, 5.0, 0.0]]]), rows, filtered=True)
    np.testing.assert_array_equal(weights[0, 0], [0, 1, 0, 0])


@pytest.mark.parametrize("filtered", [False, True])
def test_extreme_temperatures_stay_finite(filtered):
    params = [SamplingParams(temperature=t) for t in (1e-45, 1e-30, 1e-7, 1e38)]
    logits = jnp.tile(jnp.asarray([[30.0, -40.0, 20.0, 30.0]]), (4, 1))[:, None]
    weights = probabilities(logits, sampling_of(params), filtered=filtered)[:, 0]
    np.testing.assert_allclose(weights[:3], [[0.5, 0, 0, 0.5]] * 3, rtol=1e-9)
    np.testing.assert_allclose(weights[3], 0.25, rtol=1e-6)


def test_minus_infinity_has_no_mass():
    weights = probabilities(
        jnp.asarray([[[-np.inf, 0.0, -np.inf, 0.0]]]),
        sampling_of([SamplingParams(temperature=0.7, top_k=3)]),
        filtered=True,
    )
    np.testing.assert_allclose(weights[0, 0], [0, 0.5, 0, 0.5], rtol=1e-9)


def test_logits_that_are_no_numbers():
    """NaN counts as minus infinity, plus infinity as the largest number, in any tile."""
    logits = np.zeros((4, 1, 2100), np.float32)
    logits[0, 0, [3, 2000]] = np.nan
    logits[1, 0, [7, 2050]] = np.inf
    logits[2] = -np.inf
    logits[3, 0, 5:] = -np.inf
    rows = sampling_of([SamplingParams(temperature=1.0)] * 4)
    got = probabilities(logits, rows, filtered=False)[:, 0]
    np.testing.assert_allclose(got[0], np.where(np.isnan(logits[0, 0]), 0, 1 / 2098), rtol=1e-8)
    np.testing.assert_array_equal(np.flatnonzero(got[1]), [7, 2050])
    np.testing.assert_array_equal(got[2], np.arange(2100) == 0)
    np.testing.assert_array_equal(np.flatnonzero(got[3]), range(5))


@pytest.mark.parametrize("vocabulary", [7, 2500])
def test_minus_infinity_is_nothing_beside_any_number(vocabulary):
    """Rows whose tiles are empty or hold the smallest float32, at all temperatures."""
    logits = np.full((3, 1, vocabulary), -np.inf, np.float32)
    logits[:, 0, 5] = [-3e38, 0, 3e38]
    for temperature in (1e-30, 1.0, 1e38):
        rows = sampling_of([SamplingParams(temperature=temperature)] * 3)
        got = probabilities(logits, rows, filtered=False)[:, 0]
        expected = np.tile(np.arange(vocabulary) == 5, (3, 1))
        np.testing.assert_array_equal(got > 0, expected)
        np.testing.assert_allclose(got, expected, rtol=1e-8)


# --- inverse CDF -----------------------------------------------------------------------------


def pick(weights: np.ndarray, u: np.ndarray, shift: int = 0) -> np.ndarray:
    """Draw from ``weights [N, V]``, whole numbers, by numbers ``u [N]``."""
    vocabulary = Vocabulary(weights.shape[-1])
    with jax.enable_x64(True):
        tiles = vocabulary.tiles(to_uint64(weights), 0)
    shifts = np.full(tiles.shape[:-1], shift, np.uint32)
    return np.asarray(_draw(tiles, shifts, to_uint64(u), vocabulary))


def number_at(share: np.ndarray) -> np.ndarray:
    """The number of a share below 1 with few bits."""
    return (share * 2.0**63).astype(np.uint64) * np.uint64(2)


@pytest.mark.parametrize("vocabulary", [1, 1023, 1024, 1025])
def test_a_draw_is_a_search_in_the_sums(vocabulary):
    """``u`` in 1/1024 meets the borders between tokens, and must find the later one."""
    rng = np.random.default_rng(vocabulary)
    weights = rng.integers(0, 4, (512, vocabulary)) * (rng.random((512, 1)) < 0.8)
    weights[:, rng.integers(vocabulary)] += 1
    u = rng.integers(0, 1024, 512) / 1024
    sums = np.cumsum(weights, axis=-1)
    targets = np.floor(u * sums[:, -1])
    expected = [np.searchsorted(s, x, side="right") for s, x in zip(sums, targets, strict=True)]
    got = pick(weights, number_at(u))
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("vocabulary", [7, 2500])
def test_the_ends_of_u_pick_the_ends_of_the_mass(vocabulary):
    weights = np.zeros((3, vocabulary), np.int64)
    weights[0, [2, 4]] = ONE // 3
    weights[1, 5] = 1
    weights[2, [0, vocabulary - 1]] = ONE // 2
    for u, expected in ((0, [2, 5, 0]), (2**64 - 1, [4, 5, vocabulary - 1])):
        got = pick(weights, np.full(3, u, np.uint64))
        np.testing.assert_array_equal(got, expected)


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    weights=hnp.arrays(
        np.int64, (8, 11), elements=st.one_of(st.just(0), st.integers(0, 2 * ONE), st.just(1))
    ),
    u=hnp.arrays(np.uint64, 8, elements=st.integers(0, 2**64 - 1)),
    shift=st.sampled_from([0, 1, 17, 40, 60, 64, 2**31]),
)
def test_a_token_is_picked_by_whole_masses(weights, u, shift):
    """Against Python's integers. Tiles of 4, the last one ragged; a row without mass gives 0."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TILE", 4)
        got = pick(weights, u, shift)
    for row, token in enumerate(got):
        tiles = [np.cumsum(weights[row, i : i + 4]).tolist() for i in (0, 4, 8)]
        ends, before = [], 0
        for tile in tiles:
            ends += [before + (int(x) >> shift) for x in tile]
            before = ends[-1]
        target = int(u[row]) * before >> 64
        assert token == next((i for i, end in enumerate(ends) if end > target), 0)


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
    run = jax.jit(partial(sample, role=Role.BONUS, filtered=True, implementation="xla"))
    drawn = np.asarray(run(stacked, rows, positions))[:, 0]
    for part, settings in zip(np.split(drawn, 2), params, strict=True):
        check_counts(Counter(part.tolist()), dict(enumerate(filtered_law(logits, settings))))
