"""Rows fetched from columns and stored in them, against plain numpy, in either memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import host
from jspec.dispatch import BackendError
from jspec.ops.host_rows import (
    FETCH_AHEAD,
    FETCH_ROWS,
    STORE_ROWS,
    DeviceRows,
    PrefetchedRows,
    fetch_ahead,
    fetch_rows,
    store_rows,
)
from jspec.sharding import place
from tests.ops.backends import every_backend, every_case

MEMORIES = ("device", "host")
over_memories = pytest.mark.parametrize("memory", MEMORIES)


def put(memory, columns):
    if memory == "host":
        return tuple(host.place_in_host(x, None) for x in columns)
    return jax.device_put(tuple(columns))


def skip_or_run(function, operation, backend, *arguments):
    if reason := operation.backend(backend).supports(*arguments):
        pytest.skip(f"{backend}: {reason}")
    return jax.jit(functools.partial(function, implementation=backend))(*arguments)


def rows_by_hand(column: np.ndarray, slots: np.ndarray) -> np.ndarray:
    batch, heads, n = slots.shape
    result = np.zeros((batch, n, heads, column.shape[3]), column.dtype)
    for b, head, i in np.ndindex(batch, heads, n):
        if 0 <= (slot := slots[b, head, i]) < column.shape[1]:
            result[b, i, head] = column[b, slot, head]
    return result


@over_memories
@every_backend(FETCH_ROWS)
@every_case(FETCH_ROWS)
def test_rows_are_those_of_the_columns(case, backend, memory):
    columns, slots, *there = case.build()
    arguments = put(memory, columns), jax.device_put(slots)
    if reason := FETCH_ROWS.backend(backend).supports(*arguments):
        pytest.skip(f"{backend}: {reason}")
    device_rows, prefetched = (
        None if rows is None else (put("device", rows), jax.device_put(early))
        for rows, early in (there[:2], there[2:])
    )
    copies = {
        "device_rows": device_rows and DeviceRows(*device_rows),
        "prefetched": prefetched and PrefetchedRows(*prefetched, backend),
    }
    got = jax.jit(lambda *x: fetch_rows(*x, implementation=backend, **copies))(*arguments)
    for have, column in zip(got, columns, strict=True):
        assert not host.in_host(have)
        np.testing.assert_array_equal(have, rows_by_hand(column, slots))


@every_backend(FETCH_ROWS)
def test_device_rows_come_before_prefetched_rows_and_those_before_the_column(backend):
    """Each has other rows by now: those of the column times 1, 2 and 3."""
    column = np.arange(1, 1 + 40 * 2 * 4, dtype=np.float32).reshape(1, 40, 2, 4)
    device_rows, prefetched, slots = (
        np.array([rows], np.int32)
        for rows in (
            [[1, 2, 39, -1], [5, 6, -1, -1]],
            [[2, 3], [6, 7]],
            [[1, 2, 3, 4, 39], [5, 6, 7, 8, -1]],
        )
    )
    arguments = put("host", [column]), jax.device_put(slots)
    if reason := FETCH_ROWS.backend(backend).supports(*arguments):
        pytest.skip(f"{backend}: {reason}")
    there = [
        jax.device_put(((times * rows_by_hand(column, slots_of),), slots_of))
        for times, slots_of in ((3, device_rows), (2, prefetched))
    ]

    @jax.jit
    def fetch(arguments, device_rows, prefetched):
        return fetch_rows(
            *arguments,
            device_rows=DeviceRows(*device_rows),
            prefetched=PrefetchedRows(*prefetched, backend),
            implementation=backend,
        )

    (got,) = fetch(arguments, *there)
    times = np.array([[3, 3, 2, 1, 3], [3, 3, 2, 1, 0]])
    np.testing.assert_array_equal(got, times.T[None, :, :, None] * rows_by_hand(column, slots))


@every_backend(FETCH_ROWS)
def test_what_was_fetched_ahead_is_not_fetched_again(backend):
    """The rows that are there are taken, although the column has others by now."""
    column = np.arange(2 * 40 * 2 * 4, dtype=np.float32).reshape(2, 40, 2, 4)
    early = np.array([[[0, 7, 39, -1], [-1] * 4], [[3, 4, 5, 6], [38, 39, -1, -1]]], np.int32)
    slots = np.array([[[0, 8, 39], [1, 2, 3]], [[2, 6, 7], [39, 38, -1]]], np.int32)
    arguments = put("host", [column]), jax.device_put(slots)
    if reason := FETCH_ROWS.backend(backend).supports(*arguments):
        pytest.skip(f"{backend}: {reason}")
    rows = jax.device_put(-1 - rows_by_hand(column, early))
    prefetched = PrefetchedRows((rows,), jax.device_put(early), backend)
    (got,) = jax.jit(lambda *x: fetch_rows(*x, prefetched=prefetched))(*arguments)
    there = (slots[..., None] == early[:, :, None]).any(-1) & (slots >= 0)
    expected = rows_by_hand(column, slots)
    expected = np.where(np.swapaxes(there, 1, 2)[..., None], -1 - expected, expected)
    np.testing.assert_array_equal(got, expected)


@over_memories
@every_backend(FETCH_AHEAD)
def test_rows_on_their_way_arrive(backend, memory):
    columns, slots, through, early = FETCH_AHEAD.cases()[0].build()
    arguments = put(memory, columns), jax.device_put(slots), jax.device_put(through)
    if reason := FETCH_AHEAD.backend(backend).supports(*arguments, None):
        pytest.skip(f"{backend}: {reason}")
    rows = put("device", [rows_by_hand(column, early) for column in columns])
    for device_rows in (None, DeviceRows(rows, jax.device_put(early))):
        fetch = functools.partial(fetch_ahead, implementation=backend, device_rows=device_rows)
        prefetched, same = jax.jit(fetch)(*arguments)
        assert prefetched.backend == backend
        np.testing.assert_array_equal(same, through)
        read = functools.partial(fetch_rows, device_rows=device_rows, prefetched=prefetched)
        got = jax.jit(read)(*arguments[:2])
        for have, column in zip(got, columns, strict=True):
            np.testing.assert_array_equal(have, rows_by_hand(column, slots))


@every_backend(FETCH_AHEAD)
def test_what_is_near_is_not_fetched_ahead(backend):
    """It is 0 in the result."""
    columns, slots, through, early = FETCH_AHEAD.cases()[0].build()
    marked = [np.array(column) for column in columns]
    for column in marked:
        for b, head, i in np.ndindex(early.shape):
            if early[b, head, i] >= 0:
                column[b, early[b, head, i], head] = 12345
    rows = put("device", [rows_by_hand(column, early) for column in columns])
    device_rows = DeviceRows(rows, jax.device_put(early))
    fetch = functools.partial(fetch_ahead, device_rows=device_rows)
    arguments = put("host", marked), jax.device_put(slots), jax.device_put(through)
    if reason := FETCH_AHEAD.backend(backend).supports(*arguments, device_rows.slots):
        pytest.skip(f"{backend}: {reason}")
    prefetched, _ = jax.jit(functools.partial(fetch, implementation=backend))(*arguments)
    read = functools.partial(fetch_rows, device_rows=device_rows, prefetched=prefetched)
    fetched = jax.jit(read)(*arguments[:2])
    is_near = (slots[..., None] == early[:, :, None]).any(axis=-1) & (slots >= 0)
    assert is_near.any()
    for have, got, column in zip(prefetched.rows, fetched, columns, strict=True):
        assert not np.asarray(have)[np.swapaxes(is_near, 1, 2)].any()
        np.testing.assert_array_equal(got, rows_by_hand(column, slots))


@over_memories
@every_backend(STORE_ROWS)
@every_case(STORE_ROWS)
def test_stored_rows_are_in_their_slots(case, backend, memory):
    columns, rows, slots = case.build()
    arguments = put(memory, columns), put("device", rows), jax.device_put(slots)
    got = skip_or_run(store_rows, STORE_ROWS, backend, *arguments)
    for have, column, row in zip(got, columns, rows, strict=True):
        expected = column.copy()
        for b, i in np.ndindex(slots.shape):
            if 0 <= slots[b, i] < column.shape[1]:
                expected[b, slots[b, i]] = row[b, i]
        assert host.in_host(have) == (memory == "host")
        np.testing.assert_array_equal(have, expected)


def test_shapes_that_do_not_fit_are_named():
    column, slots = jnp.zeros((2, 9, 3, 4)), jnp.zeros((2, 3, 5), jnp.int32)
    with pytest.raises(ValueError, match=r"slots int32\[2, 2, 5\] must be int32 \[2, 3, 'n'\]"):
        fetch_rows((column,), slots[:, :2])
    with pytest.raises(ValueError, match=r"must be one or two of \[B, S, K, H\]"):
        fetch_rows((column, column[:, :8]), slots)
    with pytest.raises(ValueError, match=r"rows float32\[2, 1, 3, 5\] must be of the column"):
        store_rows((column,), (jnp.zeros((2, 1, 3, 5)),), jnp.zeros((2, 1), jnp.int32))
    with pytest.raises(BackendError, match="columns of int4 must have elements of whole bytes"):
        fetch_rows((column.astype(jnp.int4),), slots, implementation="cuda")


def test_a_machine_without_pinned_memory_says_what_to_do(monkeypatch):
    class Device:
        device_kind, platform = "Abacus", "wood"

        def addressable_memories(self):
            return []

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    assert "Abacus (wood) has no memory of the kind 'pinned_host'" in str(host.refusal())
    with pytest.raises(ValueError, match=r"the cache cannot lie in host memory: .* as hata does"):
        host.place_in_host(np.zeros(3), None)


def test_placing_a_state_leaves_an_array_in_the_memory_that_it_is_in():
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    state = {"host": host.place_in_host(np.zeros(3), None), "device": jnp.zeros(3)}
    assert [host.in_host(x) for x in place(state, where).values()] == [False, True]


def test_several_devices_are_refused():
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    if jax.device_count() < 2:
        pytest.skip("one device")
    sharding = jax.sharding.NamedSharding(mesh, jax.P("x"))
    with pytest.raises(ValueError, match=r"serves one device, and sharding=.* has 8"):
        host.place_in_host(np.zeros(8), sharding)
