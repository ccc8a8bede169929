"""Verification of trees in Triton: interpreted, lowered for CUDA, and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.tree import VERIFY_TREE as OPERATION
from jspec.triton import tree as module
from jspec.triton.tree import VERIFY_TREE, verify_tree_triton
from tests.ops.backends import every_case
from tests.triton.lowering import lower


def assert_verified(got, case) -> None:
    want = jax.jit(OPERATION.backend("xla").run)(*case.arguments)
    for i, (have, expected) in enumerate(zip(got, want, strict=True)):
        assert have.dtype == expected.dtype
        np.testing.assert_array_equal(have, expected, f"output {i}")


@every_case(OPERATION)
def test_equals_the_reference_in_the_interpreter(case, interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    with jax.enable_x64(case.build()[0].dtype == np.int64):
        assert_verified(verify_tree_triton(*case.arguments), case)


@every_case(OPERATION)
def test_equals_the_reference_on_a_gpu(case):
    if reason := VERIFY_TREE.supports(*case.arguments):
        pytest.skip(reason)
    with jax.enable_x64(case.build()[0].dtype == np.int64):
        assert_verified(jax.jit(verify_tree_triton)(*case.arguments), case)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int64])
def test_is_one_launch(dtype):
    with jax.enable_x64(True):
        arguments = [
            jax.ShapeDtypeStruct(shape, kind)
            for shape, kind in (
                ((32, 15), dtype),
                ((32, 16), dtype),
                ((32, 15), jnp.int32),
                ((32,), jnp.int32),
                ((32, 2), dtype),
            )
        ]
        text = lower(verify_tree_triton, *arguments)
    assert text.count("stablehlo.custom_call @triton_kernel_call_ffi") == 1


def test_refuses_with_a_reason():
    nothing, target = jnp.zeros((3, 0), jnp.int32), jnp.zeros((3, 1), jnp.int32)
    lengths = jnp.zeros((3,), jnp.int32)
    assert VERIFY_TREE.supports(nothing, target, nothing, lengths, target) == (
        "gamma=0 leaves no tree"
    )
