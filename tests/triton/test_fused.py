"""Verification with packing in Triton: interpreted, lowered for CUDA, and on a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jspec.dispatch import Case
from jspec.ops.cases import kv_rows, ragged_tokens
from jspec.ops.fused import VERIFY_AND_PACK as OPERATION
from jspec.ops.fused import fused_sizes
from jspec.triton import fused as module
from jspec.triton import pack, verify
from jspec.triton.call import refuses_triton
from jspec.triton.fused import VERIFY_AND_PACK, blocks_for, verify_and_pack_triton
from tests.kernels import assert_fused, takes
from tests.ops.backends import every_case
from tests.triton.lowering import lower

# Over the size to which the first bytes are read eagerly.
LARGE = Case(
    "large", lambda: (*ragged_tokens(32, 128, 1), kv_rows(32, 128, 2048, "float16")), small=False
)


def refusal(draft_tokens, stop_tokens, kv) -> str | None:
    return verify.refuses(draft_tokens, stop_tokens) or pack.refuses(kv)


quick = every_case(OPERATION, takes(refusal, 0, 3, 4))


@quick
@pytest.mark.parametrize(
    ("eager", "row_programs"), [(False, 99), (True, 2)], ids=["lazy-alone", "eager-in-turns"]
)
def test_equals_the_reference_in_the_interpreter(
    case, eager, row_programs, interpreted, monkeypatch
):
    monkeypatch.setattr(module, "triton_call", interpreted)
    arguments = case.arguments
    # Alone, a program a span: larger ones, or there are hundreds to interpret.
    cut = {"eager": eager, "span": 64 if eager else 256, "row_programs": row_programs, "scan": 16}
    blocks = dataclasses.replace(blocks_for(fused_sizes(*arguments)), **cut)
    assert_fused(verify_and_pack_triton(*arguments, blocks=blocks), arguments)


@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("case", [*OPERATION.cases(), LARGE], ids=lambda case: case.name)
def test_equals_the_reference_on_a_gpu(case, warps):
    if reason := refuses_triton():
        pytest.skip(reason)
    arguments = case.arguments
    if reason := VERIFY_AND_PACK.supports(*arguments):
        pytest.skip(reason)
    blocks = blocks_for(fused_sizes(*arguments))
    blocks = dataclasses.replace(blocks, warps=warps)
    got = jax.jit(lambda *x: verify_and_pack_triton(*x, blocks=blocks))(*arguments)
    assert_fused(got, arguments)


@pytest.mark.parametrize(
    ("batch", "gamma", "width"), [(1, 8, 512), (32, 128, 2048), (256, 8, 128), (1000, 9, 7)]
)
def test_the_cut_is_one_that_the_kernel_can_run(batch, gamma, width):
    tokens, kv = jnp.zeros((batch, gamma), jnp.int32), jnp.zeros((batch, gamma, width), jnp.int16)
    blocks = blocks_for(fused_sizes(tokens, None, None, None, kv))
    for size in (blocks.span, blocks.scan, blocks.tile, blocks.warps):
        assert size.bit_count() == 1
    assert blocks.row_programs >= 1
    # A thread holds no more than 16 positions of the rows before its own.
    assert blocks.scan * blocks.tile <= 16 * 32 * blocks.warps


@pytest.mark.parametrize("gamma", [4, 128])
def test_is_one_launch(gamma):
    text = lower(
        verify_and_pack_triton,
        jax.ShapeDtypeStruct((32, gamma), jnp.int32),
        jax.ShapeDtypeStruct((32, gamma + 1), jnp.int32),
        jax.ShapeDtypeStruct((32,), jnp.int32),
        jax.ShapeDtypeStruct((32, 1), jnp.int32),
        jax.ShapeDtypeStruct((32, gamma, 128), jnp.bfloat16),
    )
    assert text.count("stablehlo.custom_call @triton_kernel_call_ffi") == 1
    # To call elements by another name moves nothing.
    assert text.count("stablehlo.") == 1 + text.count("stablehlo.bitcast_convert")


def test_refuses_what_either_half_refuses():
    tokens = [jnp.zeros(s, jnp.int32) for s in ((2, 3), (2, 4), (2,), (2, 33))]
    assert "33 stop tokens" in VERIFY_AND_PACK.supports(*tokens, jnp.zeros((2, 3, 4)))
    tokens[3] = tokens[3][:, :1]
    assert "nothing to launch" in VERIFY_AND_PACK.supports(*tokens, jnp.zeros((2, 3, 0)))


def test_refuses_what_it_would_verify_too_often():
    tokens = [jnp.zeros(s, jnp.int32) for s in ((1025, 8), (1025, 9), (1025,), (1025, 1))]
    reason = VERIFY_AND_PACK.supports(*tokens, jnp.zeros((1025, 8, 4)))
    assert reason == "B * gamma = 8200 draft tokens are over 8192; verify them, then pack"
