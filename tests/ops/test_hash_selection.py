"""Scoring and selecting as one operation, by every backend, against both by their definitions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.hash_selection import HASH_SELECT, hash_select
from tests.ops.backends import every_backend, every_case
from tests.ops.test_hash import shared_bits
from tests.ops.test_selection import by_sorting


@every_backend(HASH_SELECT)
@every_case(HASH_SELECT)
def test_equals_a_stable_sort_of_shared_bits(case, backend):
    q, codes, counts, lengths = case.build()
    if reason := HASH_SELECT.backend(backend).supports(*case.arguments, **case.static):
        pytest.skip(f"{backend}: {reason}")
    function = functools.partial(hash_select, **case.static, implementation=backend)
    got = jax.jit(lambda q, c, n, m: function(q, c, counts=n, lengths=m))(*case.arguments)
    expected = by_sorting(shared_bits(q, codes), counts, lengths, **case.static)
    np.testing.assert_array_equal(got, expected)


def test_counts_and_lengths_of_a_batch_row_serve_all_heads():
    codes = jnp.zeros((2, 5, 2, 1), jnp.uint32)
    got = hash_select(
        codes[:, :1], codes, 4, counts=jnp.asarray([4, 2]), lengths=jnp.asarray([3, 5])
    )
    assert got.tolist() == [[[0, 1, 2, -1]] * 2, [[0, 1, -1, -1]] * 2]


def test_what_does_not_fit_is_refused():
    codes = jnp.zeros((2, 5, 2, 1), jnp.uint32)
    with pytest.raises(ValueError, match="k=3 must be at least 1 and hold"):
        hash_select(codes[:, :1], codes, 3, sinks=2, recent=2)
    with pytest.raises(ValueError, match="q_codes uint32"):
        hash_select(codes[:1, :1], codes, 3)
