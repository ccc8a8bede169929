"""Selection by hash codes in Triton: interpreted, lowered for CUDA, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.hash_selection import HASH_SELECT as OPERATION
from jspec.triton import hash_select as module
from jspec.triton.call import refuses_triton
from jspec.triton.hash_select import SelectBlocks, hash_select_triton, refuses
from tests.kernels import long_codes
from tests.ops.backends import every_case
from tests.triton.lowering import lower


def assert_equal(got, arguments, static) -> None:
    """What the kernels gave is the reference's, bit for bit."""
    want = jax.jit(functools.partial(OPERATION.backend("xla").run, **static))(*arguments)
    np.testing.assert_array_equal(got, want)


@every_case(OPERATION)
def test_equals_the_reference_in_the_interpreter(case, interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    monkeypatch.setattr(module, "multiprocessors", lambda: 2)  # several chunks to a program
    slots = case.arguments[1].shape[1]
    blocks = SelectBlocks(256, 64, 4) if slots < 1000 else SelectBlocks(2048, 512, 4)
    got = hash_select_triton(*case.arguments, **case.static, blocks=blocks)
    assert_equal(got, case.arguments, case.static)


@every_case(OPERATION)
def test_equals_the_reference_on_a_gpu(case):
    if reason := refuses_triton():
        pytest.skip(reason)
    got = jax.jit(functools.partial(hash_select_triton, **case.static))(*case.arguments)
    assert_equal(got, case.arguments, case.static)


def test_is_two_launches():
    q, codes = (jax.ShapeDtypeStruct((8, n, 32, 4), jnp.uint32) for n in (1, 32768))
    rows = jax.ShapeDtypeStruct((8, 32), jnp.int32)
    select = functools.partial(hash_select_triton, k=512, sinks=4, recent=64)
    text = lower(select, q, codes, rows, rows)
    assert text.count("stablehlo.custom_call @triton_kernel_call_ffi") == 2
    assert text.count("stablehlo.") == 2


def test_long_rows_equal_the_reference_on_a_gpu():
    """Of several chunks, each of several steps."""
    if reason := refuses_triton():
        pytest.skip(reason)
    arguments, static = long_codes(), {"k": 512, "sinks": 4, "recent": 64}
    got = jax.jit(functools.partial(hash_select_triton, **static))(*arguments)
    assert_equal(got, arguments, static)


def test_refuses_with_a_reason():
    codes, queries = (jnp.zeros(shape, jnp.uint32) for shape in ((1, 1, 1, 8), (1, 16, 1, 8)))
    assert refuses(codes, codes, 1) is None
    assert refuses(queries, codes, 1) == "scores to G T R = 4096 are over 4094"
    assert "k=1073741825 must be at most" in (refuses(codes, codes, 2**30 + 1) or "")
    assert "nothing to launch" in (refuses(codes, codes[:, :0], 1) or "")
