"""Packing on Mosaic GPU: interpreted, lowered for CUDA, and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas.mosaic import refuses_pallas
from jspec.pallas.pack import PACK, Blocks, pack_pallas
from tests.kernels import PACK as CASES
from tests.kernels import assert_packed, pack_arguments
from tests.pallas.mosaic import interpret, lower


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_reference_when_interpreted(case):
    arguments = [jnp.asarray(x) for x in pack_arguments(np.random.default_rng(0), *case)]
    assert_packed(interpret(pack_pallas, *arguments), arguments)


@pytest.mark.parametrize("span", [16, 256])
def test_runs_of_several_chunks_meet(span):
    """A row is 96 bytes: six chunks of the one size, three rows to a chunk of the other."""
    arguments = pack_arguments(np.random.default_rng(1), 3, 5, 24, "float32")
    arguments = [jnp.asarray(x) for x in arguments]
    got = interpret(lambda *x: pack_pallas(*x, blocks=Blocks(span)), *arguments)
    assert_packed(got, arguments)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_reference_on_a_gpu(case):
    if reason := refuses_pallas():
        pytest.skip(reason)
    arguments = [jnp.asarray(x) for x in pack_arguments(np.random.default_rng(2), *case)]
    assert_packed(jax.jit(pack_pallas)(*arguments), arguments)


@pytest.mark.parametrize("span", [4096, 8192, 16384])
def test_blocks_of_any_size_give_the_same_on_a_gpu(span):
    if reason := refuses_pallas():
        pytest.skip(reason)
    arguments = pack_arguments(np.random.default_rng(3), 32, 32, 1024, "float16")
    arguments = [jnp.asarray(x) for x in arguments]
    got = jax.jit(lambda *x: pack_pallas(*x, blocks=Blocks(span)))(*arguments)
    assert_packed(got, arguments)


@pytest.mark.parametrize("batch", [1, 2, 32, 1000])
@pytest.mark.parametrize("width", [8, 128])
def test_is_one_launch(batch, width):
    rows = jax.ShapeDtypeStruct((batch, 8, width), jnp.bfloat16)
    text = lower(pack_pallas, rows, jax.ShapeDtypeStruct((batch,), jnp.int32))
    assert text.count("stablehlo.custom_call") == 1
    # To call elements by another name, or see them in another shape, moves nothing.
    free = text.count("stablehlo.bitcast_convert") + text.count("stablehlo.reshape")
    assert text.count("stablehlo.") == 1 + free


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((2, 3, 0), "float32", "rows (2, 3, 0) leave nothing to launch"),
        ((5000, 1, 4), "float32", "B=5000 is over 4096"),
        ((2, 3, 16), "int4", "rows of int4 are not elements of 1, 2 or 4 bytes"),
        ((2, 3, 16), "bool", "rows of bool are not elements of 1, 2 or 4 bytes"),
        ((2, 3, 33), "float16", "D=33 of float16 is 66 bytes, not words of 16"),
        ((64, 2**13, 2**12), "int8", "rows (64, 8192, 4096) have more elements than int32 counts"),
    ],
    ids=["no-width", "batch", "int4", "bool", "odd-width", "large"],
)
def test_refuses_with_a_reason(shape, dtype, reason):
    rows = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    assert PACK.supports(rows, jax.ShapeDtypeStruct(shape[:1], jnp.int32)) == reason
