"""Matmuls of a few rows: the CUDA kernels on a GPU, one of them emulated, their twin on a CPU."""

import ctypes
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cuda_ffi import library
from jspec.cuda_ffi.linear import linear_chain_cuda, linear_cuda, refuses
from jspec.ops.linear_chain import chain_xla, linear_chain
from jspec.ops.norm import RMS
from jspec.ops.quantized import MXFP4
from tests.cuda_ffi.emulated import emulated
from tests.ops.test_linear_chain import a_layer, in_double_precision, summed
from tests.ops.test_quantized import numbers
from tests.parameters import default_run
from tests.triton.test_linear import arguments, in_double

CASES = {
    "qkv": (1, 384, 1280, "bfloat16", "norm"),
    "biased": (3, 96, 24, "bfloat16", "norm", "bias"),
    "gate-up": (10, 384, 1024, "bfloat16", "norm", "gated"),
    "gated-biased": (8, 32, 40, "bfloat16", "gated", "bias"),
    "down": (5, 1024, 384, "bfloat16", "add"),
    "added-biased": (16, 992, 72, "bfloat16", "add", "bias"),
    "head": (9, 384, 260, "bfloat16", "transposed", "norm", "wide"),
    "odd-head": (2, 160, 7, "bfloat16", "transposed"),
    "int8-qkv": (1, 4096, 384, "bfloat16", "norm", "bias", "int8"),
    "int8-gate-up": (4, 1040, 200, "bfloat16", "norm", "gated", "int8"),
    "int8-down": (16, 3072, 72, "bfloat16", "add", "int8"),
    "int8-odd": (9, 16, 7, "bfloat16", "wide", "int8"),
    "int8-24-rows": (24, 2064, 4200, "bfloat16", "norm", "int8"),
    "mxfp4-qkv": (1, 4096, 384, "bfloat16", "norm", "bias", "mxfp4"),
    "mxfp4-gate-up": (4, 1056, 200, "bfloat16", "norm", "gated", "mxfp4"),
    "mxfp4-down": (16, 3072, 72, "bfloat16", "add", "mxfp4"),
    "mxfp4-odd": (9, 32, 7, "bfloat16", "wide", "mxfp4"),
    "mxfp4-24-rows": (24, 2080, 1064, "bfloat16", "norm", "mxfp4"),
    "large-qkv": (1, 4096, 1280, "bfloat16", "norm", "bias"),
    "large-gate-up": (4, 1056, 9000, "bfloat16", "norm", "gated"),
    "large-down": (10, 3072, 72, "bfloat16", "add", "wide"),
    "many-rows": (24, 96, 4328, "bfloat16", "norm", "add"),
}


# Of more rows, and of few with many inputs: tiles of rows and of columns that are whole or not,
# inputs that steps of 64 do not divide, and more of them than a block has room for. The emulator
# has 3 multiprocessors: it splits the inputs of a single tile, of 32 rows or of 128, among two,
# three or four blocks, and a block of several tiles adds up the parts of an exact matmul alone.
TILES = {
    "two-blocks": (25, 96, 24, "bfloat16", "norm", "bias"),
    "three-blocks": (28, 160, 48, "bfloat16", "norm", "gated", "add", "wide"),
    "four-blocks": (32, 1120, 64, "bfloat16", "norm", "add"),
    "qkv": (96, 576, 72, "bfloat16", "norm", "wide"),
    "gate-up": (97, 160, 200, "bfloat16", "norm", "gated", "bias"),
    "down": (128, 1056, 64, "bfloat16", "add"),
    "gated-added": (33, 64, 8, "bfloat16", "gated", "add", "wide"),
    "biased": (64, 1600, 136, "bfloat16", "add", "bias", "norm"),
    "many-inputs": (128, 4096, 24, "bfloat16", "norm", "add"),
    "few-rows": (12, 1536, 72, "bfloat16", "add"),
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The CUDA source on a CPU: what calls it, and its library."""
    if jax.default_backend() != "cpu":
        pytest.skip("a GPU runs the kernel itself")
    path = tmp_path_factory.mktemp("emulated") / "linear.so"
    return emulated("linear", path), ctypes.CDLL(str(path))


@pytest.fixture(scope="module")
def emulator(compiled):
    call, functions = compiled
    functions.jspec_open_sums(4)
    return call


@pytest.fixture
def use_tile(compiled):
    """Sets the rows of the emulated tiles, and whether blocks split the inputs of each."""
    use = compiled[1].jspec_use_tile
    use.argtypes = [ctypes.c_int, ctypes.c_bool]
    yield use
    use(0, False)


@pytest.fixture(params=["library", pytest.param("emulated", marks=pytest.mark.slow)])
def kernel(request, monkeypatch):
    """What the backend calls: its library, or the CUDA source on a CPU."""
    if request.param == "emulated":
        monkeypatch.setattr(library, "call", request.getfixturevalue("emulator"))


def run_or_skip(arrays, settings, *, exact=False):
    if reason := library.refusal("linear"):
        pytest.skip(reason)
    assert refuses(*arrays, **settings, exact=exact) is None
    return jax.jit(lambda *arrays: linear_cuda(*arrays, **settings, exact=exact))(*arrays)


def assert_equals_the_definition(*case):
    arrays, settings = arguments(*case)
    got = run_or_skip(arrays, settings)
    assert got.dtype == settings["dtype"]
    want = in_double(arrays, settings)
    tolerance = 1e-2 if got.dtype == jnp.float32 else 3e-2
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance)


# The others have sizes of real models.
SMALL = ("qkv", "biased", "gate-up", "gated-biased", "down", "added-biased", "head", "odd-head")
SMALL += ("int8-qkv", "int8-gate-up", "int8-down", "int8-odd", "mxfp4-odd", "mxfp4-gate-up")


@pytest.mark.parametrize("case", default_run(list(CASES), *SMALL, "many-rows"))
def test_equals_the_definition(case):
    assert_equals_the_definition(*CASES[case])


@pytest.mark.parametrize("case", TILES)
def test_tiles_equal_the_definition(case, kernel):
    assert_equals_the_definition(*TILES[case])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_chain_is_summed_over_devices(ranks, emulator, monkeypatch):
    """The kernels of matmuls and of sums, in one call of each device."""
    layer = a_layer(ranks)
    monkeypatch.setattr(library, "call", emulator)
    results = summed(ranks, lambda x, ops: linear_chain(x, ops, implementation="cuda"), layer)
    for got, right in zip(results, in_double_precision(layer), strict=True):
        np.testing.assert_array_equal(got, np.repeat(got[:1], ranks, axis=0))
        np.testing.assert_allclose(got[0], right, rtol=3e-2, atol=5e-2)


def rows_of(arrays, rows: slice):
    """The arguments for some rows alone."""
    x, kernel, bias, norm, add = arrays
    return np.asarray(x)[rows], kernel, bias, norm, None if add is None else np.asarray(add)[rows]


@pytest.mark.parametrize("case", TILES)
def test_a_row_of_an_exact_matmul_is_that_row_alone(case, kernel):
    """Alone, among few, at other places of a tile, and with more rows than another kernel takes."""
    arrays, settings = arguments(130, *TILES[case][1:])
    settings["dtype"] = jnp.dtype("float32")  # whose bits follow from the order of sums
    every = np.asarray(run_or_skip(arrays, settings, exact=True))
    np.testing.assert_allclose(
        np.asarray(every, np.float64), in_double(arrays, settings), rtol=3e-2, atol=3e-2
    )
    for first, count in ((0, 1), (37, 1), (29, 8), (0, 96)):
        rows = slice(first, first + count)
        alone = run_or_skip(rows_of(arrays, rows), settings, exact=True)
        np.testing.assert_array_equal(alone, every[rows])


@pytest.mark.slow
@pytest.mark.parametrize("case", TILES)
def test_every_tile_gives_the_same_bits(case, emulator, use_tile, monkeypatch):
    """Of 200 rows, which another kernel scales for a norm, and of 60, which the tiles scale."""
    monkeypatch.setattr(library, "call", emulator)
    arrays, settings = arguments(200, *TILES[case][1:])
    settings["dtype"] = jnp.dtype("float32")
    few = rows_of(arrays, slice(11, 71))
    use_tile(32, False)
    right = np.asarray(run_or_skip(arrays, settings, exact=True))
    for rows in (32, 64, 128, 192):
        for splits in (False, True):
            use_tile(rows, splits)
            np.testing.assert_array_equal(run_or_skip(arrays, settings, exact=True), right)
            if rows < 192 or arrays[3] is None:
                got = run_or_skip(few, settings, exact=True)
                np.testing.assert_array_equal(got, right[11:71])


@pytest.mark.parametrize("gates", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("rows", [20, 150])
def test_rows_of_an_exact_chain_are_those_of_its_matmuls(rows, gates, kernel):
    """Two of them have a norm, of other inputs: of many rows, both are scaled in one place."""
    up, _ = arguments(rows, 96, 64, "bfloat16", "norm", *(["gated"] if gates else []))
    down, _ = arguments(rows, 64, 160, "bfloat16", "norm", "add")
    x, *first = up
    ops = (tuple(first), tuple(down[1:]))
    chain = functools.partial(
        linear_chain_cuda, added=(None, None), gated=(gates, False), exact=True
    )
    results = jax.jit(chain)(x, ops)
    for result, op, gated in zip(results, ops, (gates, False), strict=True):
        settings = {"gated": gated, "transposed": False, "dtype": x.dtype}
        x = run_or_skip((x, *op), settings, exact=True)
        np.testing.assert_array_equal(np.float32(result), np.float32(x))


def assert_a_layer_equals_the_definition(rows, width=160):
    """Each matmul of a chain, given what the chain has for the one before it."""
    middle, gated, added = 160, (False, True, False, False), (None, None, 0, None)
    (x, *output), _ = arguments(rows, 256, width, "bfloat16", "add")
    (_, *gate_up), _ = arguments(rows, width, middle, "bfloat16", "norm", "gated")
    (_, *down), _ = arguments(rows, middle, width, "bfloat16", "bias")
    (_, *qkv), _ = arguments(rows, width, 72, "bfloat16", "norm", "bias")
    ops = tuple(map(tuple, (output, gate_up, down, qkv)))
    results = jax.jit(functools.partial(linear_chain_cuda, added=added, gated=gated))(x, ops)
    for result, (*op, add), gates, other in zip(results, ops, gated, added, strict=True):
        add = add if other is None else results[other]
        settings = {"gated": gates, "transposed": False, "dtype": x.dtype}
        right = in_double((x, *op, add), settings)
        np.testing.assert_allclose(np.asarray(result, np.float64), right, rtol=3e-2, atol=3e-2)
        x = result


@pytest.mark.parametrize(("rows", "width"), [(12, 736), (70, 160), (128, 2112)])
def test_a_layer_equals_the_definition(rows, width, kernel):
    """A matmul scales its results for the norm of the next; of 128 rows there are too many sums."""
    if reason := library.refusal("linear"):
        pytest.skip(reason)
    assert_a_layer_equals_the_definition(rows, width)


# Rows, kernels, which matmuls have a norm and which a gate.
CHAINS = {
    "first-normed-wider": (40, [(256, 64), (64, 64)], (0, 1), ()),
    "every-norm": (40, [(64, 160), (160, 64), (64, 160), (160, 64)], (1, 2, 3), ()),
    "after-gated": (40, [(64, 2, 96), (96, 64)], (0, 1), (0,)),
    "many-sums": (25, [(64, 4352), (4352, 64)], (1,), ()),
    "heads": (30, [(256, 4, 64), (64, 64)], (1,), ()),
    "heads-of-few": (3, [(256, 4, 64), (64, 64)], (1,), ()),
    "heads-later": (30, [(256, 512), (512, 256), (256, 4, 64), (64, 64)], (1, 3), ()),
}


def a_chain(rows, shapes, normed, gated):
    rng = np.random.default_rng(0)

    def normal(*shape, scale=1.0):
        return jnp.asarray(scale * rng.standard_normal(shape), jnp.bfloat16)

    ops = []
    for i, shape in enumerate(shapes):
        kernel = normal(*shape, scale=shape[0] ** -0.5)
        if shape[-1] > 4096:
            kernel = kernel.at[:, 4096:].multiply(4)  # so that no square there may be left out
        ops.append((kernel, None, RMS(normal(shape[0]), 1e-6) if i in normed else None, None))
    settings = {"added": (None,) * len(ops), "gated": tuple(i in gated for i in range(len(ops)))}
    return normal(rows, shapes[0][0]), tuple(ops), settings


@pytest.mark.parametrize("case", CHAINS)
def test_each_matmul_of_a_chain_equals_the_definition(case, kernel):
    if reason := library.refusal("linear"):
        pytest.skip(reason)
    x, ops, settings = a_chain(*CHAINS[case])
    results = jax.jit(functools.partial(linear_chain_cuda, **settings))(x, ops)
    for result, op, gated in zip(results, ops, settings["gated"], strict=True):
        (right,) = chain_xla(x, (op,), added=(None,), gated=(gated,))
        np.testing.assert_allclose(np.float32(result), np.float32(right), rtol=3e-2, atol=3e-2)
        x = result


def test_places_for_scaled_rows_of_a_chain_are_checked(monkeypatch):
    if reason := library.refusal("linear"):
        pytest.skip(reason)
    places = tuple(jax.ShapeDtypeStruct((40 * 160,), d) for d in (jnp.bfloat16, jnp.float32))
    x, ops, settings = a_chain(*CHAINS["every-norm"])

    def run(*places):
        monkeypatch.setattr("jspec.cuda_ffi.linear._scaled_rows", lambda *_, **__: places)
        return jax.jit(functools.partial(linear_chain_cuda, **settings))(x, ops)

    for i in range(2):
        small = [place.update(shape=(119,)) if i == j else place for j, place in enumerate(places)]
        with pytest.raises(jax.errors.JaxRuntimeError, match="room for 40 rows of 160 of"):
            jax.block_until_ready(run(*small))


@pytest.mark.slow
@pytest.mark.parametrize("tile", [32, 64, 128, 192])
@pytest.mark.parametrize("splits", [False, True])
def test_every_tile_scales_its_results_for_the_next(tile, splits, emulator, use_tile, monkeypatch):
    """Of rows and columns that no tile divides, and of a single tile, whose inputs are split."""
    monkeypatch.setattr(library, "call", emulator)
    use_tile(tile, splits)
    assert_a_layer_equals_the_definition(70)
    assert_a_layer_equals_the_definition(29, width=64)


@pytest.mark.parametrize(
    ("normed", "shapes", "reason"),
    [
        (True, [(150, 64), (149,)], r"scaled \w+\[150, 64\] and squares \w+\[149\] must have"),
        (True, [(150, 32), (150,)], r"150 rows of 64 of"),
        (False, [(150, 64), (150,)], "rows are scaled for no norm"),
    ],
    ids=["squares", "rows", "norm"],
)
def test_places_for_scaled_rows_are_checked(normed, shapes, reason):
    (x, kernel, *others), settings = arguments(150, 64, 64, "bfloat16", "norm")
    run_or_skip((x, kernel, *others), settings, exact=True)
    kinds = jnp.bfloat16, jnp.float32
    places = [jax.ShapeDtypeStruct(*one) for one in zip(shapes, kinds, strict=True)]

    def run(x, kernel, scale):
        return library.call(
            "linear",
            (jax.ShapeDtypeStruct((150, 64), x.dtype), *places),
            *(x, kernel, x, x, scale, x),
            vmap_method="sequential",
            bits=np.int32(16),
            eps=np.float32(0),
            normed=np.bool_(normed),
            exact=np.bool_(True),
            **dict.fromkeys(("biased", "added", "gated", "transposed"), np.bool_(False)),
        )

    with pytest.raises(jax.errors.JaxRuntimeError, match=reason):
        jax.block_until_ready(jax.jit(run)(x, kernel, others[1].scale))


@pytest.mark.slow
def test_an_emulated_gpu_of_another_kind_refuses_many_rows(emulator, monkeypatch):
    """Also where `refuses` has seen a GPU of another kind: the kernel would write nothing."""
    monkeypatch.setattr(library, "call", emulator)
    monkeypatch.setenv("EMULATED_COMPUTE_CAPABILITY", "8")
    arrays, settings = arguments(*TILES["biased"])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"needs compute capability 9\.0"):
        jax.block_until_ready(run_or_skip(arrays, settings))


def test_a_row_that_is_not_finite_stays_alone(kernel):
    """Its sum of squares comes from a product with the rows next to it."""
    (x, *others), settings = arguments(*TILES["qkv"])
    got = run_or_skip((x, *others), settings)
    spoiled = run_or_skip((x.at[17].set(jnp.nan).at[40, 0, 3].set(jnp.inf), *others), settings)
    assert np.isnan(spoiled[17]).all()
    np.testing.assert_array_equal(*(np.delete(y, [17, 40], axis=0) for y in (spoiled, got)))


@pytest.mark.parametrize(("scales", "power"), [("small", 30), ("large", -30), ("mixed", 0)])
def test_every_scale_of_a_block_is_exact(scales, power):
    """Each byte up to 252 as the scale of a column, or any that float32 has the sums of mixed."""
    rng = np.random.default_rng(0)
    columns = np.arange(0, 127) if scales == "small" else np.arange(127, 253)
    blocks = np.repeat(columns[:, None], 5, axis=1).astype(np.uint8)
    if scales == "mixed":
        blocks = rng.integers(64, 190, blocks.shape, np.uint8)
    codes = rng.integers(0, 256, (len(columns), 80), np.uint8)
    kernel = MXFP4(jnp.asarray(codes), jnp.asarray(blocks))
    x = jnp.asarray(np.ldexp(rng.standard_normal((3, 160)), power), jnp.bfloat16)
    settings = {"gated": False, "transposed": False, "dtype": jnp.dtype("float32")}
    got = run_or_skip((x, kernel, None, None, None), settings)
    weights, x64 = numbers(kernel), np.float64(np.float32(x))
    error = np.abs(got - x64 @ weights)
    assert np.all(error <= 1e-6 * (np.abs(x64) @ np.abs(weights)))
    spoiled = MXFP4(kernel.codes.at[1, 32:48].set(0), kernel.scales.at[1, 2].set(255))
    again = run_or_skip((x, spoiled, None, None, None), settings)
    assert np.isnan(again[:, 1]).all()
    np.testing.assert_array_equal(np.delete(again, 1, axis=1), np.delete(got, 1, axis=1))


@pytest.mark.parametrize(
    "case",
    default_run(
        [
            *("gate-up", "added-biased", "head", "int8-gate-up", "int8-24-rows", "large-down"),
            *("mxfp4-gate-up", "mxfp4-24-rows"),
        ],
        *("gate-up", "added-biased", "head", "int8-gate-up", "mxfp4-gate-up"),
        slow=["mxfp4-24-rows"],
    ),
)
def test_a_row_alone_is_the_row_among_others(case):
    arrays, settings = arguments(*CASES[case])
    every = np.asarray(run_or_skip(arrays, settings))
    for row in (0, len(every) - 1):
        one = slice(row, row + 1)
        np.testing.assert_array_equal(run_or_skip(rows_of(arrays, one), settings), every[one])


@pytest.mark.parametrize(
    ("shape", "change", "reason"),
    [
        ((129, 64, 8), {}, "it takes 1 to 128 rows, and there are 129"),
        ((25, 64, 8), {"transposed": True}, "it takes 1 to 24 rows, and there are 25"),
        ((1, 48, 8), {}, "48 inputs are no multiple of 32 up to 1048576"),
        ((25, 32800, 8), {}, "32800 inputs are no multiple of 32 up to 32768"),
        ((17, 64, 64), {"transposed": True}, "up to 16 rows and 1024 inputs, and there are 17 and"),
        ((1, 64, 12), {}, "does not have its columns in eights"),
        ((1, 64, 8), {"gated": True, "transposed": True}, "gated=True, transposed=True"),
        ((1, 64, 8), {"dtype": jnp.dtype("float16")}, "the result is of float16"),
        ((1, 64, 8), {"add": jnp.zeros((1, 8))}, "x, kernel, bias, norm or add is not bfloat16"),
    ],
    ids=[
        "rows",
        "transposed-rows",
        "inputs",
        "more-inputs",
        "transposed",
        "columns",
        "kind",
        "dtype",
        "add",
    ],
)
def test_refuses_with_a_reason(shape, change, reason):
    rows, inputs, outputs = shape
    x, kernel = (jnp.zeros(s, jnp.bfloat16) for s in ((rows, inputs), (inputs, outputs)))
    settings = {"gated": False, "transposed": False, "dtype": jnp.dtype("float32")} | change
    result = refuses(x, kernel, None, None, settings.pop("add", None), **settings)
    assert result is not None
    assert reason in result


@pytest.mark.parametrize(("rows", "reason"), [(24, None), (25, "need compute capability 9.0")])
def test_more_rows_need_hopper(rows, reason, monkeypatch):
    monkeypatch.setattr("jspec.cuda_ffi.linear.gpu_in_use", lambda: ("NVIDIA B200", (10, 0)))
    x, kernel = (jnp.zeros(shape, jnp.bfloat16) for shape in ((rows, 64), (64, 8)))
    settings = {"gated": False, "transposed": False, "dtype": jnp.dtype("float32")}
    result = refuses(x, kernel, None, None, None, **settings)
    assert (
        result is None if reason is None else f"{reason}, and NVIDIA B200 has 10.0" in str(result)
    )


@pytest.mark.parametrize(
    ("dtype", "inputs", "reason"),
    [
        ("bfloat16", 48, "48 inputs are no multiple of 32"),
        ("float32", 64, "x, kernel, bias, norm or add is not bfloat16"),
    ],
    ids=["inputs", "rows"],
)
def test_refuses_weights_of_4_bits_with_a_reason(dtype, inputs, reason):
    codes, scales = (jnp.zeros((8, inputs // of), jnp.uint8) for of in (2, 32))
    settings = {"gated": False, "transposed": False, "dtype": jnp.dtype("float32")}
    x = jnp.zeros((1, inputs), dtype)
    result = refuses(x, MXFP4(codes, scales), None, None, None, **settings)
    assert result is not None
    assert reason in result
