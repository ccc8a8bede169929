"""New weights in a running engine: in place, without compiling, and with the cache that is asked
for.
"""

import dataclasses
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jspec import helix
from jspec.config import SamplingParams
from jspec.decode import chunks as chunks_module
from jspec.decode import weights as weights_module
from jspec.decode.engine import Engine
from jspec.decode.generation import generate
from jspec.decode.processors import completed
from jspec.decode.programs import Programs
from jspec.decode.state import FlatModels, Models
from jspec.decode.weights import WeightTypes, array_like, name_of
from tests.conftest import ONE_LAYER, make_decoder
from tests.decode.common import prompts
from tests.decode.conftest import COMPILED
from tests.decode.engines import apart, engine_of, work
from tests.parameters import default_run

TEXTS = prompts((9, 3, 14, 40, 25))
PARAMS = [
    SamplingParams(max_new_tokens=20, seed=row, temperature=float(row % 2)) for row in range(5)
]
REQUESTS = list(zip(TEXTS, PARAMS, strict=True))


@pytest.fixture(scope="module")
def models():
    """A decoder, and others of its structure."""
    return [make_decoder(ONE_LAYER, seed=seed, head=8.0) for seed in (1, 7, 8)]


@pytest.fixture(scope="module")
def expected(models):
    """The tokens of `REQUESTS` by each model."""
    return [generate(model, TEXTS, PARAMS, draft=None).tokens for model in models]


@pytest.fixture
def engine(models) -> Engine:
    return Engine(models[0], slots=3, capacity=64, prefill_chunk=16, draft=None, steps_per_chunk=4)


@pytest.fixture
def running(ahead):
    """A chunk runs ahead whenever the caller comes back."""
    return ahead


def served(engine):
    requests = [engine.submit(*request) for request in REQUESTS]
    engine.run()
    return tuple(request.tokens for request in requests)


def forms(model):
    state = nnx.state(model)
    copied = jax.tree.map(jnp.copy, state)
    return [model, state, copied, nnx.to_pure_dict(state), jax.tree.map(np.asarray, state)]


def test_updated_weights_give_the_tokens_of_a_new_engine(models, expected, engine):
    """In each form that weights may have, and nothing compiles after the first of each."""
    assert served(engine) == expected[0]
    for which in (1, 2, 1):
        for form in forms(models[which]):
            engine.update(models[0])
            before = len(COMPILED), engine.stats.compilations
            engine.update(form)
            assert served(engine) == expected[which]
            assert (len(COMPILED), engine.stats.compilations) == before
    assert engine.version == 30


def test_the_model_that_the_engine_was_made_with_is_left_alone(models, expected, engine):
    before = jax.tree.map(np.asarray, nnx.state(models[0]))
    engine.update(models[1])
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(models[0]))
    assert served(engine) == expected[1]


def first_chunk(engine):
    """Three requests with tokens, one whose prompt is being prefilled, and one that waits."""
    requests = [engine.submit(*request) for request in REQUESTS]
    while not all(len(requests[row].tokens) >= 8 for row in (0, 1, 2)):
        engine.step()
    return requests


def test_recomputed_requests_go_on_as_those_of_the_new_weights(models, expected, engine, running):
    """Each is what the new weights give after its prompt and its first tokens."""
    requests = first_chunk(engine)
    before = [request.tokens for request in requests]
    assert engine.update(models[1], on_update="recompute") == 1
    engine.run()
    for (prompt, params), first, request in zip(REQUESTS, before, requests, strict=True):
        rest = dataclasses.replace(params, max_new_tokens=20 - len(first))
        (after,) = generate(models[1], [[*prompt, *first]], rest, draft=None).tokens
        assert request.tokens == (*first, *after)
        assert request.versions == (0,) * len(first) + (1,) * len(after)
    assert requests[3].tokens == expected[1][3]
    assert engine.stats.rows == 5


@pytest.mark.exhaustive
def test_recomputed_requests_are_still_processed_by_what_their_answers_have(models):
    """Penalties and the least number of new tokens tell the prompt from the answer."""
    settings = {"frequency_penalty": 0.7, "repetition_penalty": 1.3, "min_new_tokens": 14}
    params = SamplingParams(max_new_tokens=18, stop_tokens=tuple(range(14)), **settings)
    expected = generate(models[0], TEXTS[:2], params, draft=None)
    processors = completed((), [params])
    engine = Engine(models[0], slots=2, capacity=64, draft=None, processors=processors)
    requests = [engine.submit(prompt, params) for prompt in TEXTS[:2]]
    while not all(len(request.tokens) >= 4 for request in requests):
        engine.step()
    engine.update(models[0], on_update="recompute")
    engine.run()
    assert tuple(request.tokens for request in requests) == expected.tokens


def test_kept_requests_go_on_with_their_cache(models, expected, engine, running):
    """Those that run end otherwise than with either model; the others get the new one's tokens."""
    requests = first_chunk(engine)
    assert running.at_work[-1] == 1
    prompt_tokens = engine.stats.prompt_tokens
    engine.update(models[1])
    engine.run()
    for row, request in enumerate(requests[:3]):
        first = request.versions.count(0)
        assert request.versions == (0,) * first + (1,) * (20 - first)
        assert 8 < first <= 16  # and those of the chunk that ran
        assert request.tokens[:first] == expected[0][row][:first]
    assert [request.tokens for request in requests[3:]] == [*expected[1][3:]]
    assert engine.stats.prompt_tokens == prompt_tokens + len(TEXTS[3]) + len(TEXTS[4])
    assert [request.tokens for request in requests[:3]] != [*expected[1][:3]]


def test_aborted_requests_keep_their_tokens(models, expected, engine, running):
    requests = first_chunk(engine)
    before = [request.tokens for request in requests[:3]]
    engine.update(models[1], on_update="abort")
    assert [request.finished for request in requests] == ["aborted"] * 3 + [None] * 2
    engine.run()
    assert [request.tokens for request in requests[:3]] == before
    assert [request.tokens for request in requests[3:]] == [*expected[1][3:]]


def test_shared_prefixes_are_dropped(models, engine):
    engine.share_prefix(TEXTS[3][:20])
    engine.update(models[1])
    with pytest.raises(ValueError, match="no prefix of these 20 tokens is shared"):
        engine.drop_prefix(TEXTS[3][:20])


def test_a_prompt_in_prefill_begins_again(models, expected, engine):
    request = engine.submit(*REQUESTS[3])
    engine._scheduler._begin_next()
    engine._scheduler.prefill.advance(engine._scheduler.prefill.current_row)
    engine.update(models[1])
    assert request.result() == expected[1][3]


def test_weights_of_another_structure_are_refused_and_nothing_changes(models, expected, engine):
    state = nnx.to_pure_dict(nnx.state(models[1]))
    engine.update(nnx.to_pure_dict(nnx.state(models[0])))  # of the same structure
    other = {**state, "embedding": state["embedding"][:-1]}
    with pytest.raises(ValueError, match=r"weight 'embedding' is float32\[40, 32\], and that of"):
        engine.update(other)
    with pytest.raises(ValueError, match="no weight 'more'"):
        engine.update({**state, "more": state["embedding"]})
    with pytest.raises(ValueError, match="'embedding' is missing"):
        engine.update({name: x for name, x in state.items() if name != "embedding"})
    with pytest.raises(ValueError, match=r"'embedding' is int32\[41, 32\]"):
        engine.update({**state, "embedding": state["embedding"].astype(jnp.int32)})
    with pytest.raises(ValueError, match="on_update='drop' must be one of keep, recompute, abort"):
        engine.update(state, on_update="drop")  # pyright: ignore[reportArgumentType]
    assert engine.version == 1
    assert served(engine) == expected[0]


def test_a_variable_that_is_no_parameter_may_be_missing():
    class Scaled(nnx.Module):
        def __init__(self):
            self.weight, self.counts = nnx.Param(jnp.ones(2)), nnx.Variable(jnp.zeros(1))
            self.bias = nnx.Param(jnp.ones(3))

    model: Any = Scaled()
    types, current = WeightTypes(model), FlatModels.of(Models(model))
    for scale in (2.0, 3.0):
        new = jax.tree.map(lambda x, scale=scale: scale * x, nnx.state(model, nnx.Param))
        arrays = types.matched(new, current)
        for x, expected in zip(arrays, ([scale] * 3, [0.0], [scale] * 2), strict=True):
            np.testing.assert_array_equal(x, expected)


def test_weights_are_named_once_for_each_structure(models, engine, monkeypatch):
    """Naming those of 30 layers takes milliseconds: later updates only compare structures."""
    states = [nnx.state(model) for model in models]
    dicts = [nnx.to_pure_dict(state) for state in states]
    engine.update(states[0])
    named = []
    monkeypatch.setattr(weights_module, "name_of", lambda path: named.append(path) or name_of(path))
    engine.update(states[1])
    assert not named
    engine.update(dicts[2])
    count = len(named)
    engine.update(dicts[1])
    assert len(named) == count == len(jax.tree.leaves(states[0]))


def test_a_model_with_updated_weights_is_watched(models, engine):
    """As the one that the engine was made with: what changes it in place changes no engine."""
    engine.update(models[1])
    assert engine.is_current
    nnx.update(engine.model, jax.tree.map(jnp.copy, nnx.state(models[2])))
    with pytest.raises(RuntimeError, match=r"weights of the model were replaced.*to Engine.update"):
        engine.submit(*REQUESTS[0])
    engine.update(engine.model)
    assert engine.is_current


def test_weights_that_a_training_step_took_are_refused_until_the_next_update(models, expected):
    """It may donate what the engine decodes with: nobody needs a second copy."""
    weights = jax.tree.map(jnp.copy, nnx.state(models[1]))
    engine = engine_of(models[0], "none")
    engine.update(weights)
    request = engine.submit(*REQUESTS[0])
    after = jax.jit(lambda x: jax.tree.map(lambda y: y + 0, x), donate_argnums=0)(weights)
    with pytest.raises(RuntimeError, match=r"weights of the engine were deleted.*Engine\.update"):
        engine.step()
    engine.update(after)
    assert request.result() == expected[1][0]


def test_weights_that_must_be_cast_are_freed_if_they_may_be(models):
    engine = engine_of(jax.tree.map(lambda x: x.astype(jnp.bfloat16), models[0]), "none")
    weights = jax.tree.map(jnp.copy, nnx.state(models[1]))
    cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16), models[1])
    for donate in (False, True):
        engine.update(models[0])
        engine.update(weights, donate=donate)
        assert all(x.is_deleted() == donate for x in jax.tree.leaves(weights))
        jax.tree.map(np.testing.assert_array_equal, nnx.state(engine.model), nnx.state(cast))


def test_weights_are_cast_by_one_program(models, monkeypatch):
    """Those in another dtype alone, on the device; a call for each takes the host long."""
    engine = engine_of(jax.tree.map(lambda x: x.astype(jnp.bfloat16), models[0]), "none")
    numbers = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(models[1])))
    mixed = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(models[1])))
    mixed["embedding"] = mixed["embedding"].astype(jnp.bfloat16)
    mixed["norm"] = numbers["norm"]
    calls, cast = [], weights_module._cast
    monkeypatch.setattr(weights_module, "_cast", lambda *args: calls.append(args) or cast(*args))
    engine.update(mixed)
    ((arrays, dtypes),) = calls
    count = len(jax.tree.leaves(mixed)) - 2
    assert [len(arrays), *dtypes] == [count, *[jnp.bfloat16] * count]
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(models[1]))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(engine.model), expected)


@pytest.mark.exhaustive
def test_memory_is_flat_over_many_updates(models):
    """As many bytes live after each update, and none of the earlier weights."""

    def live():
        gc.collect()
        return sum(x.nbytes for x in jax.live_arrays())

    engine, sizes = engine_of(models[0], "quantized"), []
    cast = [jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.state(x)) for x in models]
    for step in range(12):
        engine.update(cast[step % 3])
        engine.submit(*REQUESTS[0]).result()
        sizes.append(live())
    assert set(sizes[2:]) == {sizes[-1]}


def test_no_weight_is_in_memory_twice(models, monkeypatch):
    """The earlier weights, and a copy that drafts, are gone before the first new one is made."""
    engine = engine_of(models[0], "quantized")
    numbers = [jax.tree.map(np.asarray, nnx.state(model)) for model in models]
    engine.update(numbers[1])
    earlier = [weakref.ref(x) for x in jax.tree.leaves(engine._options.flat)]

    def checked(x, like, *, donate):
        assert not any(one() is not None for one in earlier)
        return array_like(x, like, donate=donate)

    monkeypatch.setattr(weights_module, "array_like", checked)
    engine.update(numbers[2])


@pytest.mark.parametrize(
    "name", default_run(["quantized", "magicpig", "lossy-hata"], "quantized", "lossy-hata")
)
def test_what_is_made_of_the_weights_is_made_again(name, models):
    engine = engine_of(models[0], name)
    engine.warm_up()
    engine.update(models[1])
    fresh = engine_of(models[1], name)._options
    made = [(x.models.draft, x.models.policy) for x in (engine._options, fresh)]
    jax.tree.map(np.testing.assert_array_equal, *made)
    assert jax.tree.structure(engine._options.flat) == jax.tree.structure(fresh.flat)
    before = len(COMPILED)
    engine.update(models[2])
    requests = [engine.submit(*request) for request in REQUESTS]
    engine.run()
    assert tuple(x.tokens for x in requests) == apart(models[2], name, REQUESTS).tokens
    compiled = len(COMPILED)
    engine.update(models[1])
    assert compiled >= before
    assert len(COMPILED) == compiled


def test_a_draft_model_that_the_caller_passed_stays(models):
    engine = engine_of(models[0], "model", models[2])
    engine.update(models[1])
    assert engine._options.models.draft is models[2]
    requests = [engine.submit(*request) for request in REQUESTS]
    engine.run()
    expected = apart(models[1], "model", REQUESTS, models[2]).tokens
    assert tuple(x.tokens for x in requests) == expected


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.device_count() < 4, reason="the mesh has four devices")
def test_weights_go_to_the_devices_of_the_engine(models, behind):
    """From one device to the shares of a mesh, also from those of another mesh."""
    first, second = (helix.HelixConfig(kvp=k, tpa=t, block=4) for k, t in ((2, 2), (4, 1)))
    engine = engine_of(helix.shard(models[0], first), "ngram")
    expected = apart(models[1], "ngram", REQUESTS).tokens
    for weights in (models[1], nnx.state(models[1]), helix.shard(models[1], second)):
        engine.update(models[0])
        engine.update(weights)
        before = len(COMPILED)
        requests = [engine.submit(*request) for request in REQUESTS]
        engine.run()
        assert tuple(x.tokens for x in requests) == expected
    assert len(COMPILED) == before


# --- the cache, released for a training step ------------------------------------------------------


def test_a_released_cache_is_free_memory_and_its_requests_go_on(models, expected, engine, running):
    def live():
        gc.collect()
        return sum(x.nbytes for x in jax.live_arrays())

    engine.warm_up()
    compiled, whole = len(COMPILED), live()
    cache = engine._runner.state.cache.nbytes * 4 // 3  # and the row for a prompt
    requests = first_chunk(engine)
    engine.release_cache()
    assert live() <= whole - cache
    with pytest.raises(RuntimeError, match="cache was released; call restore_cache"):
        engine.step()
    requests.append(engine.submit(*REQUESTS[0]))
    engine.release_cache()  # which changes nothing
    engine.restore_cache()
    assert live() == whole
    engine.run()
    assert tuple(request.tokens for request in requests) == (*expected[0], expected[0][0])
    assert len(COMPILED) == compiled


@pytest.mark.parametrize(
    "name", default_run(["none", "chain-of-models", "lossy-host", "mesh"], "none")
)
def test_programs_of_others_take_none_of_the_cache(name, models, monkeypatch, compiled):
    """A cache is restored without compiling, whatever ran since the engine was made."""
    programs = Programs(limit=1)
    monkeypatch.setattr(chunks_module, "PROGRAMS", programs)
    if name == "mesh":
        if jax.device_count() < 4:
            pytest.skip("the mesh has four devices")
        config = helix.HelixConfig(kvp=2, tpa=2, block=4)
        engine = engine_of(helix.shard(models[0], config), "ngram")
    else:
        engine = engine_of(models[0], name, models[2])
    programs(jax.jit(jnp.negative), np.float32(1))
    before = compiled()
    engine.release_cache()
    engine.restore_cache()
    assert compiled() == before


def test_weights_are_updated_while_the_cache_is_released(models, expected, engine):
    requests = first_chunk(engine)
    engine.release_cache()
    engine.update(models[1])
    requests[0].cancel()
    engine.restore_cache()
    engine.restore_cache()
    engine.run()
    assert [request.tokens for request in requests[3:]] == [*expected[1][3:]]
    assert requests[0].finished == "cancelled"
    assert requests[1].versions.count(1) > 0


# --- many requests --------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["ngram", pytest.param("suffix", marks=pytest.mark.slow)])
def test_many_requests_with_updates_and_cancellations_get_what_they_get_alone(name, models):
    """Each by the weights that were there; updates recompute, and the cache comes and goes."""
    rng, requests = np.random.default_rng(5), work(200, seed=3)
    engine = engine_of(models[0], name, slots=4)
    engine.warm_up()
    engine.update(models[0])
    before, compiled = engine.version, len(COMPILED)
    submitted, left = [], list(requests)
    while left or engine.busy:
        burst = int(rng.integers(0, 6))
        submitted += [engine.submit(*one) for one in left[:burst]]
        left = left[burst:]
        event = rng.random()
        if event < 0.05:
            engine.update(models[(engine.version + 1 - before) % 3], on_update="recompute")
        elif event < 0.07:
            engine.release_cache()
            engine.restore_cache()
        elif event < 0.15 and submitted:
            submitted[rng.integers(len(submitted))].cancel()
        engine.step()
    assert len(COMPILED) == compiled
    assert engine.version - before > 3
    _check_versions(models, requests, submitted, before)


def _check_versions(models, requests, submitted, before) -> None:
    """Each run of tokens of one version is what its model gives after all before it."""
    pieces = [[] for _ in models]
    for (prompt, params), request in zip(requests, submitted, strict=True):
        tokens, versions = request.tokens, np.array(request.versions)
        assert (np.diff(versions) >= 0).all()
        for version in np.unique(versions):
            at = np.flatnonzero(versions == version)
            known = [*prompt, *tokens[: at[0]]]
            rest = dataclasses.replace(params, max_new_tokens=len(at))
            pieces[(version - before) % 3].append((known, rest, tokens[at[0] : at[-1] + 1]))
    assert min(map(len, pieces)) > 20
    for model, rows in zip(models, pieces, strict=True):
        tokens = apart(model, "none", [row[:2] for row in rows]).tokens
        assert list(tokens) == [row[2] for row in rows]
