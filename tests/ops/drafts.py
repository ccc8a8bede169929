"""Drafts to verify by random numbers, for every backend, and comparing what they return."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import SamplingParams
from jspec.ops.distribution import distribution
from jspec.ops.sample import settings_of
from jspec.ops.stochastic import stochastic_xla
from jspec.ops.verify import Verified
from jspec.ops.vocabulary import Vocabulary
from tests.ops.laws import GREEDY, SAMPLED, sampling_of

GAMMA = 3
FILTERS = [
    SAMPLED,
    GREEDY,
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.5, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=2.0, top_k=40, top_p=0.9, min_p=0.01),
]
PLAIN = [SAMPLED, GREEDY, SamplingParams(temperature=0.01), SamplingParams(temperature=30.0)]


def drafted(
    count: int,
    vocabulary: int,
    params: list[SamplingParams],
    *,
    one_hot: bool,
    dtype: str = "float32",
) -> dict:
    """Arguments of `verify_stochastic`: drafts of every length, mostly accepted, stop tokens, and
    logits of minus infinity here and there; seed 0."""
    rng = np.random.default_rng(0)
    target = 2.5 * rng.standard_normal((count, GAMMA + 1, vocabulary))
    # A few tokens hold most of the mass, as in a language model.
    target[:, :, rng.permutation(vocabulary)[:5]] += 3 + np.log(vocabulary)
    draft = target[:, :GAMMA] + 0.5 * rng.standard_normal((count, GAMMA, vocabulary))
    target[rng.random(target.shape) < 0.02] = -np.inf
    rows = sampling_of(
        [params[i % len(params)] for i in range(count)], rng.integers(0, 2**32, count)
    )
    noise = rng.gumbel(size=draft.shape) * np.asarray(rows.temperature)[:, None, None]
    tokens = (draft + noise).argmax(axis=-1).astype(np.int32)
    lengths = rng.integers(0, GAMMA + 1, count)
    tokens[np.arange(GAMMA) >= lengths[:, None]] = -1
    stops = rng.integers(-1, vocabulary, (count, 3))
    stops[::5, 1] = tokens[::5, 1]
    out = {
        "draft_tokens": tokens,
        "target_logits": target.astype(jnp.dtype(dtype)),
        "draft_lengths": lengths.astype(np.int32),
        "stop_tokens": stops.astype(np.int32),
        "sampling": rows,
        "positions": rng.integers(0, 1000, count).astype(np.int32),
    }
    out = jax.device_put(out)
    draft = jax.device_put(draft.astype(jnp.bfloat16))
    return out if one_hot else out | {"draft_logits": draft}


def assert_same(got: Verified, expected: Verified) -> None:
    for field in dataclasses.fields(Verified):
        value, reference = getattr(got, field.name), getattr(expected, field.name)
        assert value.dtype == reference.dtype
        np.testing.assert_array_equal(value, reference, field.name)


def with_holes(logits: jax.Array) -> jax.Array:
    """The same with NaN, plus infinity, both, and rows of minus infinity or NaN alone."""
    x = np.array(logits, np.float32)
    x[0::9, :, 0] = np.nan
    x[1::9, :, [0, -1]] = np.inf
    x[2::9] = -np.inf
    x[3::9] = np.nan
    x[4::9, :, 0], x[4::9, :, -1] = np.nan, np.inf
    return jax.device_put(x.astype(logits.dtype))


def arguments_of(count: int, vocabulary: int, *, one_hot: bool, dtype: str = "bfloat16") -> tuple:
    """Operands of the backends: rows of all settings, drafts of every length, and every other
    row's first draft token is a stop token."""
    args = drafted(count, vocabulary, PLAIN, one_hot=one_hot, dtype=dtype)
    tokens = args["draft_tokens"]
    return (
        tokens,
        args["target_logits"],
        args["draft_lengths"],
        args["stop_tokens"].at[1::2, 0].set(tokens[1::2, 0]),
        settings_of(args["sampling"]),
        args["positions"],
        args.get("draft_logits"),
    )


STATIC = {"rule": "token", "filtered": False, "axis_name": None}
_reference = jax.jit(functools.partial(stochastic_xla, **STATIC))


def assert_verified(got, arguments: tuple) -> None:
    """What a backend gave for `arguments_of` is the reference's, bit for bit."""
    assert_same(Verified(*map(jnp.asarray, got)), Verified(*_reference(*arguments)))


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


@functools.cache
def tiles_of_far_logits() -> tuple[np.ndarray, np.ndarray]:
    """Of `far_logits` of 2500 tokens: the sums of tiles, uint64 ``[6, 2, 3]``, and the exponents of
    the first tiles less those of the last. Rows that are certain of a token have others."""
    logits, settings, _ = far_logits(2500)
    law_of = functools.partial(distribution, vocabulary=Vocabulary(2500), filtered=False)
    with jax.enable_x64(True):
        law = jax.jit(law_of)(logits, settings)
        shift = np.asarray(law.shift).astype(np.int64)
        return np.asarray(law.weights).sum(axis=-1), shift[..., 2] - shift[..., 0]


def shapes_of(draft: str, vocabulary: int) -> list:
    """Shapes and dtypes of `arguments_of`."""
    arguments = arguments_of(4, 5, one_hot=draft == "one-hot")

    def shape(x):
        dims = (*x.shape[:-1], vocabulary) if x.shape[-1:] == (5,) else x.shape
        return jax.ShapeDtypeStruct(dims, x.dtype)

    return [jax.tree.map(shape, x) for x in arguments]
