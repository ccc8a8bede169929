"""The all-to-all and the all-reduce by XLA and one-sided, against numpy, on virtual devices or
GPUs."""

import functools
import subprocess
import sys
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jspec.cuda_ffi import all_to_all as cuda
from jspec.cuda_ffi import library
from jspec.helix import HelixConfig
from jspec.ops.all_to_all import By, all_reduce, all_to_all, refuses_all_to_all, takes
from tests.pallas.mosaic import lower
from tests.parameters import default_run


def over(by: By, kvp: int, tpa: int = 1) -> HelixConfig:
    """A mesh whose devices exchange by ``by``; where they cannot, the test is skipped."""
    if jax.device_count() < kvp * tpa:
        pytest.skip(f"needs {kvp * tpa} devices")
    helix = HelixConfig(kvp=kvp, tpa=tpa, exchange=by)
    if reason := helix.refuses_all_to_all():
        pytest.skip(reason)
    return helix


def on(helix: HelixConfig, body, *arguments):
    """``body`` of each device's part of the arguments, whose first axis is that of devices."""
    run = jax.shard_map(body, mesh=helix.mesh, in_specs=P(helix.axes), out_specs=P(helix.axes))
    return jax.jit(run)(*arguments)


def exchanged(x: np.ndarray, kvp: int) -> np.ndarray:
    """What each device of ``x [devices, ranks, ...]`` gets: of each rank of its group."""
    groups = x.reshape(-1, kvp, *x.shape[1:])
    return np.swapaxes(groups, 1, 2).reshape(x.shape)


@pytest.mark.parametrize("by", get_args(By))
@pytest.mark.parametrize(
    ("kvp", "tpa", "shape", "dtype"),
    [
        (2, 1, (3, 5), "float32"),
        (2, 1, (1,), "bfloat16"),
        (2, 4, (7, 3), "uint16"),
        (4, 2, (2, 4, 9), "uint32"),
        (8, 1, (1001,), "uint16"),
    ],
    ids=str,
)
def test_pieces_are_where_numpy_puts_them(by, kvp, tpa, shape, dtype):
    """Groups, every number of ranks, and pieces that are no whole lines."""
    helix = over(by, kvp, tpa)
    x = np.random.default_rng(kvp).integers(0, 2**16, (kvp * tpa, kvp, *shape))
    x = np.asarray(jnp.asarray(x, dtype))

    def body(x):
        pieces = jnp.moveaxis(x[0], 0, -1)  # the axis of pieces may be any
        return all_to_all(pieces, helix.kvp_axes, axis=pieces.ndim - 1, by=by)[None]

    np.testing.assert_array_equal(on(helix, body, x), exchanged(x, kvp))


@pytest.mark.parametrize("by", ["pallas", "cuda"])
@pytest.mark.parametrize("kvp", default_run([2, 4], "2"))
def test_messages_that_follow_each_other_are_not_mixed_up(by, kvp):
    """Of two sizes in turn, each of another content."""
    helix, steps = over(by, kvp), 400
    sizes = (300, 3)
    first = [np.arange(kvp * kvp * n, dtype=np.int32).reshape(kvp, kvp, n) for n in sizes]

    def body(*starts):
        def step(_, i):
            send = functools.partial(all_to_all, axes=helix.kvp_axes, axis=0, by=by)
            one = send(starts[0][0] + i)
            # Never true, but the message follows from the one before.
            two = send(starts[1][0] - i + (one.min() < -1).astype(jnp.int32))
            third = all_reduce(two[0].astype(jnp.float32), helix.kvp_axes, by=by)
            return None, (one, two, third)

        result = lax.scan(step, None, jnp.arange(steps, dtype=jnp.int32))[1]
        return jax.tree.map(lambda x: x[None], result)

    *result, sums = on(helix, body, *first)
    np.testing.assert_array_equal(sums, np.repeat(result[1][:, :, 0].sum(0)[None], kvp, axis=0))
    for start, sign, all_steps in zip(first, (1, -1), result, strict=True):
        for i in range(steps):
            np.testing.assert_array_equal(all_steps[:, i], exchanged(start + sign * i, kvp))


@pytest.mark.parametrize(
    ("kvp", "tpa", "shape", "dtype"),
    [
        (2, 1, (3, 5), "float32"),
        (2, 4, (7,), "bfloat16"),
        (4, 2, (2, 4, 8), "float32"),
        (8, 1, (9,), "bfloat16"),
    ],
    ids=str,
)
def test_sums_are_in_the_order_of_ranks(kvp, tpa, shape, dtype):
    """Bit for bit, of numbers that sum to others in another order, and of groups.

    They are rounded, alone and before a residual is added.
    """
    helix = over("cuda", kvp, tpa)
    rng = np.random.default_rng(kvp)
    scale = np.float32(10) ** rng.integers(-4, 5, (kvp * tpa, *shape))
    x = rng.standard_normal((kvp * tpa, *shape), np.float32) * scale.astype(np.float32)
    groups = np.swapaxes(x.reshape(-1, kvp, *shape), 0, 1)
    expected = functools.reduce(np.add, groups)  # one rank after another
    if kvp > 2:
        assert (functools.reduce(np.add, groups[::-1]) != expected).any()
    residual = np.asarray(jnp.asarray(rng.standard_normal(shape), dtype))

    def body(x):
        reduced = functools.partial(all_reduce, axes=helix.kvp_axes, by="cuda", dtype=dtype)
        sums = reduced(x)
        # Never true, but the second sum follows from the first.
        follows = jnp.where(sums == jnp.inf, sums, residual)
        return sums, reduced(x, add=follows)

    rounded = np.repeat(np.asarray(jnp.asarray(expected, dtype)), kvp, axis=0)
    for found, right in zip(on(helix, body, x), (rounded, residual + rounded), strict=True):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, right)


def test_other_sums_go_by_xla():
    """Larger ones, other dtypes, and where a transport has no kernel for it."""
    helix = over("cuda", 2)
    limit = cuda.MAX_BYTES // 4
    by_kernel = ("cuda", limit, "float32", "bfloat16")
    cases = [
        by_kernel,
        ("cuda", limit + 1, "float32", None),
        ("cuda", 2, "bfloat16", None),
        ("cuda", 2, "float32", "float16"),
        ("pallas", 2, "float32", None),
        ("xla", 2, "float32", None),
    ]
    for case in cases:
        by, size, dtype, of_sums = case
        run = jax.shard_map(
            functools.partial(all_reduce, axes=helix.kvp_axes, by=by, dtype=of_sums),
            mesh=helix.mesh,
            in_specs=P(helix.axes),
            out_specs=P(helix.axes),
        )
        text = str(jax.make_jaxpr(run)(jax.ShapeDtypeStruct((2 * size,), dtype)))
        assert ("psum" in text) == (case != by_kernel), case


def traced(by: By, size: int) -> str:
    """The exchange of two pieces of ``size`` numbers, as it is traced."""
    helix = HelixConfig(kvp=2)

    def body(x):
        return all_to_all(x[0], helix.kvp_axes, axis=0, by=by)[None]

    run = jax.shard_map(body, mesh=helix.mesh, in_specs=P(helix.axes), out_specs=P(helix.axes))
    return str(jax.make_jaxpr(run)(jax.ShapeDtypeStruct((2, 2, size), jnp.float32)))


def test_larger_pieces_go_by_xla():
    over("cuda", 2)
    limit = cuda.MAX_BYTES // 4
    assert [traced("cuda", size).count("all_to_all") for size in (limit, limit + 1)] == [0, 1]
    assert takes("cuda", 4 * limit)
    assert not takes("cuda", 4 * limit + 4)
    assert takes("xla", 2**40)


@pytest.mark.parametrize(("kvp", "tpa"), [(2, 1), (2, 4), (8, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_pallas_lowers_for_cuda_and_asks_xla_where_peers_are(kvp, tpa, dtype):
    """Nothing of NVSHMEM or of multicast is in it."""
    if jax.device_count() < kvp * tpa:
        pytest.skip(f"needs {kvp * tpa} devices")
    helix = HelixConfig(kvp=kvp, tpa=tpa)

    def body(x):
        return all_to_all(x[0], helix.kvp_axes, axis=0, by="pallas")[None]

    run = jax.shard_map(body, mesh=helix.mesh, in_specs=P(helix.axes), out_specs=P(helix.axes))
    text = lower(run, jax.ShapeDtypeStruct((kvp * tpa, kvp, 3000), dtype))
    assert text.count("mosaic_gpu_v2") == 1
    assert "uses_xla_collective_metadata = true" in text
    assert f'xla_replica_ids = "{",".join(map(str, range(kvp * tpa)))}"' in text
    assert not any(word in text for word in ("nvshmem", "multimem", "symmetric_memory_parameters"))


def test_a_device_that_does_not_send_is_an_error():
    """Also for all calls that follow, which would take one message for another."""
    if jax.default_backend() != "cpu":
        pytest.skip("on a GPU the error ends the process")
    over("cuda", 2)
    script = "from tests.ops.test_all_to_all import wait_in_vain; wait_in_vain()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    said = ["another device did not send in time", "an exchange has failed before in this process"]
    assert done.stdout.splitlines() == said, done.stderr


def wait_in_vain() -> None:
    """Device 0 alone makes a call that is one of two devices'."""
    assert cuda.ALL_TO_ALL.refuses(2) is None
    cuda.PATIENCE = 0.1
    run = jax.jit(lambda x: cuda.all_to_all_cuda(x, "kvp"))
    for _ in range(2):
        try:
            run(jnp.ones((2, 3))).block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            print(str(error).rpartition(": ")[2])


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 3, 2), r"pieces F32\[2, 3, 2\] must be \[ranks, n\]"),
        ((2, 3), "device 0 cannot exchange pieces"),  # no whole lines
        ((2, cuda.MAX_BYTES), "device 0 cannot exchange pieces"),
        ((1, 2), "device 0 cannot exchange pieces"),
        ((9, 2), "device 0 cannot exchange pieces"),
    ],
    ids=str,
)
def test_calls_that_cannot_be_are_refused(shape, message):
    """By the handler, before it waits for anything."""
    over("cuda", 2)
    x = jnp.ones(shape)
    run = functools.partial(
        library.call, "exchange", [x], vmap_method="sequential", patience=np.int64(0)
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.jit(run)(x)[0].block_until_ready()


@pytest.mark.parametrize(
    ("outs", "lses", "ranks", "message"),
    [
        ((4, 2), (4,), 2, r"device 0 of 2 ranks cannot merge outs F32\[4, 2\]"),
        ((1, 4, 2), (1, 4), 9, "device 0 of 9 ranks cannot merge"),
        ((1, 3, 2), (1, 3), 2, "device 0 of 2 ranks cannot merge"),
        ((1, 4, 3), (1, 4), 2, "device 0 of 2 ranks cannot merge"),  # no whole lines
        ((2, 4, 2**16), (2, 4), 2, "device 0 of 2 ranks cannot merge"),
        ((1, 4, 2), (1, 2), 2, r"lses F32\[1, 2\] must be F32\[1, 4\]"),
    ],
    ids=str,
)
def test_merges_that_cannot_be_are_refused(outs, lses, ranks, message):
    over("cuda", 2)
    arguments = jnp.ones(outs), jnp.ones(lses)
    shapes = [
        jax.ShapeDtypeStruct((*x[:1], x[1] // 2, *x[2:]), jnp.float32) for x in (outs, outs[:2])
    ]
    settings = {"ranks": np.int64(ranks), "patience": np.int64(0)}
    run = functools.partial(
        library.call, "all_to_all_merge", shapes, vmap_method="sequential", **settings
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.jit(run)(*arguments)[0].block_until_ready()


@pytest.mark.parametrize(
    ("shape", "ranks", "message"),
    [
        ((2, 3), 2, r"values F32\[2, 3\] must be F32\[1, 2\]"),
        ((3,), 2, "device 0 of 2 ranks cannot reduce"),  # no whole lines
        ((cuda.MAX_BYTES,), 2, "device 0 of 2 ranks cannot reduce"),
        ((2,), 1, "device 0 of 1 ranks cannot reduce"),
        ((2,), 9, "device 0 of 9 ranks cannot reduce"),
    ],
    ids=str,
)
def test_sums_that_cannot_be_are_refused(shape, ranks, message):
    over("cuda", 2)
    x = jnp.ones(shape)
    settings = {"ranks": np.int64(ranks), "patience": np.int64(0)}
    run = functools.partial(library.call, "all_reduce", [x], vmap_method="sequential", **settings)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.jit(run)(x)[0].block_until_ready()


def test_devices_that_cannot_exchange_are_refused(monkeypatch):
    devices = jax.devices()
    assert refuses_all_to_all("xla", devices[::-1]) is None
    if len(devices) > 1:
        said = refuses_all_to_all("cuda", devices[1::-1])
        assert said == "devices [1, 0] are not the first 2 in their order"
    assert cuda.ALL_TO_ALL.refuses(cuda.MAX_DEVICES + 1) == "9 devices are more than 8"
    if jax.default_backend() == "cpu":
        said = refuses_all_to_all("pallas", devices)
        assert "Mosaic GPU" in str(said)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    said = refuses_all_to_all("cuda", devices)
    assert said == "a device reaches no memory of another process, and there are 2"
