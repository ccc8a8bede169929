"""Attention in Triton: interpreted, lowered for CUDA, and on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import tuned
from jspec.gpu import refuses_gpu
from jspec.triton import attention as module
from jspec.triton.attention import ATTENTION, SCORED, Blocks, attention_triton
from jspec.triton.attention import EXACT as EXACT_BACKEND
from jspec.triton.call import refuses_triton
from tests.ops.attention.test_dense import (
    CASES,
    EXACT,
    LARGE,
    Case,
    Inputs,
    brute_force,
    expected,
    in_blocks,
    inputs,
    without_block,
)
from tests.triton.lowering import lower

# Two splits of several tiles each, where a case has more than 32 keys; and one.
SMALL = Blocks(splits=2, programs=1, bytes=1, rows=16, stages=2, warps=4)
WHOLE = Blocks(splits=1, programs=1, bytes=8192, rows=64, stages=3, warps=8)
NAMED = {case.name: case for case in CASES}
INTERPRETED = [
    NAMED["three-tokens-mqa"],
    NAMED["window-padding"],
    NAMED["window-of-one-holes"],
    NAMED["softcap-small-values"],
    NAMED["values-in-keys"],
    NAMED["latent-t1"],
    NAMED["latent-t4"],
    NAMED["latent-t9-holes"],
    NAMED["latent-window-softcap"],
    NAMED["latent-alone-holes"],
    NAMED["size-80"],
    NAMED["size-96-many-rows"],
    Case("many-tiles", 1, 4200, (4190,), heads=2, kv_heads=1, size=4),
    Case("window-past-many-tiles", 2, 300, (290, 100, 2), size=4, window=40),
    dataclasses.replace(NAMED["bfloat16"], dtype="float16", tokens=1),  # it has no bfloat16
    dataclasses.replace(NAMED["latent-bfloat16"], dtype="float16"),
    dataclasses.replace(NAMED["8-bits"], dtype="float16"),
    NAMED["8-bits-float32"],
]
by_name = pytest.mark.parametrize("case", INTERPRETED, ids=lambda case: case.name)


def run(x: Inputs, case: Case, blocks: Blocks | None, transform=lambda f: f, **more):
    """The kernels' output for these inputs, jitted where ``transform`` says so."""
    settings = case.settings | {"scale": case.scale or case.size**-0.5, "blocks": blocks} | more

    def call(q, k, v, positions, key_positions):
        return attention_triton(q, k, v, positions, key_positions=key_positions, **settings)

    arrays = [None if a is None else jnp.asarray(a) for a in dataclasses.astuple(x)]
    return transform(call)(*arrays)


def row(x: Inputs, index: int) -> Inputs:
    """That batch row alone."""
    return Inputs(*(None if a is None else a[index : index + 1] for a in dataclasses.astuple(x)))


@by_name
@pytest.mark.parametrize("blocks", [SMALL, WHOLE], ids=["splits", "one-split"])
def test_equals_the_definition_in_the_interpreter(case, blocks, interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    out, lse = run(inputs(case, junk=np.nan), case, blocks)
    expected_out, expected_lse = expected(case)
    tolerance = 1e-3 if case.dtype == "float16" else 2e-6
    assert out.dtype == case.dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), expected_out, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=2e-6)


IN_BLOCKS = [
    Case("blocks-of-128", 3, 400, (390, 131, 3), size=4),
    Case("blocks-window-padding", 2, 300, (290, 100), padded=(0, 1), size=4, window=140),
]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("blocks", [SMALL, WHOLE], ids=["splits", "one-split"])
@pytest.mark.parametrize("case", IN_BLOCKS, ids=lambda case: case.name)
def test_a_table_changes_no_bit_in_the_interpreter(case, blocks, exact, interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    x = inputs(case, junk=np.nan)
    paged, table = in_blocks(x, 128)
    # A row has as many slots in blocks as in one piece.
    x = with_room(x, table.shape[1] * 128 - case.slots)
    settings = {"exact": exact}
    pairs = zip(
        run(paged, case, blocks, table=jnp.asarray(table), **settings),
        run(x, case, blocks, **settings),
        strict=True,
    )
    for got, want in pairs:
        np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(want, expected(case)[1], rtol=1e-6, atol=2e-6)


def test_positions_without_a_block_are_not_read_in_the_interpreter(interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    case = IN_BLOCKS[0]
    x = inputs(case, junk=0.0)
    paged, table = in_blocks(x, 128)
    expected_out, expected_lse = brute_force(without_block(x, table, 128))
    out, lse = run(paged, case, SMALL, table=jnp.asarray(table))
    np.testing.assert_allclose(out, expected_out, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=2e-6)


def test_a_block_may_not_end_within_a_tile():
    arrays = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 1, 4, 64), (9, 64, 2, 64))
    )
    q, k = arrays
    table = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    reason = "blocks of 64 keys are no multiple of 128, the most of a tile"
    assert ATTENTION.supports(q, k, k, None, table=table) == reason
    assert SCORED.supports(q, k, k, None, table=table) == reason


@pytest.mark.parametrize("blocks", [SMALL, WHOLE], ids=["splits", "one-split"])
@pytest.mark.parametrize(
    ("where", "readers"), [((0, 32), [[0, 1, 1]]), ((1, 0), [[1, 0, 1], [1, 1, 1]])]
)
def test_nan_in_a_key_that_is_read_is_not_hidden(where, readers, blocks, interpreted, monkeypatch):
    """A part of NaN, the second one or the only one, is not taken for one that saw no key."""
    monkeypatch.setattr(module, "triton_call", interpreted)
    case = NAMED["two-tokens-mha"]
    x = inputs(case, junk=0.0)
    x.k[*where, 1, 0] = np.nan
    for got in run(x, case, blocks):
        got = got.reshape(2, 2, 3, -1)
        np.testing.assert_array_equal(np.argwhere(np.isnan(got).all(axis=-1)), readers)
        assert np.isfinite(got).sum() == got.size - len(readers) * got.shape[-1]


def test_keys_of_another_type_are_multiplied_in_float32(interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    case = NAMED["two-tokens-mha"]
    x = inputs(case, junk=0.0)
    x = dataclasses.replace(x, k=x.k.astype(np.float16), v=x.v.astype(np.float16))
    out, lse = run(x, case, SMALL)
    expected_out, expected_lse = brute_force(x)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, expected_out, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-6)


def test_a_row_alone_is_the_row_in_the_batch_in_the_interpreter(interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    case = NAMED["one-token"]
    x = inputs(case, junk=np.nan)
    together, alone = run(x, case, SMALL), run(row(x, 2), case, SMALL)
    for got, want in zip(alone, together, strict=True):
        np.testing.assert_array_equal(got[0], want[2])


def with_room(x: Inputs, slots: int) -> Inputs:
    """The same in a cache of ``slots`` more, which hold NaN."""
    assert x.v is not None
    room = np.full((x.k.shape[0], slots, *x.k.shape[2:]), np.nan, x.k.dtype)
    k, v = (np.concatenate([a, room], axis=1) for a in (x.k, x.v))
    return dataclasses.replace(x, k=k, v=v)


@pytest.mark.parametrize("window", [None, 40])
def test_more_capacity_changes_no_bit_in_the_interpreter(window, interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    case = Case("long", 2, 100, (100, 37), size=4, window=window)
    blocks, x = dataclasses.replace(SMALL, splits=16), inputs(case, junk=np.nan)
    pairs = zip(run(with_room(x, 400), case, blocks), run(x, case, blocks), strict=True)
    for got, want in pairs:
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("case", LARGE[:4], ids=lambda case: case.name)
def test_more_capacity_changes_no_bit_on_a_gpu(case):
    if reason := refuses_triton():
        pytest.skip(reason)
    x = inputs(case, junk=np.nan)
    pairs = zip(run(with_room(x, 30000), case, None), run(x, case, None), strict=True)
    for got, want in pairs:
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("case", [NAMED["window-padding"], *LARGE], ids=lambda case: case.name)
def test_a_row_alone_is_the_row_in_the_batch_on_a_gpu(case):
    if reason := refuses_triton():
        pytest.skip(reason)
    x = inputs(case, junk=np.nan)
    together = run(x, case, None, jax.jit)
    for index in range(len(case.lengths)):
        for got, want in zip(run(row(x, index), case, None, jax.jit), together, strict=True):
            np.testing.assert_array_equal(got[0], want[index])


@pytest.mark.parametrize("blocks", [SMALL, WHOLE], ids=["splits", "one-split"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_definition_on_a_gpu(case, blocks):
    if reason := refuses_triton():
        pytest.skip(reason)
    out, lse = run(inputs(case, junk=np.nan), case, blocks, jax.jit)
    expected_out, expected_lse = expected(case)
    tolerance = 2e-2 if case.dtype == "bfloat16" else EXACT
    np.testing.assert_allclose(np.asarray(out, np.float64), expected_out, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=EXACT)


def test_slots_past_two_to_the_31_elements_are_read_on_a_gpu():
    """Keys of 0 weigh the same: the output is the share of the values that are 1."""
    if reason := refuses_gpu((8, 0), "a cache of 16 GiB") or refuses_triton():
        pytest.skip(reason)
    slots, ones = 2**22, 3 * 2**20
    k = jnp.zeros((1, slots, 8, 128), jnp.bfloat16)
    v = k + (jnp.arange(slots) >= ones).astype(k.dtype)[None, :, None, None]
    q = jnp.ones((1, 1, 8, 128), k.dtype)
    case = Case("", 1, slots, (slots,), 8, 8, 128)
    out, lse = run(Inputs(q, k, v, np.array([[slots - 1]], np.int32), None), case, None, jax.jit)
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.full((1, 1, 8, 128), 0.25))
    np.testing.assert_allclose(lse, np.full((1, 1, 8), np.log(slots)), rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "dtype", "settings", "launches"),
    [
        ((8, 1, 32, 8, 128, 262144), "bfloat16", {}, 2),
        ((2, 10, 28, 4, 128, 1000), "float16", {"window": 64, "key_positions": True}, 2),
        ((2, 10, 32, 8, 128, 4096), "bfloat16", {"table": True}, 2),
        ((2, 3, 8, 8, 80, 16), "float32", {"softcap": 5.0}, 1),
        ((2, 4, 16, 1, 256, 9000), "bfloat16", {"value_size": 192}, 2),
        ((2, 4, 128, 1, 576, 9000), "bfloat16", {"value_size": 512}, 2),
    ],
    ids=["t1", "t10-ring", "t10-blocks", "float32-one-tile", "values-in-keys", "latent"],
)
def test_is_one_launch_and_one_that_merges(shape, dtype, settings, launches):
    batch, tokens, heads, kv_heads, size, slots = shape
    reference = {"window": None, "softcap": None, "value_size": None, "key_positions": False}
    reference |= {"table": False} | settings
    integer = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    cache = jax.ShapeDtypeStruct((batch, slots, kv_heads, size), dtype)
    key_positions = integer((batch, slots)) if reference.pop("key_positions") else None
    table = None
    if reference.pop("table"):
        cache = jax.ShapeDtypeStruct((99, 128, kv_heads, size), dtype)
        table = integer((batch, slots // 128))
    text = lower(
        lambda q, k, v, positions, key_positions, table: attention_triton(
            *(q, k, v, positions),
            key_positions=key_positions,
            table=table,
            scale=size**-0.5,
            **reference,
        ),
        jax.ShapeDtypeStruct((batch, tokens, heads, size), dtype),
        *(cache, None if reference["value_size"] else cache),
        *(integer((batch, tokens)), key_positions, table),
    )
    assert text.count("stablehlo.custom_call @triton_kernel_call_ffi") == launches
    assert text.count("stablehlo.") == launches


@pytest.mark.parametrize("operation", ["attention", "gathered_attention"])
def test_the_cut_follows_neither_from_the_batch_nor_from_the_capacity(operation):
    """A row's arithmetic must not depend on its neighbours, nor on room that it does not use."""
    for table in tuned.tables().values():
        for rule in table.blocks.get(operation, {}).get("triton", []):
            assert set(rule.up_to) <= {
                "tokens",
                "rows",
                "selected",
                "channels",
                "lists",
                "key_positions",
            }


@pytest.mark.parametrize(
    ("q", "k", "v", "dtype", "reason"),
    [
        ((2, 0, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8), "float32", "leave nothing to launch"),
        ((2, 1, 4, 8), (2, 9, 2, 8), (2, 9, 2, 0), "float32", "leave nothing to launch"),
        (
            (2, 1, 4, 8),
            (2, 9, 2, 8),
            (2, 9, 2, 8),
            "float8_e4m3fn",
            "q of float8_e4m3fn is none of bfloat16, float16, float32",
        ),
        (
            (2, 1, 4, 8),
            (2, 9, 2, 8),
            (2, 9, 2, 257),
            "bfloat16",
            "keys of size 8 and values of 257 are over 256",
        ),
        ((2, 1, 4, 576), (2, 9, 2, 576), None, "bfloat16", "keys of size 576"),
    ],
    ids=["no-tokens", "no-values", "float8", "values", "keys"],
)
def test_refuses_with_a_reason(q, k, v, dtype, reason):
    arrays = [None if x is None else jax.ShapeDtypeStruct(x, jnp.dtype(dtype)) for x in (q, k, v)]
    positions = jax.ShapeDtypeStruct(q[:2], jnp.int32)
    assert reason in ATTENTION.supports(*arrays, positions)


@pytest.mark.parametrize("backend", [ATTENTION, SCORED, EXACT_BACKEND], ids=["", "scored", "exact"])
@pytest.mark.parametrize(
    ("size", "value", "supported"),
    [
        (576, 512, True),
        (512, 512, True),
        (640, 512, True),
        (264, 256, True),
        (641, 512, False),
        (576, 448, False),
        (320, 192, False),
        (1024, 1024, False),
    ],
)
def test_takes_large_keys_that_hold_their_values(backend, size, value, supported, monkeypatch):
    """On Hopper alone, whose shared memory the tiles were cut for; never exactly or with scores."""
    monkeypatch.setattr(module, "refuses_triton", lambda keys: None)
    q, k = (jax.ShapeDtypeStruct((2, 1, heads, size), jnp.bfloat16) for heads in (4, 1))
    positions = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    supported &= backend is ATTENTION
    for capability in ((8, 0), (9, 0), (10, 0)):
        monkeypatch.setattr(module, "gpu_in_use", lambda name=capability: ("NVIDIA Toy", name))
        reason = backend.supports(q, k, None, positions, value_size=value)
        assert (reason is None) == (supported and capability == (9, 0))
        if reason is not None:
            assert f"keys of size {size}" in reason
            assert "over 256" in reason


def test_a_whole_value_of_a_large_key_is_a_tile():
    """Its sums take the registers of eight warps, whatever the table."""
    k = jax.ShapeDtypeStruct((1, 64, 1, 576), jnp.bfloat16)
    shape = module.tile_shape(k, None, 512)
    assert (shape["WIDTH"], shape["REST"], shape["VALUE_WIDTH"]) == (512, 64, 512)
    for name in ("h100", "h200"):
        for operation in ("attention", "gathered_attention"):
            for stored in (0, 1):
                sizes = {
                    "tokens": 1,
                    "rows": 128,
                    "channels": 576,
                    "lists": 1,
                    "key_positions": stored,
                }
                block = tuned.tables()[name].block(operation, "triton", sizes)
                assert block["warps"] == 8
                assert module.keys_of_tile(shape, k, None, block["bytes"]) == 64
