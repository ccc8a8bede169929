"""Kernels of exact decoding: chosen by weights and heads alone, and a chain as its matmuls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import tuned
from jspec.cuda_ffi import library
from jspec.ops.exact import EXACT_ATTENTION, EXACT_LINEAR, EXACT_SCORED, NAME
from jspec.ops.linear import LINEAR
from jspec.ops.linear_chain import LINEAR_CHAIN

SHAPE = jax.ShapeDtypeStruct


def test_no_size_that_orders_matmuls_is_of_the_rows():
    kernel = SHAPE((64, 2, 40), jnp.bfloat16)
    sizes = [EXACT_LINEAR.sizes(SHAPE((rows, 64), "bfloat16"), kernel) for rows in (1, 600)]
    assert sizes == [{"inputs": 64, "outputs": 80, "bits": 16}] * 2


def test_no_size_that_orders_attention_is_of_the_pass():
    sizes = [
        EXACT_ATTENTION.sizes(
            SHAPE((batch, tokens, 12, 64), "bfloat16"), SHAPE((batch, slots, 3, 64), "bfloat16")
        )
        for batch, tokens, slots in ((1, 1, 256), (96, 9, 8192))
    ]
    assert sizes == [{"kv_heads": 3, "group": 4, "channels": 64, "bits": 16}] * 2
    assert EXACT_SCORED.name == EXACT_ATTENTION.name  # so that both are of one order


def matmuls(x, ops, *, added, gated):
    """The ops of a chain one after the other."""
    results = []
    for (kernel, bias, norm, add), other, gates in zip(ops, added, gated, strict=True):
        add = add if other is None else results[other]
        static = {"gated": gates, "transposed": False, "dtype": x.dtype}
        results.append(LINEAR(x, kernel, bias, norm, add, **static, implementation=NAME))
        x = results[-1]
    return results


@pytest.mark.parametrize("name", ["layer", "rows", "large", "gated"])
def test_a_chain_has_the_bits_of_its_matmuls_by_one_call(name, monkeypatch):
    if reason := library.refusal("linear"):
        pytest.skip(reason)
    case = next(case for case in LINEAR_CHAIN.cases() if case.name == name)
    called = []
    call = library.call

    def watched(target, *arguments, **attributes):
        called.append((target, bool(attributes["exact"])))
        return call(target, *arguments, **attributes)

    monkeypatch.setattr(library, "call", watched)
    got = LINEAR_CHAIN(*case.arguments, **case.static, implementation=NAME)
    assert called == [("linear_chain", True)]
    for mine, want in zip(got, matmuls(*case.arguments, **case.static), strict=True):
        np.testing.assert_array_equal(mine, want)
    assert set(called[1:]) == {("linear", True)}


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU has Triton's kernels")
def test_a_chain_says_which_matmul_no_kernel_takes():
    x, whole, odd = (SHAPE(shape, jnp.bfloat16) for shape in ((3, 64), (64, 64), (64, 4)))
    static = {"added": (None, None), "gated": (False, False)}
    ops = [(kernel, None, None, None) for kernel in (whole, odd)]
    reason = LINEAR_CHAIN.backend(NAME).supports(x, ops, **static)
    assert reason is not None
    assert reason.startswith("ops[1]: exact_linear cannot run as asked; triton: ")
    assert "; cuda: kernel (64, 4) does not have its columns in eights" in reason


@pytest.mark.parametrize(
    ("gpu", "first"), [("NVIDIA H200", "cuda"), ("NVIDIA H100 80GB HBM3", "triton")]
)
def test_kernels_are_of_cuda_where_they_were_timed_and_of_triton_elsewhere(gpu, first):
    table = tuned.nearest(gpu, (9, 0), list(tuned.tables().values()))
    assert table is not None
    for inputs, outputs in ((4096, 24576), (576, 3072), (896, 9728)):
        sizes = EXACT_LINEAR.sizes(
            SHAPE((1, inputs), jnp.bfloat16), SHAPE((inputs, outputs), jnp.bfloat16)
        )
        order = table.order("exact_linear", sizes)
        assert order is not None
        assert order[0] == first
    q, k = SHAPE((1, 1, 9, 64), jnp.bfloat16), SHAPE((1, 8, 3, 64), jnp.bfloat16)
    order = table.order("exact_attention", EXACT_ATTENTION.sizes(q, k))
    assert order is not None
    assert order[0] == first
    for operation in (EXACT_LINEAR, EXACT_ATTENTION, EXACT_SCORED):  # on a GPU without a table
        assert operation.default_order[0] == "triton"
