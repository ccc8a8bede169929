"""Attention with scores on Mosaic GPU: interpreted, lowered for CUDA, and on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.attention.scored import SCORED, scored_attention
from jspec.pallas.attention import attention_pallas, scored_attention_pallas, shape_of
from jspec.pallas.attention_cut import Chunks, blocks_for
from jspec.pallas.mosaic import refuses_pallas
from tests.ops.attention.test_dense import inputs
from tests.ops.attention.test_scored import arrays, read_by_some
from tests.pallas.mosaic import interpret, lower
from tests.pallas.test_attention import LARGE, SMALL, assert_attends, cut, settings

by_name = functools.partial(pytest.mark.parametrize, "case", ids=lambda case: case.name)


def assert_scores(got, operands, x, case):
    k, probe = (np.asarray(a, np.float64) for a in (x.k, operands[4]))
    expected = np.einsum("bkh,bskh->bks", probe, k) * settings(case)["scale"]
    read = np.broadcast_to(read_by_some(x, case)[:, None], expected.shape)
    assert read.any()
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(got)[read], expected[read], rtol=1e-4, atol=1e-4)


# Blocks over each other's ends; two warpgroups that compute, of channels, and of rows in two tiles.
@by_name([case for case in SMALL if case.name in ("ragged", "scale-float16", "two-tiles")])
def test_equals_the_definition_when_interpreted(case, products_of_arrays):
    if jax.default_backend() == "gpu":
        pytest.skip("stands in for a GPU, and there is one")
    x = inputs(case, junk=np.nan)
    operands, _ = arrays(x, case)
    # Two products a block: a warpgroup multiplies 64 rows at a time.
    chunks = Chunks(((case.slots, 128),))
    blocks = dataclasses.replace(cut(case), keys=128, chunks=chunks)
    run = functools.partial(scored_attention_pallas, **settings(case), blocks=blocks)
    *attended, scores = interpret(run, *operands)
    assert_attends(attended, x, case)
    assert_scores(scores, operands, x, case)


@by_name(LARGE)
def test_attention_is_the_same_bits_with_scores_on_a_gpu(case):
    if reason := refuses_pallas():
        pytest.skip(reason)
    x = inputs(case, junk=np.nan)
    operands, _ = arrays(x, case)
    # The cut of attention with scores: with fewer blocks in shared memory, of the same keys.
    blocks = blocks_for(shape_of(operands[0], operands[1], scored=True))
    plain = jax.jit(lambda *x: attention_pallas(*x, **settings(case), blocks=blocks))
    scored = jax.jit(lambda *x: scored_attention_pallas(*x, **settings(case)))
    *attended, scores = scored(*operands)
    for got, want in zip(attended, plain(*operands[:4]), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    assert_scores(scores, operands, x, case)


@pytest.mark.parametrize(("tokens", "size"), [(10, 128), (20, 64)])
def test_scoring_adds_no_launch(tokens, size):
    q = jax.ShapeDtypeStruct((2, tokens, 8, size), jnp.bfloat16)
    cache = jax.ShapeDtypeStruct((2, 8192, 2, size), jnp.bfloat16)
    positions = jax.ShapeDtypeStruct((2, tokens), jnp.int32)
    probe = jax.ShapeDtypeStruct((2, 2, size), jnp.bfloat16)
    static = dict.fromkeys(("key_positions", "window", "softcap", "value_size")) | {"scale": 0.1}
    run = functools.partial(scored_attention_pallas, **static)
    text = lower(run, q, cache, cache, positions, probe)
    assert text.count("stablehlo.custom_call") == 2
    assert "tensor<2x2x8192xf32>" in text


def test_what_a_scoring_program_holds_fits():
    """Threads of all warpgroups share the registers of a multiprocessor."""
    for size, rows in [(64, 40), (128, 40), (128, 96), (256, 40)]:
        shape = dataclasses.replace(
            shape_of(jnp.zeros((1, rows, 1, size)), jnp.zeros((1, 4096, 1, size), jnp.bfloat16)),
            scored=True,
        )
        compute, others = shape.registers
        assert compute >= 216
        total = shape.groups * compute + (shape.warpgroups - shape.groups) * others
        assert total * 128 <= 65536
        assert sum(blocks_for(shape).stages) >= 4


def test_refuses_what_attention_refuses():
    q = jax.ShapeDtypeStruct((2, 1, 4, 64), jnp.bfloat16)
    cache = jax.ShapeDtypeStruct((2, 150, 2, 64), jnp.bfloat16)
    operands = q, cache, cache, jax.ShapeDtypeStruct((2, 1), jnp.int32)
    probe = jax.ShapeDtypeStruct((2, 2, 64), jnp.bfloat16)
    with pytest.raises(Exception, match="S=150 is not a multiple of 8"):
        jax.eval_shape(
            functools.partial(scored_attention, implementation="pallas"), *operands, probe
        )
    assert SCORED.backend("pallas").name == "pallas"
