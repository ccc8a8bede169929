"""Which experts tokens take, by every backend, against the definition in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.route import ROUTE, route
from jspec.parts import Experts
from tests.ops.backends import every_backend, every_case


def by_definition(x, kernel, bias, correction, norm, experts):
    """Chosen experts and weights of one token at a time, then the pairs by expert."""
    x, kernel, bias, correction, norm = jax.tree.map(
        lambda leaf: np.asarray(leaf, np.float64), (x, kernel, bias, correction, norm)
    )
    if norm is not None:
        x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + norm.eps) * norm.scale
    chosen, weights = [], []
    for token in x:
        logits = token @ kernel + (0 if bias is None else bias)
        exponents = np.exp(logits - logits.max())
        sigmoid = 1 / (1 + np.exp(-logits))
        scores = exponents / exponents.sum() if experts.score == "softmax" else sigmoid
        ranked = scores + (0 if correction is None else correction)
        each = experts.routed // experts.groups
        count = {"highest": 1, "two_highest": 2}[experts.group_score]
        best = [np.sort(group)[-count:].sum() for group in ranked.reshape(-1, each)]
        opened = np.argsort(best)[::-1][: experts.chosen_groups]
        allowed = [e for e in range(experts.routed) if e // each in opened]
        best = sorted(allowed, key=lambda e: (-ranked[e], e))[: experts.chosen]
        normalized = scores[best] / (scores[best].sum() if experts.normalized else 1)
        chosen.append(best)
        weights.append(normalized * experts.factor)
    pairs = np.concatenate(chosen)
    order = sorted(range(len(pairs)), key=lambda pair: (pairs[pair], pair))
    starts = [int((pairs < e).sum()) for e in range(experts.routed + 1)]
    return np.array(chosen), np.array(weights), np.array(order), np.array(starts)


def assert_routed(got, case):
    expected = by_definition(*case.build(), **case.static)
    for name, have, want in zip(got._fields, got, expected, strict=True):
        if name == "weights":
            assert have.dtype == jnp.float32
            close = 1e-5 if case.arguments[0].dtype == jnp.float32 else 2e-2
            np.testing.assert_allclose(have, want, rtol=close)
        else:
            assert have.dtype == jnp.int32
            np.testing.assert_array_equal(have, want, name)


@every_case(ROUTE)
@every_backend(ROUTE)
def test_equals_the_definition(case, backend):
    if reason := ROUTE.backend(backend).supports(*case.arguments, **case.static):
        pytest.skip(f"{backend}: {reason}")
    run = functools.partial(ROUTE, implementation=backend, **case.static)
    assert_routed(jax.jit(run)(*case.arguments), case)


def test_shapes_that_do_not_fit_are_refused():
    x, kernel, experts = jnp.ones((2, 5)), jnp.ones((5, 4)), Experts(4, 2, 8)
    for wrong in ((x, kernel[:3]), (x, kernel[:, :3]), (x[0], kernel), (x, kernel, jnp.ones(3))):
        with pytest.raises(ValueError, match=r"must be \[M, D\], \[D, 4\], \[4\] and \[4\]"):
            route(*wrong, experts=experts)
