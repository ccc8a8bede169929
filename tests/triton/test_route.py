"""Routing in Triton: interpreted, lowered for CUDA, and a whole mixture of experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jspec.dispatch import use_backends
from jspec.models.experts import MixtureOfExperts
from jspec.ops.norm import RMS
from jspec.ops.route import ROUTE, Routed, route_xla
from jspec.parts import ClampedSwiGLU, Experts
from jspec.triton import grouped as grouped_module
from jspec.triton import route as module
from jspec.triton.call import refuses_triton
from jspec.triton.route import Blocks, refuses, route_triton
from tests.ops.backends import every_case
from tests.ops.test_route import assert_routed
from tests.triton.lowering import lower

BLOCKS = Blocks(splits=2, step=16, width=16, warps=1, last_warps=1)
TRITON = {"route": "triton", "grouped_linear": "triton"}
GPT_OSS = Experts(32, 4, 2880, normalized=True, bias=True, clamped=ClampedSwiGLU())
QWEN3 = Experts(128, 8, 768, normalized=True)
# Experts, channels and tokens: gpt-oss-20b's and Qwen3-30B-A3B's.
LARGE = {
    "gpt-oss": (GPT_OSS, 2880, 1),
    "gpt-oss-batch": (GPT_OSS, 2880, 40),
    "qwen3": (QWEN3, 2048, 10),
    "qwen3-batch": (QWEN3, 2048, 128),
}


@every_case(ROUTE, lambda case: case.name != "groups")
def test_equals_the_definition_in_the_interpreter(case, interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    got = module._launch(*case.arguments, **case.static, blocks=BLOCKS)
    assert_routed(Routed(*map(jnp.asarray, got)), case)


def test_pairs_of_many_tokens_are_ordered_in_the_interpreter(interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    rng = np.random.default_rng(0)
    experts = Experts(40, 3, 8)
    x, kernel = rng.standard_normal((50, 24), np.float32), rng.standard_normal((24, 40), np.float32)
    got = module._launch(x, kernel, None, None, None, experts=experts, blocks=BLOCKS)
    pairs = np.sort(np.argsort(-(x @ kernel), axis=1)[:, :3], axis=1)
    np.testing.assert_array_equal(np.sort(got.chosen, axis=1), pairs)
    flat = np.asarray(got.chosen).reshape(-1)
    np.testing.assert_array_equal(got.order, np.argsort(flat, stable=True))
    np.testing.assert_array_equal(np.diff(got.starts), np.bincount(flat, minlength=40))


def test_scores_that_are_no_numbers_still_choose_experts(interpreted, monkeypatch):
    """So that nothing is read or written that is not there."""
    monkeypatch.setattr(module, "triton_call", interpreted)
    x = jnp.full((2, 40), jnp.nan)
    got = module._launch(
        x, jnp.ones((40, 5)), None, None, None, experts=Experts(5, 2, 8), blocks=BLOCKS
    )
    assert (got.chosen >= 0).all()
    assert (got.chosen < 5).all()
    np.testing.assert_array_equal(np.sort(got.order), np.arange(4))


def mixture(experts, width, dtype):
    made = MixtureOfExperts(width, experts, dtype=dtype, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)

    def value(leaf):
        # Biases are not zero.
        return leaf + jnp.asarray(0.2 * rng.standard_normal(leaf.shape), leaf.dtype)

    graph, state = nnx.split(made)
    return nnx.merge(graph, jax.tree.map(value, state))


@pytest.mark.parametrize("tokens", [1, 3, 24])
@pytest.mark.parametrize(
    "experts",
    [
        Experts(6, 2, 20, normalized=True, bias=True, clamped=ClampedSwiGLU(limit=1.0)),
        Experts(12, 3, 10, 24, score="sigmoid", corrected=True, factor=2.0),
    ],
    ids=["gpt-oss", "shared"],
)
def test_a_mixture_equals_that_of_the_references(experts, tokens, interpreted, monkeypatch):
    made = mixture(experts, 32, jnp.float32)
    x = jax.random.normal(jax.random.key(1), (1, tokens, 32))
    norm = RMS(jnp.linspace(0.5, 1.5, 32))
    expected = made(x, norm)
    for each in (module, grouped_module):
        monkeypatch.setattr(each, "triton_call", interpreted)
        monkeypatch.setattr(each, "refuses_triton", lambda: None)
        monkeypatch.setattr(each, "differentiated_as", lambda reference, run: run)
    with use_backends(TRITON):
        got = made(x, norm)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", LARGE)
def test_a_mixture_is_four_launches_and_a_sum(case, monkeypatch):
    experts, width, tokens = LARGE[case]
    for each in (module, grouped_module):
        monkeypatch.setattr(each, "refuses_triton", lambda: None)
    made = nnx.eval_shape(
        lambda: MixtureOfExperts(width, experts, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    )
    graph, state = nnx.split(made)

    def run(state, x, scale):
        with use_backends(TRITON):
            return nnx.merge(graph, state)(x, RMS(scale))

    half = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    text = lower(run, state, half((1, tokens, width)), half((width,)))
    assert text.count("stablehlo.custom_call @triton_kernel_call_ffi") == 4
    # What XLA has left is shapes, and the sum, which it makes one kernel of.
    for name in ("dot_general", "sort", "gather", "scatter", "reduce", "while", "concatenate"):
        assert f"stablehlo.{name}" not in text, name


@pytest.mark.parametrize("case", LARGE)
def test_equals_the_reference_on_a_gpu(case):
    if reason := refuses_triton():
        pytest.skip(reason)
    experts, width, tokens = LARGE[case]
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (tokens, width), jnp.bfloat16)
    kernel = width**-0.5 * jax.random.normal(keys[1], (width, experts.routed), jnp.bfloat16)
    got, want = (
        run(x, kernel, None, None, None, experts=experts) for run in (route_triton, route_xla)
    )
    np.testing.assert_allclose(got.weights, want.weights, rtol=1e-4)
    np.testing.assert_array_equal(got.chosen, want.chosen)
    np.testing.assert_array_equal(got.order, want.order)
    np.testing.assert_array_equal(got.starts, want.starts)


def test_has_the_derivatives_of_the_reference(monkeypatch):
    # Without a GPU the launch itself is left out.
    monkeypatch.setattr(
        module, "_launch", lambda *arrays, experts, blocks: route_xla(*arrays, experts=experts)
    )
    case = ROUTE.cases()[0]

    def gradients(function):
        def loss(x, kernel, *others):
            return (function(x, kernel, *others, **case.static).weights ** 2).sum()

        return jax.grad(loss, (0, 1))(*case.arguments)

    gradients_of = jax.jit(lambda: gradients(route_triton))()
    expected = jax.jit(lambda: gradients(route_xla))()
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), gradients_of, expected)


def test_refuses_with_a_reason():
    x, kernel, experts = jnp.ones((2, 8)), jnp.ones((8, 4)), Experts(4, 2, 8)
    within = Experts(4, 2, 8, groups=2)
    for wrong, reason in (
        ((jnp.ones((129, 8)), kernel, None, experts), "1 to 128 tokens"),
        ((jnp.ones((100, 8)), kernel, None, Experts(32, 16, 8)), "1024 experts in all"),
        ((x, kernel, None, Experts(257, 2, 8)), "at most 256 experts"),
        ((x, kernel, None, within), "within groups"),
        ((x.astype(jnp.int32), kernel, None, experts), "x int32"),
        ((x, kernel, RMS(x[0], centered=True), experts), "1 + scale"),
    ):
        assert reason in (refuses(*wrong) or "")
    assert refuses(x, kernel, None, experts) is None
