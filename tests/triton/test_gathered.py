"""Gathered attention in Triton: interpreted, lowered for CUDA, and on a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.triton import gathered
from jspec.triton.call import refuses_triton
from jspec.triton.gathered import GATHERED, Blocks, cut_of, gathered_triton, heads_together
from tests.ops.attention.test_dense import EXACT
from tests.ops.attention.test_gathered import (
    CASES,
    LARGE,
    SHARED,
    Case,
    Inputs,
    expected,
    inputs,
    of_one_row,
)
from tests.triton.lowering import lower

# Several chunks, a head a program; and one chunk for as many heads as fit.
SMALL = Blocks(chunk=16, programs=1, listed=64, bytes=1, rows=16, heads=1, stages=2, warps=4)
WHOLE = Blocks(chunk=4096, programs=1, listed=0, bytes=8192, rows=64, heads=16, stages=5, warps=4)
BOTH = dataclasses.replace(SMALL, heads=2, chunk=8)
cuts = pytest.mark.parametrize("blocks", [SMALL, WHOLE, BOTH], ids=["chunks", "one", "two-heads"])
INTERPRETED = [
    dataclasses.replace(case, dtype="float16") if case.dtype == "bfloat16" else case
    for case in CASES
]


def run(x: Inputs, case: Case, blocks: Blocks | None, transform=lambda f: f):
    """The kernels' output for these inputs, jitted where ``transform`` says so."""
    settings = case.settings | {"scale": case.scale or case.size**-0.5, "blocks": blocks}

    def call(*arrays):
        return gathered_triton(*arrays[:-2], counts=arrays[-2], log_weights=arrays[-1], **settings)

    arrays = [None if a is None else jnp.asarray(a) for a in dataclasses.astuple(x)]
    return transform(call)(*arrays)


def assert_right(got, case: Case, dtype_tolerance: float):
    out, lse = got
    expected_out, expected_lse = expected(case)
    tolerance = EXACT if case.dtype == "float32" else dtype_tolerance
    assert out.dtype == case.dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), expected_out, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=EXACT)


@cuts
@pytest.mark.parametrize("case", INTERPRETED, ids=lambda case: case.name)
def test_equals_the_definition_in_the_interpreter(case, blocks, interpreted, monkeypatch):
    monkeypatch.setattr(gathered, "triton_call", interpreted)
    monkeypatch.setattr(gathered, "MERGED_PARTS", 2)
    assert_right(run(inputs(case, junk=np.nan), case, blocks), case, 1e-3)


@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.name)
def test_rows_may_read_the_slots_of_one_in_the_interpreter(case, interpreted, monkeypatch):
    monkeypatch.setattr(gathered, "triton_call", interpreted)
    assert_right(run(of_one_row(inputs(case, junk=np.nan)), case, BOTH), case, 1e-3)


@pytest.mark.parametrize("case", CASES[1:4], ids=lambda case: case.name)
def test_a_row_alone_is_the_row_in_the_batch(case, interpreted, monkeypatch):
    monkeypatch.setattr(gathered, "triton_call", interpreted)
    x = inputs(case, junk=np.nan)
    alone, together = run(x.row(1), case, BOTH), run(x, case, BOTH)
    for got, want in zip(alone, together, strict=True):
        np.testing.assert_array_equal(got[0], want[1])


def test_chunks_share_what_counts(interpreted, monkeypatch):
    """A list of which only the first fourth counts keeps as many programs busy as a full one."""
    parts = []

    def call(kernel, *arrays, **settings):
        parts.append(interpreted(kernel, *arrays, **settings))
        return parts[-1]

    monkeypatch.setattr(gathered, "triton_call", call)
    case = Case("counted", 1, 320, 256, 0, counts=(64, 256, 100))
    run(inputs(case, junk=np.nan), case, dataclasses.replace(SMALL, chunk=64))
    lse = np.asarray(parts[0][1])
    assert lse.shape[2] == 4
    assert np.isfinite(lse).all()


@cuts
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_definition_on_a_gpu(case, blocks):
    if reason := refuses_triton():
        pytest.skip(reason)
    assert_right(run(inputs(case, junk=np.nan), case, blocks, jax.jit), case, 2e-2)


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_a_row_alone_is_the_row_in_the_batch_on_a_gpu(case):
    if reason := refuses_triton():
        pytest.skip(reason)
    x = inputs(case, junk=np.nan)
    together = run(x, case, None, jax.jit)
    for row in range(case.batch):
        for got, want in zip(run(x.row(row), case, None, jax.jit), together, strict=True):
            np.testing.assert_array_equal(got[0], want[row])


@pytest.mark.parametrize(
    ("kv_heads", "rows", "max_heads", "together"),
    [
        (8, 4, 16, 4),
        (8, 1, 16, 8),
        (32, 1, 16, 16),
        (32, 1, 2, 2),
        (8, 10, 16, 1),
        (6, 2, 16, 2),
        (3, 1, 16, 1),
        (8, 40, 16, 1),
    ],
)
def test_heads_share_a_program_while_the_least_tile_holds_them(kv_heads, rows, max_heads, together):
    assert heads_together(kv_heads, rows, max_heads) == together


@pytest.mark.parametrize(
    ("count", "tail", "step", "least", "chunks", "listed"),
    [
        (8192, 1, 16, 16, 16, 1024),  # 513 steps: one of the chunks has 33 of them
        (2048, 1, 16, 16, 16, 256),
        (512, 1, 16, 16, 8, 128),  # no more chunks than of four steps each
        (512, 1, 64, 1, 1, 1024),
        (65536, 10, 64, 4, 128, 1024),
        (65536, 0, 2048, 1, 32, 0),  # more than a program keeps
    ],
)
def test_chunks_follow_from_the_selection_and_the_heads(count, tail, step, least, chunks, listed):
    cut = cut_of(count, tail, step, least, dataclasses.replace(SMALL, chunk=512, listed=1024))
    assert (cut["CHUNKS"], cut["LISTED"]) == (chunks, listed)
    assert (cut["STEPS"] - cut["TAIL_STEPS"]) * step >= count
    assert cut["TAIL_STEPS"] * step >= tail


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tokens", "lead", "chosen", "weighted", "latent", "launches"),
    [
        (32, 8, 1, (), 8192, False, False, 2),
        (32, 8, 10, (), 8192, True, False, 2),
        (32, 32, 1, (32,), 512, True, False, 1),
        (128, 1, 4, (), 2048, False, True, 2),
    ],
    ids=["shared-t1", "shared-t10-weighted", "per-head-one-chunk-weighted", "latent-t4"],
)
def test_is_one_launch_and_one_that_merges(
    heads, kv_heads, tokens, lead, chosen, weighted, latent, launches
):
    shapes = [(8, tokens), (8, *lead, chosen), (8, tokens + 9), (8,)]
    size = 576 if latent else 128
    q, cache = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((8, tokens, heads, size), (8, 9000, kv_heads, size))
    )
    settings = {"scale": 0.1, "softcap": None, "value_size": 512 if latent else None}
    text = lower(
        lambda *x: gathered_triton(*x[:-2], counts=x[-2], log_weights=x[-1], **settings),
        *(q, cache, None if latent else cache),
        *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in [*shapes, (8, *lead)]),
        jax.ShapeDtypeStruct((8, tokens, heads, chosen), jnp.float32) if weighted else None,
    )
    assert text.count("stablehlo.custom_call @triton_kernel_call_ffi") == launches
    assert text.count("stablehlo.") == launches


def test_refuses_with_a_reason():
    def refusal(chosen: int, dtype: str) -> str:
        arrays = [jax.ShapeDtypeStruct((2, 9, 2, 8), dtype)] * 3
        rest = [(2, 9), (2, chosen), (2, 3), (2,)]
        return GATHERED.supports(*arrays, *(jax.ShapeDtypeStruct(x, jnp.int32) for x in rest))

    assert refusal(0, "float32") == "selected (2, 0) leaves nothing to gather"
    assert refusal(4, "int8") == "q of int8 is none of bfloat16, float16, float32"
