"""The merge of attention over parts: against attention over all keys, and scipy's logsumexp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp

from jspec.ops.attention.dense import attention
from jspec.ops.attention.merge import merge_attention

merge = jax.jit(merge_attention)


def test_the_parts_of_a_cache_give_what_the_whole_gives():
    """Three parts of the slots, of which the last is beyond the length of the second row."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 3, 4, 8), np.float32)
    k, v = (rng.standard_normal((2, 30, 2, 8), np.float32) for _ in range(2))
    positions = np.array([[27, 28, 29], [9, 10, -1]], np.int32)
    stored = np.tile(np.arange(30, dtype=np.int32), (2, 1))
    run = jax.jit(lambda *x: attention(*x[:4], key_positions=x[4], implementation="xla"))
    expected = run(q, k, v, positions, stored)
    masked = [np.where(stored // 10 == part, stored, -1) for part in range(3)]
    outs, lses = zip(*(run(q, k, v, positions, part) for part in masked), strict=True)
    assert np.isneginf(lses[2][1]).all()
    got = merge(jnp.stack(outs), jnp.stack(lses))
    for have, want in zip(got, expected, strict=True):
        np.testing.assert_allclose(have, want, atol=1e-6)


# Parts of a query, as log-sum-exps: far apart, equal, and without any key.
exponents = st.lists(
    st.one_of(st.sampled_from([-np.inf, np.inf]), st.floats(-300, 300, width=32)),
    min_size=4,
    max_size=4,
)


@settings(max_examples=60)
@given(exponents)
def test_parts_weigh_as_their_share_of_the_exponentials(lses):
    """Outputs of parts without a key are NaN; their log-sum-exp is -inf or +inf."""
    result = np.array(lses, np.float32)
    outs = np.arange(1, 9, dtype=np.float32).reshape(4, 2)
    outs = np.where(np.isfinite(result)[:, None], outs, np.nan).astype(np.float32)
    out, lse = merge(outs, result)
    some = result[np.isfinite(result)].astype(np.float64)
    if not some.size:
        assert not np.asarray(out).any()
        assert lse == -np.inf
        return
    np.testing.assert_allclose(lse, logsumexp(some), rtol=1e-6, atol=1e-6)
    expected = np.exp(some - logsumexp(some)) @ outs[np.isfinite(result)]
    np.testing.assert_allclose(out, expected, rtol=1e-5)


def test_the_output_has_the_type_of_the_parts():
    outs, lses = np.ones((2, 3, 4), jnp.bfloat16), np.zeros((2, 3), np.float32)
    out, lse = merge(outs, lses)
    assert out.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.ones((3, 4)))


@pytest.mark.parametrize(
    ("outs", "lses"), [((2, 3, 4), (2, 4)), ((2, 3), (2, 3)), ((0, 3, 4), (0, 3))]
)
def test_bad_shapes_are_refused(outs, lses):
    with pytest.raises(ValueError, match=r"must be \[P, \.\.\., H\], \[P, \.\.\.\]") as error:
        merge_attention(jnp.zeros(outs), jnp.zeros(lses))
    assert f"outs {outs} and lses {lses}" in str(error.value)
