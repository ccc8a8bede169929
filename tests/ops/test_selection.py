"""Selection against numpy's stable sort, by every backend, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.selection import DTYPES, SELECT, rows_of_scores, select
from tests.ops.backends import every_backend, every_case


def by_sorting(scores, counts, lengths, *, k, sinks=0, recent=0, highest=None) -> np.ndarray:
    """A row after the other: what is forced first, then the rest by a stable sort."""
    out = np.full((*scores.shape[:-1], k), -1, np.int32)
    for row in np.ndindex(*scores.shape[:-1]):
        length = int(np.clip(lengths[row], 0, scores.shape[-1]))
        count = int(np.clip(counts[row], 0, min(k, length)))
        falling = -scores[row][:length].astype(np.float64)  # NaN sorts last
        slots = np.argsort(falling, kind="stable")
        forced = (slots < sinks) | (slots >= length - recent)
        order = [*sorted(slots[forced]), *slots[~forced]]
        out[row][:count] = sorted(order[:count])
    return out


def run(backend, arguments, **static):
    """`select` by a backend with the arguments of `SELECT`, jitted; a skip where it refuses."""
    if reason := SELECT.backend(backend).supports(*arguments, **static):
        pytest.skip(f"{backend}: {reason}")
    scores, counts, lengths = arguments
    function = functools.partial(select, **static, implementation=backend)
    return jax.jit(lambda s, c, n: function(s, counts=c, lengths=n))(scores, counts, lengths)


@every_backend(SELECT)
@every_case(SELECT)
def test_equals_a_stable_sort(case, backend):
    got = run(backend, case.arguments, **case.static)
    np.testing.assert_array_equal(got, by_sorting(*case.build(), **case.static))


@every_backend(SELECT)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_budget_of_every_length(dtype, backend):
    """From nothing to more than there is, with sinks and recent slots that have room or not."""
    scores = np.repeat(rows_of_scores(4, 12, dtype, 2), 14 * 9, axis=0).reshape(4, 14, 9, 12)
    counts = np.broadcast_to(np.arange(9, dtype=np.int32), (4, 14, 9)).copy()
    lengths = np.broadcast_to(np.arange(14, dtype=np.int32)[:, None], (4, 14, 9)).copy()
    static = {"k": 8, "sinks": 2, "recent": 3, "highest": 2 if dtype == "int32" else None}
    got = run(backend, jax.device_put((scores, counts, lengths)), **static)
    np.testing.assert_array_equal(got, by_sorting(scores, counts, lengths, **static))


@every_backend(SELECT)
def test_slots_behind_the_length_are_never_read_as_scores(backend):
    """Infinity there would be chosen first, and NaN is what an unused slot holds in tests."""
    scores = rows_of_scores(6, 90, "float32", 0)
    lengths = np.array([0, 1, 40, 89, 90, 7], np.int32)
    behind = np.arange(90) >= lengths[:, None]
    counts = np.full(6, 16, np.int32)
    static = {"k": 16, "sinks": 1, "recent": 2, "highest": None}
    expected = by_sorting(scores, counts, lengths, **static)
    for value in (np.inf, np.nan):
        masked = np.where(behind, np.float32(value), scores)
        got = run(backend, jax.device_put((masked, counts, lengths)), **static)
        np.testing.assert_array_equal(got, expected)


@every_backend(SELECT)
def test_scores_at_the_ends_of_their_type(backend):
    info = np.iinfo(np.int32)
    scores = np.array([[info.min, info.max, 0, -1, info.max, info.min, 1]], np.int32)
    scores = np.repeat(scores, 8, axis=0)
    counts, lengths = np.arange(8, dtype=np.int32), np.full(8, 7, np.int32)
    static = {"k": 7, "sinks": 0, "recent": 0, "highest": None}
    got = run(backend, jax.device_put((scores, counts, lengths)), **static)
    np.testing.assert_array_equal(got, by_sorting(scores, counts, lengths, **static))
    tiny = np.finfo(np.float32)
    floats = np.array(
        [[tiny.max, -0.0, tiny.smallest_subnormal, 0.0, tiny.min, -tiny.tiny, np.nan]]
    )
    floats = np.repeat(floats.astype(np.float32), 8, axis=0)
    got = run(backend, jax.device_put((floats, counts, lengths)), **static)
    np.testing.assert_array_equal(got, by_sorting(floats, counts, lengths, **static))


@every_backend(SELECT)
def test_select_under_vmap_and_with_shared_counts(backend):
    scores = rows_of_scores(6, 50, "float32", 3).reshape(2, 3, 50)
    counts = np.array([4, 9], np.int32)
    static = {"k": 9, "sinks": 1, "recent": 1, "highest": None}
    arguments = jax.device_put((scores, counts, counts * 5))
    run(backend, (scores[:, 0], counts, counts * 5), **static)  # skips where it refuses
    function = functools.partial(select, k=9, sinks=1, recent=1, implementation=backend)
    per_head = [np.repeat(x[:, None], 3, axis=1) for x in (counts, counts * 5)]
    expected = by_sorting(scores, *per_head, **static)
    of_rows = lambda s, c, n: function(s, counts=c, lengths=n)  # noqa: E731
    for got in jax.jit(lambda *x: (of_rows(*x), jax.vmap(of_rows)(*x)))(*arguments):
        np.testing.assert_array_equal(got, expected)


@every_backend(SELECT)
def test_select_inside_shard_map(backend):
    """Each device selects from its own rows."""
    devices = jax.device_count()
    scores = rows_of_scores(2 * devices, 40, "float32", 0)
    counts, lengths = (np.full(2 * devices, x, np.int32) for x in (7, 33))
    static = {"k": 7, "sinks": 1, "recent": 2, "highest": None}
    arguments = jax.device_put((scores, counts, lengths))
    run(backend, arguments, **static)  # skips where it refuses
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("x")

    def local(scores, counts, lengths):
        static = {"counts": counts, "lengths": lengths, "implementation": backend}
        return select(scores, 7, sinks=1, recent=2, **static)

    sharded = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    got = jax.jit(sharded)(*arguments)
    np.testing.assert_array_equal(got, by_sorting(scores, counts, lengths, **static))


def test_equals_the_library_where_there_are_no_ties():
    scores = jnp.asarray(np.random.default_rng(0).standard_normal((4, 1000), np.float32))
    expected = np.sort(jax.lax.top_k(scores, 77)[1], axis=-1)
    np.testing.assert_array_equal(select(scores, 77), expected)


@pytest.mark.parametrize(
    ("static", "message"),
    [
        ({"k": 0}, "k=0 must be at least 1"),
        ({"k": 4, "sinks": 3, "recent": 2}, "k=4 must be at least 1 and hold sinks=3 and recent=2"),
        ({"k": 4, "sinks": -1}, "hold sinks=-1"),
        ({"k": 4, "highest": 3}, "highest=3 must be in .* of int32 scores, not of float32"),
        ({"k": 4, "counts": jnp.zeros(3, jnp.int32)}, r"int32\[3\] must be int32 of the sizes"),
        ({"k": 4, "lengths": jnp.zeros(2)}, r"float32\[2\] must be int32 of the sizes"),
    ],
)
def test_what_does_not_fit_is_refused(static, message):
    with pytest.raises(ValueError, match=message):
        select(jnp.zeros((2, 5)), **static)
    with pytest.raises(ValueError, match=r"scores uint8\[2, 5\] must be int32 or float32"):
        select(jnp.zeros((2, 5), jnp.uint8), 2)


@every_backend(SELECT)
def test_a_million_slots_and_a_budget_of_16384(backend):
    """Of the largest scores more are equal than fit."""
    rng = np.random.default_rng(5)
    scores = rng.standard_normal((1, 2**20)).astype(np.float32)
    scores[0, rng.choice(2**20, 9000, replace=False)] = 4.0
    scores[0, rng.choice(2**20, 9000, replace=False)] = 3.5
    k, length = 16384, 2**20 - 77
    arguments = jnp.asarray(scores), jnp.array([k], jnp.int32), jnp.array([length], jnp.int32)
    got = np.asarray(run(backend, arguments, k=k, sinks=0, recent=0, highest=None))
    expected = np.sort(np.argsort(-scores[0, :length], kind="stable")[:k])
    np.testing.assert_array_equal(got[0], expected)


# A block for a row, a cluster for a row, a block that lists, and chunks.
@pytest.mark.parametrize(("rows", "n"), [(3, 1000), (2, 30_720), (130, 17_000), (1, 140_000)])
def test_every_way_to_divide_rows_on_a_gpu(rows, n):
    rng = np.random.default_rng(n)
    scores = np.round(rng.standard_normal((rows, n)) * 8).astype(np.float32) / 8  # with ties
    lengths = rng.integers(n // 2, n + 1, rows, np.int32)
    arguments = (jnp.asarray(scores), jnp.full(rows, 700, jnp.int32), jnp.asarray(lengths))
    static = {"k": 700, "sinks": 4, "recent": 9, "highest": None}
    got = run("cuda", arguments, **static)
    expected = by_sorting(scores, np.full(rows, 700), lengths, k=700, sinks=4, recent=9)
    np.testing.assert_array_equal(got, expected)
