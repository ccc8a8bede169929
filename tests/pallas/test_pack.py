"""Packing on Mosaic GPU: interpreted, lowered for CUDA, and on a GPU."""

import jax
import jax.numpy as jnp
import pytest

from jspec.ops.cases import counts, kv_rows
from jspec.ops.packing import PACK as OPERATION
from jspec.pallas.mosaic import refuses_pallas
from jspec.pallas.pack import PACK, Blocks, pack_pallas, refuses
from tests.kernels import assert_packed, takes
from tests.ops.backends import every_case
from tests.pallas.mosaic import interpret, lower

over_cases = every_case(OPERATION, takes(refuses, 0))


@over_cases
def test_equals_the_reference_when_interpreted(case):
    arguments = case.arguments
    assert_packed(interpret(pack_pallas, *arguments), arguments)


@pytest.mark.parametrize("span", [16, 256])
def test_runs_of_several_chunks_meet(span):
    """A row is 96 bytes: six chunks of the one size, three rows to a chunk of the other."""
    arguments = (jnp.asarray(kv_rows(3, 5, 24, "float32")), jnp.asarray(counts(3, 5)))
    got = interpret(lambda *x: pack_pallas(*x, blocks=Blocks(span)), *arguments)
    assert_packed(got, arguments)


@over_cases
def test_equals_the_reference_on_a_gpu(case):
    if reason := refuses_pallas():
        pytest.skip(reason)
    arguments = case.arguments
    assert_packed(jax.jit(pack_pallas)(*arguments), arguments)


@pytest.mark.parametrize("span", [4096, 8192, 16384])
def test_blocks_of_any_size_give_the_same_on_a_gpu(span):
    if reason := refuses_pallas():
        pytest.skip(reason)
    arguments = (jnp.asarray(kv_rows(32, 32, 1024, "float16")), jnp.asarray(counts(32, 32)))
    got = jax.jit(lambda *x: pack_pallas(*x, blocks=Blocks(span)))(*arguments)
    assert_packed(got, arguments)


@pytest.mark.parametrize("batch", [1, 2, 32, 1000])
@pytest.mark.parametrize("width", [8, 128])
def test_is_one_launch(batch, width):
    kv = jax.ShapeDtypeStruct((batch, 8, width), jnp.bfloat16)
    text = lower(pack_pallas, kv, jax.ShapeDtypeStruct((batch,), jnp.int32))
    assert text.count("stablehlo.custom_call") == 1
    # To call elements by another name, or see them in another shape, moves nothing.
    free = text.count("stablehlo.bitcast_convert") + text.count("stablehlo.reshape")
    assert text.count("stablehlo.") == 1 + free


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((2, 3, 0), "float32", "kv (2, 3, 0) leaves nothing to launch"),
        ((5000, 1, 4), "float32", "B=5000 is over 4096"),
        ((2, 3, 16), "int4", "kv of int4 does not have elements of 1, 2 or 4 bytes"),
        ((2, 3, 16), "bool", "kv of bool does not have elements of 1, 2 or 4 bytes"),
        ((2, 3, 33), "float16", "D=33 of float16 is 66 bytes, not words of 16"),
        ((64, 2**13, 2**12), "int8", "kv (64, 8192, 4096) has more elements than int32 counts"),
    ],
    ids=["no-width", "batch", "int4", "bool", "odd-width", "large"],
)
def test_refuses_with_a_reason(shape, dtype, reason):
    kv = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    assert PACK.supports(kv, jax.ShapeDtypeStruct(shape[:1], jnp.int32)) == reason
