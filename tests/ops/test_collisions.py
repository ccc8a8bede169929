"""Buckets in hash tables and scores by collisions against plain numpy, by every backend."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.collisions import COLLISION_SCORES, bucket_codes, collision_scores
from tests.ops.backends import every_backend, every_case


def buckets_of(codes: np.ndarray, tables: int) -> np.ndarray:
    """The buckets in a code as whole numbers, ``[..., tables]``, bit by bit."""
    bits = codes.shape[-1] // -(-tables // 32)
    result = np.zeros((*codes.shape[:-1], tables), np.int64)
    for table in range(tables):
        for bit in range(bits):
            word = codes[..., table // 32 * bits + bit]
            result[..., table] += (word >> (table % 32) & 1).astype(np.int64) << bit
    return result


def collided(q: np.ndarray, k: np.ndarray, tables: int) -> np.ndarray:
    """The paper's rule, query by query: the tables shared where they are two or more."""
    q, k = (np.swapaxes(buckets_of(x, tables), 1, 2) for x in (q, k))
    group = q.shape[1] // k.shape[1]
    score = np.zeros(k.shape[:3], np.int64)
    for head in range(q.shape[1]):
        for token in range(q.shape[2]):
            met = (q[:, head, token, None] == k[:, head // group]).sum(axis=-1)
            score[:, head // group] += np.where(met >= 2, met, 0)
    return np.where(score > 0, score, -1)


@every_backend(COLLISION_SCORES)
@every_case(COLLISION_SCORES)
def test_scores_are_shared_buckets(case, backend):
    """Slots after a row's length hold the codes of queries."""
    q, k, lengths = case.build()
    if reason := COLLISION_SCORES.backend(backend).supports(*case.arguments, **case.static):
        pytest.skip(f"{backend}: {reason}")
    function = functools.partial(collision_scores, **case.static, implementation=backend)
    got = jax.jit(lambda q, k, n: function(q, k, lengths=n))(*case.arguments)
    assert got.dtype == jnp.int32
    want = collided(q, k, **case.static)
    read = np.arange(k.shape[1]) < lengths[:, None, None]
    np.testing.assert_array_equal(got, np.where(read, want, -1))


def test_cases_have_the_edges():
    """Keys that all queries find in all tables and that none finds, rows of none, some and all."""
    cases = [(case.build(), case.static["tables"]) for case in COLLISION_SCORES.cases()]
    assert {2, 3, 150, 151} <= {tables for _, tables in cases}
    assert {1, 4, 8, 12} <= {q.shape[2] // k.shape[2] for (q, k, _), _ in cases}
    (q, k, lengths), tables = cases[2]
    assert (lengths[0], lengths[1]) == (k.shape[1], 0)
    scores = collided(q, k, tables)[0]
    assert {-1, 2} < set(scores.ravel().tolist())
    assert (buckets_of(q[0, 0, 0], tables) == buckets_of(k[0, 0, 0], tables)).all()


@pytest.mark.parametrize("tables", [2, 32, 33])
def test_all_and_no_tables(tables):
    queries, w = np.ones((2, 3, 4, 1), np.float32), np.ones((1, 5 * tables), np.float32)
    keys = np.broadcast_to(np.float32([1, -1])[None, :, None, None], (2, 2, 2, 1))

    @jax.jit
    def scores(*x):
        return collision_scores(*(bucket_codes(part, w, tables) for part in x), tables)

    assert scores(queries, keys).tolist() == [[[2 * 3 * tables, -1]] * 2] * 2


@pytest.mark.parametrize(("tables", "bits"), [(2, 1), (40, 3), (150, 10)])
def test_buckets_are_the_signs(tables, bits):
    rng = np.random.default_rng(tables)
    # Whole numbers: sums are exact in any order, and some are 0.
    x, w = (
        rng.integers(-3, 4, shape).astype(np.float32) for shape in ((3, 5, 8), (8, tables * bits))
    )
    x[0, 0, 0] = np.nan
    codes = np.asarray(jax.jit(bucket_codes, static_argnums=2)(x, w, tables))
    assert codes.dtype == np.uint32
    with np.errstate(invalid="ignore"):
        signs = (np.einsum("abh,hp->abp", x, w) > 0).reshape(3, 5, tables, bits)
    np.testing.assert_array_equal(buckets_of(codes, tables), signs @ (1 << np.arange(bits)))
    # Nothing lies after the last table.
    used = sum(np.bitwise_count(codes).astype(int).ravel())
    assert used == signs.sum()


def test_there_is_no_derivative():
    def loss(x, w):
        codes = bucket_codes(x, w, 4)
        return collision_scores(codes, codes, 4).sum().astype(jnp.float32)

    x, w = np.ones((1, 2, 3, 4), np.float32), np.ones((4, 8), np.float32)
    assert not any(np.any(g) for g in jax.jit(jax.grad(loss, (0, 1)))(x, w))


@pytest.mark.parametrize(
    ("q", "k", "tables", "message"),
    [
        ((2, 1, 3, 10), (2, 9, 2, 10), 40, "with N a multiple of K"),
        ((2, 1, 4, 10), (1, 9, 2, 10), 40, "with N a multiple of K"),
        ((2, 1, 4, 10), (2, 9, 2, 12), 40, "with N a multiple of K"),
        ((2, 1, 4, 9), (2, 9, 2, 9), 40, "9 words a code must be a multiple of tables / 32"),
        ((2, 1, 4, 9), (2, 9, 2, 9), 1, "tables=1, which must be at least 2"),
        ((2, 2**26, 4, 2), (2, 9, 1, 2), 40, "do not fit into int32; score fewer tokens"),
    ],
)
def test_scores_refuse_what_does_not_fit(q, k, tables, message):
    codes = (jax.ShapeDtypeStruct(shape, jnp.uint32) for shape in (q, k))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda q, k: collision_scores(q, k, tables), *codes)


def test_buckets_refuse_what_does_not_fit():
    for w, tables in (((5, 12), 4), ((4, 12), 5), ((4, 12), 0), ((4, 0), 4)):
        with pytest.raises(ValueError, match="with tables="):
            bucket_codes(jnp.zeros((2, 4)), jnp.zeros(w), tables)
    with pytest.raises(ValueError, match="int32 of the sizes"):
        collision_scores(
            *[jnp.zeros((2, 3, 1, 2), jnp.uint32)] * 2, 4, lengths=jnp.zeros(3, jnp.int32)
        )
