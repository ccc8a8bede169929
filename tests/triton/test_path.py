"""Packing of a path in Triton: interpreted, lowered for CUDA, and on a GPU."""

import jax
import jax.numpy as jnp
import pytest

from jspec.ops.path import PACK_PATH as OPERATION
from jspec.triton import path as module
from jspec.triton.call import not_installed, passes_aliases_twice
from jspec.triton.path import PACK_PATH, pack_path_triton, refuses
from tests.ops.backends import every_case
from tests.ops.test_path import assert_moved
from tests.triton.lowering import lower


@every_case(OPERATION)
def test_entries_move_in_the_interpreter(case, interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    assert_moved(pack_path_triton(*case.arguments), case)


@every_case(OPERATION)
def test_entries_move_on_a_gpu(case):
    if reason := PACK_PATH.supports(*case.arguments):
        pytest.skip(reason)
    assert_moved(jax.jit(pack_path_triton)(*case.arguments), case)


def test_is_one_launch_that_writes_in_place():
    if not_installed() is None and passes_aliases_twice():
        pytest.skip("jax-triton before 0.4 passes no tuples of arrays")
    columns = tuple(jax.ShapeDtypeStruct((4, 64, 8, 128), jnp.bfloat16) for _ in range(6))
    slots, counts = (jax.ShapeDtypeStruct(x, jnp.int32) for x in ((4, 15), (4,)))
    text = lower(pack_path_triton, columns, slots, slots, counts)
    assert text.count("stablehlo.custom_call @triton_kernel_call_ffi") == 1
    assert text.count("#stablehlo.output_operand_alias<") == 6


@pytest.mark.parametrize(
    ("shape", "dtype", "moves", "reason"),
    [
        ((2, 0, 4), "float32", 3, "a column of (2, 0, 4) is empty"),
        ((2, 3, 4), "int4", 3, "a column of int4 does not have elements of 1, 2, 4 or 8 bytes"),
        ((2, 3, 4), "float32", 9000, "n=9000 is over 8192"),
    ],
    ids=["empty", "int4", "moves"],
)
def test_refuses_with_a_reason(shape, dtype, moves, reason):
    column = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    assert refuses((column,), jax.ShapeDtypeStruct((2, moves), jnp.int32)) == reason
