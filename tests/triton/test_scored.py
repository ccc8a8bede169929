"""Attention with scores in Triton: interpreted, lowered for CUDA, and on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.gpu import refuses_gpu
from jspec.ops.attention.scored import SCORED
from jspec.triton import attention as module
from jspec.triton.attention import attention_triton, scored_attention_triton
from tests.ops.attention.test_dense import LARGE, in_blocks, inputs
from tests.ops.attention.test_scored import arrays, by_name, check, read_by_some
from tests.triton.lowering import lower
from tests.triton.test_attention import IN_BLOCKS, SMALL, WHOLE

MORE_ROWS = dataclasses.replace(SMALL, rows=64, least=64)  # tiles of more rows than there are


@by_name
@pytest.mark.parametrize("blocks", [SMALL, WHOLE, MORE_ROWS], ids=["splits", "one-split", "wide"])
def test_equals_the_definition_in_the_interpreter(case, blocks, interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    x = inputs(case, junk=np.nan)
    operands, stored = arrays(x, case)
    settings = case.settings | {"key_positions": stored, "blocks": blocks}
    settings["scale"] = case.size**-0.5 if case.scale is None else case.scale
    check(scored_attention_triton(*operands, **settings), x, case, 2e-6)


@pytest.mark.parametrize("case", IN_BLOCKS, ids=lambda case: case.name)
def test_keys_in_blocks_are_scored_in_the_order_of_their_positions(case, interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    x = inputs(case, junk=np.nan)
    paged, table = in_blocks(x, 128)
    (q, _, _, positions, probe), _ = arrays(x, case)
    operands = q, jnp.asarray(paged.k), jnp.asarray(paged.v), positions, probe
    settings = case.settings | {"key_positions": None, "scale": case.size**-0.5, "blocks": SMALL}
    out, lse, scores = scored_attention_triton(*operands, **settings, table=jnp.asarray(table))
    check((out, lse, scores[..., : case.slots]), x, case, 2e-6)


@pytest.mark.parametrize("case", LARGE[:4], ids=lambda case: case.name)
def test_attention_is_the_same_bits_with_scores_on_a_gpu(case):
    """Where both have the same blocks."""
    if reason := refuses_gpu((8, 0), "a case of this size"):
        pytest.skip(reason)
    x = inputs(case, junk=np.nan)
    operands, stored = arrays(x, case)
    if reason := SCORED.backend("triton").supports(*operands):
        pytest.skip(reason)
    settings = case.settings | {"key_positions": stored, "scale": case.size**-0.5, "blocks": WHOLE}
    out, lse, scores = jax.jit(functools.partial(scored_attention_triton, **settings))(*operands)
    alone = jax.jit(functools.partial(attention_triton, **settings))(*operands[:4])
    for got, want in zip((out, lse), alone, strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    k, probe = (np.asarray(a, np.float64) for a in (x.k, operands[4]))
    expected = np.einsum("bkh,bskh->bks", probe, k) * case.size**-0.5
    read = np.broadcast_to(read_by_some(x, case)[:, None], expected.shape)
    np.testing.assert_allclose(np.asarray(scores)[read], expected[read], rtol=1e-4, atol=1e-4)


def test_scoring_adds_no_launch():
    def shape_of(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype)

    q, kv = shape_of(2, 10, 32, 128), shape_of(2, 4096, 8, 128)
    settings = dict.fromkeys(("key_positions", "window", "softcap", "value_size"))
    run = functools.partial(scored_attention_triton, scale=0.1, **settings)
    text = lower(run, q, kv, kv, shape_of(2, 10, dtype="int32"), shape_of(2, 8, 128))
    assert text.count("stablehlo.custom_call @triton_kernel_call_ffi") == 2
    assert text.count("stablehlo.") == 2
