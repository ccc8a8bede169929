"""Greedy speculation gives the tokens of plain greedy decoding, whatever drafts them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config import SamplingParams
from jspec.decode.draft import ModelDraft, NoDraft
from jspec.decode.generation import generate
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.decode.step import decode_chunk
from tests.conftest import make_decoder
from tests.decode.common import (
    DRAFTERS,
    NEW,
    NGRAM,
    STREAMING,
    full_logits,
    prompts,
    requests,
)
from tests.parameters import default_run


@pytest.fixture(scope="module")
def tiny():
    """Two layers, each with a cache of its own."""
    return make_decoder(seed=3)


@pytest.fixture(scope="module")
def sharp():
    return make_decoder(seed=1, embedding=400.0, head=4.0)


@pytest.fixture(scope="module")
def plain(tiny, sharp):
    """Plain decoding of the eight requests by both models."""
    return {
        name: generate(model, prompts(), requests(), draft=None)
        for name, model in (("tiny", tiny), ("sharp", sharp))
    }


@pytest.mark.parametrize("name", ["tiny", "sharp"])
def test_plain_decoding_follows_the_argmax_of_a_full_pass(name, plain, request):
    model = request.getfixturevalue(name)
    for prompt, tokens, new in zip(prompts(), plain[name].tokens, NEW, strict=True):
        assert len(tokens) == new
        text = np.zeros((1, 96), np.int32)
        text[0, : len(prompt) + new] = [*prompt, *tokens]
        choice = np.asarray(jnp.argmax(full_logits(model, jnp.asarray(text)), axis=-1))[0]
        assert choice[len(prompt) - 1 :][:new].tolist() == list(tokens)


@pytest.mark.parametrize(
    ("draft", "gamma"),
    default_run({"streaming-1": (STREAMING, 1), "ngram-8": (NGRAM, 8)}, "ngram-8"),
)
def test_self_drafted_tokens_are_the_plain_ones(draft, gamma, plain, tiny, sharp):
    rates = {}
    for name, model in (("tiny", tiny), ("sharp", sharp)):
        got = generate(model, prompts(), requests(), gamma=gamma, draft=draft)
        assert got.tokens == plain[name].tokens
        rates[name] = got.stats.acceptance_rate
    # Both ways through the verification were taken.
    assert rates["tiny"] < 0.9
    assert rates["sharp"] > 0.5


@pytest.mark.parametrize("gamma", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_a_second_models_tokens_are_the_plain_ones(gamma, plain, tiny, sharp, other):
    for name, model in (("tiny", tiny), ("sharp", sharp)):
        got = generate(
            model, prompts(), requests(), gamma=gamma, draft=ModelDraft(), draft_model=other
        )
        assert got.tokens == plain[name].tokens
        assert got.stats.acceptance_rate < 0.5


@pytest.mark.exhaustive
@pytest.mark.parametrize(("source", "gamma"), [("model", 1), ("dense", 8)])
def test_a_model_that_drafts_for_itself_is_never_rejected(source, gamma, plain, tiny):
    second = tiny if source == "model" else None
    draft = DRAFTERS[source]
    got = generate(tiny, prompts(), requests(), gamma=gamma, draft=draft, draft_model=second)
    assert got.tokens == plain["tiny"].tokens
    assert got.stats.accepted == got.stats.drafted > 40


@pytest.mark.parametrize(
    ("draft", "gamma"), default_run({"padded": (NoDraft(), 4), "gamma-0": (NGRAM, 0)}, "gamma-0")
)
def test_a_step_without_draft_tokens_gives_the_plain_tokens(draft, gamma, plain, tiny, sharp):
    for name, model in (("tiny", tiny), ("sharp", sharp)):
        got = generate(model, prompts(), requests(), gamma=gamma, draft=draft)
        assert got.tokens == plain[name].tokens
        assert got.stats.drafted == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("source", ["ngram", "model"])
def test_a_request_alone_gets_the_same_tokens(source, plain, sharp, other):
    for row in (0, 1):
        got = generate(
            sharp,
            prompts()[row : row + 1],
            requests()[row],
            draft=DRAFTERS[source],
            draft_model=other if source == "model" else None,
        )
        assert got.tokens == plain["sharp"].tokens[row : row + 1]


@pytest.mark.parametrize("source", default_run(["dense", "model"], "model"))
def test_a_capacity_without_a_slot_to_spare(source, sharp, other, plain):
    """Drafts that would run over the end of the cache are cut, not written."""
    params = SamplingParams(max_new_tokens=40)
    config = StepConfig(8, DRAFTERS[source])
    models = Models(sharp, other if source == "model" else None)
    state = start_decoding(models, prompts()[:1], params, config, capacity=90)
    state, _ = decode_chunk(models, state, config, 40)
    assert state.done.all()
    assert tuple(state.tokens[0, 50:90].tolist()) == plain["sharp"].tokens[0]
    before = jax.tree.map(np.array, state)
    state, record = decode_chunk(models, state, config, 40)
    assert not record.committed.any()
    jax.tree.map(np.testing.assert_array_equal, before, state)
