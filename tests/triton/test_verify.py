"""Greedy verification in Triton: interpreted, lowered for CUDA, and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.cases import ragged_tokens
from jspec.ops.verify import VERIFY_GREEDY as OPERATION
from jspec.triton import verify as module
from jspec.triton.call import refuses_triton
from jspec.triton.verify import VERIFY_GREEDY, Blocks, refuses, verify_triton
from tests.kernels import assert_greedy, takes
from tests.ops.backends import every_case
from tests.triton.lowering import lower


@every_case(OPERATION, takes(refuses, 0, 3))
def test_equals_the_reference_in_the_interpreter(case, interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    arguments = case.arguments
    assert_greedy(verify_triton(*arguments), arguments)


@pytest.mark.parametrize("rows", [1, 4])
def test_rows_of_one_program_do_not_mix(rows, interpreted, monkeypatch):
    """Seven rows: with four a program, the last program has a place to spare."""
    monkeypatch.setattr(module, "triton_call", interpreted)
    arguments = [jnp.asarray(x) for x in ragged_tokens(7, 6, 2)]
    assert_greedy(verify_triton(*arguments, blocks=Blocks(rows, 4)), arguments)


def test_int64_and_no_draft_at_all(interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    with jax.enable_x64(True):
        arguments = [jnp.asarray(x) for x in ragged_tokens(9, 5, 2, dtype=np.int64)]
        assert_greedy(verify_triton(*arguments), arguments)
    nothing = jnp.zeros((3, 0), jnp.int32)
    target = jnp.asarray([[4], [5], [-1]], jnp.int32)
    arguments = [nothing, target, jnp.zeros((3,), jnp.int32), jnp.full((3, 1), 5, jnp.int32)]
    assert_greedy(verify_triton(*arguments), arguments)


@every_case(OPERATION)
def test_equals_the_reference_on_a_gpu(case):
    if reason := refuses_triton():
        pytest.skip(reason)
    draft, _, _, stop_tokens = case.arguments
    arguments = [jnp.asarray(x) for x in ragged_tokens(1000, draft.shape[1], stop_tokens.shape[1])]
    assert_greedy(jax.jit(verify_triton)(*arguments), arguments)


@pytest.mark.parametrize("gamma", [1, 8, 128])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int64])
def test_is_one_launch(gamma, dtype):
    with jax.enable_x64(True):
        arguments = [
            jax.ShapeDtypeStruct(shape, kind)
            for shape, kind in [
                ((32, gamma), dtype),
                ((32, gamma + 1), dtype),
                ((32,), jnp.int32),
                ((32, 2), dtype),
            ]
        ]
        text = lower(verify_triton, *arguments)
    assert text.count("stablehlo.custom_call @triton_kernel_call_ffi") == 1
    assert text.count("stablehlo.") == 1


def test_vmap_launches_one_after_the_other():
    shapes = [(6, 4, 8), (6, 4, 9), (6, 4), (6, 4, 1)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    text = lower(jax.vmap(verify_triton), *arguments)
    assert text.count("stablehlo.custom_call @triton_kernel_call_ffi") == 1
    assert "stablehlo.while" in text


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((0, 4, 1), "B=0 leaves nothing to launch"),
        ((2, 1025, 1), "gamma=1025 is over 1024"),
        ((2, 4, 33), "33 stop tokens a row are over 32"),
    ],
    ids=["no-rows", "gamma", "stops"],
)
def test_refuses_with_a_reason(shape, reason):
    batch, gamma, stops = shape
    shapes = [(batch, gamma), (batch, gamma + 1), (batch,), (batch, stops)]
    assert VERIFY_GREEDY.supports(*[jnp.zeros(s, jnp.int32) for s in shapes]) == reason
