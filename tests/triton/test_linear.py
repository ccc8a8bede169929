"""Products of a few rows in Triton: interpreted, lowered for CUDA, and on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import dispatch, tuned
from jspec.ops.linear import LINEAR, linear_xla
from jspec.ops.norm import RMS
from jspec.ops.quantized import KINDS, MXFP4, Quantized, quantized
from jspec.triton import linear as module
from jspec.triton.call import refuses_triton
from jspec.triton.linear import RowBlocks, linear_triton, refuses
from tests.ops.test_quantized import numbers
from tests.triton.lowering import lower

BLOCKS = RowBlocks(width=16, bytes=2048, stages=2, warps=1, rows=16)


def arguments(rows, inputs, outputs, dtype, *options, drawn=True):
    """Random ones, with what ``options`` name, or their shapes alone; and the settings."""
    rng = np.random.default_rng(rows + inputs)

    def normal(*shape, scale=1.0):
        if not drawn:
            return jax.ShapeDtypeStruct(shape, dtype)
        x = scale * rng.standard_normal(shape, np.float32)
        return jax.device_put(x.astype(jnp.dtype(dtype)))

    gated, transposed = "gated" in options, "transposed" in options
    every = (2, outputs) if gated else (outputs,)
    kernel = normal(*((*every, inputs) if transposed else (inputs, *every)), scale=inputs**-0.5)
    bias = normal(*every) if "bias" in options else None
    norm = RMS(normal(inputs), 1e-5) if "norm" in options else None
    add = normal(rows, 1, outputs) if "add" in options else None
    for kind in set(options) & set(KINDS):
        pack = functools.partial(quantized, kind=kind)
        kernel = pack(kernel) if drawn else jax.eval_shape(pack, kernel)
    settings = {
        "gated": gated,
        "transposed": transposed,
        "dtype": jnp.dtype("float32" if "wide" in options else dtype),
    }
    return (normal(rows, 1, inputs, scale=3.0), kernel, bias, norm, add), settings


CASES = {
    "one-row": (1, 48, 40, "float32", "norm", "bias"),
    "gated": (3, 40, 24, "float32", "norm", "gated", "bias"),
    "added": (17, 72, 16, "float32", "add"),
    "transposed": (2, 33, 50, "float32", "transposed", "norm"),
    "transposed-gated": (2, 33, 20, "float32", "transposed", "gated"),
    "int8": (3, 40, 24, "float32", "norm", "gated", "bias", "int8"),
    "mxfp4": (3, 96, 24, "float32", "norm", "gated", "bias", "mxfp4"),
    "mxfp4-half": (9, 160, 40, "float16", "norm", "add", "wide", "mxfp4"),
    "half": (5, 64, 32, "float16", "norm", "add", "wide"),
    "tiles": (35, 40, 40, "float32", "norm", "add"),
}
LARGE = {
    "qkv": (1, 4096, 6144, "bfloat16", "norm", "bias"),
    "gate-up": (10, 4096, 12288, "bfloat16", "norm", "gated"),
    "down": (64, 12288, 4096, "bfloat16", "add"),
    "tiles": (576, 576, 1536, "bfloat16", "norm", "gated"),
    "head": (4, 2560, 151936, "bfloat16", "transposed", "wide"),
    "int8-gate-up": (4, 2048, 3072, "bfloat16", "norm", "gated", "int8"),
    "fp8-down": (2, 3072, 2048, "bfloat16", "add", "fp8"),
    "mxfp4-gate-up": (10, 4096, 12288, "bfloat16", "norm", "gated", "mxfp4"),
    "mxfp4-down": (64, 12288, 4096, "bfloat16", "add", "mxfp4"),
    "mxfp4-odd": (7, 2912, 777, "float16", "norm", "gated", "add", "mxfp4"),
    "odd": (7, 1000, 777, "float16", "norm", "gated", "add"),
}


def in_double(arrays, settings):
    """The definition in float64."""
    x, kernel, bias, norm, add = arrays
    kernel = numbers(kernel) if isinstance(kernel, MXFP4) else kernel
    x, kernel, bias, norm, add = jax.tree.map(
        lambda x: np.float64(np.float32(x)), (x, kernel, bias, norm, add)
    )
    if isinstance(kernel, Quantized):
        kernel = np.moveaxis(kernel.values, -1, 0) * kernel.scale
    if norm is not None:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps) * norm.scale
    kernel = np.moveaxis(kernel, -1, 0) if settings["transposed"] else kernel
    y = np.tensordot(x, kernel, 1) + (0 if bias is None else bias)
    if settings["gated"]:
        y = y[..., 0, :] / (1 + np.exp(-y[..., 0, :])) * y[..., 1, :]
    return y + (0 if add is None else add)


def assert_product(got, arrays, settings) -> None:
    want = in_double(arrays, settings)
    assert got.dtype == settings["dtype"]
    tolerance = 1e-5 if arrays[0].dtype == jnp.float32 else 3e-2
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_equals_the_definition_in_the_interpreter(case, interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    arrays, settings = arguments(*CASES[case])
    assert_product(module._launch(*arrays, **settings, blocks=BLOCKS), arrays, settings)


def every_weight(dtype, scales, **settings):
    """What the kernel makes of all numbers of MXFP4 at these scales, and what they are."""
    codes = np.random.default_rng(0).integers(0, 256, (16 * scales.size, 32), np.uint8)
    kernel = MXFP4(jnp.asarray(codes), jnp.repeat(scales, 32).reshape(-1, 2))
    plain = {"gated": False, "transposed": False, "dtype": np.dtype("float32")}
    ones = jnp.eye(64, dtype=dtype)
    return module._launch(ones, kernel, None, None, None, **plain, **settings), numbers(kernel)


@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize(
    ("dtype", "smallest", "largest"), [("float32", 1, 252), ("float16", 104, 140)]
)
def test_every_weight_is_exact_in_the_interpreter(
    dtype, smallest, largest, warps, interpreted, monkeypatch
):
    """With and without parts of the inputs; a scale that is NaN gives NaN."""
    monkeypatch.setattr(module, "triton_call", interpreted)
    blocks = dataclasses.replace(BLOCKS, warps=warps)
    scales = jnp.asarray([smallest, 120, 127, largest], jnp.uint8)
    got, want = every_weight(dtype, scales, blocks=blocks)
    np.testing.assert_array_equal(got, want)
    spoiled, _ = every_weight(dtype, scales.at[0].set(255), blocks=blocks)
    assert not np.isfinite(np.asarray(spoiled)[:, :16]).any()
    np.testing.assert_array_equal(spoiled[:, 16:], want[:, 16:])


@pytest.mark.parametrize("width", [32, 64])
def test_every_weight_is_exact_on_a_gpu(width):
    if reason := refuses_triton():
        pytest.skip(reason)
    blocks = RowBlocks(width=width, bytes=4096, stages=3, warps=4, rows=64)
    scales = jnp.asarray([35, 100, 127, 160], jnp.uint8)
    got, want = every_weight("bfloat16", scales, blocks=blocks)
    np.testing.assert_array_equal(got, want)
    spoiled, _ = every_weight("bfloat16", scales.at[0].set(255), blocks=blocks)
    assert not np.isfinite(np.asarray(spoiled)[:, :16]).any()


@pytest.mark.parametrize("case", ["mxfp4", "mxfp4-half"])
def test_parts_of_the_inputs_add_up_in_the_interpreter(case, interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    arrays, settings = arguments(*CASES[case])
    blocks = dataclasses.replace(BLOCKS, warps=4)
    assert_product(module._launch(*arrays, **settings, blocks=blocks), arrays, settings)


def test_many_rows_of_mxfp4_are_left_to_xla(monkeypatch):
    """On a GPU, where the order of backends begins with kernels."""
    monkeypatch.setattr(dispatch, "gpu_in_use", lambda: ("NVIDIA H200", (9, 0)))
    monkeypatch.setattr(tuned, "gpu_in_use", lambda: ("NVIDIA H200", (9, 0)))
    kernel = quantized(jnp.zeros((64, 8)), "mxfp4")
    settings = {"gated": False, "transposed": False, "dtype": np.dtype("float32")}
    for rows in (65, 4096):
        result = LINEAR.choose(None, jnp.zeros((rows, 64)), kernel, None, None, None, **settings)
        assert result.name == "xla"


@pytest.mark.parametrize("case", [*CASES, *LARGE])
def test_equals_the_definition_on_a_gpu(case):
    if reason := refuses_triton():
        pytest.skip(reason)
    arrays, settings = arguments(*(CASES | LARGE)[case])
    assert_product(linear_triton(*arrays, **settings), arrays, settings)


@pytest.mark.parametrize("case", LARGE)
def test_a_row_alone_is_the_row_among_others_on_a_gpu(case):
    if reason := refuses_triton():
        pytest.skip(reason)
    arrays, settings = arguments(*LARGE[case])
    (x, kernel, bias, norm, add), every = arrays, linear_triton(*arrays, **settings)
    for row in (0, x.shape[0] - 1):
        one = slice(row, row + 1)
        alone = (x[one], kernel, bias, norm, None if add is None else add[one])
        np.testing.assert_array_equal(linear_triton(*alone, **settings), every[one])


@pytest.mark.parametrize("case", LARGE)
def test_is_one_launch(case):
    arrays, settings = arguments(*LARGE[case], drawn=False)
    text = lower(lambda *arrays: linear_triton(*arrays, **settings), *arrays)
    assert text.count("stablehlo.custom_call @triton_kernel_call_ffi") == 1
    assert "dot_general" not in text


def test_has_the_derivatives_of_the_reference(monkeypatch):
    arrays, settings = arguments(*CASES["gated"])
    # Without a GPU the launch itself is left out.
    monkeypatch.setattr(
        module, "_launch", lambda *arrays, blocks, exact, **of: linear_xla(*arrays, **of)
    )

    def gradients(function):
        loss = lambda *arrays: function(*arrays, **settings).sum()  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1, 3)))(*arrays)

    jax.tree.map(np.testing.assert_array_equal, gradients(linear_triton), gradients(linear_xla))


def test_refuses_with_a_reason():
    x, kernel = jnp.zeros((1025, 8)), jnp.zeros((8, 8))
    assert refuses(x, kernel) == "it takes 1 to 1024 rows, and there are 1025"
    assert "not of one type" in refuses(x[:1], kernel.astype(jnp.bfloat16))
    assert "nothing to launch" in refuses(x[:1, :0], kernel[:0])
    assert refuses(x[:1024], kernel) is None
    small = quantized(jnp.zeros((32, 8)), "mxfp4")
    assert refuses(jnp.zeros((64, 32), jnp.float16), small) is None
    assert "not of one type" in refuses(jnp.zeros((1, 32), jnp.int8), small)


def test_weights_on_a_mesh_are_left_to_xla():
    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def reason(x, kernel):
        assert "XLA would gather weights" in refuses(x, kernel)
        return x

    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(reason, jnp.zeros((1, 8)), jnp.zeros((8, 8)))
