"""Products by groups of rows, by every backend, against float64 from the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.grouped import GROUPED, grouped_linear
from tests.ops.backends import every_backend, every_case, run_or_skip


@every_case(GROUPED)
@every_backend(GROUPED)
def test_equals_the_definition(case, backend):
    got = run_or_skip(grouped_linear, GROUPED, backend, *case.arguments)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, case.wanted(), rtol=1e-5, atol=1e-5)


@every_backend(GROUPED)
def test_rows_behind_the_last_group_change_nothing(backend):
    x, kernel, counts = GROUPED.cases()[0].arguments
    more = jnp.concatenate([x, jnp.full((3, x.shape[1]), jnp.nan, x.dtype)])
    whole = run_or_skip(grouped_linear, GROUPED, backend, x, kernel, counts)
    got = run_or_skip(grouped_linear, GROUPED, backend, more, kernel, counts)
    np.testing.assert_array_equal(got[: len(x)], whole)


def test_shapes_that_do_not_fit_are_refused():
    x, kernel, counts = GROUPED.cases()[0].arguments
    for wrong in ((x[:, :3], kernel, counts), (x, kernel[0], counts), (x, kernel, counts[:2])):
        with pytest.raises(ValueError, match=r"must be \[M, in\], \[E, in, out\] and int32 \[E\]"):
            grouped_linear(*wrong)
    with pytest.raises(ValueError, match="counts float32"):
        jax.eval_shape(grouped_linear, x, kernel, counts.astype(jnp.float32))
