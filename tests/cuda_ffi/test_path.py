"""Packing of a path in CUDA: the kernel on a GPU or emulated, its counterpart on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cuda_ffi import library
from jspec.cuda_ffi.path import PACK_PATH as BACKEND
from jspec.ops.path import PACK_PATH
from tests.cuda_ffi.emulated import emulated
from tests.ops.backends import every_case
from tests.ops.test_path import assert_moved


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    if jax.default_backend() != "cpu":
        pytest.skip("a GPU runs the kernel itself")
    return emulated("pack", tmp_path_factory.mktemp("emulated") / "path.so", "path")


@pytest.mark.slow
@every_case(PACK_PATH)
def test_the_cuda_source_moves_entries(case, emulator, monkeypatch):
    monkeypatch.setattr(library, "call", emulator)
    assert_moved(jax.jit(lambda *x: BACKEND.run(*x))(*case.arguments), case)


def test_more_columns_than_a_launch_has():
    if reason := library.refusal("pack"):
        pytest.skip(reason)
    columns = tuple(jnp.arange(8, dtype=jnp.int8).reshape(1, 4, 2) + i for i in range(241))
    slots = jnp.array([[3]], jnp.int32), jnp.array([[1]], jnp.int32), jnp.array([1], jnp.int32)
    moved = jax.jit(lambda *x: BACKEND.run(*x))(columns, *slots)
    for i, column in enumerate(moved):
        np.testing.assert_array_equal(column[0, :, 0] - i, [0, 6, 4, 6])


def test_refuses_with_a_reason():
    halves = BACKEND.supports((jnp.zeros((1, 2), jnp.int4),))
    assert halves == "columns of int4 must have elements of whole bytes"
    assert BACKEND.supports((jnp.zeros((1, 2, 0)),)) == "a column of (1, 2, 0) is empty"
    large = jax.ShapeDtypeStruct((1, 2, 2**29), jnp.float32)
    assert "float32 have over 2^31 - 1 bytes" in (BACKEND.supports((large,)) or "")
