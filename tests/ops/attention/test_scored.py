"""Attention that scores its keys beside: the same attention, and scores from the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.attention.scored import SCORED, scored_attention
from tests.ops.attention.test_dense import CASES, EXACT, Case, Inputs, brute_force, inputs

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
    """Positional arguments and key positions; the first and the last token share the scores."""
    q, k, v, positions, held = (
        None if a is None else jnp.asarray(a) for a in (x.q, x.k, x.v, x.positions, x.key_positions)
    )
    shares = np.zeros(x.positions.shape, np.float32)
    shares[:, 0] += 0.5
    shares[:, -1] += 0.5
    return (q, k, v, positions, jnp.asarray(shares)), held


def pooled(x: Inputs, case: Case) -> np.ndarray:
    """The query that scores, float64 ``[B, K, H]``: halves of few queries have no rounding but the
    last."""
    wide = np.asarray(x.q, np.float64)[:, [0, -1]].mean(axis=1)
    wide = wide.reshape(len(case.lengths), case.kv_heads, -1, case.size).mean(axis=2)
    return wide.astype(np.asarray(x.q).dtype).astype(np.float64)


def read_by_some(x: Inputs, case: Case) -> np.ndarray:
    """Which of ``[B, S]`` slots some query of the row reads."""
    held = np.arange(case.slots)[None] if x.key_positions is None else x.key_positions
    here, at = x.positions[:, :, None], held[:, None]
    seen = (at >= 0) & (at <= here)
    if case.window is not None:
        seen &= at > here - case.window
    return seen.any(axis=1)


def check(got, x: Inputs, case: Case, tolerance: float):
    out, lse, scores = (np.asarray(a, np.float64) for a in got)
    expected_out, expected_lse = brute_force(x, **case.settings)
    np.testing.assert_allclose(out, expected_out, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=max(EXACT, tolerance))
    assert_scores(scores, x, case, rtol=1e-5, atol=EXACT)


def assert_scores(scores, x: Inputs, case: Case, **tolerance: float):
    """The scores of the slots that are read are those of `pooled`."""
    wanted = np.einsum("bkh,bskh->bks", pooled(x, case), np.asarray(x.k, np.float64))
    wanted *= case.size**-0.5 if case.scale is None else case.scale
    read = np.broadcast_to(read_by_some(x, case)[:, None], wanted.shape)
    assert read.any()
    np.testing.assert_allclose(np.asarray(scores)[read], wanted[read], **tolerance)


@by_name
@pytest.mark.parametrize("implementation", SCORED.backends)
def test_equals_the_definition(case, implementation):
    x = inputs(case, junk=np.nan)
    given, held = arrays(x, case)
    settings = case.settings | {"key_positions": held}
    backend = SCORED.backend(implementation)
    if reason := backend.supports(*given, **settings):
        pytest.skip(reason)
    run = functools.partial(scored_attention, implementation=implementation, **settings)
    check(jax.jit(run)(*given), x, case, EXACT)


@pytest.mark.parametrize("implementation", SCORED.backends)
def test_queries_without_a_share_are_not_read(implementation):
    case = NAMED["seven-tokens-holes"]
    x = inputs(case, junk=0.0)
    (q, *given, _), held = arrays(x, case)
    shares = jnp.zeros(q.shape[:2]).at[:, 2].set(1.0)
    settings = case.settings | {"key_positions": held}
    if reason := SCORED.backend(implementation).supports(q, *given, shares, **settings):
        pytest.skip(reason)
    run = functools.partial(scored_attention, implementation=implementation, **settings)
    *_, clean = run(q, *given, shares)
    *_, scores = run(q.at[:, 5].set(jnp.inf), *given, shares)
    read = np.broadcast_to(read_by_some(x, case)[:, None], scores.shape)
    np.testing.assert_array_equal(np.asarray(scores)[read], np.asarray(clean)[read])


def test_shares_that_do_not_fit_are_refused():
    q, kv = jnp.zeros((1, 2, 4, 8)), jnp.zeros((1, 9, 2, 8))
    positions = jnp.array([[3, 4]], jnp.int32)
    with pytest.raises(ValueError, match=r"shares float32\[1, 4\] must be float32\[1, 2\]"):
        scored_attention(q, kv, kv, positions, jnp.zeros((1, 4)))
