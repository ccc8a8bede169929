"""Drawing and stochastic verification on Mosaic GPU: interpreted, lowered, and on a GPU."""

import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config import SamplingParams
from jspec.ops.sample import Role, sample_xla, settings_of, unfiltered
from jspec.pallas import distribution
from jspec.pallas import stochastic as module
from jspec.pallas.mosaic import refuses_pallas
from jspec.pallas.sample import sample_pallas
from jspec.pallas.stochastic import verify_pallas
from jspec.pallas.tile_sums import Blocks, sum_tiles
from tests.ops.drafts import (
    STATIC,
    arguments_of,
    assert_verified,
    far_logits,
    shapes_of,
    tiles_of_far_logits,
    with_holes,
)
from tests.ops.laws import SAMPLED, sampling_of
from tests.pallas.mosaic import interpret, lower
from tests.triton.interpreter import INSTRUCTIONS

BLOCKS = Blocks(warp_tiles=1)
runs_of_arrays = pytest.mark.usefixtures("runs_of_arrays")
draw = functools.partial(sample_pallas, role=Role.BONUS, filtered=False, axis_name=None)
drawn = jax.jit(functools.partial(sample_xla, role=Role.BONUS, filtered=False, axis_name=None))


@runs_of_arrays
@pytest.mark.parametrize(
    ("draft", "dtype", "ptx"),
    [
        ("one-hot", "bfloat16", False),
        ("logits", "bfloat16", False),
        ("logits", "float32", True),
        pytest.param("logits", "float32", False, marks=pytest.mark.slow),
    ],
)
def test_verification_is_that_of_the_reference_when_interpreted(draft, dtype, ptx, instructions):
    """Two ragged tiles, where half of the rows have logits that are no numbers."""
    args = arguments_of(10, 1100, one_hot=draft == "one-hot", dtype=dtype)
    arguments = (args[0], with_holes(args[1]), *args[2:])
    verify = functools.partial(verify_pallas, **STATIC, blocks=Blocks(1, ptx=ptx))
    assert_verified(interpret(verify, *arguments), arguments)


@runs_of_arrays
@pytest.mark.parametrize(
    ("dtype", "vocabulary"),
    [(jnp.float32, 2500), (jnp.bfloat16, 2500), (jnp.bfloat16, 37)],
    ids=["float32", "bfloat16", "less-than-a-tile"],
)
def test_a_draw_is_that_of_the_reference_when_interpreted(dtype, vocabulary):
    logits, *rest = far_logits(vocabulary)
    arguments = (logits.astype(dtype), *rest)
    got = interpret(functools.partial(draw, blocks=BLOCKS), *arguments)
    np.testing.assert_array_equal(got, drawn(*arguments))


@pytest.fixture
def instructions(monkeypatch):
    """Stands in for PTX instructions, which the interpreter does not run."""
    with ThreadPoolExecutor(1) as thread:
        # Started by this thread, it does not take the smallest numbers for 0, as XLA's threads do.
        thread.submit(int).result()

        def rounded(instruction, layout, *operands):
            def call(*arrays):
                return thread.submit(INSTRUCTIONS[instruction], *map(np.array, arrays)).result()

            result = jax.ShapeDtypeStruct(operands[0].shape, jnp.float32)
            return jax.pure_callback(call, result, *operands)

        monkeypatch.setattr(distribution, "rounded", rounded)
        yield


@runs_of_arrays
@pytest.mark.parametrize("blocks", [Blocks(1), Blocks(2), Blocks(1, ptx=True)], ids=str)
def test_tiles_have_the_sums_of_the_reference_when_interpreted(blocks, instructions):
    """Every bit of every weight counts in a sum, where a draw may not notice it."""
    logits, settings, _ = far_logits(2500)
    lengths = jnp.full(6, 2, jnp.int32)
    cells = interpret(lambda *x: sum_tiles(*x, 0, blocks), logits, settings.rate, lengths)
    sums = np.asarray(cells.high).astype(np.uint64) << np.uint64(32) | np.asarray(cells.low)
    expected, differences = tiles_of_far_logits()
    exponents = np.asarray(cells.exponents).reshape(6, 2, -1)
    got = sums.reshape(6, 2, -1)[:5, :, :3]
    np.testing.assert_array_equal(got[1:], expected[1:5])
    np.testing.assert_array_equal((exponents[..., 0] - exponents[..., 2])[1:5], differences[1:5])


@runs_of_arrays
@pytest.mark.parametrize("ptx", [False, True])
def test_near_tiles_of_bfloat16_have_the_sums_of_the_reference_when_interpreted(ptx, instructions):
    """Weights from 32 bits or PTX, at exponents on both sides of each bound, against 64 bits."""
    rng = np.random.default_rng(1)
    offsets = np.array([0, -0.01, 3, 125, -300, 5000, -0.4, 0])
    logits = 3 * rng.standard_normal((8, 1, 1024)) + offsets[:, None, None]
    logits[7] = -2e-38  # with this rate, float32 has no product but 0
    logits = jnp.asarray(logits, jnp.bfloat16)
    temperatures = np.ones(8)
    temperatures[7] = 1e6
    params = [SamplingParams(temperature=x) for x in temperatures]
    rates, lengths = settings_of(sampling_of(params)).rate, jnp.ones(8, jnp.int32)

    def cells_of(logits, ptx):
        blocks = Blocks(1, ptx=ptx)
        return interpret(lambda *x: sum_tiles(*x, 0, blocks), logits, rates, lengths)

    near, far = cells_of(logits, ptx), cells_of(logits.astype(jnp.float32), ptx=False)
    for field in ("low", "high", "exponents"):
        got, expected = getattr(near, field)[:, 0], getattr(far, field)[:, 0]
        np.testing.assert_array_equal(got, expected, field)


@runs_of_arrays
@pytest.mark.parametrize("draft", ["one-hot", "logits"])
def test_an_empty_residual_draws_from_the_target(draft, monkeypatch):
    """Tokens rejected by force where target and draft are equal, as rounding could do it."""
    judge = module.Kernels.judge

    def reject(*arguments):
        accepts, *sources = judge(*arguments)
        return jnp.zeros_like(accepts), *sources

    monkeypatch.setattr(module.Kernels, "judge", reject)
    one_hot = draft == "one-hot"
    logits = np.random.default_rng(0).standard_normal((4, 2, 1100)).astype(np.float32)
    if one_hot:
        logits[:, :, :1050], logits[:, :, 1051:] = -np.inf, -np.inf
    logits = jnp.asarray(logits, jnp.bfloat16)
    rows = settings_of(sampling_of([SAMPLED] * 4))
    tokens, positions = jnp.full((4, 1), 1050, jnp.int32), jnp.arange(4, dtype=jnp.int32)
    lengths, stops = jnp.ones(4, jnp.int32), jnp.zeros((4, 0), jnp.int32)
    draft_logits = None if one_hot else logits[:, :1]
    verify = functools.partial(verify_pallas, **STATIC, blocks=BLOCKS)
    got = interpret(verify, tokens, logits, lengths, stops, rows, positions, draft_logits)
    expected = sample_xla(
        *(logits[:, :1], rows, positions[:, None]),
        role=Role.RESIDUAL,
        filtered=False,
        axis_name=None,
    )
    np.testing.assert_array_equal(got[3], expected[:, 0])


@pytest.mark.parametrize("vocabulary", [128_256, 50_257])
@pytest.mark.parametrize("draft", ["one-hot", "logits"])
@pytest.mark.parametrize("blocks", [Blocks(1), Blocks(2), Blocks(1, ptx=True)], ids=str)
def test_verification_on_a_gpu(draft, blocks, vocabulary):
    if reason := refuses_pallas():
        pytest.skip(reason)
    arguments = arguments_of(64, vocabulary, one_hot=draft == "one-hot")
    run = jax.jit(functools.partial(verify_pallas, **STATIC, blocks=blocks))
    assert_verified(run(*arguments), arguments)
    arguments = (arguments[0], with_holes(arguments[1]), *arguments[2:])
    assert_verified(run(*arguments), arguments)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("ptx", [False, True])
def test_a_draw_on_a_gpu(dtype, ptx):
    if reason := refuses_pallas():
        pytest.skip(reason)
    logits, *rest = far_logits(133_000)
    arguments = (logits.astype(dtype), *rest)
    run = jax.jit(functools.partial(draw, blocks=Blocks(1, ptx=ptx)))
    np.testing.assert_array_equal(run(*arguments), drawn(*arguments))


@pytest.mark.parametrize(
    ("draft", "launches", "ptx"), [("one-hot", 3, False), ("logits", 5, False), ("logits", 5, True)]
)
def test_launches_of_a_verification(draft, launches, ptx):
    verify = functools.partial(verify_pallas, **STATIC, blocks=Blocks(1, ptx=ptx))
    text = lower(verify, *shapes_of(draft, 128_256))
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == launches


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_draw_is_two_launches(dtype):
    text = lower(
        draw,
        jax.ShapeDtypeStruct((4, 2, 50_257), dtype),
        jax.eval_shape(lambda: unfiltered(4)),
        jax.ShapeDtypeStruct((4, 2), jnp.int32),
    )
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == 2
