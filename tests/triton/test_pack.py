"""Packing in Triton: interpreted, lowered for CUDA, and on a GPU."""

import jax
import jax.numpy as jnp
import pytest

from jspec.ops.cases import counts, kv_rows
from jspec.ops.packing import PACK as OPERATION
from jspec.triton import pack as module
from jspec.triton.call import refuses_triton
from jspec.triton.pack import PACK, Blocks, pack_triton, refuses
from tests.kernels import assert_packed, takes
from tests.ops.backends import every_case
from tests.triton.lowering import lower

over_cases = every_case(OPERATION, takes(refuses, 0))


@over_cases
def test_equals_the_reference_in_the_interpreter(case, interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    arguments = case.arguments
    assert_packed(pack_triton(*arguments), arguments)


@pytest.mark.parametrize("span", [16, 256])
def test_runs_of_several_chunks_meet(span, interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    arguments = (jnp.asarray(kv_rows(3, 5, 24, "float32")), jnp.asarray(counts(3, 5)))
    assert_packed(pack_triton(*arguments, blocks=Blocks(span, 1)), arguments)


@over_cases
def test_equals_the_reference_on_a_gpu(case):
    if reason := refuses_triton():
        pytest.skip(reason)
    arguments = case.arguments
    assert_packed(jax.jit(pack_triton)(*arguments), arguments)


@pytest.mark.parametrize("span", [4096, 8192, 16384])
def test_blocks_of_any_size_give_the_same_on_a_gpu(span):
    if reason := refuses_triton():
        pytest.skip(reason)
    arguments = (jnp.asarray(kv_rows(32, 32, 1024, "float16")), jnp.asarray(counts(32, 32)))
    got = jax.jit(lambda *x: pack_triton(*x, blocks=Blocks(span, 4)))(*arguments)
    assert_packed(got, arguments)


@pytest.mark.parametrize("batch", [1, 32, 3000])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.bool_])
def test_is_one_launch(batch, dtype):
    kv = jax.ShapeDtypeStruct((batch, 8, 128), dtype)
    text = lower(pack_triton, kv, jax.ShapeDtypeStruct((batch,), jnp.int32))
    assert text.count("stablehlo.custom_call @triton_kernel_call_ffi") == 1
    # To call elements by another name moves nothing.
    assert text.count("stablehlo.") == 1 + text.count("stablehlo.bitcast_convert")


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((2, 0, 4), "float32", "kv (2, 0, 4) leaves nothing to launch"),
        ((2, 3, 4), "int4", "kv of int4 does not have elements of 1, 2, 4 or 8 bytes"),
        ((2, 3, 4), "complex64", "kv of complex64 does not have elements of 1, 2, 4 or 8 bytes"),
        (
            (1, 2**16, 2**15),
            "int8",
            "gamma * D = 2147483648 elements a batch row are over 1073741824",
        ),
    ],
    ids=["no-rows", "int4", "complex", "large"],
)
def test_refuses_with_a_reason(shape, dtype, reason):
    kv = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    assert PACK.supports(kv, jax.ShapeDtypeStruct(shape[:1], jnp.int32)) == reason
