"""Products by groups of rows in Triton: interpreted, lowered for CUDA, and on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.grouped import GROUPED, grouped_linear_xla
from jspec.ops.norm import RMS
from jspec.ops.quantized import quantized
from jspec.parts import ClampedSwiGLU
from jspec.triton import grouped as module
from jspec.triton.call import refuses_triton
from jspec.triton.grouped import grouped_linear_triton, refuses
from jspec.triton.linear import Blocks
from tests.ops.backends import every_case
from tests.triton.lowering import lower

BLOCKS = Blocks(width=16, bytes=1024, stages=2, warps=1)
# Experts, their inputs and outputs, rows of x and pairs: gpt-oss-20b's and Qwen3-30B-A3B's at
# decode and at prefill, whose tiles are larger; the first products of an expert are gated.
LARGE = {
    "gpt-oss": (32, 2880, (2, 2880), 1, 4),
    "gpt-oss-down": (32, 2880, (2880,), 160, 160),
    "qwen3": (128, 2048, (2, 768), 1, 8),
    "qwen3-down": (128, 768, (2048,), 8, 8),
    "qwen3-batch": (128, 768, (2048,), 2560, 2560),
    "gpt-oss-prefill": (32, 2880, (2, 2880), 1024, 4096),
}
# Some of them with weights in MXFP4.
FOUR_BITS = {f"{name}-mxfp4": LARGE[name] for name in ("gpt-oss", "qwen3-down", "gpt-oss-prefill")}
LARGE |= FOUR_BITS


def drawn(groups, inputs, outputs, rows, pairs, *, kind=""):
    """A product as a model has it: rows taken and normed before a gate, put and weighted after."""
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (rows, inputs), jnp.bfloat16)
    kernel = inputs**-0.5 * jax.random.normal(keys[1], (groups, inputs, *outputs), jnp.bfloat16)
    if kind:
        kernel = quantized(kernel, kind, leading=1)
    counts = jnp.bincount(jax.random.randint(keys[2], (pairs,), 0, groups), length=groups)
    starts = jnp.pad(jnp.cumsum(counts).astype(jnp.int32), (1, 0))
    bias = jax.random.normal(keys[3], (groups, *outputs), jnp.bfloat16)
    order = jax.random.permutation(keys[4], pairs).astype(jnp.int32)
    if len(outputs) == 2:
        return x, kernel, starts, bias, order, None, RMS(jnp.ones(inputs, jnp.bfloat16)), None
    weights = jnp.linspace(0, 1, pairs, dtype=jnp.float32)
    return x, kernel, starts, bias, None, order, None, weights


def large_arguments(case):
    return drawn(*LARGE[case], kind="mxfp4" if case in FOUR_BITS else "")


def static(case):
    gated = len(LARGE[case][2]) == 2
    clamped = ClampedSwiGLU() if case.startswith("gpt-oss") and gated else None
    return {"gated": gated, "clamped": clamped, "dtype": np.dtype("float32")}


def is_interpreted(case) -> bool:
    """Whether Triton's interpreter multiplies numbers of the case's dtype as a GPU does."""
    return case.arguments[0].dtype != jnp.bfloat16


@every_case(GROUPED, is_interpreted)
def test_equals_the_definition_in_the_interpreter(case, interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    got = module._launch(*case.arguments, **case.static, blocks=BLOCKS)
    close = 1e-5 if case.arguments[0].dtype == jnp.float32 else 1e-3
    np.testing.assert_allclose(got, case.expected(), rtol=close, atol=close)


@every_case(GROUPED, lambda case: case.name.startswith("mxfp4") and is_interpreted(case))
def test_parts_of_the_inputs_add_up_in_the_interpreter(case, interpreted, monkeypatch):
    """Of MXFP4, where each warp has one."""
    monkeypatch.setattr(module, "triton_call", interpreted)
    blocks = dataclasses.replace(BLOCKS, warps=2)
    got = module._launch(*case.arguments, **case.static, blocks=blocks)
    close = 1e-5 if case.arguments[0].dtype == jnp.float32 else 1e-3
    np.testing.assert_allclose(got, case.expected(), rtol=close, atol=close)


def test_a_group_without_rows_is_not_read_in_the_interpreter(interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    case = GROUPED.cases()[0]
    x, kernel, starts, *others = case.arguments
    run = functools.partial(module._launch, **case.static, blocks=BLOCKS)
    poisoned = jnp.where((jnp.diff(starts) == 0)[:, None, None], jnp.nan, kernel)
    got = run(x, poisoned, starts, *others)
    np.testing.assert_array_equal(got, run(x, kernel, starts, *others))


@pytest.mark.parametrize(("rows", "slots"), [(4, 4), (12, 10)])
def test_there_are_programs_for_no_more_groups_than_can_have_rows(rows, slots, monkeypatch):
    programs = []

    def call(kernel, *arrays, out, **settings):
        programs.append(settings["programs"] // settings["PARTS"])
        return [np.zeros(x.shape, x.dtype) for x in out]

    pytest.importorskip("triton")
    monkeypatch.setattr(module, "triton_call", call)
    arguments = drawn(10, 16, (40,), rows, rows)
    plain = {"gated": False, "clamped": None, "dtype": np.dtype("float32")}
    module._launch(*arguments, **plain, blocks=BLOCKS)
    assert programs == [slots]


@pytest.mark.parametrize("case", LARGE)
def test_equals_the_reference_on_a_gpu(case):
    if reason := refuses_triton():
        pytest.skip(reason)
    arguments = large_arguments(case)
    exact = exact_product(case)
    error, reference = (
        np.abs(np.asarray(backend(*arguments, **static(case))) - exact)
        for backend in (grouped_linear_triton, grouped_linear_xla)
    )
    # The kernel's norm follows the product, the reference's is rounded before it: neither has the
    # bits of the other, and the kernel is not to be further from the product of float32.
    assert np.linalg.norm(error) <= 1.1 * np.linalg.norm(reference) + 1e-4 * np.linalg.norm(exact)
    assert error.max() <= 1.5 * reference.max() + 1e-3 * np.abs(exact).max()


def exact_product(case):
    """The reference's result in float32."""

    def widened(leaf):
        return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf

    arguments = jax.tree.map(widened, large_arguments(case))
    with jax.default_matmul_precision("highest"):
        return np.asarray(grouped_linear_xla(*arguments, **static(case)))


@pytest.mark.parametrize("case", LARGE)
def test_is_one_launch(case):
    run = functools.partial(grouped_linear_triton, **static(case))
    text = lower(run, *jax.eval_shape(lambda: large_arguments(case)))
    assert text.count("stablehlo.custom_call @triton_kernel_call_ffi") == 1
    assert "dot_general" not in text


@pytest.mark.parametrize("name", ["some-empty", "clamped", "weighted"])
def test_has_the_derivatives_of_the_reference(name, monkeypatch):
    # Without a GPU the launch itself is left out.
    monkeypatch.setattr(
        module,
        "_launch",
        lambda *arrays, blocks, **settings: grouped_linear_xla(*arrays, **settings),
    )
    (case,) = (case for case in GROUPED.cases() if case.name == name)

    def gradients(function):
        def loss(x, kernel, starts, *others):
            return (function(x, kernel, starts, *others, **case.static) ** 2).sum()

        return jax.grad(loss, (0, 1))(*case.arguments)

    result = jax.jit(lambda: gradients(grouped_linear_triton))()
    expected = jax.jit(lambda: gradients(grouped_linear_xla))()
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), result, expected)


def test_refuses_with_a_reason():
    x, kernel, *_ = GROUPED.cases()[0].arguments
    assert "not of one type" in (refuses(x, kernel.astype(jnp.bfloat16)) or "")
    assert "nothing to launch" in (refuses(x[:0], kernel) or "")
    assert "1 + scale" in (refuses(x, kernel, RMS(x[0], centered=True)) or "")
