"""Scores of keys and of pages in Triton: interpreted, lowered for CUDA, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.key_scores import DOT_SCORES, PAGE_SCORES
from jspec.triton import key_scores as module
from jspec.triton.call import refuses_triton
from jspec.triton.key_scores import Blocks, dot_scores_triton, page_scores_triton, refuses_scores
from tests.kernels import takes
from tests.triton.lowering import lower

TRITON = {"dot_scores": dot_scores_triton, "page_scores": page_scores_triton}
CASES = [
    pytest.param(operation, case, id=f"{operation.name}-{case.name}")
    for operation in (DOT_SCORES, PAGE_SCORES)
    for case in filter(takes(refuses_scores, 0, 1), operation.cases())
]
over_cases = pytest.mark.parametrize(("operation", "case"), CASES)


def assert_equal(got, operation, case) -> None:
    """Sums of small whole numbers are the reference's, bit for bit."""
    np.testing.assert_array_equal(got, jax.jit(operation.backend("xla").run)(*case.arguments))


@over_cases
@pytest.mark.parametrize("blocks", [Blocks(64, 512, 4), Blocks(100, 2048, 4)], ids=["small", "odd"])
def test_equals_the_reference_in_the_interpreter(blocks, operation, case, interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    assert_equal(TRITON[operation.name](*case.arguments, blocks=blocks), operation, case)


@over_cases
def test_equals_the_reference_on_a_gpu(operation, case):
    if reason := refuses_triton():
        pytest.skip(reason)
    assert_equal(jax.jit(TRITON[operation.name])(*case.arguments), operation, case)


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (32, 32)], ids=["groups", "heads"])
def test_each_is_one_launch(heads, kv_heads):
    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    q, w = shape(8, 1, heads, 128), shape(kv_heads, 128, 32, dtype=jnp.float32)
    bounds = shape(8, 2**15, kv_heads, 128)
    components = shape(8, 2**20, kv_heads, 32)
    by_components = functools.partial(lower, dot_scores_triton, q, components)
    for text in (by_components(w), lower(page_scores_triton, q, bounds, bounds)):
        assert text.count("stablehlo.custom_call @triton_kernel_call_ffi") == 1
        assert text.count("stablehlo.") == 1


def test_refuses_with_a_reason():
    q, keys = jnp.zeros((1, 1, 2, 4)), jnp.zeros((1, 3, 2, 4))
    assert refuses_scores(q, keys) is None
    assert "nothing to launch" in (refuses_scores(q, keys[:, :0]) or "")
    wide = jnp.zeros((1, 1, 2, 516))
    assert refuses_scores(wide, wide) == "516 channels are over 512"
