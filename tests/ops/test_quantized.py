"""Weights of 8 bits: how far they are off, and products with them."""

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.linear import linear
from jspec.ops.norm import RMS
from jspec.ops.quantized import KINDS, quantized

RNG = np.random.default_rng(3)


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape) * 10.0 ** RNG.integers(-3, 3, shape), jnp.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_off_by_what_its_kind_allows(kind):
    """A column of zeros stays one; the largest weight of each column is kept."""
    kernel = normal(64, 3, 5).at[:, 1, 2].set(0)
    found = quantized(kernel, kind)
    assert (found.values.dtype.itemsize, found.shape) == (1, (64, 3, 5))
    wide, scale = np.float64(kernel), np.float64(found.scale)
    values = np.moveaxis(np.asarray(found.values, np.float32), -1, 0)
    off = np.abs(np.float64(values) * scale - wide)
    allowed = scale / 2 if kind == "int8" else np.maximum(np.abs(wide) / 16, scale * 2**-10)
    assert (off <= allowed * 1.00001).all()
    assert off.max() > 0
    largest = np.take_along_axis(off, np.abs(wide).argmax(axis=0)[None], axis=0)
    np.testing.assert_allclose(largest, 0, atol=1e-6 * np.abs(wide).max())
    assert not found.scale[1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_with_the_scaled_values(kind):
    x, bias, norm = normal(3, 16), normal(2, 6), RMS(normal(16), 0.1)
    kernel = quantized(normal(16, 2, 6), kind)
    values = np.moveaxis(np.asarray(kernel.values, np.float32), -1, 0)
    wide = jnp.asarray(values) * kernel.scale[None]
    for settings in ({}, {"norm": norm}, {"gated": True, "norm": norm}):
        got, want = (linear(x, one, bias, **settings) for one in (kernel, wide))
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5 * np.abs(want).max())


def test_a_transposed_one_is_refused():
    with pytest.raises(ValueError, match=r"transposed=True must be"):
        linear(normal(3, 16), quantized(normal(8, 16), "int8"), transposed=True)
