"""A vocabulary sharded over devices gives the tokens of the whole one, and is not gathered."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

from jspec.ops import vocabulary as module
from jspec.ops.sample import Role, sample
from jspec.ops.stochastic import verify_stochastic
from jspec.ops.verify import Verified
from tests.ops.drafts import FILTERS, GAMMA, PLAIN, drafted
from tests.ops.laws import GREEDY, SAMPLED, sampling_of

DEVICES = jax.device_count()
COLLECTIVES = ("psum", "pmax", "pmin", "ppermute", "all_gather", "all_to_all", "reduce_scatter")


@pytest.fixture(autouse=True, scope="module")
def compiled_again():
    """Read and keep no program: JAX 0.10 hangs in these where its compilation cache has them."""
    name = "jax_enable_compilation_cache"
    before = getattr(jax.config, name)
    jax.config.update(name, False)
    reset_cache()  # whether there is a cache is asked once
    yield
    jax.config.update(name, before)
    reset_cache()


def sharded(function, vocabulary_arguments: list[str]):
    """``function`` of keyword arguments, those named sharded over their last axis."""
    mesh = jax.make_mesh((DEVICES,), ("shards",), axis_types=(jax.sharding.AxisType.Auto,))
    function = functools.partial(function, axis_name="shards")

    def run(**arguments):
        specs = {
            name: P(None, None, "shards") if name in vocabulary_arguments else P()
            for name in arguments
        }
        body = jax.shard_map(
            lambda x: function(**x), mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=True
        )
        return body(arguments)

    return jax.jit(run)


@pytest.mark.parametrize(
    ("count", "vocabulary", "tile", "params", "draft"),
    [
        pytest.param(2000, 64, 4, PLAIN, "logits", marks=pytest.mark.slow),
        (200, 80, 4, FILTERS, "logits"),
        pytest.param(200, 24, 7, PLAIN, "block", marks=pytest.mark.exhaustive),
        pytest.param(200, 24, 7, FILTERS, "one-hot", marks=pytest.mark.slow),
        pytest.param(16, 8 * 1500, 1024, PLAIN, "block", marks=pytest.mark.slow),
    ],
    ids=["fit", "shared", "over-three-block", "over-three-one-hot", "large-block"],
)
def test_sharded_is_the_same_as_whole(count, vocabulary, tile, params, draft, monkeypatch):
    """Tiles that shards hold whole, that two shards share, and that lie over three."""
    filtered = params is FILTERS
    args = drafted(count, vocabulary, params, one_hot=draft == "one-hot")
    monkeypatch.setattr(module, "TILE", tile)
    settings = {"rule": "block" if draft == "block" else "token", "filtered": filtered}
    verify = functools.partial(verify_stochastic, **settings, implementation="xla")
    whole = jax.jit(verify)(**args)
    parts = sharded(verify, ["target_logits", "draft_logits"])(**args)
    for field in dataclasses.fields(Verified):
        np.testing.assert_array_equal(getattr(parts, field.name), getattr(whole, field.name))
    assert whole.mismatch.any()
    assert whole.stopped.any()
    assert count < 100 or set(whole.accepted.tolist()) == set(range(GAMMA + 1))


def test_logits_that_are_no_numbers_sharded():
    logits = np.random.default_rng(0).standard_normal((40, 1, 80)).astype(np.float32)
    logits[:10, :, 30:] = -np.inf
    logits[10:20, :, ::3] = np.nan
    logits[20:30, :, [17, 40, 79]] = np.inf
    logits[30:] = -np.inf
    args = {
        "logits": jnp.asarray(logits),
        "sampling": sampling_of([SAMPLED, GREEDY] * 20),
        "positions": jnp.zeros((40, 1), jnp.int32),
    }
    draw = functools.partial(sample, role=Role.DRAFT, filtered=False)
    np.testing.assert_array_equal(sharded(draw, ["logits"])(**args), jax.jit(draw)(**args))


@pytest.mark.skipif(DEVICES == 1, reason="one device divides every vocabulary")
def test_the_axis_must_divide_the_vocabulary():
    args = drafted(8, 41, PLAIN, one_hot=True)
    with pytest.raises(ValueError, match="41"):
        sharded(verify_stochastic, ["target_logits"])(**args)


def test_what_is_exchanged_does_not_grow_with_the_vocabulary():
    """Bytes of all collectives, for two vocabularies and against both."""
    args, moved = drafted(4, 8, FILTERS, one_hot=False), []
    verify = sharded(
        functools.partial(verify_stochastic, filtered=True), ["target_logits", "draft_logits"]
    )
    for vocabulary in (8 * 1500, 8 * 6500):
        for name in ("target_logits", "draft_logits"):
            shape = (*args[name].shape[:2], vocabulary)
            args[name] = jax.ShapeDtypeStruct(shape, args[name].dtype)
        moved.append(collective_bytes(jax.make_jaxpr(verify)(**args).jaxpr))
    assert moved[0] == moved[1]
    assert 0 < moved[0] < 0.05 * args["target_logits"].size * 4


def collective_bytes(jaxpr) -> int:
    """Sizes of what the collectives of a program give, those of a loop counted once."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith(COLLECTIVES):
            total += sum(x.aval.size * x.aval.dtype.itemsize for x in equation.outvars)
        total += sum(map(collective_bytes, jaxprs_in_params(equation.params)))
    return total
