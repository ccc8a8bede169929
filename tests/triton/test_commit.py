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
from tests.kernels import assert_committed
from tests.ops.backends import every_case
from tests.triton.lowering import lower


@every_case(OPERATION, lambda case: case.name != "many-rows")
def test_equals_the_reference_in_the_interpreter(case, interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    arguments = case.arguments
    assert_committed(commit_triton(*arguments), arguments)


@pytest.mark.parametrize("name", ["no-draft", "odd"])
def test_parts_equal_the_reference_in_the_interpreter(name, interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    arguments = next(case for case in OPERATION.cases() if case.name == name).arguments
    assert_committed(commit_triton(*arguments, max_logits=0, part=16), arguments)


@every_case(OPERATION)
def test_equals_the_reference_on_a_gpu(case):
    if reason := refuses_triton():
        pytest.skip(reason)
    arguments = case.arguments
    assert_committed(jax.jit(commit_triton)(*arguments), arguments)


@pytest.mark.parametrize(
    ("gamma", "vocabulary", "launches"), [(0, 260, 1), (8, 260, 1), (0, 151936, 2), (9, 128256, 2)]
)
def test_is_few_launches_and_writes_in_place(gamma, vocabulary, launches):
    like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    logits = jax.ShapeDtypeStruct((4, gamma + 1, vocabulary), jnp.float32)
    rows = like((4, 512)), like((4,)), jax.ShapeDtypeStruct((4,), jnp.bool_)
    text = lower(commit_triton, like((4, gamma)), logits, *map(like, [(4,), (4, 2), (4,)]), *rows)
    assert text.count("stablehlo.custom_call @triton_kernel_call_ffi") == launches
    assert text.count("#stablehlo.output_operand_alias<") == 3


@pytest.mark.parametrize(
    ("positions", "vocabulary", "dtype", "reason"),
    [
        (2, 0, "float32", "V=0 leaves no token to take"),
        (2, 9, "float64", "logits of float64 are none of float32, bfloat16, float16"),
        (900, 151936, "float32", "900 positions of 151936 logits are over 16384 parts of 2048"),
        (1200, 16, "float32", "gamma=1199 is over 1024"),
    ],
)
def test_refuses_with_a_reason(positions, vocabulary, dtype, reason):
    draft = np.zeros((3, positions - 1), np.int32)
    logits = np.broadcast_to(np.zeros((), dtype), (3, positions, vocabulary))
    stops = np.zeros((3, 1), np.int32)
    assert module.VERIFY_AND_COMMIT.supports(draft, logits, stops[:, 0], stops) == reason
