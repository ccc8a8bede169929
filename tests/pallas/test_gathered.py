"""Gathered attention on Mosaic GPU: interpreted, lowered for CUDA, and on a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.ops.attention.gathered import gathered_sizes
from jspec.pallas import gathered as module
from jspec.pallas.gathered import GATHERED, Blocks, blocks_for, cut_for, gathered_pallas
from jspec.pallas.matmul import swizzled
from jspec.pallas.mosaic import refuses_pallas
from tests.ops.attention.test_gathered import Case, Inputs, expected, inputs
from tests.pallas.mosaic import interpret, lower

SIZES = {"heads": 8, "kv_heads": 8, "size": 64, "dtype": "bfloat16"}
FEW = SIZES | {"heads": 4, "kv_heads": 2}
# Lists of several blocks and chunks, of none, of a part of a block; slots of -1 in all.
CASES = [
    Case("ragged", 1, 200, 90, 5, counts=(90, 0, 33), **SIZES | {"heads": 16}),
    Case("two-groups-t2", 2, 120, 40, 3, **SIZES | {"heads": 16, "kv_heads": 16}),
    Case("tail-alone", 3, 90, 5, 7, counts=(0, 0, 0), padded=(0, 3, 1), scale=0.7, **SIZES),
    Case("softcap-float16", 2, 120, 70, 0, softcap=0.8, **SIZES | {"dtype": "float16", "size": 80}),
    # Two chunks, of which the first has no block where one slot counts: the copies of a program's
    # items before must have been signalled by then.
    Case("per-head", 1, 700, 600, 5, counts=(600, 1, 133), per_head=True, **FEW),
    Case("per-head-short", 2, 90, 20, 3, counts=(20, 0, 3), per_head=True, **FEW | {"size": 96}),
    Case("single-t6", 6, 120, 70, 8, padded=(0, 6, 2), **FEW | {"heads": 9, "kv_heads": 3}),
]
LARGE = [
    *CASES,
    Case("llama-t1", 1, 6000, 3000, 10, None, False, 2, 32, 8, 128, dtype="bfloat16"),
    Case("llama-t2", 2, 3000, 1025, 12, (1025, 5, 0), False, 3, 32, 8, 128, dtype="bfloat16"),
    Case("mha-t1", 1, 2000, 512, 1, (512, 77, 300), False, 3, 32, 32, 128, dtype="bfloat16"),
    Case(
        "mha-per-head-t1", 1, 2000, 512, 1, (512, 77, 300), True, 3, 32, 32, 128, dtype="bfloat16"
    ),
    Case("llama-t10", 10, 3000, 1025, 12, (1025, 5, 0), False, 3, 32, 8, 128, dtype="bfloat16"),
    Case("gqa-per-head-t2", 2, 4000, 700, 9, None, True, 2, 32, 8, 64, dtype="float16"),
    Case("size-16", 1, 900, 300, 2, None, True, 2, 8, 4, 16, dtype="bfloat16"),
]
# Chunks of several blocks, more of them than programs; few buffers, which are used again.
SMALL = Blocks(keys=64, single_keys=64, buffers=6, chunks=4)
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def run(x: Inputs, case: Case, blocks: Blocks | None, execute=lambda f, *x: jax.jit(f)(*x)):
    settings = case.settings | {"scale": case.scale or case.size**-0.5, "blocks": blocks}
    arrays = [None if a is None else jnp.asarray(a) for a in dataclasses.astuple(x)[:-1]]

    def call(*arrays):
        return gathered_pallas(*arrays[:-1], counts=arrays[-1], **settings)

    return execute(call, *arrays)


def assert_right(got, case: Case):
    out, lse = got
    expected_out, expected_lse = expected(case)
    assert out.dtype == case.dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), expected_out, atol=2e-2)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    nothing = np.isneginf(expected_lse)
    assert not np.asarray(out, np.float64)[nothing].any()


@by_name
def test_equals_the_definition_when_interpreted(
    case, products_of_arrays, copies_of_arrays, monkeypatch
):
    if jax.default_backend() == "gpu":
        pytest.skip("stands in for a GPU, and there is one")
    monkeypatch.setattr(module, "multiprocessors", lambda: 1 if case.per_head else 3)
    assert_right(run(inputs(case, junk=np.nan), case, SMALL, interpret), case)


@pytest.mark.parametrize("case", [CASES[0], CASES[4]], ids=lambda case: case.name)
def test_a_row_alone_is_the_row_in_the_batch(
    case, products_of_arrays, copies_of_arrays, monkeypatch
):
    if jax.default_backend() == "gpu":
        pytest.skip("stands in for a GPU, and there is one")
    monkeypatch.setattr(module, "multiprocessors", lambda: 2)
    x = inputs(case, junk=np.nan)
    alone, together = (run(y, case, SMALL, interpret) for y in (x.row(2), x))
    for got, want in zip(alone, together, strict=True):
        np.testing.assert_array_equal(got[0], want[2])


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
@pytest.mark.parametrize("blocks", [None, SMALL], ids=["tuned", "small"])
def test_equals_the_definition_on_a_gpu(case, blocks):
    if reason := refuses_pallas():
        pytest.skip(reason)
    assert_right(run(inputs(case, junk=np.nan), case, blocks), case)


@pytest.mark.parametrize("case", LARGE[len(CASES) :], ids=lambda case: case.name)
def test_a_row_alone_is_the_row_in_the_batch_on_a_gpu(case):
    if reason := refuses_pallas():
        pytest.skip(reason)
    x = inputs(case, junk=np.nan)
    together = run(x, case, None)
    for row in range(case.batch):
        for got, want in zip(run(x.row(row), case, None), together, strict=True):
            np.testing.assert_array_equal(got[0], want[row])


def shapes(heads, kv_heads, tokens, lead, size=128, dtype="bfloat16", chosen=8192, slots=131072):
    """Arguments of the backend without counts."""
    q, cache = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape in ((8, tokens, heads, size), (8, slots, kv_heads, size))
    )
    rest = [(8, tokens), (8, *lead, chosen), (8, tokens), (8,)]
    return q, cache, cache, *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in rest)


@pytest.mark.parametrize(
    ("heads", "tokens", "lead", "size", "together"),
    [
        ((32, 8), 1, (), 128, 8),
        ((32, 8), 10, (), 128, 1),
        ((32, 32), 1, (32,), 128, 1),
        ((9, 3), 6, (), 64, 1),
        ((8, 2), 1, (2,), 80, 1),
        ((8, 2), 1, (), 96, 1),
    ],
)
def test_is_two_launches_and_no_copy_of_the_cache(heads, tokens, lead, size, together):
    settings = {"counts": None, "scale": 0.1, "softcap": None, "value_size": None}
    arguments = shapes(*heads, tokens, lead, size)
    q, k, _, _, selected, *_ = arguments
    blocks = blocks_for(gathered_sizes(q, k, None, None, selected))
    assert cut_for(q, k, selected, 8192, blocks).together == together
    text = lower(lambda *x: gathered_pallas(*x, **settings), *arguments)
    assert text.count("stablehlo.custom_call") == 2
    made = [line for line in text.splitlines() if "= stablehlo." in line]
    assert not [x for x in made if "131072x" in x and "custom_call" not in x]


@pytest.mark.parametrize(("size", "least"), [(16, 6), (64, 5), (128, 2)])
@pytest.mark.parametrize("tokens", [1, 3])
def test_buffers_that_fit_are_enough(size, least, tokens):
    """Blocks in flight are those of keys and values that hide the latency of memory."""
    q, k, _, _, selected, *_ = shapes(32, 8, tokens, (), size)
    blocks = Blocks(keys=128, single_keys=64, buffers=12, chunks=32)
    cut = cut_for(q, k, selected, 8192, blocks)
    assert cut.together == (8 if tokens == 1 else 1)
    assert min(cut.stages) >= (least if tokens == 1 else 5)
    assert cut.keys * sum(cut.stages) * size * 2 <= 200 * 1024


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": 17}, "T * G = 68 query rows of a KV head are over 64"),
        (
            {"slots": 2**21},
            "k (8, 2097152, 8, 128) has more elements a batch row than int32 counts",
        ),
        ({"size": 72}, "H=72 and H'=72 are not one multiple of 16 up to 128"),
        ({"size": 256}, "H=256 and H'=256"),
        ({"dtype": "float32"}, "q of float32, k and v of float32 are not all"),
        ({"chosen": 0}, "selected (8, 0) leaves nothing to gather"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_refuses_with_a_reason(change, reason):
    arguments = shapes(**{"heads": 32, "kv_heads": 8, "tokens": 1, "lead": ()} | change)
    assert GATHERED.supports(*arguments).startswith(reason)


def test_refuses_log_weights_and_values_in_keys():
    q, k, v, *rest = shapes(32, 8, 1, ())
    weights = jax.ShapeDtypeStruct((8, 1, 32, 8192), jnp.float32)
    assert (
        GATHERED.supports(q, k, v, *rest, log_weights=weights)
        == "log_weights are given; it adds none"
    )
    assert GATHERED.supports(q, k, None, *rest) == "the values are in the keys"


def gather_by_vector(x, index, out):
    out[...] = x[index[...]]


def gather_by_rows(x, index, out):
    def copy(rows, arrived):
        for i in range(8):
            plgpu.copy_gmem_to_smem(x.at[pl.ds(index[i], 1)], rows.at[pl.ds(i, 1)], arrived)

    pl.run_scoped(copy, swizzled((8, 128), jnp.bfloat16), plgpu.Barrier(num_arrivals=8))


@pytest.mark.parametrize(
    ("kernel", "error", "message"),
    [
        (gather_by_vector, NotImplementedError, "int_indexer_shape non-empty"),
        (gather_by_rows, ValueError, r"slice size \(1\) to be divisible by the tile size \(8\)"),
    ],
    ids=["vector", "rows"],
)
def test_mosaic_has_no_gather_of_rows(kernel, error, message):
    """Neither by a vector of indices, nor row by row into the layout that matmuls read: this is why
    `copy_rows` is inline code. When one of them lowers, it need not be."""
    call = plgpu.kernel(kernel, out_type=jax.ShapeDtypeStruct((8, 128), jnp.bfloat16))
    rows, index = (
        jax.ShapeDtypeStruct((512, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((8,), jnp.int32),
    )
    with pytest.raises(error, match=message):
        lower(call, rows, index)
