"""Greedy verification on Mosaic GPU: interpreted, lowered for CUDA, and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.cases import ragged_tokens
from jspec.ops.verify import VERIFY_GREEDY as OPERATION
from jspec.pallas.mosaic import refuses_pallas
from jspec.pallas.verify import VERIFY_GREEDY, Blocks, refuses, verify_pallas
from tests.kernels import assert_greedy, takes
from tests.ops.backends import every_case
from tests.pallas.mosaic import interpret, lower


@every_case(OPERATION, takes(refuses, 0, 3))
def test_equals_the_reference_when_interpreted(case):
    arguments = case.arguments
    assert_greedy(interpret(verify_pallas, *arguments), arguments)


def test_pieces_of_any_size_give_the_same():
    arguments = [jnp.asarray(x) for x in ragged_tokens(4, 13, 2)]
    got = interpret(lambda *x: verify_pallas(*x, blocks=Blocks(3, 4)), *arguments)
    assert_greedy(got, arguments)


def test_vmap():
    batches = [ragged_tokens(4, 5, 1, seed=seed) for seed in range(3)]
    stacked = [jnp.asarray(np.stack(x)) for x in zip(*batches, strict=True)]
    got = interpret(jax.vmap(verify_pallas), *stacked)
    for i in range(3):
        assert_greedy([x[i] for x in got], [x[i] for x in stacked])


def test_int64():
    with jax.enable_x64(True):
        arguments = [jnp.asarray(x) for x in ragged_tokens(5, 6, 2, dtype=np.int64)]
        assert_greedy(interpret(verify_pallas, *arguments), arguments)


@every_case(OPERATION)
def test_equals_the_reference_on_a_gpu(case):
    if reason := refuses_pallas():
        pytest.skip(reason)
    draft, _, _, stop_tokens = case.arguments
    arguments = [jnp.asarray(x) for x in ragged_tokens(1000, draft.shape[1], stop_tokens.shape[1])]
    assert_greedy(jax.jit(verify_pallas)(*arguments), arguments)


@pytest.mark.parametrize("gamma", [1, 2, 5, 100, 128])
@pytest.mark.parametrize(("stops", "dtype"), [(0, jnp.int32), (2, jnp.int64)])
def test_is_one_launch(gamma, stops, dtype):
    with jax.enable_x64(True):
        text = lower(
            verify_pallas,
            jax.ShapeDtypeStruct((32, gamma), dtype),
            jax.ShapeDtypeStruct((32, gamma + 1), dtype),
            jax.ShapeDtypeStruct((32,), jnp.int32),
            jax.ShapeDtypeStruct((32, stops), dtype),
        )
    assert text.count("stablehlo.custom_call") == text.count("stablehlo.") == 1


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((0, 4, 1), "B=0, gamma=4 leave nothing to compare"),
        ((2, 0, 1), "B=2, gamma=0 leave nothing to compare"),
        ((2, 1025, 1), "gamma=1025 is over 1024"),
        ((2, 4, 33), "33 stop tokens a row are over 32"),
    ],
    ids=["no-rows", "no-draft", "gamma", "stops"],
)
def test_refuses_with_a_reason(shape, reason):
    batch, gamma, stops = shape
    shapes = [(batch, gamma), (batch, gamma + 1), (batch,), (batch, stops)]
    assert VERIFY_GREEDY.supports(*[jnp.zeros(s, jnp.int32) for s in shapes]) == reason
