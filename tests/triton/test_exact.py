"""Exact products and attention in Triton: a row's bits follow from the row and its keys alone.

Interpreted, and on a GPU. That one machine program serves every size is read off what is launched.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import tuned
from jspec.triton import attention as attention_module
from jspec.triton import linear as linear_module
from jspec.triton.attention import attention_triton, scored_attention_triton
from jspec.triton.call import refuses_triton
from tests.ops.attention.test_dense import Case, Inputs, brute_force, inputs
from tests.triton import test_linear
from tests.triton.lowering import lower
from tests.triton.test_attention import SMALL, row, with_room
from tests.triton.test_linear import arguments, assert_product

ROWS = (1, 3, 17, 64, 65, 130)
# Of a cache that both splits of `SMALL` share, in tiles of 16 query rows.
CASES = [
    Case("mha", 9, 70, (70, 21), heads=2, kv_heads=2, size=4, softcap=5.0),
    Case("group-4-window", 6, 100, (100, 40), heads=4, kv_heads=1, size=4, window=40),
    Case("group-8", 3, 70, (70, 40), heads=8, kv_heads=1, size=4),
]
LARGE_CASES = [
    Case("qwen", 17, 9000, (9000, 4321, 17), 32, 8, 128, dtype="bfloat16"),
    Case("window", 17, 3000, (3000, 150), 64, 8, 64, dtype="bfloat16", window=128),
    Case("float32", 17, 1000, (1000, 300), 8, 2, 128),
]


@pytest.fixture
def in_interpreter(interpreted, monkeypatch):
    for module in (linear_module, attention_module):
        monkeypatch.setattr(module, "triton_call", interpreted)


@pytest.fixture
def on_a_gpu():
    if reason := refuses_triton():
        pytest.skip(reason)


def product(arrays, settings, first: int, rows: int):
    """The exact product of these rows alone."""
    x, kernel, bias, norm, add = arrays
    rows_alone = slice(first, first + rows)
    operands = (x[rows_alone], kernel, bias, norm, None if add is None else add[rows_alone])
    blocks = None if jax.default_backend() == "gpu" else test_linear.BLOCKS
    return np.asarray(linear_module._launch(*operands, **settings, blocks=blocks, exact=True))


def assert_rows_alone(case) -> None:
    """The first rows, and some from the middle, have the bits that they have among all."""
    arrays, settings = arguments(130, *case[1:])
    every = product(arrays, settings, 0, 130)
    assert_product(jnp.asarray(every), arrays, settings)
    for rows in ROWS:
        np.testing.assert_array_equal(product(arrays, settings, 0, rows), every[:rows])
    np.testing.assert_array_equal(product(arrays, settings, 63, 3), every[63:66])


@pytest.mark.parametrize("case", ["one-row", "gated", "transposed", "int8", "mxfp4"])
def test_rows_of_a_product_in_the_interpreter(case, in_interpreter):
    assert_rows_alone(test_linear.CASES[case])


@pytest.mark.parametrize("case", ["qkv", "gate-up", "down", "int8-gate-up", "mxfp4-gate-up", "odd"])
def test_rows_of_a_product_on_a_gpu(case, on_a_gpu):
    assert_rows_alone(test_linear.LARGE[case])


def attended(x: Inputs, case: Case, *, probe: bool = False) -> list[np.ndarray]:
    """Output and log-sum-exp of the exact attention; with ``probe``, of the one that scores."""
    settings = case.settings | {"scale": case.size**-0.5, "exact": True}
    settings["blocks"] = None if jax.default_backend() == "gpu" else SMALL
    *operands, stored = (None if a is None else jnp.asarray(a) for a in dataclasses.astuple(x))
    if probe:
        operands.append(operands[0][:, 0, :: case.heads // case.kv_heads])
    run = scored_attention_triton if probe else attention_triton
    return [np.asarray(a) for a in run(*operands, key_positions=stored, **settings)[:2]]


def last(x: Inputs, tokens: int) -> Inputs:
    """The same with the last so many of its tokens alone."""
    return dataclasses.replace(x, q=x.q[:, -tokens:], positions=x.positions[:, -tokens:])


def assert_tokens_alone(case: Case, capacity: int, tolerance: float) -> None:
    """Tokens have the same bits in passes of any length, alone, and in a larger cache."""
    x = inputs(case, junk=np.nan)
    every = attended(x, case)
    want = brute_force(inputs(case, junk=0.0), **case.settings)
    for got, of in zip(every, want, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), of, atol=tolerance, rtol=1e-5)
    for tokens in (1, case.tokens - 1):
        for got, of in zip(attended(last(x, tokens), case), every, strict=True):
            np.testing.assert_array_equal(got, of[:, -tokens:])
    for index in range(len(case.lengths)):
        alone = with_room(row(last(x, 2), index), capacity - case.slots)
        for got, of in zip(attended(alone, case, probe=index == 1), every, strict=True):
            np.testing.assert_array_equal(got[0], of[index, -2:])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_of_a_pass_in_the_interpreter(case, in_interpreter):
    assert_tokens_alone(case, 300, 2e-6)


@pytest.mark.parametrize("piece", [1, 4, 5])
def test_a_long_pass_goes_by_pieces_of_tokens(piece, in_interpreter, monkeypatch):
    case = CASES[1]
    x = inputs(case, junk=np.nan)
    every = attended(x, case)
    launched, right = [], attention_module._attended

    def counted(q, *rest, **settings):
        launched.append(q.shape[1])
        return right(q, *rest, **settings)

    monkeypatch.setattr(attention_module, "_attended", counted)
    parts = 4 * case.heads * (case.size + 1) * SMALL.splits  # bytes that a token leaves
    monkeypatch.setattr(attention_module, "PIECE_BYTES", parts * (piece + 1) - 1)
    monkeypatch.setattr(attention_module, "PIECE", 1)
    with jax.disable_jit():
        result = attended(x, case)
    assert launched == {1: [1] * 6, 4: [4, 2], 5: [5, 1]}[piece]
    for got, of in zip(result, every, strict=True):
        np.testing.assert_array_equal(got, of)


@pytest.mark.parametrize("case", LARGE_CASES, ids=lambda case: case.name)
def test_tokens_of_a_pass_on_a_gpu(case, on_a_gpu):
    assert_tokens_alone(case, 120_000, 2e-2)


def test_a_long_pass_is_many_tiles_on_a_gpu(on_a_gpu):
    """A prompt's pass against its last token alone."""
    case = Case("prompt", 2000, 2100, (2100,), 32, 8, 128, dtype="bfloat16")
    x = inputs(case, junk=np.nan)
    for got, of in zip(attended(last(x, 1), case), attended(x, case), strict=True):
        np.testing.assert_array_equal(got[0, -1], of[0, -1])


@pytest.fixture
def launches(monkeypatch):
    """What is launched, without what it is given: the kernel, its constants and its warps."""
    results = []

    def call(kernel, *arrays, out, programs, **settings):
        kinds = [x.dtype for x in (*arrays, *out)]
        results.append((kernel.fn.__name__, *kinds, *sorted(settings.items(), key=str)))
        return tuple(jnp.zeros(x.shape, x.dtype) for x in out)

    for module in (linear_module, attention_module):
        monkeypatch.setattr(module, "triton_call", call)
    return results


def test_one_machine_program_serves_every_size(launches):
    pytest.importorskip("triton")
    for rows in ROWS:
        arrays, settings = arguments(rows, *test_linear.CASES["half"][1:])
        linear_module._launch(*arrays, **settings, blocks=None, exact=True)
    assert len(launches) == len(ROWS)
    assert len(set(launches)) == 1
    launches.clear()
    for batch, tokens, slots in ((1, 1, 16), (1, 1, 256), (3, 17, 4096), (1, 300, 2**20)):
        q, positions = jnp.zeros((batch, tokens, 4, 8)), jnp.zeros((batch, tokens), jnp.int32)
        kv = jnp.zeros((batch, slots, 2, 8), jnp.bfloat16)
        settings = dict.fromkeys(("key_positions", "window", "softcap", "value_size"))
        attention_triton(q, kv, kv, positions, scale=1.0, **settings, exact=True)
    assert len(launches) == 8
    assert len(set(launches)) == 2


@pytest.mark.parametrize("case", ["gate-up", "mxfp4-gate-up"])
def test_a_product_lowers_for_cuda(case):
    arrays, settings = arguments(200, *test_linear.LARGE[case][1:], drawn=False)
    run = lambda *arrays: linear_module.linear_triton(*arrays, **settings, exact=True)  # noqa: E731
    assert lower(run, *arrays).count("stablehlo.custom_call @triton_kernel_call_ffi") == 1


def test_attention_lowers_for_cuda():
    def shape_of(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype)

    settings = dict.fromkeys(("key_positions", "window", "softcap", "value_size"))
    kv = shape_of(2, 4096, 8, 128)
    for tokens, launches in ((32, 2), (33, 4)):  # in one piece, and in a loop over pieces and rest
        text = lower(
            lambda *arrays: attention_triton(*arrays, scale=0.1, exact=True, **settings),
            *(shape_of(2, tokens, 32, 128), kv, kv, shape_of(2, tokens, dtype="int32")),
        )
        assert text.count("stablehlo.custom_call @triton_kernel_call_ffi") == launches


def test_the_cut_follows_from_the_weights_and_the_heads_alone():
    for table in tuned.tables().values():
        for operation in ("linear", "attention"):
            for rule in table.blocks.get(operation, {}).get("exact", []):
                assert set(rule.up_to) <= {"inputs", "outputs", "bits"}
