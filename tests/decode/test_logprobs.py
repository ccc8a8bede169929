"""Log-probabilities from verification passes, against passes without a cache."""

import dataclasses
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jspec
from jspec import helix
from jspec.config import SamplingMode
from jspec.decode.checks import MODES, sampling_of
from jspec.decode.logprobs import token_scores, verified_logprobs
from jspec.decode.score import score_top_tokens
from tests.decode.common import NGRAM, STREAMING, full_logits, prompts
from tests.decode.engines import VEGAS
from tests.decode.processed import processed
from tests.helix.test_decoding import CONFIG
from tests.ops.laws import filtered_law
from tests.parameters import default_run

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
    default_run(
        {"plain": (None, 0), "ngram": (NGRAM, 3), "streaming": (STREAMING, 2)},
        "ngram",
        slow=["plain"],
    ),
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


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
def test_a_request_holds_its_own_scores_alone(tiny, texts):
    """Not those of the other slots, which it may outlive by many chunks."""
    engine = jspec.Engine(tiny, slots=4, capacity=64, logprobs=3, draft=None)
    asks, _ = (
        engine.submit(text, jspec.SamplingParams(12, logprobs=count, ignore_eos=True))
        for text, count in zip(texts[:2], (3, None), strict=True)
    )
    engine.run()
    arrays = jax.tree.leaves(asks._scores)
    assert sum(map(len, arrays)) == 7 * 12
    assert all(x.base is None for x in arrays)


@pytest.mark.exhaustive
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


def check_prompt(model, prompt, count, scores: jspec.TokenScores) -> None:
    """``scores`` of a prompt's tokens are those that `score_top_tokens` gives."""
    (expected,) = score_top_tokens(model, [prompt], count)
    assert scores.top_tokens.shape == (len(prompt) - 1, count)
    np.testing.assert_allclose(scores.logprobs, expected.logprobs, atol=3e-5)
    np.testing.assert_array_equal(scores.top_tokens, expected.top_tokens)
    np.testing.assert_allclose(scores.top_logprobs, expected.top_logprobs, atol=3e-5)


@pytest.mark.parametrize("chunk", default_run([4, 256], "4"))
def test_tokens_of_prompts_are_scored_by_their_prefill(chunk, tiny):
    """Also in pieces of logits, and for a draft that scores a prompt's last query."""
    texts = prompts((150, 1, 9, 40))
    counts = (2, 0, None, 3)
    params = [jspec.SamplingParams(2, prompt_logprobs=count) for count in counts]
    draft = STREAMING if chunk == 4 else VEGAS
    got = jspec.generate(tiny, texts, params, draft=draft, gamma=2, prefill_chunk=chunk)
    for text, count, scores in zip(texts, counts, got.prompt_logprobs, strict=True):
        if count is None:
            assert scores is None
        else:
            check_prompt(tiny, text, count, scores)
    bare = jspec.generate(tiny, texts, jspec.SamplingParams(2), draft=draft, gamma=2)
    assert bare.tokens == got.tokens
    assert bare.prompt_logprobs == (None,) * 4


@pytest.mark.exhaustive
def test_an_engine_prefills_prompts_that_are_scored_whole(tiny, other):
    """After a shared prefix, and where a row has the prompt; in groups; nothing compiles."""
    engine = jspec.Engine(
        tiny, slots=2, capacity=256, draft=NGRAM, gamma=3, prefill_chunk=32, prompt_logprobs=2
    )
    engine.warm_up()
    programs = engine.stats.compilations
    long, short, one = prompts((100, 20, 1), vocabulary=41)
    engine.share_prefix(long[:70])
    asked, bare = jspec.SamplingParams(6, prompt_logprobs=1), jspec.SamplingParams(6)
    requests = [engine.submit(text, bare) for text in (long, short)]
    requests[0].result()
    before = engine.stats.prompt_tokens
    group = engine.submit_group(long, asked, n=3)
    assert group[0].prompt_logprobs is None
    others = [engine.submit(text, asked) for text in (short, one, long[:90])]
    again = engine.submit(long, bare)
    engine.run()
    for request in group:
        check_prompt(tiny, long, 1, request.prompt_logprobs)
        assert request.tokens == requests[0].tokens
    # The group's prompt once, the others whole, and the last from a row.
    assert engine.stats.prompt_tokens - before <= 100 + 20 + 1 + 90 + 40
    for request, text in zip(others, (short, one, long[:90]), strict=True):
        check_prompt(tiny, text, 1, request.prompt_logprobs)
    assert again.prompt_logprobs is None
    assert again.tokens == requests[0].tokens
    # Those of the weights that prefilled it, whatever prefills it again.
    kept = engine.submit(long, jspec.SamplingParams(40, prompt_logprobs=2))
    while not kept.tokens:
        engine.step()
    engine.update(other, on_update="recompute")
    kept.result()
    check_prompt(tiny, long, 2, kept.prompt_logprobs)
    assert engine.stats.compilations == programs


def test_prompts_are_not_scored_where_nobody_takes_it(tiny):
    params = jspec.SamplingParams(4, prompt_logprobs=1)
    engine = jspec.Engine(tiny, slots=1, capacity=64, draft=None)
    with pytest.raises(ValueError, match="prompt_logprobs=1, and the engine was made with prompt"):
        engine.submit([1, 2], params)
    with pytest.raises(ValueError, match="prompt_logprobs=42 must be at most the 41 tokens"):
        jspec.Engine(tiny, slots=1, capacity=64, prompt_logprobs=42)
    with pytest.raises(ValueError, match=r"prompt_logprobs=1, .* start_decoding\(on_prompt_rec"):
        jspec.start_decoding(tiny, [[1, 2]], params)
    state = jspec.start_decoding(tiny, [[1, 2]], jspec.SamplingParams(4))
    with pytest.raises(ValueError, match=r"prompt_logprobs=1, .* an Engine gives them"):
        jspec.fill_slot(tiny, state, 0, [1], params)
    with pytest.raises(ValueError, match=r"prompt_logprobs=1, .* prefilled has none of prompts"):
        jspec.generate(tiny, [[1, 2]], params, prefilled=state, draft=None)


@pytest.mark.exhaustive
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


def settings_of_steps(mode: SamplingMode, count: int, rows: int, temperature: float = 0.0) -> Any:
    """What `verified_logprobs` takes of the state of rows without filters."""
    sampling = sampling_of([jspec.SamplingParams(temperature=temperature, seed=0)] * rows)
    return SimpleNamespace(mode=mode, logprobs=count, sampling=sampling)


def test_greedy_rows_are_scored_alike_in_every_mode():
    """Steps of greedy rows alone sum no second distribution."""
    logits = 9 * np.random.default_rng(0).standard_normal((2, 3, 60)).astype(np.float32)
    processed = np.where(np.arange(60) % 3, logits, -np.inf)
    tokens = processed.argmax(axis=-1).astype(np.int32)
    greedy, *others = (
        jax.jit(partial(verified_logprobs, settings_of_steps(mode, 3, 2), axes=None))(
            logits, processed, tokens
        )
        for mode in MODES
    )
    assert not greedy.sampling.logprobs.any()
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, greedy, other)


@pytest.mark.parametrize("mode", ["sampled", "filtered"])
def test_at_temperature_one_a_token_is_drawn_from_the_model(mode):
    """Bit for bit, as a trainer takes them that scores with the model."""
    logits = 9 * np.random.default_rng(0).standard_normal((2, 3, 60)).astype(np.float32)
    tokens = logits.argsort(axis=-1)[..., 7].astype(np.int32)
    score = jax.jit(partial(verified_logprobs, settings_of_steps(mode, 3, 2, 1.0), axes=None))
    got = score(logits, logits, tokens)
    jax.tree.map(np.testing.assert_array_equal, got.sampling, got.model)


def test_a_step_reads_the_vocabulary_few_times():
    """By the bytes that XLA counts, and in few kernels; single halvings read it 11 times."""
    logits = jax.ShapeDtypeStruct((8, 1, 4096), jnp.float32)
    tokens = jax.ShapeDtypeStruct((8, 1), jnp.int32)
    for mode in ("greedy", "sampled"):
        settings = settings_of_steps(mode, 0, 8)
        score = jax.jit(partial(verified_logprobs, settings, axes=None))
        lowered = score.lower(logits, logits, tokens)
        assert lowered.as_text().count("optimization_barrier") <= 4
        cost: Any = lowered.compile().cost_analysis()
        assert cost["bytes accessed"] < 7 * 4 * math.prod(logits.shape)


def test_a_law_of_one_token_has_no_nan(tiny):
    """With all tokens banned, token 0 is certain, as docs/sampling.md says."""
    params = jspec.SamplingParams(3, temperature=1e-6, seed=1, logprobs=1)
    nothing = jspec.LogitsFunction(lambda logits, *_: jnp.full_like(logits, -jnp.inf))
    forced = jspec.LogitsFunction(lambda logits, *_: logits.at[7].set(jnp.inf))
    for function, token in ((nothing, 0), (forced, 7)):
        got = jspec.generate(tiny, [[1]], params, draft=None, processors=[function])
        np.testing.assert_array_equal(got.logprobs[0].sampling.logprobs, 0)
        assert got.tokens == ((token,) * 3,)


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_shards_of_the_vocabulary_give_the_same():
    model = jspec.Decoder(CONFIG, rngs=nnx.Rngs(0))
    sharded = helix.shard(model, helix.HelixConfig(kvp=1, tpa=2, block=4))
    texts = prompts((6, 3, 5), vocabulary=40)
    params = [dataclasses.replace(one, prompt_logprobs=1) for one in SOME]
    alone, got = (jspec.generate(x, texts, params, draft=NGRAM, gamma=2) for x in (model, sharded))
    assert got.tokens == alone.tokens
    leaves = (jax.tree.leaves((x.logprobs, x.prompt_logprobs)) for x in (got, alone))
    for ours, theirs in zip(*leaves, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
