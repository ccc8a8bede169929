"""Drawing and verifying by random numbers: the CUDA source on a CPU, its counterpart, the law."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config import SamplingParams
from jspec.cuda_ffi import library
from jspec.ops.distribution import distribution, draw
from jspec.ops.exact_probabilities import masses
from jspec.ops.sample import SAMPLE, Role, number, settings_of
from jspec.ops.stochastic import verify_stochastic
from jspec.ops.vocabulary import TILE, Vocabulary
from tests.cuda_ffi.emulated import emulated
from tests.ops.drafts import FILTERS, PLAIN, assert_same, drafted, with_holes
from tests.ops.laws import GREEDY, SAMPLED, sampling_of
from tests.ops.test_sample import BORDERS, ONE_BIT

pytestmark = pytest.mark.slow

# What the kernel's workspace begins with, for each tile of each position.
CELL = np.dtype([("sum", np.uint64), ("top", np.float32), ("exponent", np.int32)])

PARAMS = [
    GREEDY,
    SAMPLED,
    SamplingParams(temperature=0.5, top_k=1),
    SamplingParams(temperature=0.8, top_k=3),  # of three tiles, or a tie
    SamplingParams(temperature=1.5, top_k=40),
    SamplingParams(temperature=1.0, top_k=2**30),
    SamplingParams(temperature=1.5, top_p=0.8),
    SamplingParams(temperature=1.0, top_p=1e-6),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=2.0, top_k=40, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=2.0, top_k=2, top_p=0.6, min_p=0.7),
    # Powers beyond the range of float32 products.
    SamplingParams(temperature=1e-6, top_k=3, top_p=0.9),
]
KINDS = ("spread", "tied", "equal", "holes", "one-tile", "empty", "huge")


def row_of(kind: str, vocabulary: int, rng: np.random.Generator) -> np.ndarray:
    """Logits of one position, float32 ``[V]``."""
    x = 3 * rng.standard_normal(vocabulary).astype(np.float32)
    if kind == "tied":
        x = np.round(2 * x) / 2
    elif kind == "equal":
        x[:] = 1.5
    elif kind == "holes":
        x[rng.random(vocabulary) < 0.5] = -np.inf
        x[rng.random(vocabulary) < 0.1] = np.nan
        x[rng.integers(vocabulary)] = 1
    elif kind == "one-tile":  # fewer tiles with a finite logit than top-k asks for
        x[: (vocabulary - 1) // TILE * TILE] = -np.inf
    elif kind == "empty":
        x = np.where(x > 0, np.float32(np.nan), np.float32(-np.inf))
    elif kind == "huge":
        x *= np.float32(1e20)
        x[rng.integers(vocabulary)] = np.inf
    return x


def rows_of(vocabulary: int, pairs: str) -> tuple[np.ndarray, list[SamplingParams]]:
    """Logits, float32 ``[rows, V]``, and settings: pairs of `PARAMS` and `KINDS`, and `BORDERS`."""
    rng = np.random.default_rng(vocabulary)
    chosen = [(params, kind) for params in PARAMS for kind in KINDS]
    if pairs == "some":  # all settings, and one of them with logits of all kinds
        chosen = chosen[:: len(KINDS) + 1] + chosen[3 * len(KINDS) : 4 * len(KINDS)]
    borders = np.full((len(BORDERS), vocabulary), -np.inf, np.float32)
    borders[:, -4:] = [logits for logits, *_ in BORDERS]
    at_borders = [SamplingParams(**{"temperature": ONE_BIT} | filters) for _, filters, _ in BORDERS]
    logits = [row_of(kind, vocabulary, rng) for _, kind in chosen]
    return np.stack([*logits, *borders]), [params for params, _ in chosen] + at_borders


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    if jax.default_backend() != "cpu":
        pytest.skip("a GPU runs the kernel itself")
    output = tmp_path_factory.mktemp("emulated") / "stochastic.so"
    return emulated("sample", output, "stochastic")


def drawn_by_the_law(logits: np.ndarray, params: SamplingParams, number: np.uint64) -> int:
    """By inverse CDF, of ``logits [V]``, in Python's integers."""
    ends = np.cumsum(masses(logits, params))
    target = int(number) * int(ends[-1]) >> 64
    return int(np.searchsorted(ends, np.uint64(target), side="right"))


@functools.partial(jax.jit, static_argnames="vocabulary")
def _reference(logits, settings, positions, vocabulary: Vocabulary):
    """Tokens, the tiles' sums of the weights that the filters keep, and the random numbers."""
    law = distribution(logits, settings, vocabulary, filtered=True)
    numbers = number(settings.seeds, positions, Role.BONUS)
    sums = law.weights.sum(axis=-1)
    return draw(law.weights, law.shift, numbers, vocabulary), sums, numbers


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "pairs"),
    [
        (37, "float32", "all"),
        (TILE, "bfloat16", "all"),
        (2500, "float32", "all"),
        (151_936, "bfloat16", "some"),
    ],
)
def test_emulated_draws_are_those_of_the_law(vocabulary, dtype, pairs, emulator, monkeypatch):
    floats, params = rows_of(vocabulary, pairs)
    logits = jnp.asarray(floats[:, None]).astype(dtype)
    settings = settings_of(sampling_of(params))
    positions = jnp.arange(len(params), dtype=jnp.int32)[:, None]
    static = {"role": Role.BONUS, "filtered": True, "axis_name": None}
    run = functools.partial(SAMPLE.backend("cuda").run, **static)
    by_counterpart = run(logits, settings, positions)
    calls = []

    def call(*arguments, **keywords):
        calls.append(emulator(*arguments, **keywords))
        return calls[-1]

    monkeypatch.setattr(library, "call", call)
    tokens = np.asarray(run(logits, settings, positions))
    with jax.enable_x64(True):
        reference = _reference(logits, settings, positions, Vocabulary(vocabulary))
        by_reference, sums, numbers = map(np.asarray, reference)

    floats = np.asarray(logits.astype(jnp.float32))[:, 0]
    by_law = map(drawn_by_the_law, floats, params, numbers[:, 0])
    np.testing.assert_array_equal(tokens[:, 0], list(by_law))
    np.testing.assert_array_equal(tokens, by_reference)
    np.testing.assert_array_equal(tokens, by_counterpart)
    cells = np.asarray(calls[0][1]).reshape(-1)[: 4 * sums.size].view(CELL)
    # Where one token is certain, the kernel has no sums.
    drawn = np.asarray(settings.rate > 0) & (floats > -np.inf).any(axis=-1)
    assert drawn.sum() > len(params) / 2
    np.testing.assert_array_equal(cells["sum"].reshape(sums.shape)[drawn], sums[drawn])


@pytest.mark.parametrize(
    ("count", "vocabulary", "params", "dtype", "draft"),
    [
        (90, 37, PLAIN, "bfloat16", "token"),
        (45, 2500, PLAIN, "bfloat16", "block"),
        (18, TILE, FILTERS, "float32", "one-hot"),
        (27, 2500, FILTERS, "bfloat16", "token"),
        (27, 1100, FILTERS, "float32", "block"),
        (6, 151_936, FILTERS, "bfloat16", "token"),
    ],
)
def test_emulated_verification_is_that_of_the_reference(
    count, vocabulary, params, dtype, draft, emulator, monkeypatch
):
    arguments = drafted(count, vocabulary, params, one_hot=draft == "one-hot", dtype=dtype)
    target = arguments["target_logits"]
    # Two rows of five reject most of their drafts; five of nine have logits that are no numbers.
    other = jnp.arange(count)[:, None, None] % 5 > 2
    target = jnp.where(other, jnp.roll(target, 1, axis=-1), target)
    arguments["target_logits"] = with_holes(target) if count > 6 else target
    settings = {"filtered": params is FILTERS, "rule": "block" if draft == "block" else "token"}

    def run(backend: str):
        verify = functools.partial(verify_stochastic, implementation=backend, **settings)
        return jax.jit(lambda arguments: verify(**arguments))(arguments)

    by_counterpart, by_reference = run("cuda"), run("xla")
    monkeypatch.setattr(library, "call", emulator)
    got = run("cuda")
    assert_same(got, by_counterpart)
    assert_same(got, by_reference)
    accepted, rejected = np.asarray(got.accepted), np.asarray(got.mismatch)
    assert (accepted > 0).any()
    assert rejected.sum() > 2
