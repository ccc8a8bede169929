"""Attention that scores its keys too: the same attention, and scores from the definition."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.attention.scored import SCORED, scored_attention
from tests.ops.attention.test_dense import (
    CASES,
    EXACT,
    Case,
    Inputs,
    brute_force,
    in_blocks,
    inputs,
)

NAMED = {case.name: case for case in CASES}
SOME = [
    NAMED["three-tokens-mqa"],
    NAMED["seven-tokens-holes"],
    NAMED["window-padding"],
    NAMED["all-settings"],
    NAMED["values-in-keys"],
]
by_name = pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)


def arrays(x: Inputs, case: Case):
    """Positional arguments and key positions, with the mean of each KV head's queries as probe."""
    arrays = x.q, x.k, x.v, x.positions, x.key_positions
    q, k, v, positions, stored = jax.device_put(arrays)
    query = np.asarray(x.q, np.float32).mean(axis=1)
    query = query.reshape(len(case.lengths), case.kv_heads, -1, case.size).mean(axis=2)
    return (q, k, v, positions, jnp.asarray(query, q.dtype)), stored


def read_by_some(x: Inputs, case: Case) -> np.ndarray:
    """Which of ``[B, S]`` slots some query of the row reads."""
    stored = np.arange(case.slots)[None] if x.key_positions is None else x.key_positions
    position, at = x.positions[:, :, None], stored[:, None]
    observed = (at >= 0) & (at <= position)
    if case.window is not None:
        observed &= at > position - case.window
    return observed.any(axis=1)


def check(got, x: Inputs, case: Case, tolerance: float):
    out, lse, scores = (np.asarray(a, np.float64) for a in got)
    expected_out, expected_lse = brute_force(x, **case.settings)
    np.testing.assert_allclose(out, expected_out, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=max(EXACT, tolerance))
    (*_, probe), _ = arrays(x, case)
    k = np.asarray(x.k, np.float64)
    expected = np.einsum("bkh,bskh->bks", np.asarray(probe, np.float64), k)
    expected *= case.size**-0.5 if case.scale is None else case.scale
    read = np.broadcast_to(read_by_some(x, case)[:, None], expected.shape)
    assert read.any()
    np.testing.assert_allclose(scores[read], expected[read], rtol=1e-5, atol=EXACT)


@by_name
@pytest.mark.parametrize("implementation", SCORED.backends)
def test_equals_the_definition(case, implementation):
    x = inputs(case, junk=np.nan)
    operands, stored = arrays(x, case)
    settings = case.settings | {"key_positions": stored}
    backend = SCORED.backend(implementation)
    if reason := backend.supports(*operands, **settings):
        pytest.skip(reason)
    run = functools.partial(scored_attention, implementation=implementation, **settings)
    check(jax.jit(run)(*operands), x, case, EXACT)


@pytest.mark.parametrize("implementation", SCORED.backends)
def test_keys_in_blocks_are_scored_in_the_order_of_their_positions(implementation):
    case = dataclasses.replace(NAMED["four-tokens-padding"], slots=40)
    x = inputs(case, junk=np.nan)
    operands, _ = arrays(x, case)
    paged, table = in_blocks(x, 8)
    settings = case.settings | {"key_positions": None, "table": jnp.asarray(table)}
    q, _, _, *rest = operands
    operands = q, jnp.asarray(paged.k), jnp.asarray(paged.v), *rest
    if reason := SCORED.backend(implementation).supports(*operands, **settings):
        pytest.skip(reason)
    run = functools.partial(scored_attention, implementation=implementation, **settings)
    check(jax.jit(run)(*operands), x, case, EXACT)


def test_a_probe_that_does_not_fit_is_refused():
    q, kv = jnp.zeros((1, 2, 4, 8)), jnp.zeros((1, 9, 2, 8))
    positions = jnp.array([[3, 4]], jnp.int32)
    with pytest.raises(ValueError, match=r"probe float32\[1, 4, 8\] must be float32\[1, 2, 8\]"):
        scored_attention(q, kv, kv, positions, jnp.zeros((1, 4, 8)))
