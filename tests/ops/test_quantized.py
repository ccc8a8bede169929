"""Weights of 8 bits and of 4: how far they are off, and products with them."""

import functools
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models import packed
from jspec.ops.linear import linear
from jspec.ops.norm import RMS
from jspec.ops.quantized import BLOCK, EIGHT_BITS, KINDS, MXFP4, dequantized, quantized, weight_bits

RNG = np.random.default_rng(3)
to_dense = jax.jit(dequantized, static_argnums=1)


def normal(*shape):
    drawn = RNG.standard_normal(shape) * 10.0 ** RNG.integers(-3, 3, shape)
    return jax.device_put(drawn.astype(np.float32))


def numbers(kernel) -> np.ndarray:
    """The weights ``[*lead, in, *out]`` in float64, by the dtypes of their parts."""
    if not isinstance(kernel, MXFP4):
        values = np.moveaxis(np.asarray(kernel.values, np.float32), -1, 0)
        return np.asarray(values, np.float64) * np.asarray(kernel.scale, np.float64)
    codes, scales = np.asarray(kernel.codes), np.asarray(kernel.scales)
    pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    factors = np.repeat(scales.view(jnp.float8_e8m0fnu).astype(np.float64), BLOCK, axis=-1)
    numbers_of = pairs.view(jnp.float4_e2m1fn).astype(np.float64) * factors
    return np.moveaxis(numbers_of, -1, kernel.leading)


@pytest.mark.parametrize("kind", EIGHT_BITS)
def test_a_weight_of_8_bits_is_off_by_what_its_kind_allows(kind):
    """A column of zeros stays one; the largest weight of each column is kept."""
    kernel = np.array(normal(64, 3, 5))
    kernel[:, 1, 2] = 0
    result = quantized(kernel, kind)
    assert (result.values.dtype.itemsize, result.shape) == (1, (64, 3, 5))
    exact, scale = np.float64(kernel), np.float64(result.scale)
    off = np.abs(numbers(result) - exact)
    allowed = scale / 2 if kind == "int8" else np.maximum(np.abs(exact) / 16, scale * 2**-10)
    assert (off <= allowed * 1.00001).all()
    assert off.max() > 0
    largest = np.take_along_axis(off, np.abs(exact).argmax(axis=0)[None], axis=0)
    np.testing.assert_allclose(largest, 0, atol=1e-6 * np.abs(exact).max())
    assert not result.scale[1, 2]


def blocks_of(kernel) -> np.ndarray:
    """The blocks ``[*out, in / BLOCK, BLOCK]`` of ``[in, *out]``, float64."""
    columns = np.moveaxis(np.asarray(kernel, np.float64), 0, -1)
    return columns.reshape(*columns.shape[:-1], -1, BLOCK)


@pytest.mark.parametrize("size", [1e-30, 0.02, 1.0, 1e30])
def test_a_block_has_the_scale_of_the_least_error(size):
    """No power of two is better, with each weight at the nearest E2M1 of ml_dtypes."""
    # Many a block has one weight far above the rest, for which half of the scale is better.
    drawn = RNG.standard_normal((8 * BLOCK, 2, 40)) * np.exp2(RNG.uniform(-3, 3, (1, 2, 40)))
    kernel = jax.device_put((drawn * size).astype(np.float32))
    result = quantized(kernel, "mxfp4")
    assert (result.shape, result.ndim, result.size, len(result)) == ((256, 2, 40), 3, 20480, 256)
    assert (result.codes.shape, result.scales.shape) == ((2, 40, 128), (2, 40, 8))
    blocks = blocks_of(kernel)

    def error(scale):
        scaled = np.float32(blocks / scale)
        nearest = scaled.astype(jnp.float4_e2m1fn).astype(np.float64)
        return np.square(nearest * scale - blocks).sum(axis=-1)

    middle = int(np.log2(np.abs(blocks).max())) - 2
    powers = 2.0 ** np.arange(middle - 12, middle + 3)
    best = np.min([error(power) for power in powers], axis=0)
    off = np.square(blocks_of(numbers(result)) - blocks).sum(axis=-1)
    np.testing.assert_allclose(off, best, rtol=1e-6)
    least = 2.0 ** np.ceil(np.log2(np.abs(blocks).max(axis=-1) / 6))
    halved = 2.0 ** (np.int64(result.scales) - 127) / least
    assert set(halved.ravel()) == {1.0, 0.5}


def test_a_weight_is_the_nearest_e2m1_of_its_scale():
    """Ties go to the even one; what a scale has exactly is kept."""
    steps = np.arange(-96, 97) / 16
    kernel = np.zeros((BLOCK, steps.size), np.float32)
    kernel[0], kernel[1] = 6, steps
    result = quantized(jax.device_put(kernel), "mxfp4")
    want = np.float32(steps).astype(jnp.float4_e2m1fn)
    np.testing.assert_array_equal(numbers(result)[1], want.astype(np.float64))
    assert (np.asarray(result.scales) == 127).all()
    np.testing.assert_array_equal(
        numbers(quantized(to_dense(result, jnp.float32), "mxfp4")), numbers(result)
    )


def test_blocks_of_zeros_and_the_largest_and_smallest_weights():
    kernel = np.zeros((BLOCK, 6), np.float32)
    kernel[:, 1] = 2.0**-126
    kernel[3, 2], kernel[4, 3], kernel[5, 4] = np.finfo(np.float32).max, -(2.0**127), 1.5 * 2.0**127
    kernel[6, 5] = 2.0**-140
    result = quantized(jax.device_put(kernel), "mxfp4")
    assert (np.asarray(result.scales) >= 1).all()
    assert (np.asarray(result.scales) <= packed.LARGEST).all()
    want = kernel.astype(np.float64)
    want[3, 2] = 1.5 * 2.0**127  # the largest that there is
    want[6, 5] = 0
    np.testing.assert_array_equal(numbers(result), want)
    for dtype in (jnp.float32, jnp.bfloat16):
        np.testing.assert_array_equal(np.float64(np.float32(to_dense(result, dtype))), want)


def test_matrices_of_leading_axes_are_each_as_alone():
    kernel = normal(3, 2, 2 * BLOCK, 2, 5)
    result = quantized(kernel, "mxfp4", leading=2)
    assert (result.shape, result.codes.shape) == (kernel.shape, (3, 2, 2, 5, BLOCK))
    result32 = np.asarray(to_dense(result, jnp.float32))
    np.testing.assert_array_equal(result32, numbers(result))
    alone = quantized(np.asarray(kernel)[2, 1], "mxfp4")
    np.testing.assert_array_equal(np.asarray(result.codes)[2, 1], alone.codes)
    np.testing.assert_array_equal(np.asarray(result.scales)[2, 1], alone.scales)


def test_bfloat16_has_every_weight_and_the_layout_is_that_of_checkpoints():
    codes = RNG.integers(0, 256, (4, 7, 3 * BLOCK // 2), np.uint8)
    scales = RNG.integers(2, packed.LARGEST + 1, (4, 7, 3), np.uint8)
    kernel = MXFP4(jax.device_put(codes), jax.device_put(scales), leading=1)
    want = packed.dequantized(codes.reshape(4, 7, 3, BLOCK // 2), scales)
    kernel32 = np.asarray(to_dense(kernel, jnp.float32))
    np.testing.assert_array_equal(kernel32, np.swapaxes(want, 1, 2))
    half = np.asarray(to_dense(kernel, jnp.bfloat16))
    np.testing.assert_array_equal(half.astype(np.float32), kernel32)
    np.testing.assert_array_equal(numbers(kernel), kernel32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_shows(kind, bad):
    """In products with its column; the next block of MXFP4 is as it was."""
    kernel = normal(2 * BLOCK, 3)
    spoiled = np.array(kernel)
    spoiled[BLOCK, 1] = bad
    spoiled = quantized(spoiled, kind)
    result = np.asarray(jax.jit(linear)(np.ones((2, 2 * BLOCK), np.float32), spoiled))
    np.testing.assert_array_equal(np.isnan(result), [[False, True, False]] * 2)
    if kind == "mxfp4":
        was = numbers(quantized(kernel, kind))
        np.testing.assert_array_equal(numbers(spoiled)[:BLOCK], was[:BLOCK])


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_with_the_scaled_values(kind):
    x, bias, norm = normal(3, 64), normal(2, 6), RMS(normal(64), 0.1)
    kernel = quantized(normal(64, 2, 6), kind)
    dense = numbers(kernel).astype(np.float32)
    every: list[dict[str, Any]] = [{}, {"norm": norm}, {"gated": True, "norm": norm}]
    for settings in every:
        run = jax.jit(functools.partial(linear, bias=bias, **settings))
        got, want = (run(x, one) for one in (kernel, dense))
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("fp8", 8), ("mxfp4", 4), (None, 32)])
def test_the_bits_of_a_weight(kind, bits):
    kernel = normal(BLOCK, 4)
    make = functools.partial(quantized, kind=kind) if kind else lambda x: x
    assert weight_bits(make(kernel)) == weight_bits(jax.eval_shape(make, kernel)) == bits


@pytest.mark.parametrize("kind", KINDS)
def test_a_transposed_one_is_refused(kind):
    with pytest.raises(ValueError, match=r"transposed=True must be"):
        linear(normal(3, 32), quantized(normal(32, 32), kind), transposed=True)


def test_a_matrix_is_refused_that_has_leading_axes_or_no_whole_blocks():
    with pytest.raises(ValueError, match=r"must be \[\.\.\., in\]"):
        linear(normal(2, 1), quantized(normal(1, 32), "mxfp4", leading=1))
    with pytest.raises(ValueError, match=r"a kernel \(2, 48, 3\) of 48 inputs has no MXFP4"):
        quantized(normal(2, 48, 3), "mxfp4", leading=1)


@pytest.mark.skipif(version("jaxlib").startswith("0.10."), reason="its XLA holds them even so")
def test_weights_of_one_layer_at_a_time_are_dequantised_in_a_loop():
    layers, inputs, outputs = 6, 64, 2048
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((layers, inputs, outputs), np.float32)
    kernels = [quantized(jax.device_put(kernel), "mxfp4") for kernel in normal]

    @jax.jit
    def steps(kernels, x):
        def step(x, _):
            for kernel in kernels:
                x = linear(x, kernel, implementation="xla")[:, :inputs]
            return x, None

        return jax.lax.scan(step, x, None, length=4)[0]

    compiled = steps.lower(kernels, jnp.ones((2, inputs))).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 2 * 4 * inputs * outputs
