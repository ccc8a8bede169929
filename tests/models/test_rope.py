"""Rotary frequencies against the papers' formulae, one dimension at a time, and rotation."""

import cmath
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec import Rope, RopeScaling
from jspec.models.rope import rope_angles, rope_frequencies
from jspec.ops.append import rotate

HEADS = st.integers(1, 64).map(lambda half: 2 * half)
THETAS = st.floats(500.0, 1e7)
FACTORS = st.floats(1.0, 64.0)
CONTEXTS = st.integers(64, 65536)


def plain(head: int, theta: float) -> list[float]:
    """Su et al. 2021, section 3.4.3: theta_i = base ** (-2 i / d)."""
    return [theta ** (-2 * i / head) for i in range(head // 2)]


@given(HEADS, THETAS, FACTORS)
def test_plain_and_linear(head, theta, factor):
    """Position interpolation (Chen et al. 2023, equation 4) evaluates RoPE at m / s."""
    frequencies, scale = rope_frequencies(head, Rope(theta))
    np.testing.assert_allclose(frequencies, plain(head, theta), rtol=1e-6)
    assert frequencies.dtype == np.float32
    assert scale == 1.0
    frequencies, scale = rope_frequencies(head, Rope(theta, RopeScaling("linear", factor)))
    np.testing.assert_allclose(frequencies, np.divide(plain(head, theta), factor), rtol=1e-6)
    assert scale == 1.0


@given(HEADS, THETAS, FACTORS, CONTEXTS, st.floats(0.5, 2.0), st.floats(0.5, 8.0))
def test_llama3(head, theta, factor, context, low, width):
    """Meta's llama-models: wavelengths from context / high to context / low are on a ramp."""
    high, want = low + width, []
    for frequency in plain(head, theta):
        wavelength = 2 * math.pi / frequency
        if wavelength < context / high:
            want.append(frequency)
        elif wavelength > context / low:
            want.append(frequency / factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            want.append((1 - smooth) * frequency / factor + smooth * frequency)
    scaling = RopeScaling(
        "llama3",
        factor,
        original_context=context,
        low_frequency_factor=low,
        high_frequency_factor=high,
    )
    frequencies, scale = rope_frequencies(head, Rope(theta, scaling))
    np.testing.assert_allclose(frequencies, want, rtol=1e-5)
    assert scale == 1.0


@given(HEADS, THETAS, FACTORS, CONTEXTS, st.floats(0.25, 2.0), st.floats(2.0, 40.0))
def test_yarn_with_rotations_as_in_the_paper(head, theta, factor, context, alpha, beta):
    """Peng et al. 2023, equations 20 to 23, with the ramp over dimensions of the authors' code.

    The paper ramps over r = L / wavelength; the code, which every checkpoint follows, over the
    dimension where r reaches beta and alpha.
    """

    def index(rotations: float) -> float:
        # The (real) pair i whose wavelength 2 pi base ** (2 i / d) fits L `turns` times.
        return head / 2 * math.log(context / (2 * math.pi * rotations), theta)

    first, last = max(index(beta), 0.0), min(index(alpha), head - 1)
    want = []
    for i, frequency in enumerate(plain(head, theta)):
        ramp = min(max((i - first) / max(last - first, 1e-3), 0.0), 1.0)
        want.append((1 - ramp) * frequency + ramp * frequency / factor)
    scaling = RopeScaling(
        "yarn",
        factor,
        original_context=context,
        beta_fast=beta,
        beta_slow=alpha,
        truncate=False,
    )
    frequencies, scale = rope_frequencies(head, Rope(theta, scaling))
    np.testing.assert_allclose(frequencies, want, rtol=1e-4)
    # Equation 22: sqrt(1 / t) = 0.1 ln(s) + 1 goes on queries and on keys.
    assert scale == pytest.approx(0.1 * math.log(factor) + 1)


@given(HEADS, THETAS, st.floats(1.5, 64.0), CONTEXTS)
def test_yarn_truncates_to_whole_dimensions(head, theta, factor, context):
    loose, whole = (
        rope_frequencies(
            head,
            Rope(theta, RopeScaling("yarn", factor, original_context=context, truncate=truncate)),
        )[0]
        / plain(head, theta)
        for truncate in (False, True)
    )
    # Whole dimensions start the ramp no later and end it no earlier; both are monotonic.
    remaining, stretched = np.isclose(loose, 1, rtol=1e-5), np.isclose(loose, 1 / factor, rtol=1e-5)
    assert remaining.sum() >= np.isclose(whole, 1, rtol=1e-6).sum()
    assert stretched.sum() >= np.isclose(whole, 1 / factor, rtol=1e-6).sum()
    assert (np.diff(whole) <= 1e-6).all()


def test_yarn_uses_the_attention_factor_of_the_config():
    scaling = RopeScaling("yarn", 4.0, original_context=64, attention_factor=1.5)
    assert rope_frequencies(16, Rope(1e4, scaling))[1] == 1.5


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(0, 4096), st.floats(1.0, 2.0))
def test_rotation_is_complex_multiplication(half, position, factor):
    """Pair i of the half-split layout is one complex number, times factor * exp(i m theta)."""
    frequencies = np.float32(plain(2 * half, 1e4))
    x = np.random.default_rng(position).normal(size=(1, 1, 1, 2 * half)).astype(np.float32)
    angles = rope_angles(jnp.full((1, 1), position), jnp.asarray(frequencies), factor)
    got = np.asarray(rotate(jnp.asarray(x), *angles))[0, 0, 0]
    for i in range(half):
        pair = complex(x[0, 0, 0, i], x[0, 0, 0, half + i])
        angle = float(np.float32(position) * frequencies[i])
        want = pair * cmath.rect(factor, angle)
        assert complex(got[i], got[half + i]) == pytest.approx(want, abs=1e-4)


def test_scores_depend_on_distance_alone():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 16)), jnp.float32) for _ in range(2))
    frequencies = jnp.asarray(rope_frequencies(16, Rope())[0])

    def score(m: int, n: int) -> float:
        a, b = (rope_angles(jnp.full((1, 1), p), frequencies, 1.0) for p in (m, n))
        return float(jnp.sum(rotate(q, *a) * rotate(k, *b)))

    assert score(7, 3) == pytest.approx(score(1007, 1003), abs=1e-3)
    assert score(7, 3) != pytest.approx(score(7, 2), abs=1e-2)
