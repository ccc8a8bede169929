"""Selection by hash codes on Mosaic GPU: interpreted, lowered for CUDA, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.hash_selection import HASH_SELECT as OPERATION
from jspec.pallas import hash_select as module
from jspec.pallas.hash_select import SelectBlocks, hash_select_pallas, refuses
from jspec.pallas.inline import INTERPRETED
from jspec.pallas.mosaic import refuses_pallas
from tests.kernels import long_codes
from tests.ops.backends import every_case
from tests.pallas.mosaic import interpret, lower

interpreted_select = functools.partial(hash_select_pallas, inline=INTERPRETED)


def is_supported(case) -> bool:
    q_codes, k_codes, *_ = case.build()
    return refuses(q_codes, k_codes, case.static["k"]) is None


over_cases = every_case(OPERATION, is_supported)


def assert_equal(got, arguments, static) -> None:
    """What the kernels gave is the reference's, bit for bit."""
    want = jax.jit(functools.partial(OPERATION.backend("xla").run, **static))(*arguments)
    np.testing.assert_array_equal(got, want)


@over_cases
def test_equals_the_reference_when_interpreted(case, monkeypatch):
    monkeypatch.setattr(module, "multiprocessors", lambda: 2)  # long chunks, several to a program
    got = interpret(functools.partial(interpreted_select, **case.static), *case.arguments)
    assert_equal(got, case.arguments, case.static)


def test_programs_that_share_a_row():
    case = next(case for case in OPERATION.cases() if case.name == "grouped")
    got = interpret(functools.partial(interpreted_select, **case.static), *case.arguments)
    assert_equal(got, case.arguments, case.static)


@over_cases
def test_equals_the_reference_on_a_gpu(case):
    if reason := refuses_pallas():
        pytest.skip(reason)
    got = jax.jit(functools.partial(hash_select_pallas, **case.static))(*case.arguments)
    assert_equal(got, case.arguments, case.static)


def test_blocks_of_any_size_give_the_same_on_a_gpu():
    if reason := refuses_pallas():
        pytest.skip(reason)
    case = next(case for case in OPERATION.cases() if case.name == "long")
    for blocks in (SelectBlocks(1024), SelectBlocks(8192)):
        select = functools.partial(hash_select_pallas, **case.static, blocks=blocks)
        assert_equal(jax.jit(select)(*case.arguments), case.arguments, case.static)


@over_cases
def test_lowers(case):
    select = functools.partial(hash_select_pallas, **case.static)
    assert lower(select, *case.arguments).count("@mosaic_gpu_v2") == 2


@pytest.mark.parametrize("heads", [2, pytest.param(32, marks=pytest.mark.slow)])
def test_is_two_launches(heads):
    q, codes = (
        jax.ShapeDtypeStruct((8, n, h, 4), jnp.uint32) for n, h in ((1, 32), (32768, heads))
    )
    rows = jax.ShapeDtypeStruct((8, heads), jnp.int32)
    select = functools.partial(hash_select_pallas, k=512, sinks=4, recent=64)
    text = lower(select, q, codes, rows, rows)
    assert text.count("stablehlo.custom_call") == 2
    assert text.count("stablehlo.") == 2 + text.count("stablehlo.reshape")


def test_long_rows_equal_the_reference_on_a_gpu():
    """Of several chunks, each of several steps."""
    if reason := refuses_pallas():
        pytest.skip(reason)
    arguments, static = long_codes(), {"k": 512, "sinks": 4, "recent": 64}
    got = jax.jit(functools.partial(hash_select_pallas, **static))(*arguments)
    assert_equal(got, arguments, static)


def test_refuses_with_a_reason():
    codes, queries = (jnp.zeros(shape, jnp.uint32) for shape in ((1, 1, 4, 8), (1, 64, 16, 8)))
    assert refuses(codes, codes, 1) is None
    assert refuses(queries, codes, 1) == "scores to G T R = 65536 are over 4094"
    assert "k=1073741825 must be at most" in (refuses(codes, codes, 2**30 + 1) or "")
