"""The law by enumeration: near softmax, what is drawn, and one law in every corner."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from bench.report.law import (
    TEMPERATURES,
    VOCABULARIES,
    Enumerated,
    coarse_law,
    compare,
    enumerate_law,
    shapes,
    softmax,
)
from jspec.config import SamplingParams
from jspec.ops.distribution import ONE, distribution, draw
from jspec.ops.exact_probabilities import masses, token_probabilities
from jspec.ops.sample import SAMPLE, Role, greedy, number, sample, settings_of
from jspec.ops.vocabulary import Vocabulary
from tests.ops.laws import (
    GREEDY,
    SAMPLED,
    filtered_law,
    sampling_of,
    to_uint64,
)
from tests.parameters import default_run

BOUND = 1e-6  # of total variation


def check_law(enumerated: Enumerated) -> None:
    assert enumerated.variation < BOUND, f"total variation {enumerated.variation:.1e}"
    assert enumerated.lost == 0, f"{enumerated.lost} tokens that can never be drawn"


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_law_is_softmax_at_the_temperature_that_counts(vocabulary, dtype):
    for logits in shapes(vocabulary, dtype).values():
        for temperature in TEMPERATURES:
            check_law(enumerate_law(logits, temperature))


@pytest.mark.parametrize(("number_bits", "mass_bits"), [(23, 30), (64, 30), (23, 53)])
def test_the_check_catches_numbers_and_masses_of_0_1_0(number_bits, mass_bits):
    expected = softmax(shapes(128256, "float32")["Gaussian, deviation 3"], 1.0)
    result = coarse_law(expected, number_bits=number_bits, mass_bits=mass_bits)
    with pytest.raises(AssertionError, match="total variation"):
        check_law(compare(result, expected))


SETTINGS = [
    SAMPLED,
    SamplingParams(temperature=0.1),
    SamplingParams(temperature=1e-9),
    SamplingParams(temperature=0.8, top_k=40),
    SamplingParams(temperature=1.5, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.02),
    SamplingParams(temperature=2.0, top_k=300, top_p=0.7, min_p=1e-9),
    GREEDY,
]


def corners(vocabulary: int) -> np.ndarray:
    """Rows of logits: common ones, NaN, infinities, and rows without a finite logit."""
    rng = np.random.default_rng(0)
    x = (4 * rng.standard_normal((10, vocabulary))).astype(np.float32)
    x[1, ::3] = np.nan
    x[2, [vocabulary // 2, vocabulary - 1]] = np.inf
    x[3] = -np.inf
    x[4] = np.nan
    x[5, : vocabulary // 2] = -np.inf
    x[6] = np.where(np.arange(vocabulary) == 2, -np.finfo(np.float32).max, -np.inf)
    x[7] = np.round(x[7])
    x[8] = np.where(np.arange(vocabulary) % 2, np.inf, np.nan)
    x[9, [1, 3]] = np.finfo(np.float32).max, np.inf  # which count as equal
    return x


_distribution = jax.jit(distribution, static_argnames=("vocabulary", "filtered"))
_draw = jax.jit(draw, static_argnames="vocabulary")
_settings = jax.jit(settings_of)
_number = jax.jit(number, static_argnames="role")


@pytest.mark.parametrize("vocabulary", default_run([5, 2500], "2500"))
def test_a_token_is_drawn_by_exactly_its_share_of_the_numbers(vocabulary):
    """The first and the last number that the law gives to a token draw it."""
    logits, whole = corners(vocabulary), Vocabulary(vocabulary)
    rows = [(x, params) for x in logits for params in SETTINGS]
    of_rows = _settings(sampling_of([params for _, params in rows]))
    stacked = jnp.asarray(np.stack([x for x, _ in rows]))[:, None]
    got = _distribution(stacked, of_rows, vocabulary=whole, filtered=True)
    rng = np.random.default_rng(1)
    tokens, first, last = [], [], []
    for x, params in rows:
        ends = np.cumsum(masses(x, params)).tolist()
        token = int(rng.choice(np.flatnonzero(token_probabilities(x, params))))
        begin, total = ends[token - 1] if token else 0, ends[-1]
        tokens.append(token)
        # The smallest number n with n * total // 2**64 == begin, and the largest below the end.
        first.append(-(-begin * 2**64 // total))
        last.append(-(-ends[token] * 2**64 // total) - 1)
    for numbers in (first, last):
        number = to_uint64(np.array(numbers, np.uint64)[:, None])
        drawn = _draw(got.weights, got.shift, number, vocabulary=whole)
        np.testing.assert_array_equal(np.asarray(drawn)[:, 0], tokens)


ONE_BIT = SamplingParams(temperature=float(np.float32(np.log2(np.e))))  # whose rate is 1


def drawn_by_law(number: int, logits: list[float]) -> int:
    """The token that ``number`` draws, in Python's integers."""
    ends = np.cumsum(masses(np.array(logits, np.float32), ONE_BIT)).tolist()
    return next(i for i, end in enumerate(ends) if end > number * ends[-1] >> 64)


def last_that(holds, low: float, high: float) -> float:
    """The last multiple of 2**-23 for which ``holds``, which does for ``low``, by bisection."""
    first, behind = int(low * 2**23), int(high * 2**23)
    while behind - first > 1:
        middle = (first + behind) // 2
        first, behind = (middle, behind) if holds(middle / 2**23) else (first, middle)
    return first / 2**23


def close_call(n: int) -> list[list[float]]:
    """Logits of three tokens of which ``n`` draws the last, and of which it draws the second.

    The border between the two lies as close to ``n`` as logits can bring it.
    """
    x = last_that(lambda x: drawn_by_law(n, [0, -np.inf, x]) == 0, -12, 12) + 2**-20
    y = last_that(lambda y: drawn_by_law(n, [0, y, x]) == 2, -28, 12)
    return [[0, y, x], [0, y + 2**-23, x]]


@functools.cache
def close_calls() -> np.ndarray:
    """`close_call` of the numbers of seeds 0..7 at position 0, role BONUS."""
    seeds, positions = np.arange(8, dtype=np.uint32), np.zeros((8, 1), np.int32)
    numbers = np.asarray(_number(seeds, positions, role=Role.BONUS))[:, 0]
    return np.array([close_call(n) for n in numbers.tolist()], np.float32)


@pytest.mark.parametrize("backend", SAMPLE.backends)
def test_every_backend_draws_by_all_bits_of_a_number(backend):
    """Numbers of 32 bits would draw another token somewhere."""
    rows = _settings(sampling_of([ONE_BIT] * 16, np.repeat(np.arange(8), 2)))
    arguments = (jnp.asarray(close_calls()).reshape(16, 1, 3), rows, jnp.zeros((16, 1), jnp.int32))
    static = {"role": Role.BONUS, "filtered": False, "axis_name": None}
    if reason := SAMPLE.backend(backend).supports(*arguments, **static):
        pytest.skip(reason)
    drawn = jax.jit(functools.partial(SAMPLE.backend(backend).run, **static))(*arguments)
    assert drawn[:, 0].tolist() == [2, 1] * 8


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_the_law_filters_by_definition(params):
    logits = corners(2500)[[0, 5, 7]]
    for row, shares in zip(logits, token_probabilities(logits, params), strict=True):
        expected = filtered_law(row, params)
        certain = (expected == 0) | (expected > 2**-30)
        np.testing.assert_array_equal(shares[certain] > 0, expected[certain] > 0)
        np.testing.assert_allclose(shares, expected, rtol=2e-6, atol=2**-30)


@jax.jit
def _probabilities(logits, of_rows):
    law = distribution(logits, of_rows, vocabulary=Vocabulary(2500), filtered=True)
    return law.probabilities()


def test_acceptance_uses_the_law_of_the_draws():
    """Probabilities that acceptance compares, against the law of the draws."""
    logits = corners(2500)
    for params in SETTINGS:
        of_rows = _settings(sampling_of([params] * len(logits)))
        got = _probabilities(logits[:, None], of_rows)
        p = np.asarray(got).reshape(len(logits), -1)[:, :2500] / ONE
        np.testing.assert_allclose(p, token_probabilities(logits, params), rtol=2**-28, atol=2**-50)


def test_greedy_rows_take_the_same_token_everywhere():
    """By argmax, by each backend sampling and filtering, and by the law."""
    logits = corners(2500)
    clean = np.minimum(np.where(np.isnan(logits), -np.inf, logits), np.finfo(np.float32).max)
    expected = [int(row.argmax()) for row in clean]
    np.testing.assert_array_equal(greedy(jnp.asarray(logits)), expected)
    np.testing.assert_array_equal(greedy(jnp.asarray(logits, jnp.bfloat16))[3:5], [0, 0])
    np.testing.assert_array_equal(token_probabilities(logits, GREEDY).argmax(axis=-1), expected)
    rows, positions = sampling_of([GREEDY] * 10), jnp.zeros((10, 1), jnp.int32)
    for backend in SAMPLE.backends:
        arguments = (jnp.asarray(logits)[:, None], _settings(rows), positions)
        for filtered in (False, True):
            static = {"role": Role.BONUS, "filtered": filtered}
            if SAMPLE.backend(backend).supports(*arguments, axis_name=None, **static):
                continue
            run = functools.partial(sample, **static)
            tokens = jax.jit(functools.partial(run, implementation=backend))(
                arguments[0], rows, positions
            )
            np.testing.assert_array_equal(tokens[:, 0], expected, err_msg=backend)


def test_the_law_is_public_and_refuses_what_has_no_tokens():
    assert jspec.ops.token_probabilities is token_probabilities
    np.testing.assert_allclose(
        jspec.ops.token_probabilities([[0.0, np.log(3)]], SAMPLED), [[0.25, 0.75]], rtol=1e-4
    )
    with pytest.raises(ValueError, match=r"logits \(2, 0\) must be"):
        jspec.ops.token_probabilities(np.zeros((2, 0)), SAMPLED)
