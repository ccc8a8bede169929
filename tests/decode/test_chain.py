"""Chains: they draft what their second drafter would by itself, and leave the output as it is."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cache import RingLayout
from jspec.config import SamplingParams
from jspec.decode import generation
from jspec.decode.draft import (
    Chain,
    Drafted,
    Drafter,
    GuidedDraft,
    ModelDraft,
    NgramDraft,
    NoDraft,
    SelfDraft,
    SuffixDraft,
    named_draft,
)
from jspec.decode.generation import generate
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.decode.step import speculative_step
from jspec.policies import Dense, ExactTopK, Hata, Quest, Streaming, Vegas
from tests.conftest import ONE_LAYER, TINY, make_decoder
from tests.decode.common import NGRAM, STREAMING, prompts, requests

PAGES = SelfDraft(Quest(budget=12, page=4, sinks=1, recent=2, dense_layers=0))
PAIRS = {
    "ngram-streaming": Chain(NGRAM, STREAMING, inner=2, rounds=3),
    "suffix-quest": Chain(SuffixDraft(min_match=1), PAGES, inner=3, rounds=2),
    "suffix-vegas": Chain(
        SuffixDraft(min_match=1), GuidedDraft(Vegas(budget=12, least=0)), inner=2, rounds=3
    ),
    "suffix-refreshed": Chain(
        SuffixDraft(1), GuidedDraft(Vegas(budget=12, least=0, refresh=1)), inner=2, rounds=3
    ),
    "model-dense": Chain(ModelDraft(), SelfDraft(Dense()), inner=2, rounds=3),
}
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def plain(sharp, tiny):
    return {
        name: generate(model, prompts(), requests(), draft=None)
        for name, model in (("sharp", sharp), ("tiny", tiny))
    }


@pytest.mark.parametrize(
    ("pair", "name"),
    [
        pytest.param("ngram-streaming", "sharp", marks=pytest.mark.exhaustive),
        ("suffix-vegas", "tiny"),
        pytest.param("suffix-refreshed", "tiny", marks=slow),
        pytest.param("suffix-quest", "tiny", marks=slow),
        pytest.param("suffix-quest", "sharp", marks=slow),
        pytest.param("model-dense", "sharp", marks=slow),
        pytest.param("ngram-streaming", "tiny", marks=slow),
    ],
)
def test_greedy_tokens_are_the_plain_ones(pair, name, plain, other, monkeypatch, request):
    """Ragged prompts, limits and draft limits, in a cache that grows."""
    monkeypatch.setattr(generation, "START", 48)
    monkeypatch.setattr(generation, "rounded_capacity", lambda needed: needed)
    draft, model = PAIRS[pair], request.getfixturevalue(name)
    second = other if draft.traits.needs_model else None
    got = generate(model, prompts(), requests(), draft=draft, draft_model=second, gamma=6)
    assert got.tokens == plain[name].tokens
    assert got.stats.drafted > 60
    rate = got.stats.acceptance_rate
    assert rate == 1 if pair == "model-dense" else rate > 0.1
    assert name == "sharp" or rate < 0.9


def test_a_stop_token_inside_a_draft_ends_the_row_there(plain, sharp):
    texts = prompts()[:1] * 3
    stops = (plain["sharp"].tokens[0][9], plain["sharp"].tokens[0][3], 40)
    params = [SamplingParams(max_new_tokens=30, stop_tokens=(stop,)) for stop in stops]
    expected = generate(sharp, texts, params, draft=None)
    got = generate(sharp, texts, params, draft=PAIRS["ngram-streaming"], gamma=6)
    assert got.tokens == expected.tokens
    assert "stop" in got.finished


def drafted(model, draft, gamma: int, params, second=None, steps: int = 0):
    """The draft of a batch after so many steps by it."""
    models, config = Models(model, second), StepConfig(gamma, draft)
    state = start_decoding(models, prompts((50, 1, 17, 33)), params, config)
    for _ in range(steps):
        state = speculative_step(models, state, config)
    propose = jax.jit(lambda state: config.draft.draft(models, state, config.gamma)[0])
    return jax.device_get(propose(state))


@pytest.mark.exhaustive
def test_the_draft_is_that_of_its_second_drafter_alone(sharp, other):
    """The same tokens by the same numbers from the same logits, whatever the first one drafts."""
    params = [SamplingParams(max_new_tokens=30, temperature=row % 2, seed=row) for row in range(4)]
    chain = Chain(ModelDraft(), STREAMING, inner=2, rounds=6)
    got = drafted(sharp, chain, 6, params, other, steps=1)
    expected = drafted(sharp, STREAMING, 6, params, steps=1)
    np.testing.assert_array_equal(got.lengths, [6] * 4)
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_allclose(got.logits, expected.logits, atol=2e-4)


@pytest.mark.parametrize(
    ("first", "length"),
    [(NoDraft(), 2), pytest.param(ModelDraft(), 6, marks=slow)],
    ids=["never", "always"],
)
def test_rounds_bound_the_draft(first, length, sharp):
    """A round adds a token where its first draft is wrong or none, and all where it is right."""
    params = SamplingParams(max_new_tokens=30)
    chain = Chain(first, SelfDraft(Dense()), inner=2, rounds=2)
    got = drafted(sharp, chain, 9, params, sharp if first.traits.needs_model else None)
    assert got.lengths.tolist() == [length] * 4


def test_the_draft_model_of_a_chain_lacks_no_key(sharp):
    """The keys of a draft model that is the target, next to those of the target."""
    models = Models(sharp, sharp)
    config = StepConfig(6, Chain(ModelDraft(), SelfDraft(Dense()), inner=2, rounds=2))
    state = start_decoding(models, prompts((5,)), SamplingParams(max_new_tokens=40), config)
    for _ in range(3):
        state = speculative_step(models, state, config)
    known = int(state.cache.lengths[0]) - 2  # the next draft takes up the rest
    assert known > 15  # chains that were accepted whole
    of_draft = state.draft[0].keys(0)[0, :known]
    np.testing.assert_allclose(of_draft, state.cache.keys(0)[0, :known], atol=1e-4)


def test_the_rings_of_a_chains_draft_model_have_room_for_its_last_round(sharp):
    """Up to ``inner`` tokens past a whole draft: a window of 3, 4 of the draft, 2, and one."""
    windowed = make_decoder(
        dataclasses.replace(ONE_LAYER, layers=(dataclasses.replace(TINY.layers[0], window=3),))
    )
    chain = Chain(ModelDraft(), SelfDraft(Dense()), inner=2, rounds=2)
    first, _ = chain.init(Models(sharp, windowed), 1, 64, 4)
    assert first.layouts == (RingLayout(10),)


@pytest.mark.exhaustive
def test_a_draft_changes_nothing_that_is_committed(sharp):
    """Tokens, lengths and the index are those of before; the cache differs past the lengths."""
    config = StepConfig(6, PAIRS["suffix-quest"])
    state = start_decoding(sharp, prompts((50, 9)), SamplingParams(max_new_tokens=20), config)
    before = jax.device_get(state)
    draft = jax.jit(lambda state: config.draft.draft(Models(sharp), state, config.gamma)[1])
    after = jax.device_get(draft(state))
    same = dataclasses.replace(after, cache=before.cache)
    jax.tree.map(np.testing.assert_array_equal, same, before)
    jax.tree.map(np.testing.assert_array_equal, after.cache.pages, before.cache.pages)
    np.testing.assert_array_equal(after.cache.lengths, before.cache.lengths)
    for row, length in enumerate(before.cache.lengths):
        pairs = zip(after.cache.columns, before.cache.columns, strict=True)
        for new, old in pairs:
            np.testing.assert_array_equal(new["keys"][row, :length], old["keys"][row, :length])
            assert (new["keys"][row, length:] != old["keys"][row, length:]).any()


@dataclasses.dataclass(frozen=True)
class Fixed(Drafter):
    """Drafts the row's first stop token again and again."""

    def draft(self, models, state, gamma):
        shape = len(state.lengths), gamma
        tokens = jnp.broadcast_to(state.stop_tokens[:, :1], shape)
        return Drafted(tokens, jnp.full(shape[:1], gamma, jnp.int32)), state


def test_the_law_of_a_token_ignores_the_draft_behind_it(tiny):
    """The selection is made by the first query of a round: another draft changes no bit."""
    params = [
        SamplingParams(max_new_tokens=30, temperature=1.0, seed=3, stop_tokens=(stop,))
        for stop in (7, 30)
    ]
    scored = SelfDraft(ExactTopK(budget=6, sinks=0, recent=0, dense_layers=0))
    config = StepConfig(6, Chain(Fixed(), scored, inner=2, rounds=1))
    state = start_decoding(tiny, prompts((50,)) * 2, params, config)
    propose = jax.jit(lambda state: config.draft.draft(Models(tiny), state, config.gamma)[0])
    logits = np.asarray(propose(state).logits)
    assert logits[0, 0].any()
    np.testing.assert_array_equal(logits[0, 0], logits[1, 0])


# --- settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("suffix > hata:budget=256", Chain(SuffixDraft(), SelfDraft(Hata(budget=256)))),
        (
            "ngram:min_match=2>streaming:window=60; rounds=6, inner=3",
            Chain(NgramDraft(min_match=2), SelfDraft(Streaming(window=60)), inner=3, rounds=6),
        ),
    ],
)
def test_a_chain_is_written_as_text(text, expected):
    assert named_draft(text) == expected
    assert hash(expected) == hash(named_draft(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ngram > suffix > hata", "must be FIRST > SECOND, a chain of two drafters"),
        ("ngram > ", "'ngram > ' must be FIRST > SECOND"),
        (
            "ngram > suffix",
            "second=SuffixDraft(min_match=3, factor=4.0, other_rows=False) must draft",
        ),
        ("hata > quest", "keeps columns in the cache, which has room for those of second alone"),
        ("ngram > hata; rounds=0", "draft chain: rounds=0 must be at least 1"),
        ("ngram > hata; first=suffix", "draft 'chain' has no setting 'first=suffix'; it has inner"),
    ],
)
def test_text_that_means_no_chain_says_why(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        named_draft(text)


def test_a_chain_of_chains_is_refused():
    with pytest.raises(TypeError, match="must be a drafter and no chain, as SuffixDraft"):
        Chain(PAIRS["suffix-quest"], STREAMING)
