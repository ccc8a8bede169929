"""Drawing and rejection sampling: every backend gives the tokens of the reference, all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.dispatch import BackendError
from jspec.ops.sample import SAMPLE, Role, sample, settings_of
from jspec.ops.stochastic import VERIFY_STOCHASTIC, verify_stochastic
from tests.ops.drafts import FILTERS, GAMMA, PLAIN, assert_same, drafted, with_holes
from tests.ops.laws import SAMPLED, sampling_of
from tests.parameters import default_run


def kernels(operation) -> pytest.MarkDecorator:
    """Runs a test over all backends of ``operation`` but the reference."""
    return pytest.mark.parametrize("backend", [x for x in operation.backends if x != "xla"])


@functools.cache
def by(function, backend: str, **settings):
    """``function`` jitted, by one backend; a skip where it cannot run with these settings."""
    logits, tokens = jnp.zeros((1, 1, 4)), jnp.zeros((1, 1), jnp.int32)
    of_rows = settings_of(sampling_of([SAMPLED]))
    if function is sample:
        arguments = (logits, of_rows, tokens)
        reason = SAMPLE.backend(backend).supports(*arguments, axis_name=None, **settings)
    else:
        arguments = (tokens[:, :0], logits, tokens[0], tokens, of_rows, tokens[0], None)
        static = {"rule": "token", "axis_name": None, **settings}
        reason = VERIFY_STOCHASTIC.backend(backend).supports(*arguments, **static)
    if reason:
        pytest.skip(f"{backend}: {reason}")
    return jax.jit(functools.partial(function, implementation=backend, **settings))


CASES = {
    "plain": (500, 37, PLAIN, "float32"),
    "filters": (500, 37, FILTERS, "float32"),
    "ragged-tiles": (40, 1100, FILTERS, "bfloat16"),
    "many-tiles": (4, 133_000, PLAIN, "bfloat16"),  # a warp of the kernel holds 128
    "one-token": (3, 1, PLAIN, "float32"),
}
every_case = pytest.mark.parametrize(
    ("count", "vocabulary", "params", "dtype"),
    default_run(CASES, "ragged-tiles", "one-token"),
)


VERIFIED = [(case, "distribution") for case in CASES if case != "one-token"]
VERIFIED += [("ragged-tiles", "one-hot")]
VERIFIED += [(case, "block") for case in ("filters", "many-tiles", "one-token")]
# `tests.ops.test_block_law` has these settings and one-hot drafts, of every backend.
REPEATED = [("filters", "distribution"), ("ragged-tiles", "one-hot"), ("many-tiles", "block")]


@kernels(VERIFY_STOCHASTIC)
@pytest.mark.parametrize(
    ("case", "draft"),
    default_run(
        {"-".join(x): x for x in VERIFIED},
        *("ragged-tiles-distribution", "one-token-block"),
        slow=["-".join(x) for x in REPEATED],
    ),
)
def test_verification_is_that_of_the_reference(backend, case, draft):
    count, vocabulary, params, dtype = CASES[case]
    settings = {
        "filtered": params is FILTERS,
        "rule": "block" if draft == "block" else "token",
    }
    run = by(verify_stochastic, backend, **settings)
    reference = by(verify_stochastic, "xla", **settings)
    args = drafted(count, vocabulary, params, one_hot=draft == "one-hot", dtype=dtype)
    expected = reference(**args)
    assert_same(run(**args), expected)
    if count > 50:
        assert set(expected.accepted.tolist()) == set(range(GAMMA + 1))
        assert expected.stopped.any()
    args["target_logits"] = with_holes(args["target_logits"])
    assert_same(run(**args), reference(**args))


@kernels(SAMPLE)
@every_case
def test_drawing_is_that_of_the_reference(backend, count, vocabulary, params, dtype):
    settings = {"filtered": params is FILTERS, "role": Role.BONUS}
    run = by(sample, backend, **settings)
    reference = by(sample, "xla", **settings)
    args = drafted(count, vocabulary, params, one_hot=True, dtype=dtype)
    logits, rows = args["target_logits"], args["sampling"]
    positions = args["positions"][:, None] + jnp.arange(GAMMA + 1)[None]
    for x in (logits, with_holes(logits)):
        expected = reference(x, rows, positions)
        np.testing.assert_array_equal(run(x, rows, positions), expected)


@kernels(SAMPLE)
@pytest.mark.slow
@pytest.mark.parametrize("spread", [4.0, 0.05], ids=["peaked", "flat"])
def test_a_million_draws_are_those_of_the_reference(backend, spread):
    """Seeds 0..999,999, each over one of 1,000 rows of logits."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(spread * rng.standard_normal((1000, 1, 1500)), jnp.float32)
    settings = {"filtered": False, "role": Role.BONUS}
    run, reference = (by(sample, name, **settings) for name in (backend, "xla"))
    for block in range(1000):
        rows = sampling_of([SAMPLED] * 1000, 1000 * block + np.arange(1000))
        positions = jnp.full((1000, 1), block, jnp.int32)
        expected = reference(logits, rows, positions)
        np.testing.assert_array_equal(run(logits, rows, positions), expected)


@kernels(VERIFY_STOCHASTIC)
def test_verification_under_vmap(backend):
    run = by(verify_stochastic, backend, filtered=False)
    args = drafted(24, 37, PLAIN, one_hot=False)
    expected = run(**args)
    split = jax.tree.map(lambda x: x.reshape(4, 6, *x.shape[1:]), args)
    got = jax.vmap(lambda args: run(**args))(split)
    assert_same(jax.tree.map(lambda x: x.reshape(24, *x.shape[2:]), got), expected)


def test_a_backend_says_what_it_refuses():
    args = drafted(24, 37, PLAIN, one_hot=True)
    for change, reason in (
        ({"target_logits": args["target_logits"].astype(jnp.float16)}, "float16"),
        ({"axis_name": "shards"}, "sharded over 'shards'"),
    ):
        with pytest.raises(BackendError, match=reason):
            verify_stochastic(**args | change, filtered=False, implementation="cuda")


def test_shapes_that_do_not_fit_are_refused():
    args = drafted(24, 37, PLAIN, one_hot=True)
    with pytest.raises(ValueError, match=r"positions \(24, 3\) must be .* with B=24"):
        sample(
            args["target_logits"],
            args["sampling"],
            jnp.zeros((24, 3), jnp.int32),
            Role.BONUS,
            filtered=False,
        )
