"""One prefill for several policies: what each keeps is as in a prefill of its own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jspec.config import SamplingParams
from jspec.decode.convert_state import convert_state
from jspec.decode.draft import ModelDraft, SelfDraft, named_draft
from jspec.decode.generation import generate
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import PLAIN, StepConfig
from jspec.decode.state import Models
from tests.conftest import TINY, make_decoder
from tests.decode.common import prompts
from tests.parameters import default_run
from tests.policies.common import MATRIX, arrays_of

PROMPTS = prompts((30, 7, 1))
PARAMS = SamplingParams(max_new_tokens=8)
PLAINLY = {"draft": None}


@pytest.fixture(scope="module")
def windowed():
    first, second = TINY.layers
    layers = (first, dataclasses.replace(second, window=8))
    return make_decoder(dataclasses.replace(TINY, layers=layers), seed=3)


@pytest.mark.parametrize("name", default_run(["hata", "quest", "loki"], "hata", slow=["loki"]))
def test_it_keeps_what_a_direct_prefill_keeps(name, windowed):
    policy = MATRIX[name]
    models = Models(windowed, policy=arrays_of(policy, windowed.config.layers))
    config = StepConfig(3, SelfDraft(policy))
    larger_gamma = dataclasses.replace(PLAIN, gamma=3)
    direct = start_decoding(models, PROMPTS, PARAMS, config)
    shared = start_decoding(windowed, PROMPTS, PARAMS, larger_gamma)
    got = convert_state(models, shared, config)
    assert jax.tree.structure(got) == jax.tree.structure(direct)
    remaining = [x.columns for x in (direct.cache, got.cache)]
    for expected, result in zip(*remaining, strict=True):
        for column in expected:
            assert expected[column].dtype == result[column].dtype
            size = expected[column].shape[1]
            for row, length in enumerate(map(len, PROMPTS)):
                # What no position is in may be anything.
                used = slice(0, min(length - 1, size))
                pair = (np.asarray(x[column])[row, used] for x in (result, expected))
                np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, got.cache.pages, direct.cache.pages)
    assert not shared.cache.keys(0).is_deleted()


@pytest.mark.exhaustive
def test_a_prefill_serves_several_calls(tiny):
    shared = start_decoding(tiny, PROMPTS, PARAMS, PLAIN)
    lossy = {"draft": None, "target": MATRIX["quest"]}
    expected = [generate(tiny, PROMPTS, PARAMS, **settings).tokens for settings in (lossy, PLAINLY)]
    for settings, tokens in zip((lossy, PLAINLY, lossy), (*expected, expected[0]), strict=True):
        got = generate(tiny, PROMPTS, PARAMS, prefilled=shared, **settings)
        assert got.tokens == tokens
    assert expected[0] != expected[1]


def test_the_params_of_a_call_count_and_not_those_of_the_prefill(tiny):
    """Other lengths, past the capacity too, other seeds, and those that the call draws."""
    short = SamplingParams(max_new_tokens=2, temperature=1.0, stop_tokens=(3,))
    small = start_decoding(tiny, PROMPTS, short, PLAIN, capacity=32)
    for params in (
        PARAMS,
        SamplingParams(max_new_tokens=40),
        SamplingParams(max_new_tokens=8, temperature=1.0, top_k=9, seed=5),
    ):
        got = generate(tiny, PROMPTS, params, draft=None, prefilled=small)
        assert got.tokens == generate(tiny, PROMPTS, params, draft=None).tokens
    params = SamplingParams(max_new_tokens=8, temperature=1.0)
    got = generate(tiny, PROMPTS, params, draft=None, prefilled=small)
    again = [dataclasses.replace(params, seed=seed) for seed in got.seeds]
    assert got.tokens == generate(tiny, PROMPTS, again, draft=None).tokens
    with pytest.raises(ValueError, match="exceeds the context of 512"):
        generate(tiny, PROMPTS, SamplingParams(max_new_tokens=500), draft=None, prefilled=small)


@pytest.mark.parametrize("text", ["suffix", "suffix > vegas:budget=6,least=0; rounds=2"])
def test_a_drafter_reads_what_was_prefilled_without_it(text, tiny):
    config = StepConfig(3, named_draft(text))
    direct = start_decoding(tiny, PROMPTS, PARAMS, config)
    shared = start_decoding(tiny, PROMPTS, PARAMS, dataclasses.replace(PLAIN, gamma=3))
    got = convert_state(tiny, shared, config)
    jax.tree.map(np.testing.assert_array_equal, got.draft, direct.draft)


def test_a_second_model_takes_up_the_prompts_in_pieces(tiny, other, monkeypatch):
    monkeypatch.setattr("jspec.decode.convert_state.default_chunk", lambda batch: 16)
    models, config = Models(tiny, other), StepConfig(3, ModelDraft())
    direct = start_decoding(models, PROMPTS, PARAMS, config)
    shared = start_decoding(tiny, PROMPTS, PARAMS, dataclasses.replace(PLAIN, gamma=3))
    got = convert_state(models, shared, config).draft
    np.testing.assert_array_equal(got.lengths, [29, 6, 0])
    for layer in range(len(other.config.layers)):
        for row, length in enumerate(got.lengths):
            pair = (x.keys(layer)[row, :length] for x in (got, direct.draft))
            np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-6)
    drafted = {"draft": ModelDraft(), "draft_model": other, "gamma": 3, "prefilled": shared}
    plain = generate(tiny, PROMPTS, PARAMS, draft=None)
    assert generate(tiny, PROMPTS, PARAMS, **drafted).tokens == plain.tokens


@pytest.mark.skipif(jax.device_count() < 3, reason="needs 3 devices")
def test_it_lies_where_it_is_told_to(tiny):
    mesh = jax.make_mesh((3,), ("rows",), devices=jax.devices()[:3])
    where = NamedSharding(mesh, PartitionSpec("rows"))
    state = start_decoding(tiny, PROMPTS, PARAMS, PLAIN, sharding=where)
    config = dataclasses.replace(PLAIN, target=MATRIX["quest"])
    got = convert_state(tiny, state, config, sharding=where)
    assert {x.sharding for x in jax.tree.leaves(got)} == {where}
    np.testing.assert_array_equal(got.cache.keys(0), state.cache.keys(0))


def test_what_it_cannot_make_is_refused(tiny, windowed):
    state = start_decoding(windowed, PROMPTS, PARAMS, PLAIN)
    with pytest.raises(ValueError, match="gamma=3 does not fit"):
        convert_state(windowed, state, StepConfig(3, SelfDraft(MATRIX["streaming"])))
    state = start_decoding(tiny, PROMPTS, PARAMS, PLAIN)
    with pytest.raises(ValueError, match="Loki needs parameters"):
        convert_state(tiny, state, dataclasses.replace(PLAIN, target=MATRIX["loki"]))
    with pytest.raises(ValueError, match=r"prefilled has 3 rows of \[30, 7, 1\] tokens"):
        generate(tiny, PROMPTS[:2], PARAMS, draft=None, prefilled=state)
    assert jnp.isfinite(state.cache.keys(0)[0, :29]).all()


def test_prompts_of_other_lengths_compile_nothing(tiny, compiled):
    config = StepConfig(3, named_draft("suffix"))
    first, second = (
        start_decoding(tiny, [prompt], PARAMS, PLAIN, capacity=64)
        for prompt in (PROMPTS[0], PROMPTS[0][:19])
    )
    convert_state(tiny, first, config)
    before = compiled()
    convert_state(tiny, second, config)
    assert compiled() == before
