"""Weights in whole numbers: rates, powers of logits and their mantissas."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from jspec.config import SamplingParams
from jspec.ops.distribution import POLYNOMIAL, exp2_fixed, power
from jspec.ops.exact_probabilities import rate_of
from jspec.ops.sample import settings_of
from tests.ops.laws import sampling_of


def rates(temperatures: np.ndarray) -> np.ndarray:
    rows = sampling_of([SamplingParams(temperature=float(t)) for t in temperatures])
    return np.asarray(jax.jit(settings_of)(rows).rate)


def products(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits of every size and rates of every temperature, float32."""
    rng = np.random.default_rng(0)
    sizes = rng.choice([-30, -3, 0, 0.5, 1, 2, 5, 30], count)
    logits = (rng.standard_normal(count) * 10**sizes).astype(np.float32)
    logits[:6] = [0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38]
    temperatures = 10 ** rng.uniform(-7, 31, count) * (rng.random(count) < 0.5) + 0.1
    return logits, rates(temperatures)


def test_a_power_is_the_exact_product_rounded_down():
    logits, rates = products(4000)
    whole, fraction = jax.jit(power)(jnp.asarray(logits), jnp.asarray(rates))
    got = np.asarray(whole, np.int64) * 2**23 + np.asarray(fraction, np.int64)
    exact = [Fraction(float(x)) * Fraction(float(r)) for x, r in zip(logits, rates, strict=True)]
    expected = [math.floor(max(-(2**30), min(y, 2**30)) * 2**23) for y in exact]
    np.testing.assert_array_equal(got, expected)


def test_rates_have_16_bits_and_are_those_of_the_law():
    temperatures = np.concatenate([np.geomspace(2e-6, 1e30, 999), [1e-7, 1e-45, 1e38, 0]])
    rate = rates(temperatures)
    np.testing.assert_array_equal(rate, [rate_of(t) for t in temperatures])
    np.testing.assert_allclose(
        np.float64(rate[:999]) * temperatures[:999], np.log2(np.e), rtol=1.01 * 2**-16
    )
    np.testing.assert_array_equal(rate[999:], [2.0**20, 2.0**20, 2.0**-100, 0])
    np.testing.assert_array_equal(rate.view(np.uint32) & 0xFF, 0)


def test_rates_are_those_of_numpys_division():
    """At 20,000 float32 of any size, and at 20,000 that are usual."""
    rng = np.random.default_rng(0)
    any_size = rng.integers(0, np.float32(np.inf).view(np.int32), 20_000, np.int32)
    usual = rng.uniform(0.05, 3, 20_000).astype(np.float32)
    temperatures = np.concatenate([any_size.view(np.float32), usual])
    np.testing.assert_array_equal(rates(temperatures), [rate_of(t) for t in temperatures])


def test_no_division_of_floats_makes_a_rate():
    """On a GPU it is off by a last place now and then, which no test on a CPU can see."""
    rows = sampling_of([SamplingParams(temperature=1.0)])
    divisions = [x for x in equations(jax.make_jaxpr(settings_of)(rows).jaxpr) if x[0] == "div"]
    assert divisions == [("div", "uint64")]


def equations(jaxpr) -> list[tuple[str, str]]:
    """The primitives of a program and the dtypes of what they give."""
    results = []
    for equation in jaxpr.eqns:
        results.append((equation.primitive.name, str(equation.outvars[0].aval.dtype)))
        for inner in jaxprs_in_params(equation.params):
            results += equations(inner)
    return results


def test_exp2_is_near_the_real_one_and_never_falls():
    """At every fraction there is."""
    fractions = np.arange(2**23)
    got = np.asarray(jax.jit(exp2_fixed)(jnp.asarray(fractions, jnp.uint32)), np.int64)
    assert got[0] == 2**22
    assert got[-1] < 2**23
    assert (np.diff(got) >= 0).all()
    np.testing.assert_allclose(got / 2**22, np.exp2(fractions / 2**23), rtol=3.1e-7)


def rounded(exact: Fraction, unit: Fraction, *, up: bool) -> Fraction:
    """To a multiple of ``unit``: up, or towards zero."""
    return (math.ceil if up else math.trunc)(exact / unit) * unit


def test_a_kernel_finds_the_same_bits_in_float32():
    """What `Weigher::quick` in tile.cuh does, in fractions: two fused products find the whole and
    the fraction of a power, and five more the mantissa, below 2**-125."""
    rng = np.random.default_rng(0)
    for x, rate in zip(rng.normal(0, 20, 300), rng.uniform(0.01, 20, 300), strict=True):
        x, rate = Fraction(float(np.float32(x))), Fraction(float(rate_of(1 / rate)))
        exponent = math.floor(x * rate) + int(rng.integers(0, 40))
        offset = 3145728 + Fraction(exponent, 4)
        below = rounded(offset - x * rate / 4, Fraction(1, 4), up=True)
        lift = below - (offset - Fraction(1, 4))
        v = rounded(x * rate / 4 + lift, Fraction(1, 2**25), up=False)
        p = Fraction(0)
        for coefficient in (POLYNOMIAL[0], 0, *POLYNOMIAL[1:]):
            p = rounded(p * v, Fraction(1), up=False) + coefficient
            assert p < 2**24
        whole, fraction = power(jnp.float32(x), jnp.float32(rate))
        assert (below - 3145728) * 4 == exponent - int(whole)
        assert p == int(exp2_fixed(fraction))
