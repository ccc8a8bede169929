"""The verification paper's scan by every backend: against what its inputs were made of."""

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.acceptance_scan import ACCEPTANCE_SCAN, acceptance_scan
from tests.ops.backends import every_backend, every_case, run_or_skip


@every_backend(ACCEPTANCE_SCAN)
@every_case(ACCEPTANCE_SCAN)
def test_equals_what_the_inputs_were_made_of(case, backend):
    got = run_or_skip(acceptance_scan, ACCEPTANCE_SCAN, backend, *case.arguments)
    for have, want in zip(got, case.expected(), strict=True):
        np.testing.assert_array_equal(have, want)
        assert have.dtype == want.dtype


@pytest.mark.parametrize(
    ("draft", "target"),
    [
        (jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 3), jnp.int32)),
        (jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 4), jnp.int16)),
        (jnp.zeros(3, jnp.int32), jnp.zeros(4, jnp.int32)),
    ],
    ids=["shape", "dtype", "rank"],
)
def test_other_arguments_are_refused(draft, target):
    with pytest.raises(ValueError, match=r"must be int32 \[B, gamma\] and \[B, gamma \+ 1\]"):
        acceptance_scan(draft, target)
