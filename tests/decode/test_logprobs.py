"""Log-probabilities from verification passes, against passes without a cache."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jspec
from jspec import helix
from jspec.decode.logprobs import token_scores
from jspec.decode.score import score_top_tokens
from tests.decode.common import NGRAM, STREAMING, full_logits, prompts
from tests.decode.processed import processed
from tests.helix.test_decoding import CONFIG
from tests.ops.laws import filtered_law

LENGTHS = (9, 5, 7, 3)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"logprobs": 3},
    {"logprobs": 0, "temperature": 1.3},
    {"logprobs": 2, "temperature": 0.8, "top_p": 0.7, "repetition_penalty": 1.4},
    {"temperature": 1.0, "top_k": 5},
)
PARAMS = [jspec.SamplingParams(12, seed=i, **settings) for i, settings in enumerate(SETTINGS)]
SOME = PARAMS[:3]


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return prompts(LENGTHS, vocabulary=41)


def laws(model, text, prompt, params) -> np.ndarray:
    """The distribution that each token of ``text`` after ``prompt`` is drawn from, ``[n, V]``."""
    logits = np.asarray(full_logits(model, jnp.asarray([text])))[0]
    rows = range(len(prompt), len(text))
    return np.array(
        [
            filtered_law(processed(logits[i - 1], prompt, text[len(prompt) : i], params), params)
            for i in rows
        ]
    )


def check(model, prompt, params, tokens, logprobs: jspec.Logprobs) -> None:
    """``logprobs`` of the answer ``tokens`` are those of passes over the whole text."""
    count, whole = params.logprobs, [*prompt, *tokens]
    (scores,) = score_top_tokens(model, [whole], count)
    expected = jax.tree.map(lambda x: x[len(prompt) - 1 :], scores)
    np.testing.assert_allclose(logprobs.model.logprobs, expected.logprobs, atol=3e-5)
    np.testing.assert_array_equal(logprobs.model.top_tokens, expected.top_tokens)
    np.testing.assert_allclose(logprobs.model.top_logprobs, expected.top_logprobs, atol=3e-5)
    law = laws(model, whole, prompt, params)
    chosen = law[np.arange(len(tokens)), list(tokens)]
    np.testing.assert_allclose(logprobs.sampling.logprobs, np.log(chosen), atol=1e-4)
    np.testing.assert_array_equal(logprobs.passing_counts, (law > 0).sum(axis=1))
    top = np.take_along_axis(law, logprobs.sampling.top_tokens, axis=1)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(logprobs.sampling.top_logprobs, np.log(top), atol=1e-4)
    assert np.all(np.diff(top, axis=1) <= 0)
    assert top.shape == (len(tokens), count)
    if count:
        np.testing.assert_allclose(top[:, 0], law.max(axis=1))


@pytest.mark.parametrize(
    ("draft", "gamma"),
    [pytest.param(None, 0, marks=pytest.mark.slow), (NGRAM, 3), (STREAMING, 2)],
    ids=["plain", "ngram", "streaming"],
)
def test_log_probabilities_are_those_of_a_pass_over_the_whole_text(draft, gamma, tiny, texts):
    got = jspec.generate(tiny, texts, PARAMS, draft=draft, gamma=gamma)
    for prompt, params, tokens, logprobs in zip(
        texts, SOME, got.tokens, got.logprobs, strict=False
    ):
        check(tiny, prompt, params, tokens, logprobs)
    assert got.logprobs[3] is None
    greedy = jspec.generate(tiny, texts[:1], PARAMS[:1], draft=draft, gamma=gamma)
    check(tiny, texts[0], PARAMS[0], greedy.tokens[0], greedy.logprobs[0])


def test_an_engine_gives_them_to_requests_that_ask(tiny, texts):
    engine = jspec.Engine(
        tiny, slots=2, capacity=64, draft=NGRAM, gamma=3, logprobs=3, processors=[jspec.Penalties()]
    )
    engine.warm_up()
    programs = engine.stats.compilations
    bare = [jspec.SamplingParams(20), PARAMS[3]]
    asked = [*zip(texts, PARAMS, strict=True), *zip(texts, bare, strict=False)]
    requests = [engine.submit(*one) for one in asked]
    engine.run()
    for request, (prompt, params) in zip(requests, asked, strict=True):
        if params.logprobs is None:
            assert request.logprobs is None
        else:
            check(tiny, prompt, params, request.tokens, request.logprobs)
    assert engine.stats.compilations == programs


def test_a_request_that_its_callback_ends_has_as_many_as_tokens(tiny, texts):
    engine = jspec.Engine(tiny, slots=2, capacity=64, draft=NGRAM, gamma=3, logprobs=1)
    params = jspec.SamplingParams(30, logprobs=1)
    cut = engine.submit(texts[0], params, on_tokens=lambda tokens: 1)
    cancelled: list[jspec.Request] = []
    cancelled.append(
        engine.submit(texts[1], params, on_tokens=lambda tokens: cancelled[0].cancel())
    )
    fresh = engine.submit(texts[2], params)
    assert fresh.logprobs.model.top_tokens.shape == (0, 1)
    engine.run()
    for request, prompt in ((cut, texts[0]), (cancelled[0], texts[1])):
        assert 0 < len(request.tokens) < 30
        check(tiny, prompt, params, request.tokens, request.logprobs)


def test_an_engine_refuses_more_than_it_was_made_for(tiny):
    engine = jspec.Engine(tiny, slots=1, capacity=64, draft=None, logprobs=2)
    with pytest.raises(ValueError, match="asks for logprobs=3, and the engine was made with"):
        engine.submit([1], jspec.SamplingParams(4, logprobs=3))
    engine = jspec.Engine(tiny, slots=1, capacity=64, draft=None)
    with pytest.raises(ValueError, match="logprobs=0, and the engine was made with logprobs=None"):
        engine.submit([1], jspec.SamplingParams(4, logprobs=0))
    with pytest.raises(ValueError, match="logprobs=42 must be at most the 41 tokens"):
        jspec.Engine(tiny, slots=1, capacity=64, logprobs=42)


def test_steps_of_a_loop_record_them(tiny, texts):
    config, params = jspec.StepConfig(2, NGRAM), jspec.SamplingParams(8, logprobs=2)
    state = jspec.start_decoding(tiny, texts[:1], jspec.SamplingParams(8), config, capacity=64)
    _, record = jspec.decode_step(tiny, state, config)
    assert record.logprobs is None
    state = jspec.fill_slot(tiny, state, 0, texts[1], params, config)
    state, record = jspec.decode_chunk(tiny, state, config, 8)
    is_token = np.asarray(record.tokens[:, 0]) >= 0
    logprobs = jax.tree.map(lambda x: np.asarray(x)[:, 0][is_token], record.logprobs)
    check(tiny, texts[1], params, np.asarray(record.tokens[:, 0])[is_token].tolist(), logprobs)


def test_their_bits_do_not_depend_on_the_batch():
    """What `exact` promises, where the logits have the same bits."""
    rng = np.random.default_rng(0)
    logits = 9 * rng.standard_normal((3, 5, 1500)).astype(np.float32)
    tokens = rng.integers(0, 1500, (3, 5)).astype(np.int32)
    scores = jax.jit(token_scores, static_argnums=(2, 3))
    whole = scores(logits, tokens, 4, None)
    for row, place in ((0, 0), (2, 3)):
        one = logits[row : row + 1, place : place + 1], tokens[row : row + 1, place : place + 1]
        one = scores(*one, 4, None)
        for ours, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(ours[0, 0], theirs[row, place])


def test_a_law_of_one_token_has_no_nan(tiny):
    """With all tokens banned, token 0 is certain, as docs/sampling.md says."""
    params = jspec.SamplingParams(3, temperature=1e-6, seed=1, logprobs=1)
    nothing = jspec.LogitsFunction(lambda logits, *_: jnp.full_like(logits, -jnp.inf))
    forced = jspec.LogitsFunction(lambda logits, *_: logits.at[7].set(jnp.inf))
    for function, token in ((nothing, 0), (forced, 7)):
        got = jspec.generate(tiny, [[1]], params, draft=None, processors=[function])
        np.testing.assert_array_equal(got.logprobs[0].sampling.logprobs, 0)
        assert got.tokens == ((token,) * 3,)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_shards_of_the_vocabulary_give_the_same():
    model = jspec.Decoder(CONFIG, rngs=nnx.Rngs(0))
    sharded = helix.shard(model, helix.HelixConfig(kvp=1, tpa=2, block=4))
    texts, params = prompts((6, 3, 5), vocabulary=40), SOME
    alone, got = (
        jspec.generate(x, texts, params, draft=STREAMING, gamma=2) for x in (model, sharded)
    )
    assert got.tokens == alone.tokens
    for ours, theirs in zip(
        jax.tree.leaves(got.logprobs), jax.tree.leaves(alone.logprobs), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
