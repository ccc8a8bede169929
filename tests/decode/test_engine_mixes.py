"""Many requests of all kinds through one engine, with any settings; slow."""

import dataclasses
import gc
import math
from collections import Counter

import jax
import pytest

from jspec import helix
from jspec.cache import StripedLayout
from jspec.decode import prefill
from jspec.decode.engine import Engine
from tests.conftest import TINY, make_decoder
from tests.decode.conftest import COMPILED
from tests.decode.engines import (
    GREEDY,
    ON_A_MESH,
    SETTINGS,
    ExpectedTokens,
    PromptAndParams,
    apart,
    check_arrivals,
    engine_of,
    long_work,
    work,
)
from tests.decode.text_laws import PROMPT, SAMPLED, SOURCES, enumerated, second, seeded, target
from tests.decode.watching import host_takes
from tests.ops.laws import check_counts

pytestmark = pytest.mark.slow
LONG = 8192  # most tokens of a request


@pytest.fixture(autouse=True)
def looks_ahead(monkeypatch):
    """Wherever it may, whatever chunks take and whoever idles."""
    host_takes(monkeypatch, math.inf)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_request_gets_what_it_gets_alone_with_any_settings(name, sharp, other):
    """Half of the prompts are short enough to be taken up together."""
    requests = [one for pair in zip(work(40), work(40, 18, seed=7), strict=True) for one in pair]
    engine = engine_of(sharp, name, other, slots=4, prefill_chunk=64)
    check_arrivals(engine, requests, apart(sharp, name, requests, other), seed=1)


@pytest.mark.parametrize("name", ["ngram", "streaming", "vegas", "chain"])
def test_a_thousand_requests_of_up_to_8192_tokens_get_what_they_get_alone(name):
    """Bursts, stop tokens, cancellations; nothing compiles, and no array is left after.

    What each gives alone is what `generate` gives it among those of like length; ten of them,
    long ones too, are decoded all by themselves as well.
    """
    config = dataclasses.replace(TINY, max_context=LONG)
    model = make_decoder(config, seed=1, embedding=400.0, head=4.0)
    requests = long_work(1000, seed=3)
    expected = in_groups(model, name, requests)
    for row in range(7, 1000, 101):
        assert apart(model, name, requests[row : row + 1]).tokens[0] == expected.tokens[row]
    engine = engine_of(model, name, slots=8, capacity=LONG, prefill_chunk=256)
    engine.warm_up()
    compiled, arrays = len(COMPILED), []
    for some in (slice(100), slice(100, None)):
        part = ExpectedTokens(expected.tokens[some], expected.finished[some])
        check_arrivals(engine, requests[some], part, seed=4, cancelling=0.05)
        engine.step()  # reads what ran ahead for nobody
        gc.collect()
        arrays.append(len(jax.live_arrays()))
    assert len(COMPILED) == compiled
    assert arrays[0] == arrays[1]


def in_groups(model, name: str, requests: list[PromptAndParams]) -> ExpectedTokens:
    """What `apart` gives each request among those whose length rounds up to the same power."""
    sizes = [(len(text) + params.max_new_tokens - 1).bit_length() for text, params in requests]
    tokens, finished = {}, {}
    for size in sorted(set(sizes)):
        rows = [row for row, row_size in enumerate(sizes) if row_size == size]
        result = apart(model, name, [requests[row] for row in rows])
        tokens |= dict(zip(rows, result.tokens, strict=True))
        finished |= dict(zip(rows, result.finished, strict=True))
    order = range(len(requests))
    return ExpectedTokens(
        tuple(tokens[row] for row in order), tuple(finished[row] for row in order)
    )


@pytest.mark.parametrize("source", SOURCES)
def test_texts_have_the_target_law(source, monkeypatch):
    """The joint law of four tokens over 6,000 requests; fails below p = 1e-4."""
    monkeypatch.setattr(prefill, "CAPACITY_STEP", 2)
    draft, rows = SOURCES[source], 6000
    engine = Engine(
        target(),
        slots=256,
        capacity=10,
        draft=draft,
        gamma=0 if source == "plain" else 2,
        draft_model=second() if draft.traits.needs_model else None,
        prefill_chunk=256 * 16,
        steps_per_chunk=2,
    )
    requests = [engine.submit(PROMPT, params) for params in seeded(SAMPLED, 0, rows)]
    engine.run()
    check_counts(Counter(request.tokens for request in requests), enumerated(SAMPLED))


@pytest.mark.parametrize("name", ["ngram", "suffix", "vegas", "model", "chain-of-models"])
def test_a_gamma_that_is_chosen_changes_no_token(name, sharp, other, monkeypatch):
    """Sampled ones of one-hot drafts, and greedy ones of others.

    Nor does it compile anything: a second model rests and is caught up, row by row.
    """
    monkeypatch.setitem(SETTINGS, "auto", SETTINGS[name] | {"gamma": "auto"})
    settings = {} if name in ("ngram", "suffix") else GREEDY
    requests = [(text, dataclasses.replace(params, **settings)) for text, params in work(120)]
    expected = apart(sharp, "none", requests)
    engine = engine_of(sharp, "auto", other, steps_per_chunk=1)
    engine.warm_up()
    compiled = len(COMPILED)
    check_arrivals(engine, requests, expected)
    assert len(engine.stats.steps_at_gamma) > 2
    assert len(COMPILED) == compiled


@pytest.mark.parametrize("name", ON_A_MESH)
def test_a_model_on_a_mesh_serves_as_one_device_does(name, sharp):
    requests = work(20)
    expected = apart(sharp, name, requests)
    sharded = helix.shard(sharp, helix.HelixConfig(kvp=2, tpa=2, block=4))
    engine = engine_of(sharded, name)
    engine.warm_up()
    compiled = len(COMPILED)
    check_arrivals(engine, requests, expected)
    which = max(range(20), key=lambda row: len(requests[row][0]))
    engine.share_prefix(requests[which][0][:-1])
    shared = engine.submit(*requests[which])
    assert shared.result() == expected.tokens[which]
    assert len(COMPILED) == compiled


def test_an_engine_on_a_mesh_alternates_with_rings():
    """Rows come and go in slots whose rings earlier rows have wrapped many times."""
    layers = [dataclasses.replace(TINY.layers[0], window=window) for window in (5, None)]
    model = make_decoder(dataclasses.replace(TINY, layers=tuple(layers)), seed=3)
    requests = work(20)
    expected = apart(model, "ngram", requests)
    sharded = helix.shard(model, helix.HelixConfig(kvp=4, block=2))
    engine = engine_of(sharded, "ngram")
    assert engine._runner.state.cache.layouts[0] == StripedLayout(16, 4, 2, wraps=True)
    check_arrivals(engine, requests, expected)
