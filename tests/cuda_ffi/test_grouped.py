"""Products by groups of rows in MXFP4: the CUDA kernel on a GPU, its twin on a CPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cuda_ffi import library
from jspec.cuda_ffi.grouped import grouped_linear_cuda, refuses
from jspec.ops.norm import RMS
from jspec.ops.quantized import MXFP4
from jspec.parts import ClampedSwiGLU
from tests.ops.test_quantized import numbers

# Rows of each group, inputs, outputs, pairs for each row of x, and what there is.
CASES = {
    "plain": ([0, 3, 0, 17, 1, 0], 96, 40, 1, ""),
    "one-row": ([0, 0, 1], 32, 7, 1, "wide"),
    "gate-up": ([2, 0, 1, 0, 0, 5], 672, 72, 4, "gated norm gather_indices"),
    "clamped": ([2, 0, 1, 0, 0, 5], 672, 72, 4, "gated clamped norm gather_indices bias"),
    "down": ([0, 9, 0, 24, 1], 160, 33, 1, "bias scatter_indices weights wide"),
    "all": (
        [25, 0, 40, 7],
        544,
        21,
        2,
        "gated clamped norm bias gather_indices scatter_indices weights wide",
    ),
    "many-groups": ([0, 1, 0, 0, 2, 0] * 40, 64, 20, 8, "gated norm gather_indices"),
}


def arguments(counts, inputs, outputs, share, has) -> tuple[Any, dict[str, Any]]:
    """Of the backends: the arrays, and the settings."""
    rng, rows, groups, has = np.random.default_rng(inputs), sum(counts), len(counts), has.split()
    columns = (2, outputs) if "gated" in has else (outputs,)

    def normal(*shape):
        return rng.standard_normal(shape).astype(jnp.bfloat16)

    codes = rng.integers(0, 256, (groups, *columns, inputs // 2), np.uint8)
    scales = rng.integers(118, 123, (groups, *columns, inputs // 32), np.uint8)
    kernel = MXFP4(codes, scales, leading=1)
    starts = np.cumsum([0, *counts]).astype(np.int32)
    gather_indices, scatter_indices = (rng.permutation(rows).astype(np.int32) for _ in range(2))
    named = {
        "bias": normal(groups, *columns),
        "gather_indices": gather_indices,
        "scatter_indices": scatter_indices,
        "norm": RMS((1 + np.float32(normal(inputs)) / 8).astype(jnp.bfloat16)),
        "weights": rng.random(rows).astype(np.float32),
    }
    arrays = (array if name in has else None for name, array in named.items())
    settings = {
        "gated": "gated" in has,
        "clamped": ClampedSwiGLU(limit=1.5) if "clamped" in has else None,
        "dtype": jnp.dtype("float32" if "wide" in has else "bfloat16"),
    }
    return jax.device_put((normal(rows // share, inputs), kernel, starts, *arrays)), settings


def in_double(arrays, *, gated, clamped, dtype):
    """The definition, row by row."""
    x, kernel, starts, bias, gather_indices, scatter_indices, norm, weights = arrays
    rows = len(x) if gather_indices is None else len(gather_indices)
    x = np.asarray(x, np.float64)
    if norm is not None:
        root = np.sqrt((x**2).mean(axis=1, keepdims=True) + norm.eps)
        # Rounded to bfloat16 where the kernel does it: the scale first, then what the norm is.
        x = np.float64(jnp.asarray(x * np.asarray(norm.scale, np.float64), jnp.bfloat16)) / root
    result = np.full((rows, *kernel.shape[3 if gated else 2 :]), np.nan)
    for group in range(len(kernel)):
        one = MXFP4(kernel.codes[group], kernel.scales[group])
        for row in range(int(starts[group]), int(starts[group + 1])):
            source = row if gather_indices is None else int(gather_indices[row]) // (rows // len(x))
            y = np.tensordot(x[source], numbers(one), 1)
            y = y if bias is None else y + np.asarray(bias[group], np.float64)
            if clamped is not None:
                gate = np.minimum(y[0], clamped.limit)
                up = np.clip(y[1], -clamped.limit, clamped.limit)
                y = (up + 1) * gate / (1 + np.exp(-clamped.alpha * gate))
            elif gated:
                y = y[0] / (1 + np.exp(-y[0])) * y[1]
            goal = row if scatter_indices is None else int(scatter_indices[row])
            result[goal] = y if weights is None else y * float(weights[goal])
    return result


def run_or_skip(arrays, settings):
    if reason := library.refusal("grouped"):
        pytest.skip(reason)
    assert refuses(*arrays, **settings) is None
    return jax.jit(lambda *arrays: grouped_linear_cuda(*arrays, **settings))(*arrays)


@pytest.mark.parametrize("case", CASES)
def test_equals_the_definition(case):
    arrays, settings = arguments(*CASES[case])
    got = run_or_skip(arrays, settings)
    assert got.dtype == settings["dtype"]
    close = 2e-5 if got.dtype == jnp.float32 else 4e-3
    want = in_double(arrays, **settings)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=close, atol=close)


def test_a_row_alone_is_the_row_among_others():
    arrays, settings = arguments([0, 30, 2], 544, 40, 1, "gated norm bias wide")
    x, kernel, _, bias, *others = arrays
    every = run_or_skip(arrays, settings)
    for row, group in ((0, 1), (17, 1), (31, 2)):
        starts = jnp.asarray([0, *(int(g >= group) for g in range(3))], jnp.int32)
        alone = run_or_skip((x[row : row + 1], kernel, starts, bias, *others), settings)
        np.testing.assert_array_equal(alone[0], every[row])


def test_neither_groups_without_rows_nor_rows_behind_the_last_group_are_read():
    arrays, settings = arguments([3, 0, 0, 9], 96, 40, 1, "scatter_indices weights wide")
    x, kernel, starts, *others, scatter_indices, _, weights = arrays
    want = run_or_skip(arrays, settings)
    poisoned = MXFP4(kernel.codes, kernel.scales.at[1:3].set(255), leading=1)
    more = jnp.concatenate([x, jnp.full((4, 96), jnp.nan, jnp.bfloat16)])
    scatter_indices = jnp.concatenate([scatter_indices, len(x) + jnp.arange(4, dtype=jnp.int32)])
    weights = jnp.concatenate([weights, jnp.ones(4)])
    got = run_or_skip((more, poisoned, starts, *others, scatter_indices, None, weights), settings)
    np.testing.assert_array_equal(got[: len(x)], want)


@pytest.mark.parametrize(
    "starts", [[-5, 4, 2**31 - 1, 12], [2**30, -(2**31), 7, 3]], ids=["beyond", "unordered"]
)
def test_numbers_out_of_range_are_brought_into_it(starts):
    arrays, settings = arguments([4, 4, 4], 96, 40, 1, "gather_indices scatter_indices wide")
    x, kernel, _, bias, _, _, *others = arrays
    order = [-1, 99, 2**31 - 1, -(2**31), *range(4, 12)]
    inside = np.clip(order, 0, 11).astype(np.int32)
    indices = jnp.asarray(starts, jnp.int32), bias, jnp.asarray(order, jnp.int32)
    got = run_or_skip((x, kernel, *indices, jnp.asarray(order, jnp.int32), *others), settings)
    within = np.clip(starts, 0, 12)
    want = in_double((x, kernel, within, bias, inside, inside, *others), **settings)
    # Rows 0 and 11 of the result are more than one row's.
    known = np.isfinite(want).all(axis=1) & ~np.isin(np.arange(12), (0, 11))
    np.testing.assert_allclose(np.asarray(got)[known], want[known], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("counts", "change", "reason"),
    [
        ([49, 0], {}, "1 to 24 rows a group in the mean, and there are 49 in 2"),
        ([3, 1], {"kernel": jnp.zeros((2, 96, 40), jnp.bfloat16)}, "bfloat16, not MXFP4"),
        ([3, 1], {"x": jnp.zeros((4, 96))}, "is not bfloat16"),
        ([3, 1], {"weights": jnp.zeros(4, jnp.bfloat16)}, "bfloat16, not float32"),
        ([3, 1], {"dtype": jnp.dtype("float16")}, "the result is of float16"),
        ([3, 1], {"norm": RMS(jnp.ones(96, jnp.bfloat16), centered=True)}, "1 + scale"),
        ([0, 0], {}, "and there are 0 in 2"),
    ],
    ids=["rows", "kernel", "x", "weights", "dtype", "centered", "none"],
)
def test_refuses_with_a_reason(counts, change, reason):
    arrays, settings = arguments(counts, 96, 40, 1, "wide")
    names = (
        "x",
        "kernel",
        "starts",
        "bias",
        "gather_indices",
        "scatter_indices",
        "norm",
        "weights",
    )
    changed = dict(zip(names, arrays, strict=True)) | settings | change
    result = refuses(**changed)
    assert result is not None
    assert reason in result
