"""Packing of a path against plain NumPy, on every backend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops import pack_path
from jspec.ops.path import PACK_PATH
from tests.ops.backends import every_backend, every_case, run_or_skip


def assert_moved(got, case) -> None:
    for have, want in zip(got, case.expected(), strict=True):
        assert have.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(have).view(np.uint8), want.view(np.uint8))


@every_backend(PACK_PATH)
@every_case(PACK_PATH)
def test_entries_move_as_if_all_at_once(case, backend):
    assert_moved(run_or_skip(pack_path, PACK_PATH, backend, *case.arguments), case)


@every_case(PACK_PATH)
def test_no_target_of_a_case_is_the_source_of_a_later_entry(case):
    """And some are the source of an earlier one, or nothing would depend on the order."""
    _, source, target, counts = case.build()
    overlaps = 0
    for s, t, count in zip(source, target, counts, strict=True):
        assert all(t[i] not in s[i + 1 : count] for i in range(count))
        overlaps += len(set(t[:count]) & set(s[:count]))
    assert overlaps


def test_columns_are_updated_in_place():
    case = PACK_PATH.cases()[1]
    columns, *rest = case.build()
    # On a CPU, older XLA turns whole columns of bfloat16 to float32.
    columns = jax.device_put(tuple(x.astype(np.float32) for x in columns))
    run = jax.jit(lambda *x: PACK_PATH.backend("xla").run(*x), donate_argnums=0)
    memory = run.lower(columns, *rest).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in columns)
    # 16 of 40 entries are copied; a copy of one of the larger columns would be more.
    assert memory.temp_size_in_bytes < 0.5 * sum(x.nbytes for x in columns)


def test_nothing_to_move():
    columns = (jnp.zeros((2, 3, 4)),)
    empty, counts = jnp.zeros((2, 0), jnp.int32), jnp.zeros((2,), jnp.int32)
    assert pack_path(columns, empty, empty, counts) == columns
    assert pack_path((), empty, empty, counts) == ()


def test_shapes_and_dtypes_that_do_not_fit_are_named():
    slots, counts = jnp.zeros((2, 4), jnp.int32), jnp.zeros((2,), jnp.int32)
    columns = [jnp.zeros((2, 9, 3)), jnp.zeros((2, 8, 3))]
    with pytest.raises(ValueError, match=r"\(2, 8, 3\)\] must all be \[B, S, \.\.\.\] with B=2"):
        pack_path(columns, slots, slots, counts)
    with pytest.raises(ValueError, match=r"target_slots \(2, 3\) and counts \(2,\) must be"):
        pack_path(columns[:1], slots, slots[:, :3], counts)
    with pytest.raises(ValueError, match="counts int8 must be int32"):
        pack_path(columns[:1], slots, slots, counts.astype(jnp.int8))
