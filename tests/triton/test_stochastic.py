"""Drawing and stochastic verification in Triton: interpreted, lowered for CUDA, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.sample import Role, sample_xla, settings_of, unfiltered
from jspec.triton import sample as sample_module
from jspec.triton import stochastic as module
from jspec.triton.call import refuses_triton
from jspec.triton.sample import Blocks, sample_triton, sum_tiles
from jspec.triton.stochastic import verify_triton
from tests.ops.drafts import (
    STATIC,
    arguments_of,
    assert_verified,
    far_logits,
    shapes_of,
    tiles_of_far_logits,
    with_holes,
)
from tests.ops.laws import GREEDY, SAMPLED, sampling_of
from tests.triton.lowering import lower

BLOCKS = Blocks(tiles=2, warps=1, last_warps=4)
draw = functools.partial(sample_triton, role=Role.BONUS, filtered=False, axis_name=None)
drawn = jax.jit(functools.partial(sample_xla, role=Role.BONUS, filtered=False, axis_name=None))


@pytest.fixture
def interpreter(interpreted, monkeypatch):
    """The kernels run in Triton's interpreter."""
    monkeypatch.setattr(module, "triton_call", interpreted)
    monkeypatch.setattr(sample_module, "triton_call", interpreted)


@pytest.mark.parametrize("draft", ["one-hot", "logits"])
def test_verification_is_that_of_the_reference_in_the_interpreter(draft, interpreter):
    """Two ragged tiles of float32, where half of the rows have logits that are no numbers."""
    args = arguments_of(10, 1100, one_hot=draft == "one-hot", dtype="float32")
    arguments = (args[0], with_holes(args[1]), *args[2:])
    assert_verified(verify_triton(*arguments, **STATIC, blocks=BLOCKS), arguments)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_draw_is_that_of_the_reference_in_the_interpreter(dtype, interpreter):
    logits, *rest = far_logits(2500)
    arguments = (logits.astype(dtype), *rest)
    np.testing.assert_array_equal(draw(*arguments, blocks=BLOCKS), drawn(*arguments))


def test_tiles_have_the_sums_of_the_reference_in_the_interpreter(interpreter):
    """Every bit of every weight counts in a sum, where a draw may not notice it."""
    logits, settings, _ = far_logits(2500)
    lengths = jnp.asarray([0, 1, 2, 2, 2, 2], jnp.int32)
    cells = sum_tiles(logits, settings.rate, lengths, 0, BLOCKS)
    sums, exponents = np.asarray(cells.sums), np.asarray(cells.exponents)
    expected, differences = tiles_of_far_logits()
    for at in ((1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 1)):
        np.testing.assert_array_equal(sums[at].view(np.uint64)[..., 0], expected[at], str(at))
        assert exponents[at][0] - exponents[at][2] == differences[at]
    assert np.all(sums[0] == 99), "a position that does not count is written"
    assert np.all(sums[1, 1] == 99)


def test_no_draft_at_all(interpreter):
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((2, 1, 5)), jnp.float32)
    rows = settings_of(sampling_of([SAMPLED, GREEDY]))
    none = jnp.zeros((2, 0), jnp.int32)
    zeros, stops = jnp.zeros(2, jnp.int32), jnp.full((2, 0), -1, jnp.int32)
    arguments = (none, logits, zeros, stops, rows, zeros, None)
    assert_verified(verify_triton(*arguments, **STATIC, blocks=BLOCKS), arguments)


@pytest.mark.parametrize("draft", ["one-hot", "logits"])
def test_an_empty_residual_draws_from_the_target(draft, interpreted, monkeypatch):
    """Tokens rejected by force where target and draft are equal, as rounding could do it."""

    def reject(kernel, *arrays, **settings):
        got = interpreted(kernel, *arrays, **settings)
        return (np.zeros_like(got[0]), *got[1:]) if "judge" in kernel.fn.__name__ else got

    monkeypatch.setattr(module, "triton_call", reject)
    monkeypatch.setattr(sample_module, "triton_call", interpreted)
    one_hot = draft == "one-hot"
    logits = np.random.default_rng(0).standard_normal((4, 2, 1100)).astype(np.float32)
    if one_hot:
        logits[:, :, :1050], logits[:, :, 1051:] = -np.inf, -np.inf
    logits = jnp.asarray(logits)
    rows = settings_of(sampling_of([SAMPLED] * 4))
    tokens, positions = jnp.full((4, 1), 1050, jnp.int32), jnp.arange(4, dtype=jnp.int32)
    lengths, stops = jnp.ones(4, jnp.int32), jnp.full((4, 1), -1, jnp.int32)
    draft_logits = None if one_hot else logits[:, :1]
    got = verify_triton(
        *(tokens, logits, lengths, stops, rows, positions, draft_logits), **STATIC, blocks=BLOCKS
    )
    expected = sample_xla(
        *(logits[:, :1], rows, positions[:, None]),
        role=Role.RESIDUAL,
        filtered=False,
        axis_name=None,
    )
    np.testing.assert_array_equal(got[3], expected[:, 0])


@pytest.mark.parametrize("draft", ["one-hot", "logits"])
@pytest.mark.parametrize("tiles", [1, 4])
def test_verification_on_a_gpu(draft, tiles):
    if reason := refuses_triton():
        pytest.skip(reason)
    arguments = arguments_of(64, 133_000, one_hot=draft == "one-hot")
    blocks = Blocks(tiles=tiles, warps=tiles, last_warps=4)
    run = jax.jit(functools.partial(verify_triton, **STATIC, blocks=blocks))
    assert_verified(run(*arguments), arguments)
    arguments = (arguments[0], with_holes(arguments[1]), *arguments[2:])
    assert_verified(run(*arguments), arguments)


def test_a_draw_on_a_gpu():
    if reason := refuses_triton():
        pytest.skip(reason)
    arguments = far_logits(133_000)
    np.testing.assert_array_equal(jax.jit(draw)(*arguments), drawn(*arguments))


@pytest.mark.parametrize(("draft", "launches"), [("one-hot", 3), ("logits", 5)])
def test_launches_of_a_verification(draft, launches):
    text = lower(functools.partial(verify_triton, **STATIC), *shapes_of(draft, 128_256))
    assert text.count("stablehlo.custom_call @triton_kernel_call_ffi") == launches
    assert text.count("stablehlo.") == launches


def test_a_draw_is_two_launches():
    text = lower(
        draw,
        jax.ShapeDtypeStruct((4, 2, 128_256), jnp.float32),
        jax.eval_shape(lambda: unfiltered(4)),
        jax.ShapeDtypeStruct((4, 2), jnp.int32),
    )
    assert text.count("stablehlo.custom_call @triton_kernel_call_ffi") == 2
