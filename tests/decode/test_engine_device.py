"""An engine whose model is on another device than the default one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jspec.config import SamplingParams
from jspec.decode import weights as weights_module
from jspec.decode.convert_state import convert_state
from jspec.decode.engine import Engine
from jspec.decode.generation import generate
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import StepConfig
from tests.conftest import ONE_LAYER, make_decoder
from tests.decode.common import prompts
from tests.decode.engines import apart, engine_of
from tests.parameters import default_run

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="models are on the second device")

TEXTS = prompts((9, 3, 40, 25))
PARAMS = [
    SamplingParams(max_new_tokens=12, seed=row, temperature=float(row % 2)) for row in range(4)
]
REQUESTS = list(zip(TEXTS, PARAMS, strict=True))
NAMES = ["none", "quantized", "lossy-hata", "model", "chain", "lossy-host"]


@pytest.fixture(scope="module")
def models():
    """A decoder, and others of its structure."""
    return [make_decoder(ONE_LAYER, seed=seed, head=8.0) for seed in (1, 7, 8)]


def served(engine):
    requests = [engine.submit(*request) for request in REQUESTS]
    engine.run()
    return tuple(request.tokens for request in requests)


def replicated(tree):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def places(tree):
    return {device for x in jax.tree.leaves(tree) for device in x.devices()}


@pytest.mark.parametrize("name", default_run(NAMES, "none"))
def test_an_engine_is_on_the_device_of_its_model(name, models, compiled):
    """With all that it makes, and takes its copy of weights that each device has."""
    device = jax.devices()[1]
    engine = engine_of(jax.device_put(models[0], device), name, models[2], capacity=64)
    engine.warm_up()
    expected = [apart(x, name, REQUESTS, models[2]).tokens for x in models[:2]]
    assert served(engine) == expected[0]
    engine.share_prefix(TEXTS[2][:20])
    weights = replicated(nnx.state(models[1]))
    before = compiled()
    engine.release_cache()
    engine.restore_cache()
    engine.update(weights)
    assert served(engine) == expected[1]
    assert compiled() == before
    assert places((engine._options.flat, engine._runner.state)) == {device}
    for x, y in zip(*map(jax.tree.leaves, (weights, nnx.state(engine.model))), strict=True):
        assert x.addressable_shards[1].data.unsafe_buffer_pointer() == y.unsafe_buffer_pointer()


def test_replicated_weights_are_cast_where_they_are(models, monkeypatch):
    """By one program on the device of the engine alone, unless each is to be freed."""
    cast, where = weights_module._cast, []
    monkeypatch.setattr(
        weights_module, "_cast", lambda x, dtypes: where.append(places(x)) or cast(x, dtypes)
    )
    device = jax.devices()[1]
    model = jax.device_put(jax.tree.map(lambda x: x.astype(jnp.bfloat16), models[0]), device)
    engine = Engine(model, slots=1, capacity=16, draft=None)
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(models[1]))
    for donate in (False, True):
        weights = replicated(nnx.state(models[1]))
        engine.update(weights, donate=donate)
        jax.tree.map(np.testing.assert_array_equal, nnx.state(engine.model), expected)
        assert places(engine.model) == {device}
        assert where == [{device}]
        assert all(x.is_deleted() == donate for x in jax.tree.leaves(weights))


@pytest.mark.exhaustive
def test_a_state_is_on_the_device_of_its_model(models):
    model = jax.device_put(models[0], jax.devices()[1])
    state = start_decoding(model, TEXTS, PARAMS, StepConfig(2))
    for one in (state, convert_state(model, state, StepConfig(3))):
        assert places(one) == {jax.devices()[1]}
    tokens = generate(model, TEXTS, PARAMS, draft=None, prefilled=state).tokens
    assert tokens == generate(models[0], TEXTS, PARAMS, draft=None).tokens
