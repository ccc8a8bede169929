"""Mean softmax weights of keys: against weights that are written out from the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.attention.weights import WEIGHTS, mean_weights
from tests.ops.attention.test_dense import CASES, Case, brute_force, inputs

NAMED = {case.name: case for case in CASES}
SOME = [
    NAMED["three-tokens-mqa"],
    NAMED["four-tokens-padding"],
    NAMED["softcap-small-values"],
    NAMED["size-80"],
]
by_name = pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)


def arguments(case: Case):
    """Queries, keys with NaN in empty slots, and the log-sum-exp of their attention."""
    x = inputs(case, junk=np.nan)
    return tuple(
        map(jnp.asarray, (x.q, x.k, brute_force(x, **case.settings)[1].astype(np.float32)))
    )


def check(got, case: Case) -> None:
    """For the slots that all queries of a row read, head by head."""
    x = inputs(case, junk=np.nan)
    got, q, k = (np.asarray(a, np.float64) for a in (got, x.q, x.k))
    lse = brute_force(x, **case.settings)[1]
    scale = case.size**-0.5 if case.scale is None else case.scale
    for row, length in enumerate(case.lengths):
        counted = x.positions[row] >= 0
        end = length - case.tokens + 1
        for head in range(case.kv_heads):
            group = slice(*(case.heads // case.kv_heads * h for h in (head, head + 1)))
            scores = np.einsum("tgh,sh->tgs", q[row, counted, group], k[row, :end, head]) * scale
            if case.softcap is not None:
                scores = case.softcap * np.tanh(scores / case.softcap)
            weights = np.exp(scores - lse[row, counted, group, None])
            expected = weights.mean(axis=(0, 1)) if counted.any() else np.zeros(max(end, 0))
            np.testing.assert_allclose(
                got[row, head, : max(end, 0)], expected, rtol=2e-5, atol=1e-7
            )


@by_name
@pytest.mark.parametrize("implementation", WEIGHTS.backends)
def test_equals_the_definition(case, implementation):
    operands = arguments(case)
    settings = {"scale": case.scale, "softcap": case.softcap}
    if reason := WEIGHTS.backend(implementation).supports(*operands, **settings):
        pytest.skip(reason)
    check(
        jax.jit(functools.partial(mean_weights, implementation=implementation, **settings))(
            *operands
        ),
        case,
    )


def test_a_log_sum_exp_that_does_not_fit_is_refused():
    q, k = jnp.zeros((1, 2, 4, 8)), jnp.zeros((1, 9, 2, 8))
    with pytest.raises(ValueError, match=r"lse float32\[1, 4, 2\] must be float32\[1, 2, 4\]"):
        mean_weights(q, k, jnp.zeros((1, 4, 2)))
