"""Packing of a path on Mosaic GPU: interpreted, lowered for CUDA, and on a GPU."""

import jax
import jax.numpy as jnp
import pytest

from jspec.ops.path import PACK_PATH as OPERATION
from jspec.pallas.path import PACK_PATH, pack_path_pallas, refuses
from tests.ops.backends import every_case
from tests.ops.test_path import assert_moved
from tests.pallas.mosaic import interpret, lower

over_cases = every_case(OPERATION, lambda case: refuses(case.arguments[0]) is None)


@over_cases
def test_entries_move_when_interpreted(case):
    assert_moved(interpret(pack_path_pallas, *case.arguments), case)


@over_cases
def test_entries_move_on_a_gpu(case):
    if reason := PACK_PATH.supports(*case.arguments):
        pytest.skip(reason)
    assert_moved(jax.jit(pack_path_pallas)(*case.arguments), case)


def test_is_one_launch():
    columns = tuple(jax.ShapeDtypeStruct((4, 64, 8, 128), jnp.bfloat16) for _ in range(6))
    slots, counts = (jax.ShapeDtypeStruct(x, jnp.int32) for x in ((4, 15), (4,)))
    text = lower(pack_path_pallas, columns, slots, slots, counts)
    assert text.count("stablehlo.custom_call") == 1


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((2, 3, 0), "float32", "a column of (2, 3, 0) is empty"),
        ((2, 3, 4), "bool", "a column of bool does not have elements of 1, 2 or 4 bytes"),
        ((2, 3, 4), "float16", "entries of 8 bytes are not words of 16"),
    ],
    ids=["empty", "bool", "odd-bytes"],
)
def test_refuses_with_a_reason(shape, dtype, reason):
    assert refuses((jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)),)) == reason
