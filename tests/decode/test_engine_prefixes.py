"""Prefixes that an engine finds in its rows: system prompts, and the turns of conversations."""

import dataclasses

import jax
import numpy as np
import pytest

from jspec import helix
from jspec.config import SamplingParams
from jspec.decode.draft import SelfDraft
from jspec.decode.engine import Engine
from tests.conftest import TINY, make_decoder
from tests.decode.common import prompts
from tests.decode.conftest import COMPILED
from tests.decode.engines import QUEST, apart, engine_of
from tests.parameters import default_run

SYSTEM = prompts((70,), seed=8)[0]


def sampled(seed, new=10):
    return SamplingParams(max_new_tokens=new, temperature=float(seed % 2), seed=seed)


def converse(engine, users, turns):
    """Conversations that end one turn after the other; returns all requests as they were given.

    Each turn is the one before it, its answer, and some new tokens.
    """
    rng, texts = np.random.default_rng(3), prompts((66,) * users, seed=1)
    given, answers = [], []
    for turn in range(turns):
        requests = []
        for user in range(users):
            params = sampled(10 * user + turn)
            given.append((list(texts[user]), params))
            requests.append(engine.submit(*given[-1]))
        engine.run()
        for user, request in enumerate(requests):
            new = rng.integers(0, 41, 3).tolist()
            texts[user] = [*texts[user], *request.tokens, *new]
            answers.append(request.tokens)
    return given, tuple(answers)


NAMES, SLOW = ("ngram", "quest", "lossy"), ("suffix", "vegas", "model")


@pytest.fixture(scope="module")
def deep():
    """A model whose second layer's keys depend on what the first one read."""
    return make_decoder(TINY, seed=1, head=8.0)


@pytest.mark.parametrize("name", default_run([*NAMES, *SLOW], "lossy", slow=SLOW))
def test_turns_of_a_conversation_are_prefilled_once(name, deep, other):
    engine = engine_of(deep, name, other, prefill_chunk=16)
    engine.warm_up()
    compiled = len(COMPILED)
    given, answers = converse(engine, users=3, turns=4)
    assert len(COMPILED) == compiled
    assert answers == apart(deep, name, given, other).tokens
    # Of each turn the new tokens, and the answer's last one, which no step took. A page is whole,
    # and a lossy policy decodes with other keys and values than a prefill gives.
    new = {"lossy": 10 + 3 + 1 + 3, "quest": 1 + 3 + 3}.get(name, 1 + 3)
    assert engine.stats.prompt_tokens <= 3 * (66 + 3 * new)


@pytest.mark.parametrize("name", default_run(["suffix", "vegas", "lossy"], "lossy"))
def test_a_system_prompt_is_prefilled_once(name, sharp):
    """It is found in the row of the last prompt, and later in a slot."""
    rests = prompts((9, 20, 2, 30), seed=6)
    requests = [([*SYSTEM, *rest], sampled(seed)) for seed, rest in enumerate(rests)]
    between = [(prompts((50,), seed=7)[0], sampled(5, new=2))]
    requests = [*requests[:3], *between, requests[3]]
    engine = engine_of(sharp, name, prefill_chunk=16)
    submitted = [engine.submit(*request) for request in requests]
    engine.run()
    assert tuple(request.tokens for request in submitted) == apart(sharp, name, requests).tokens
    whole = 70 + 9 + 20 + 2 + 50 + 30
    assert whole <= engine.stats.prompt_tokens <= whole + 3 * 4


@pytest.mark.parametrize("name", default_run(["suffix", "vegas"], "vegas"))
def test_a_drafter_takes_up_the_tokens_that_a_row_had(name, sharp):
    """Its state is that of a prompt that was prefilled whole."""
    request = [*SYSTEM, *prompts((9,), seed=6)[0]], sampled(1)
    engines = [engine_of(sharp, name, prefill_chunk=16) for _ in range(2)]
    engines[0].submit([*SYSTEM, *prompts((20,), seed=7)[0]], sampled(0)).result()
    states = []
    for engine in engines:
        engine.submit(*request).result()
        states.append(engine._scheduler.prefill.current_row.drafter_state)
    assert engines[0].stats.prompt_tokens == 90 + 9
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_a_page_of_other_positions_is_not_taken_over(sharp):
    """The slot's page goes on with an answer, of which a lossy policy would read the summary."""
    policy = dataclasses.replace(QUEST, page=16, budget=64)
    engine = Engine(
        sharp, slots=2, capacity=128, prefill_chunk=16, draft=SelfDraft(policy), steps_per_chunk=4
    )
    first = engine.submit(SYSTEM, sampled(0, new=40))
    first.result()
    before = engine.stats.prompt_tokens
    request = [*SYSTEM[:66], *prompts((12,), seed=3)[0]], sampled(1)
    engine._scheduler.prefill._forget_row()
    engine.submit(*request).result()
    assert engine.stats.prompt_tokens - before == 78 - 64
    rows = engine._scheduler.prefill.current_row.cache.pages
    fresh = Engine(sharp, slots=1, capacity=128, prefill_chunk=16, draft=SelfDraft(policy))
    fresh.submit(*request).result()
    expected = fresh._scheduler.prefill.current_row.cache.pages
    for layer, other in zip(rows, expected, strict=True):
        for name in layer:  # 77 positions have 5 pages
            np.testing.assert_allclose(layer[name][:, :5], other[name][:, :5], atol=1e-5)


def test_the_slot_that_was_filled_longest_ago_is_filled_next(sharp):
    """So the texts of the others can be found: here every second request goes on with the first."""
    engine = engine_of(sharp, "none", prefill_chunk=16)
    requests = []
    for seed in range(4):
        requests.append(([*SYSTEM, *prompts((3,), seed=seed)[0]], sampled(seed)))
        requests.append((prompts((66,), seed=30 + seed)[0], sampled(seed)))
    answers = tuple(engine.submit(*request).result() for request in requests)
    assert answers == apart(sharp, "none", requests).tokens
    assert engine.stats.prompt_tokens == 4 * 66 + 70 + 4 * 3


def test_a_row_with_earlier_weights_is_not_taken_over(sharp):
    engine, other = engine_of(sharp, "none", prefill_chunk=16), make_decoder(sharp.config, seed=9)
    request = [*SYSTEM, 1, 2, 3], sampled(1)
    running = engine.submit([*SYSTEM, 7, 8], sampled(0, new=50))
    while not running.tokens:
        engine.step()
    engine.update(other)
    assert engine.submit(*request).result() == apart(other, "none", [request]).tokens[0]
    assert engine.stats.prompt_tokens == 72 + 73


def test_rows_that_wrap_are_not_taken_over():
    layers = [dataclasses.replace(TINY.layers[0], window=window) for window in (5, None)]
    model = make_decoder(dataclasses.replace(TINY, layers=tuple(layers)), seed=3)
    engine = engine_of(model, "none", prefill_chunk=16)
    given, answers = converse(engine, users=2, turns=2)
    assert answers == apart(model, "none", given).tokens
    assert engine.stats.prompt_tokens == sum(len(text) for text, _ in given)


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.device_count() < 4, reason="the mesh has four devices")
@pytest.mark.parametrize("name", [pytest.param("suffix", marks=pytest.mark.slow), "vegas"])
def test_prefixes_are_found_on_a_mesh(name, sharp):
    sharded = helix.shard(sharp, helix.HelixConfig(kvp=2, tpa=2, block=4))
    engine = engine_of(sharded, name, prefill_chunk=16)
    engine.warm_up()
    compiled = len(COMPILED)
    given, answers = converse(engine, users=2, turns=3)
    assert len(COMPILED) == compiled
    assert answers == apart(sharp, name, given).tokens
    assert engine.stats.prompt_tokens <= 2 * (66 + 2 * 4)
