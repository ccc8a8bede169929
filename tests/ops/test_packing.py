"""Packing against plain numpy, on every backend."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.dispatch import BackendError
from jspec.ops.packing import PACK, pack
from tests.ops.backends import every_backend, every_case, run_or_skip

over_backends = every_backend(PACK)


def assert_packed(got, kv: np.ndarray, accepted: np.ndarray) -> None:
    """Compare with the KV rows that ``accepted``, within 0..gamma, lets through, in order."""
    accepted = accepted.clip(0, kv.shape[1])
    expected = np.concatenate([row[:n] for row, n in zip(kv, accepted, strict=True)])
    assert got.kv.shape == (kv.shape[0] * kv.shape[1], kv.shape[2])
    assert (got.kv.dtype, got.offsets.dtype, got.total.dtype) == (kv.dtype, "int32", "int32")
    np.testing.assert_array_equal(got.total, accepted.sum())
    np.testing.assert_array_equal(got.offsets, np.cumsum(accepted) - accepted)
    packed = np.asarray(got.kv)[: accepted.sum()]
    # As bytes, since NaN must arrive too, and equals nothing.
    np.testing.assert_array_equal(packed.view(np.uint8), expected.view(np.uint8))


def random_kv(shape: tuple[int, ...], dtype, seed: int) -> np.ndarray:
    """Random numbers of ``dtype``; a float in five is NaN."""
    rng = np.random.default_rng(seed)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return rng.integers(0, 2 if dtype == jnp.bool_ else 100, shape).astype(dtype)
    drawn = rng.standard_normal(shape)
    return np.where(rng.random(shape) < 0.2, np.nan, drawn).astype(dtype)


@over_backends
@every_case(PACK)
def test_cases_equal_numpy(case, backend):
    got = run_or_skip(pack, PACK, backend, *case.arguments)
    assert_packed(got, *case.build())


@over_backends
@pytest.mark.parametrize(
    ("batch", "gamma", "width", "dtype"),
    [
        (33, 5, 7, jnp.bfloat16),
        (7, 33, 12, jnp.float16),
        (2500, 2, 8, jnp.float16),
        (6, 70, 1000, jnp.float32),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_what_is_no_number_arrives(batch, gamma, width, dtype, backend):
    """In batches and rows beyond those of the cases."""
    kv = random_kv((batch, gamma, width), dtype, seed=batch)
    accepted = np.random.default_rng(0).integers(-1, gamma + 2, batch).astype(np.int32)
    got = run_or_skip(pack, PACK, backend, jax.device_put(kv), jax.device_put(accepted))
    assert_packed(got, kv, accepted)


@over_backends
@pytest.mark.parametrize("count", [0, 4], ids=["none", "all"])
def test_none_and_all_are_packed(count, backend):
    kv = random_kv((6, 4, 8), np.float32, seed=1)
    accepted = np.full(6, count, np.int32)
    got = run_or_skip(pack, PACK, backend, jax.device_put(kv), jax.device_put(accepted))
    assert_packed(got, kv, accepted)


@over_backends
def test_pack_under_vmap(backend):
    kv = jax.device_put(random_kv((3, 5, 4, 8), np.float32, seed=2))
    accepted = jnp.asarray(np.random.default_rng(1).integers(0, 5, (3, 5)), jnp.int32)
    run_or_skip(pack, PACK, backend, kv[0], accepted[0])
    run = jax.vmap(lambda kv, a: pack(kv, a, implementation=backend))
    got = jax.device_get(jax.jit(run)(kv, accepted))
    for i in range(3):
        one = jax.tree.map(lambda x, i=i: x[i], got)
        assert_packed(one, np.asarray(kv[i]), np.asarray(accepted[i]))


@over_backends
def test_pack_inside_shard_map(backend):
    """Each device packs its own rows into its own buffer."""
    kv = jax.device_put(random_kv((24, 4, 8), np.float32, seed=3))
    accepted = jnp.asarray(np.random.default_rng(2).integers(0, 5, 24), jnp.int32)
    run_or_skip(pack, PACK, backend, kv, accepted)

    def local(kv, accepted):
        got = pack(kv, accepted, implementation=backend)
        return got.kv, got.offsets, got.total[None]

    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("x")
    sharded = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    packed, offsets, totals = map(np.asarray, jax.jit(sharded)(kv, accepted))
    each = 24 // devices
    kv, accepted = np.asarray(kv), np.asarray(accepted)
    alone = jax.jit(functools.partial(pack, implementation="xla"))
    for i in range(devices):
        part = slice(each * i, each * (i + 1))
        expected = alone(kv[part], accepted[part])
        total = int(totals[i])
        assert total == expected.total
        np.testing.assert_array_equal(offsets[part], expected.offsets)
        block = packed[4 * each * i : 4 * each * i + total]
        np.testing.assert_array_equal(
            block.view(np.uint8), np.asarray(expected.kv)[:total].view(np.uint8)
        )


@pytest.mark.parametrize(
    ("kv", "accepted", "message"),
    [
        ((2, 3), (2,), r"kv \(2, 3\) and accepted \(2,\) must be"),
        ((2, 3, 4), (3,), r"kv \(2, 3, 4\) and accepted \(3,\) must be"),
    ],
    ids=["kv", "accepted"],
)
def test_bad_shapes_are_refused(kv, accepted, message):
    with pytest.raises(ValueError, match=message):
        pack(jnp.zeros(kv), jnp.zeros(accepted, jnp.int32))


def test_bad_dtypes_are_refused():
    with pytest.raises(ValueError, match="accepted uint32 must be int32"):
        pack(jnp.zeros((2, 3, 4)), jnp.zeros((2,), jnp.uint32))
    with pytest.raises(BackendError, match="cuda: kv int4 must have elements of whole bytes"):
        pack(jnp.zeros((2, 3, 4), jnp.int4), jnp.zeros((2,), jnp.int32), implementation="cuda")
