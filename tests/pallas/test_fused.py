"""Verification with packing on Mosaic GPU: interpreted, lowered for CUDA, and on a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.dispatch import Case
from jspec.ops.cases import kv_rows, ragged_tokens
from jspec.ops.fused import VERIFY_AND_PACK as OPERATION
from jspec.ops.fused import fused_sizes
from jspec.pallas import pack, verify
from jspec.pallas.fused import VERIFY_AND_PACK, blocks_for, verify_and_pack_pallas
from jspec.pallas.mosaic import refuses_pallas
from tests.kernels import assert_fused, takes
from tests.ops.backends import every_case
from tests.pallas.mosaic import interpret, lower

LARGE = Case(
    "large", lambda: (*ragged_tokens(32, 128, 1), kv_rows(32, 128, 2048, "float16")), small=False
)


def refusal(draft_tokens, stop_tokens, kv) -> str | None:
    return verify.refuses(draft_tokens, stop_tokens) or pack.refuses(kv)


@every_case(OPERATION, takes(refusal, 0, 3, 4))
def test_equals_the_reference_when_interpreted(case):
    arguments = case.arguments
    assert_fused(interpret(verify_and_pack_pallas, *arguments), arguments)


@pytest.mark.parametrize(("rows", "tile", "row_programs"), [(4, 4, 2), (1, 8, 1)])
def test_tiles_and_programs_of_any_size_give_the_same(rows, tile, row_programs):
    """Tiles of rows and of positions that overlap; programs that copy several chunks."""
    arguments = (*ragged_tokens(7, 13, 2), kv_rows(7, 13, 8, "float32"))
    arguments = jax.tree.map(jnp.asarray, arguments)
    blocks = dataclasses.replace(
        blocks_for(fused_sizes(*arguments)),
        span=64,
        rows=rows,
        tile=tile,
        row_programs=row_programs,
    )
    got = interpret(lambda *x: verify_and_pack_pallas(*x, blocks=blocks), *arguments)
    assert_fused(got, arguments)


def test_int64_tokens_lower():
    with jax.enable_x64(True):
        tokens = map(jnp.asarray, ragged_tokens(20, 6, 2, dtype=np.int64))
        text = lower(verify_and_pack_pallas, *tokens, jnp.asarray(kv_rows(20, 6, 4, "float32")))
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == 1


@pytest.mark.parametrize("case", [*OPERATION.cases(), LARGE], ids=lambda case: case.name)
def test_equals_the_reference_on_a_gpu(case):
    if reason := refuses_pallas():
        pytest.skip(reason)
    arguments = case.arguments
    if reason := VERIFY_AND_PACK.supports(*arguments):
        pytest.skip(reason)
    assert_fused(jax.jit(verify_and_pack_pallas)(*arguments), arguments)


@pytest.mark.parametrize(
    ("batch", "gamma", "width", "stops"), [(1, 1, 8, 0), (5, 3, 8, 1), (32, 128, 2048, 1)]
)
def test_is_one_launch(batch, gamma, width, stops):
    text = lower(
        verify_and_pack_pallas,
        jax.ShapeDtypeStruct((batch, gamma), jnp.int32),
        jax.ShapeDtypeStruct((batch, gamma + 1), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
        jax.ShapeDtypeStruct((batch, stops), jnp.int32),
        jax.ShapeDtypeStruct((batch, gamma, width), jnp.bfloat16),
    )
    assert text.count("stablehlo.custom_call") == 1
    # To call elements by another name, or see them in another shape, moves nothing.
    free = text.count("stablehlo.bitcast_convert") + text.count("stablehlo.reshape")
    assert text.count("stablehlo.") == 1 + free


def test_refuses_what_either_half_refuses():
    tokens = [jnp.zeros(s, jnp.int32) for s in ((2, 3), (2, 4), (2,), (2, 33))]
    assert "33 stop tokens" in VERIFY_AND_PACK.supports(*tokens, jnp.zeros((2, 3, 4)))
    tokens[3] = tokens[3][:, :1]
    assert "nothing to launch" in VERIFY_AND_PACK.supports(*tokens, jnp.zeros((2, 3, 0)))


def test_refuses_what_it_would_verify_too_often():
    tokens = [jnp.zeros(s, jnp.int32) for s in ((1025, 8), (1025, 9), (1025,), (1025, 1))]
    reason = VERIFY_AND_PACK.supports(*tokens, jnp.zeros((1025, 8, 4)))
    assert reason == "B * gamma = 8200 draft tokens are over 8192; verify them, then pack"
