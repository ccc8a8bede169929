"""Drawing and stochastic verification in Triton: interpreted, lowered for CUDA, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config import SamplingParams
from jspec.ops.distribution import distribution
from jspec.ops.sample import Role, sample_xla, settings_of, unfiltered
from jspec.ops.stochastic import stochastic_xla
from jspec.ops.verify import Verified
from jspec.ops.vocabulary import Vocabulary
from jspec.triton import sample as sample_module
from jspec.triton import stochastic as module
from jspec.triton.call import refuses_triton
from jspec.triton.sample import SAMPLE, Blocks, sample_triton, sum_tiles
from jspec.triton.stochastic import VERIFY, verify_triton
from tests.ops.drafts import GAMMA, PLAIN, assert_same, drafted, with_holes
from tests.ops.laws import GREEDY, SAMPLED, sampling_of
from tests.triton.lowering import lower

STATIC = {"rule": "token", "filtered": False, "axis_name": None}
BLOCKS = Blocks(tiles=2, warps=1, last_warps=4)
reference = jax.jit(functools.partial(stochastic_xla, **STATIC))
draw = functools.partial(sample_triton, role=Role.BONUS, filtered=False, axis_name=None)
tiles_of = jax.jit(functools.partial(distribution, vocabulary=Vocabulary(2500), filtered=False))
drawn = jax.jit(functools.partial(sample_xla, role=Role.BONUS, filtered=False, axis_name=None))


@pytest.fixture
def interpreter(interpreted, monkeypatch):
    """The kernels run in Triton's interpreter."""
    monkeypatch.setattr(module, "triton_call", interpreted)
    monkeypatch.setattr(sample_module, "triton_call", interpreted)


def arguments_of(count: int, vocabulary: int, *, one_hot: bool, dtype: str = "bfloat16") -> tuple:
    """Operands of the backends: rows of all settings, drafts of every length."""
    args = drafted(count, vocabulary, PLAIN, one_hot=one_hot, dtype=dtype)
    return (
        args["draft_tokens"],
        args["target_logits"],
        args["draft_lengths"],
        args["stop_tokens"],
        settings_of(args["sampling"]),
        args["positions"],
        args.get("draft_logits"),
    )


def assert_verified(got, arguments) -> None:
    assert_same(Verified(*map(jnp.asarray, got)), Verified(*reference(*arguments)))


@pytest.mark.parametrize("draft", ["one-hot", "logits"])
def test_verification_is_that_of_the_reference_in_the_interpreter(draft, interpreter):
    """Two ragged tiles of float32, where half of the rows have logits that are no numbers."""
    args = arguments_of(10, 1100, one_hot=draft == "one-hot", dtype="float32")
    arguments = (args[0], with_holes(args[1]), *args[2:])
    assert_verified(verify_triton(*arguments, **STATIC, blocks=BLOCKS), arguments)


def far_logits(vocabulary: int) -> tuple:
    """Logits whose products with the rate leave the range of float32 products, and rates from the
    largest to the smallest: arguments of a draw."""
    rng = np.random.default_rng(0)
    logits = 40 * rng.standard_normal((6, 2, vocabulary))
    logits[:, 1] *= 1e20
    logits[:, 0, ::7] = -1e-37
    logits[1, 0] = -100 - 2.0**-17 * rng.integers(0, 300, vocabulary)
    temperatures = (1e-6, 1e-4, 0.7, 30.0, 1e30, 0.0)
    rows = sampling_of([SamplingParams(temperature=t) for t in temperatures])
    positions = rng.integers(0, 1000, (6, 2)).astype(np.int32)
    return jnp.asarray(logits, jnp.float32), settings_of(rows), jnp.asarray(positions)


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
    with jax.enable_x64(True):
        law = tiles_of(logits, settings)
        sums = np.asarray(law.weights).sum(axis=-1)
        below = np.asarray(law.shift)[..., 0] - np.asarray(law.shift)[..., 2]
    for row, position in ((1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 1)):
        got = np.asarray(cells.sums)[row, position].view(np.uint64)[..., 0]
        np.testing.assert_array_equal(got, sums[row, position], f"row {row}, {position}")
        exponents = np.asarray(cells.exponents)[row, position]
        assert np.uint32(exponents[2] - exponents[0]) == below[row, position]
    assert np.all(np.asarray(cells.sums)[0] == 99), "a position that does not count is written"
    assert np.all(np.asarray(cells.sums)[1, 1] == 99)


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


def shapes_of(draft: str, vocabulary: int) -> list:
    """Shapes and dtypes of `arguments_of`."""
    arguments = arguments_of(4, 5, one_hot=draft == "one-hot")

    def shape(x):
        dims = (*x.shape[:-1], vocabulary) if x.shape[-1:] == (5,) else x.shape
        return jax.ShapeDtypeStruct(dims, x.dtype)

    return [jax.tree.map(shape, x) for x in arguments]


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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"filtered": True}, "filtered=True: it has no search for thresholds"),
        ({"rule": "block"}, "rule='block': it sums one residual a row"),
        ({"axis_name": "shards"}, "sharded over 'shards'"),
    ],
    ids=["filters", "block", "sharded"],
)
def test_refuses_settings_with_a_reason(change, reason):
    arguments = arguments_of(4, 5, one_hot=False)
    assert reason in VERIFY.supports(*arguments, **STATIC | change)
    static = {"role": Role.DRAFT, "filtered": False, "axis_name": None}
    if "rule" not in change:
        tokens = jnp.zeros((4, GAMMA + 1), jnp.int32)
        assert reason in SAMPLE.supports(arguments[1], arguments[4], tokens, **static | change)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((2, 3, 2**20 + 1), "V=1048577 must be in 1..1048576"),
        ((2, 1025, 8), "1025 positions a row are over 1024"),
        ((0, 3, 8), r"logits (0, 3, 8) leave nothing to launch"),
        ((2**21, 1, 2**20), "have more than 2147483647 tiles of 1024 tokens"),
    ],
    ids=["vocabulary", "positions", "no-rows", "tiles"],
)
def test_refuses_shapes_with_a_reason(shape, reason):
    logits = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct(shape[:2], jnp.int32)
    static = {"role": Role.DRAFT, "filtered": False, "axis_name": None}
    assert reason in SAMPLE.supports(logits, unfiltered(1), tokens, **static)


def test_refuses_many_stop_tokens():
    draft, target, lengths, _, *rest = arguments_of(4, 5, one_hot=True)
    stops = jnp.zeros((4, 33), jnp.int32)
    got = VERIFY.supports(draft, target, lengths, stops, *rest, **STATIC)
    assert got == "33 stop tokens a row are over 32"
