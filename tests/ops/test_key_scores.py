"""Scores of keys and of pages of keys against the papers' formulas in NumPy, by every backend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.key_scores import DOT_SCORES, PAGE_SCORES, dot_scores, page_scores
from tests.ops.backends import every_backend, every_case, run_or_skip


def by_pair(q: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Queries ``[B, N, T, 1, H]``, and the keys ``[B, N, 1, S, C]`` that each of them reads."""
    group = q.shape[2] // keys.shape[2]
    keys = np.repeat(keys.astype(np.float64), group, axis=2)
    return np.swapaxes(q.astype(np.float64), 1, 2)[:, :, :, None], np.swapaxes(keys, 1, 2)[
        :, :, None
    ]


def summed(scores: np.ndarray, kv_heads: int) -> np.ndarray:
    """Scores of each query ``[B, N, T, S]``, summed over those of a KV head: ``[B, K, S]``."""
    batch, heads, tokens, slots = scores.shape
    return scores.reshape(batch, kv_heads, heads // kv_heads, tokens, slots).sum(axis=(2, 3))


@every_backend(DOT_SCORES)
@every_case(DOT_SCORES)
def test_scores_are_dot_products(case, backend):
    q, keys, projection = case.build()
    got = run_or_skip(
        lambda q, k, w, **rest: dot_scores(q, k, projection=w, **rest),
        *(DOT_SCORES, backend, *case.arguments),
    )
    if projection is not None:  # every query by the matrix of the KV head that it reads
        matrices = np.repeat(projection, q.shape[2] // keys.shape[2], axis=0)
        q = np.einsum("btnh,nhc->btnc", q.astype(np.float64), matrices)
    queries, rows = by_pair(q, keys)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, summed((queries * rows).sum(axis=-1), keys.shape[2]))


@every_backend(PAGE_SCORES)
@every_case(PAGE_SCORES)
def test_scores_of_pages_are_the_bounds_of_quest(case, backend):
    """A page without a position has infinite bounds, and its score is no finite number."""
    q, low, high = case.build()
    full = low.shape[1] - (case.name != "full")
    got = run_or_skip(page_scores, PAGE_SCORES, backend, *case.arguments)
    queries, least = by_pair(q, low[:, :full])
    _, largest = by_pair(q, high[:, :full])
    bounds = np.maximum(queries * least, queries * largest).sum(axis=-1)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got[:, :, :full], summed(bounds, low.shape[2]))
    assert not np.isfinite(got[:, :, full:]).any()


def test_no_key_of_a_page_scores_higher():
    rng = np.random.default_rng(0)
    q, keys = rng.standard_normal((1, 2, 6, 8)), rng.standard_normal((1, 5, 7, 3, 8))
    q, keys = q.astype(np.float32), keys.astype(np.float32)
    bounds = np.asarray(page_scores(q, keys.min(axis=2), keys.max(axis=2)))
    scores = np.asarray(dot_scores(q, keys.reshape(1, 35, 3, 8))).reshape(1, 3, 5, 7)
    assert (scores.max(axis=-1) <= bounds + 1e-5).all()


def test_shapes_that_do_not_fit_are_errors():
    q, keys = np.zeros((2, 1, 4, 8), np.float32), np.zeros((2, 9, 2, 8), np.float32)
    for wrong in (keys[:1], keys[..., :4], np.zeros((2, 9, 3, 8), np.float32)):
        with pytest.raises(ValueError, match=r"must be \[B, T, N, H\] and \[B, S, K, C\]"):
            dot_scores(q, wrong)
    with pytest.raises(
        ValueError, match=r"projection \[2, 4, 8\] must be \[K, H, C\] = \[2, 8, 8\]"
    ):
        dot_scores(q, keys, projection=np.zeros((2, 4, 8), np.float32))
    with pytest.raises(ValueError, match="must be of one shape and dtype"):
        page_scores(q, keys, keys[:, :5])


def test_they_have_no_derivative():
    keys = jnp.ones((1, 3, 2, 4))
    gradient = jax.grad(lambda q: dot_scores(q, keys).sum() + page_scores(q, keys, keys).sum())
    assert not gradient(jnp.ones((1, 1, 4, 4))).any()
