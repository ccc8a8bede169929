"""Verification of trees on Mosaic GPU: interpreted, lowered for CUDA, and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.tree import VERIFY_TREE as OPERATION
from jspec.ops.tree import random_tree
from jspec.pallas.mosaic import refuses_pallas
from jspec.pallas.tree import VERIFY_TREE, verify_tree_pallas
from tests.ops.backends import every_case
from tests.pallas.mosaic import interpret, lower

ROWS = 6  # that are interpreted of a case


def assert_verified(got, arguments) -> None:
    want = jax.jit(OPERATION.backend("xla").run)(*arguments)
    for i, (have, expected) in enumerate(zip(got, want, strict=True)):
        assert have.dtype == expected.dtype
        np.testing.assert_array_equal(have, expected, f"output {i}")


@every_case(OPERATION)
def test_equals_the_reference_when_interpreted(case):
    # Larger programs of 64 bits cannot be interpreted: not all of its threads have them enabled.
    arguments = [jnp.asarray(x[-ROWS:], jnp.int32) for x in case.build()]
    assert_verified(interpret(verify_tree_pallas, *arguments), arguments)


def test_int64():
    with jax.enable_x64(True):
        arguments = [jnp.asarray(x) for x in random_tree(4, 5, 2, "int64")]
        assert_verified(interpret(verify_tree_pallas, *arguments), arguments)


@every_case(OPERATION)
def test_equals_the_reference_on_a_gpu(case):
    if reason := refuses_pallas():
        pytest.skip(reason)
    with jax.enable_x64(case.build()[0].dtype == np.int64):
        assert_verified(jax.jit(verify_tree_pallas)(*case.arguments), case.arguments)


@pytest.mark.parametrize(("gamma", "stops", "dtype"), [(1, 0, jnp.int32), (31, 2, jnp.int64)])
def test_is_one_launch(gamma, stops, dtype):
    with jax.enable_x64(True):
        arguments = [
            jax.ShapeDtypeStruct(shape, kind)
            for shape, kind in (
                ((32, gamma), dtype),
                ((32, gamma + 1), dtype),
                ((32, gamma), jnp.int32),
                ((32,), jnp.int32),
                ((32, stops), dtype),
            )
        ]
        text = lower(verify_tree_pallas, *arguments)
    assert text.count("stablehlo.custom_call") == text.count("stablehlo.") == 1


def test_refuses_with_a_reason():
    nothing, target = jnp.zeros((3, 0), jnp.int32), jnp.zeros((3, 1), jnp.int32)
    lengths = jnp.zeros((3,), jnp.int32)
    assert VERIFY_TREE.supports(nothing, target, nothing, lengths, target) == (
        "B=3, gamma=0 leave nothing to compare"
    )
