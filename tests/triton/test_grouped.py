"""Products by groups of rows in Triton: interpreted, lowered for CUDA, and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.grouped import GROUPED, grouped_linear_xla
from jspec.triton import grouped as module
from jspec.triton.call import refuses_triton
from jspec.triton.grouped import grouped_linear_triton, refuses
from jspec.triton.linear import Blocks
from tests.ops.backends import every_case
from tests.triton.lowering import lower

BLOCKS = Blocks(width=16, bytes=1024, stages=2, warps=1)
# Experts, their inputs and outputs, and rows: gpt-oss-20b's and Qwen3-30B-A3B's at decode.
LARGE = {
    "gpt-oss": (32, 2880, 5760, 4),
    "gpt-oss-down": (32, 2880, 2880, 160),
    "qwen3": (128, 2048, 1536, 8),
    "qwen3-batch": (128, 768, 2048, 2560),
}


def drawn(groups, inputs, outputs, rows):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (rows, inputs), jnp.bfloat16)
    kernel = inputs**-0.5 * jax.random.normal(keys[1], (groups, inputs, outputs), jnp.bfloat16)
    counts = jnp.bincount(jax.random.randint(keys[2], (rows,), 0, groups), length=groups)
    return x, kernel, counts.astype(jnp.int32)


@every_case(GROUPED)
def test_equals_the_definition_in_the_interpreter(case, interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    x, kernel, counts = case.arguments
    got = module._launch(x, kernel, counts=counts, blocks=BLOCKS)
    np.testing.assert_allclose(got, case.wanted(), rtol=1e-5, atol=1e-5)


def test_a_group_without_rows_is_not_read_in_the_interpreter(interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    x, kernel, counts = GROUPED.cases()[0].arguments
    poisoned = jnp.where((counts == 0)[:, None, None], jnp.nan, kernel)
    got = module._launch(x, poisoned, counts=counts, blocks=BLOCKS)
    np.testing.assert_array_equal(got, module._launch(x, kernel, counts=counts, blocks=BLOCKS))


@pytest.mark.parametrize("case", LARGE)
def test_equals_the_reference_on_a_gpu(case):
    if reason := refuses_triton():
        pytest.skip(reason)
    arguments = drawn(*LARGE[case])
    want = grouped_linear_xla(*arguments)
    np.testing.assert_allclose(grouped_linear_triton(*arguments), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("case", LARGE)
def test_is_one_launch(case):
    text = lower(grouped_linear_triton, *jax.eval_shape(lambda: drawn(*LARGE[case])))
    assert text.count("stablehlo.custom_call @triton_kernel_call_ffi") == 1
    assert "dot_general" not in text


def test_has_the_derivatives_of_the_reference(monkeypatch):
    # Without a GPU the launch itself is left out.
    monkeypatch.setattr(
        module, "_launch", lambda *arrays, counts, blocks: grouped_linear_xla(*arrays, counts)
    )

    def gradients(function):
        return jax.grad(lambda *arrays: (function(*arrays) ** 2).sum(), (0, 1))(*arguments)

    arguments = GROUPED.cases()[0].arguments
    found = jax.jit(lambda: gradients(grouped_linear_triton))()
    jax.tree.map(np.testing.assert_array_equal, found, gradients(grouped_linear_xla))


def test_refuses_with_a_reason():
    x, kernel, _ = GROUPED.cases()[0].arguments
    assert "not of one type" in refuses(x, kernel.astype(jnp.bfloat16))
    assert "nothing to launch" in refuses(x[:0], kernel)
