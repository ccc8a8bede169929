"""Attention on Mosaic GPU: interpreted, lowered for CUDA, and on a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.attention.dense import attention
from jspec.pallas.attention import ATTENTION, attention_pallas, shape_of
from jspec.pallas.attention_cut import Blocks, Chunks, blocks_for
from jspec.pallas.mosaic import refuses_pallas
from tests.ops.attention.test_dense import Case, brute_force, inputs
from tests.pallas.mosaic import interpret, lower

HALF = {"dtype": "bfloat16", "heads": 2, "kv_heads": 1, "size": 64}
SMALL = [
    # The last block begins before the end of the one before it; a row of one key, one of none.
    Case("ragged", 1, 152, (152, 1, 97), **HALF),
    # Two warpgroups, each of some of the rows.
    Case("padding-over-chunks", 40, 256, (256, 140, 40), padded=(0, 7, 40), **HALF),
    Case("window", 4, 200, (200, 70), window=66, **HALF | {"size": 128}),
    # Two warpgroups, each of half of the channels.
    Case(
        "scale-float16", 2, 128, (128, 100), scale=0.5, **HALF | {"dtype": "float16", "size": 160}
    ),
    Case("two-tiles", 15, 192, (190, 70), padded=(0, 9), **HALF | {"heads": 10}),
]
LARGE = [
    *SMALL,
    Case("one-token", 1, 5000, (5000, 1, 4097), dtype="bfloat16", heads=8, kv_heads=2, size=128),
    Case("full-tile", 8, 1504, (1500, 800), dtype="bfloat16", heads=16, kv_heads=2, size=128),
    Case("wide-window", 3, 3000, (3000, 9), window=1024, **HALF),
    Case("two-groups", 12, 704, (700, 350, 12), dtype="bfloat16", heads=8, kv_heads=1, size=64),
    Case("tiles", 90, 504, (500, 401, 90), padded=(0, 7, 90), **HALF | {"heads": 8, "kv_heads": 2}),
    Case("size-80", 2, 904, (904, 333), **HALF | {"size": 80}),
    Case("size-96-window", 2, 904, (904, 333), window=100, **HALF | {"size": 96}),
    Case("size-256-softcap", 5, 904, (900, 333), softcap=20.0, **HALF | {"size": 256}),
    Case("size-192", 2, 904, (904, 333), **HALF | {"size": 192}),
    Case("size-16", 2, 904, (904, 333), **HALF | {"size": 16}),
]


# Chunks of one and two blocks, or one chunk; fewer programs than chunks, fewer stages than blocks.
def cut(case: Case) -> Blocks:
    chunks = Chunks(((64, 64), (case.slots, 128)) if case.slots > 128 else ((128, 128),))
    return Blocks(keys=64, stages=(3, 2), sides=2, chunks=chunks, programs=2, gang=1)


def settings(case: Case) -> dict:
    scale = case.size**-0.5 if case.scale is None else case.scale
    settings = {"scale": scale, "window": case.window, "softcap": case.softcap}
    return {"key_positions": None, "value_size": None, **settings}


def arrays(case: Case):
    x = inputs(case, junk=np.nan)
    return x, tuple(map(jnp.asarray, (x.q, x.k, x.v, x.positions)))


def assert_attends(got, x, case: Case):
    out, lse = got
    expected_out, expected_lse = brute_force(x, **case.settings)
    assert out.dtype == case.dtype
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(out, np.float64), expected_out, atol=2e-2)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    padding = x.positions < 0
    assert not np.asarray(out, np.float64)[padding].any()
    assert (np.asarray(lse)[padding] == -np.inf).all()


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_equals_the_definition_when_interpreted(case, products_of_arrays):
    if jax.default_backend() == "gpu":
        pytest.skip("stands in for a GPU, and there is one")
    x, operands = arrays(case)
    got = interpret(lambda *x: attention_pallas(*x, **settings(case), blocks=cut(case)), *operands)
    assert_attends(got, x, case)


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_equals_the_definition_on_a_gpu(case):
    if reason := refuses_pallas():
        pytest.skip(reason)
    x, operands = arrays(case)
    # As it is cut for the shape, and in chunks of one or two blocks for few programs.
    best = blocks_for(shape_of(operands[0], operands[1]))
    few = Chunks(((2 * best.keys, best.keys), (case.slots, 2 * best.keys)))
    for blocks in (None, dataclasses.replace(best, chunks=few, programs=2, gang=1)):
        call = jax.jit(lambda *x, b=blocks: attention_pallas(*x, **settings(case), blocks=b))
        assert_attends(call(*operands), x, case)


def test_a_row_does_not_depend_on_its_neighbours_or_the_capacity_on_a_gpu():
    if reason := refuses_pallas():
        pytest.skip(reason)
    case = next(case for case in LARGE if case.name == "one-token")
    _, (q, k, v, positions) = arrays(case)
    call = jax.jit(lambda *x: attention_pallas(*x, **settings(case)))
    together = call(q, k, v, positions)
    more = [jnp.pad(x, ((0, 0), (0, 9000), (0, 0), (0, 0))) for x in (k, v)]
    longer = call(q, *more, positions)
    for row in range(3):
        alone = call(*(x[row : row + 1] for x in (q, k, v, positions)))
        for one, all_of_them, in_more in zip(alone, together, longer, strict=True):
            np.testing.assert_array_equal(one[0], all_of_them[row])
            np.testing.assert_array_equal(one[0], in_more[row])


@pytest.mark.parametrize("size", [64, 128])
def test_the_cache_is_read_where_it_lies(size):
    """One kernel, and nothing of a cache's size besides the cache."""
    q = jax.ShapeDtypeStruct((2, 3, 8, size), jnp.bfloat16)
    cache = jax.ShapeDtypeStruct((2, 8192, 2, size), jnp.bfloat16)
    positions = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    case = Case("", 3, 8192, (1, 1), size=size)
    text = lower(lambda *x: attention_pallas(*x, **settings(case)), q, cache, cache, positions)
    assert text.count("stablehlo.custom_call") == 2
    assert not [
        line
        for line in text.splitlines()
        if "8192x2x" in line and "= stablehlo." in line and "custom_call" not in line
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"size": 72}, "H=72 and H'=72 are not one multiple of 16 up to 128, or of 32"),
        ({"size": 144}, "H=144"),
        ({"size": 288}, "H=288"),
        ({"dtype": "float32"}, "q of float32, k and v of float32 are not all bfloat16 or float16"),
        ({"slots": 56}, "over S=56 is too small"),
        ({"slots": 150}, "S=150 is not a multiple of 8; round the capacity up"),
        ({"holes": True}, "key_positions are given"),
    ],
    ids=["size", "half", "large", "dtype", "small", "uneven", "positions"],
)
def test_refuses_with_a_reason(change, reason):
    shape = {"size": 64, "dtype": "bfloat16", "tokens": 1, "slots": 640} | change
    q = jax.ShapeDtypeStruct((2, shape["tokens"], 4, shape["size"]), shape["dtype"])
    cache = jax.ShapeDtypeStruct((2, shape["slots"], 2, shape["size"]), shape["dtype"])
    where = jax.ShapeDtypeStruct(cache.shape[:2], jnp.int32) if change.get("holes") else None
    with pytest.raises(Exception, match=reason):
        jax.eval_shape(
            lambda *x: attention(*x, key_positions=where, implementation="pallas"),
            q,
            cache,
            cache,
            jax.ShapeDtypeStruct(q.shape[:2], jnp.int32),
        )
    assert ATTENTION.name == "pallas"


def test_layers_of_a_program_share_their_kernels():
    """XLA compiles what is lowered: two kernels, and not two for each layer."""
    q = jax.ShapeDtypeStruct((2, 3, 8, 64), jnp.bfloat16)
    cache = jax.ShapeDtypeStruct((2, 8192, 2, 64), jnp.bfloat16)
    positions = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    case = Case("", 3, 8192, (1, 1), size=64)

    def layers(q, k, v, positions):
        for _ in range(3):
            q, _ = attention_pallas(q, k, v, positions, **settings(case))
        return q

    text = lower(layers, q, cache, cache, positions)
    assert text.count("stablehlo.custom_call") == 2
