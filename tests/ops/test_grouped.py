"""Products by groups of rows, by every backend, against float64 from the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.grouped import GROUPED, grouped_linear
from jspec.ops.quantized import quantized
from jspec.parts import ClampedSwiGLU
from tests.ops.backends import every_backend, every_case

PLAIN = GROUPED.cases()[0]


def run(backend, arguments, static):
    """What the backend gives; a refusal is a skip."""
    if reason := GROUPED.backend(backend).supports(*arguments, **static):
        pytest.skip(f"{backend}: {reason}")
    return jax.jit(functools.partial(GROUPED, implementation=backend, **static))(*arguments)


@every_case(GROUPED)
@every_backend(GROUPED)
def test_equals_the_definition(case, backend):
    got = run(backend, case.arguments, case.static)
    assert got.dtype == jnp.float32
    close = 1e-5 if case.arguments[0].dtype == jnp.float32 else 1e-3
    np.testing.assert_allclose(got, case.expected(), rtol=close, atol=close)


@every_backend(GROUPED)
def test_rows_behind_the_last_group_change_nothing(backend):
    x, *others = PLAIN.arguments
    more = jnp.concatenate([x, jnp.full((3, x.shape[1]), jnp.nan, x.dtype)])
    whole = run(backend, (x, *others), PLAIN.static)
    got = run(backend, (more, *others), PLAIN.static)
    np.testing.assert_array_equal(got[: len(x)], whole)


def test_the_result_is_of_the_dtype_asked_for():
    x, kernel, starts, *_ = PLAIN.arguments
    half = grouped_linear(x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16), starts)
    assert half.dtype == jnp.bfloat16
    assert grouped_linear(x, kernel, starts, dtype=jnp.float16).dtype == jnp.float16


def test_shapes_that_do_not_fit_are_refused():
    x, kernel, starts, *_ = PLAIN.arguments
    order = jnp.arange(len(x))
    unstacked = quantized(jnp.zeros((*kernel.shape[:2], 32)), "mxfp4", leading=2)
    for wrong, more in (
        ((x[:, :3], kernel, starts), {}),
        ((x, kernel[0], starts), {}),
        ((x, unstacked, starts), {}),
        ((x, kernel, starts[1:]), {}),
        ((x, kernel, starts, jnp.ones(3)), {}),
        ((x, kernel, starts), {"gated": True}),
        ((x, kernel, starts), {"clamped": ClampedSwiGLU()}),
        ((x[:2], kernel, starts), {"gather_indices": order}),
        ((x, kernel, starts), {"scatter_indices": order[1:]}),
        ((x, kernel, starts), {"scatter_indices": order.astype(jnp.float32)}),
        ((x, kernel, starts), {"weights": jnp.ones(2)}),
    ):
        with pytest.raises(ValueError, match=r"must be \[P, in\] .*, \[E, in, \*out\] and int32"):
            grouped_linear(*wrong, **more)
    with pytest.raises(ValueError, match="starts float32"):
        jax.eval_shape(grouped_linear, x, kernel, starts.astype(jnp.float32))
