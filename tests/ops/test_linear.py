"""A product with what is before and after it, against float64 from the definition."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.dispatch import BackendError, use_backends
from jspec.ops.linear import DOUBLED, REWRITTEN, linear
from jspec.ops.norm import RMS

RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("lead", [(1,), (2, 3)], ids=["one-row", "rows"])
def test_plain_and_normed_products(lead):
    x, kernel, bias, scale = normal(*lead, 5), normal(5, 2, 3), normal(2, 3), normal(5)
    x64, kernel64 = np.float64(x), np.float64(kernel)
    want = np.einsum("...i,iab->...ab", x64, kernel64) + np.float64(bias)
    np.testing.assert_allclose(linear(x, kernel, bias), want, rtol=1e-5, atol=1e-5)
    mean = np.mean(x64 * x64, axis=-1, keepdims=True)
    normed = x64 / np.sqrt(mean + 0.1) * np.float64(scale)
    want = np.einsum("...i,iab->...ab", normed, kernel64)
    got = linear(x, kernel, norm=RMS(scale, 0.1))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_gate_sum_and_transposed():
    x, kernel, bias, add = normal(2, 4), normal(4, 2, 3), normal(2, 3), normal(2, 3)
    both = np.einsum("bi,ija->bja", np.float64(x), np.float64(kernel)) + np.float64(bias)
    want = np.float64(add) + silu(both[:, 0]) * both[:, 1]
    got = linear(x, kernel, bias, add=add, gated=True)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    flipped = jnp.moveaxis(kernel, 0, -1)
    got = linear(x, flipped, bias, add=add, gated=True, transposed=True)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("outputs", [8, REWRITTEN // 1024 + 8, DOUBLED // 1024])
def test_sums_are_float32_and_the_result_is_of_the_dtype_asked_for(outputs):
    """Also of the smallest products that XLA is given as one row and as two on a GPU."""
    x = jnp.ones((1, 1024), jnp.bfloat16).at[0, 0].set(256)
    kernel = jnp.ones((1024, outputs), jnp.bfloat16)
    got = jax.jit(lambda *arrays: linear(*arrays, dtype=jnp.float32, implementation="xla"))(
        x, kernel
    )
    np.testing.assert_array_equal(got, np.full((1, outputs), 1279.0))
    assert linear(x, kernel).dtype == jnp.bfloat16


@pytest.mark.parametrize(("outputs", "rows"), [(8, 8), (16, 1), (24, 2)])
def test_a_single_row_is_padded_for_a_gpu(outputs, rows, monkeypatch):
    """Where XLA would rewrite the product, and where it multiplies two rows faster than one."""
    module = importlib.import_module("jspec.ops.linear")
    monkeypatch.setattr(module, "REWRITTEN", 8 * 10)
    monkeypatch.setattr(module, "DOUBLED", 24 * 10)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x, kernel = normal(1, 1, 10), normal(10, outputs)
    run = functools.partial(linear, implementation="xla")
    np.testing.assert_allclose(run(x, kernel), np.float64(x) @ np.float64(kernel), rtol=1e-5)
    every = jax.make_jaxpr(run)(x, kernel).eqns
    (product,) = [one for one in every if one.primitive.name == "dot_general"]
    assert product.invars[0].aval.size == rows * 10


@pytest.mark.parametrize(
    ("shapes", "settings"),
    [
        (((2, 4), (5, 3), None, None), {}),
        (((2, 4), (4, 3), (4,), None), {}),
        (((2, 4), (4, 3), None, (2, 4)), {}),
        (((2, 4), (4, 3), None, None), {"gated": True}),
        (((2, 4), (4, 3), None, None), {"transposed": True}),
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes, settings):
    x, kernel, bias, add = (None if shape is None else jnp.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=r"x \(2, 4\), kernel .* must be \[\.\.\., in\]"):
        linear(x, kernel, bias, add=add, **settings)


def test_a_preference_counts_inside_its_block_and_where_none_is_named():
    x, kernel = jnp.ones((1, 4), jnp.int32), jnp.ones((4, 3), jnp.int32)
    with use_backends({"linear": "triton"}):
        with pytest.raises(BackendError, match="triton: "):
            linear(x, kernel)
        linear(x, kernel, implementation="xla")
    linear(x, kernel)
