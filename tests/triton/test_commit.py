"""Verification with a step's bookkeeping in Triton: interpreted, lowered for CUDA, on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.commit import VERIFY_AND_COMMIT as OPERATION
from jspec.triton import commit as module
from jspec.triton.call import refuses_triton
from jspec.triton.commit import commit_triton
from jspec.triton.verify import Blocks
from tests.ops.backends import every_case
from tests.triton.lowering import lower

REFERENCE = OPERATION.backend("xla").run


def assert_committed(got, arguments) -> None:
    expected = jax.jit(REFERENCE)(*arguments)
    for i, (have, want) in enumerate(zip(got, expected, strict=True)):
        assert have.dtype == want.dtype
        np.testing.assert_array_equal(have, want, f"output {i}")


@every_case(OPERATION, lambda case: case.name != "many-rows")
def test_equals_the_reference_in_the_interpreter(case, interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    arguments = case.arguments
    assert_committed(commit_triton(*arguments), arguments)


def test_rows_of_one_program_do_not_mix(interpreted, monkeypatch):
    """Five rows: with four a program, the last program has places to spare."""
    monkeypatch.setattr(module, "triton_call", interpreted)
    arguments = next(case for case in OPERATION.cases() if case.name == "odd").arguments
    assert_committed(commit_triton(*arguments, blocks=Blocks(4, 4)), arguments)


@every_case(OPERATION)
def test_equals_the_reference_on_a_gpu(case):
    if reason := refuses_triton():
        pytest.skip(reason)
    arguments = case.arguments
    assert_committed(jax.jit(commit_triton)(*arguments), arguments)


@pytest.mark.parametrize("gamma", [0, 8])
def test_is_one_launch_that_writes_in_place(gamma):
    like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    rows = like((4, 512)), like((4,)), jax.ShapeDtypeStruct((4,), jnp.bool_)
    given = (like((4, gamma)), like((4, gamma + 1)), like((4,)), like((4, 2)), like((4,)), *rows)
    text = lower(commit_triton, *given)
    assert text.count("stablehlo.custom_call @triton_kernel_call_ffi") == 1
    assert text.count("#stablehlo.output_operand_alias<") == 3
