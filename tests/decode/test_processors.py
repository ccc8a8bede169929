"""Logits processors: their values, and tokens with them in every loop."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jspec
from jspec import helix
from jspec.decode.engine_pool import EnginePool
from jspec.decode.processors import Processing
from tests.decode.common import DRAFTERS, NGRAM, full_logits, prompts
from tests.decode.engines import STREAMING
from tests.decode.processed import processed
from tests.helix.test_decoding import CONFIG
from tests.parameters import default_run

LENGTHS = (9, 5, 7, 3)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 0.9, "presence_penalty": 0.6},
    {"repetition_penalty": 1.8, "banned_tokens": (5, 9), "logit_bias": {3: 2.5, 7: -1.0}},
    {"min_new_tokens": 12, "stop_tokens": (*range(20),)},
    {"presence_penalty": -2.0, "frequency_penalty": 0.3, "repetition_penalty": 0.7},
)


def sum_of_tokens(logits, tokens, length):
    """Adds to the logit of one token, which all tokens so far decide."""
    known = jnp.where(jnp.arange(len(tokens), dtype=jnp.int32) < length, tokens, 0)
    index = jnp.arange(len(logits), dtype=jnp.int32)
    return logits + 4.0 * (index == known.sum() % len(logits)).astype(jnp.float32)


SUM = jspec.LogitsFunction(sum_of_tokens)


def params(new: int = 20, **settings) -> list[jspec.SamplingParams]:
    rows = enumerate(SETTINGS)
    return [
        jspec.SamplingParams(max_new_tokens=new, seed=row, **{**own, **settings})
        for row, own in rows
    ]


def check_greedy(model, texts, rows, answers, change=lambda logits, text: logits) -> None:
    """Every token is the largest of the processed logits, up to rounding."""
    for prompt, row, answer in zip(texts, rows, answers, strict=True):
        whole = np.asarray(full_logits(model, jnp.asarray([[*prompt, *answer]])))[0]
        for index, token in enumerate(answer):
            logits, ends = whole[len(prompt) - 1 + index], model.config.stop_tokens
            of_params = processed(logits, prompt, answer[:index], row, ends)
            expected = change(of_params, [*prompt, *answer[:index]])
            assert expected[token] >= expected.max() - 1e-4


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return prompts(LENGTHS, vocabulary=41)


@pytest.fixture(scope="module")
def plain(tiny, texts) -> tuple[tuple[int, ...], ...]:
    return jspec.generate(tiny, texts, params(), draft=None).tokens


def test_tokens_are_those_of_the_documented_processors(tiny, texts, plain):
    check_greedy(tiny, texts, params(), plain)
    without = jspec.generate(tiny, texts, jspec.SamplingParams(20), draft=None).tokens
    assert all(a != b for a, b in zip(plain, without, strict=True))


@pytest.mark.parametrize(
    "name", default_run([name for name in DRAFTERS if name != "plain"], "streaming")
)
def test_no_drafter_changes_greedy_tokens(name, tiny, other, texts, plain):
    model = {"draft_model": other} if name == "model" else {}
    got = jspec.generate(tiny, texts, params(), draft=DRAFTERS[name], gamma=3, **model)
    assert got.tokens == plain
    assert name != "dense" or got.stats.acceptance_rate > 0.9  # the draft is processed too


def test_a_function_gets_the_tokens_so_far(tiny, texts):
    def change(logits, text):
        logits = np.array(logits)
        logits[sum(text) % len(logits)] += 4.0
        return logits

    rows, settings = [jspec.SamplingParams(12)] * 4, {"gamma": 3, "processors": [SUM]}
    got = jspec.generate(tiny, texts, rows, draft=STREAMING, **settings)
    check_greedy(tiny, texts, rows, got.tokens, change)
    assert jspec.generate(tiny, texts, rows, draft=NGRAM, **settings).tokens == got.tokens


@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, marks=pytest.mark.slow), {"temperature": 0.9}],
    ids=["greedy", "sampled"],
)
def test_requests_of_an_engine_have_the_tokens_that_they_have_alone(settings, tiny, texts):
    """Slots are filled again by requests with other settings."""
    needed = [jspec.LogitBias(), jspec.MinNewTokens(), jspec.Penalties()]
    options: dict[str, Any] = {"draft": NGRAM, "gamma": 3, "processors": needed}
    engine = jspec.Engine(tiny, slots=2, capacity=64, stop_tokens=32, **options)
    rows = [*params(**settings), jspec.SamplingParams(20, seed=0, **settings)]
    asked = [*texts, texts[0]]
    requests = [engine.submit(*one) for one in zip(asked, rows, strict=True)]
    engine.run()
    alone = jspec.generate(tiny, asked, rows, **options)
    assert tuple(request.tokens for request in requests) == alone.tokens
    assert alone.tokens[0] != alone.tokens[4]


def test_an_engine_refuses_what_its_processors_do_not_serve(tiny):
    engine = jspec.Engine(tiny, slots=1, capacity=64, draft=None)
    with pytest.raises(
        ValueError, match=r"needs processors=\[Penalties\(\)\], the engine has \[\]"
    ):
        engine.submit([1], jspec.SamplingParams(4, presence_penalty=1.0))
    engine = jspec.Engine(tiny, slots=1, capacity=64, draft=None, processors=[jspec.LogitBias(2)])
    engine.submit([1], jspec.SamplingParams(4, banned_tokens=(1,), logit_bias={2: 1.0}))
    with pytest.raises(ValueError, match=r"LogitBias\(room=4\)\], the engine has \[LogitBias"):
        engine.submit([1], jspec.SamplingParams(4, banned_tokens=(1, 2, 3)))


def test_a_pool_makes_engines_with_the_processors_that_requests_need(tiny):
    pool = EnginePool(tiny, {"draft": None, "processors": [SUM]})

    def engine_of(**settings) -> jspec.Engine:
        params = jspec.SamplingParams(4, seed=1, **settings)
        pool.submit([[1]], [params], [lambda tokens: None], slots=1)
        return pool.engines[1]

    first = engine_of()
    assert first.processors == (SUM,)
    second = engine_of(presence_penalty=0.5)
    assert second.processors == (jspec.Penalties(), SUM)
    third = engine_of(banned_tokens=tuple(range(20)))
    assert third.processors == (jspec.LogitBias(32), jspec.Penalties(), SUM)
    assert engine_of(frequency_penalty=1.0) is engine_of() is third is not second


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (3, "function=3 must be a function"),
        (lambda logits, tokens: logits, r"must take \(logits, tokens, length\), and takes \(log"),
    ],
    ids=["number", "two"],
)
def test_what_cannot_be_called_so_is_refused_when_it_is_made(function, message):
    with pytest.raises(TypeError, match=message):
        jspec.LogitsFunction(function)


def test_invalid_processors_are_refused(tiny):
    def options(value) -> Any:
        return {"processors": value}

    for value, message in (
        ([len], "wrap a function as jspec.LogitsFunction"),
        ([jspec.Penalties], "processor=Penalties is a class"),
        (jspec.Penalties(), "must be a list of processors"),
    ):
        with pytest.raises(TypeError, match=message):
            jspec.generate(tiny, [[1]], **options(value))
    wrong = jspec.LogitsFunction(lambda logits, *_: logits[:3])
    with pytest.raises(TypeError, match=r"returned logits float32 \(1, 3\) in place of"):
        jspec.generate(tiny, [[1]], draft=None, processors=[wrong])
    with pytest.raises(ValueError, match=r"hold token 41, outside the vocabulary 0\.\.40"):
        jspec.generate(tiny, [[1]], jspec.SamplingParams(banned_tokens=(41,)))


@pytest.mark.exhaustive
def test_a_slot_is_filled_and_grown_with_processors(tiny, texts, plain):
    config, rows = jspec.StepConfig(3, NGRAM), params()
    needed = [jspec.LogitBias(), jspec.MinNewTokens(), jspec.Penalties()]
    state = jspec.start_decoding(tiny, texts[:1], rows[:1], config, capacity=64, processors=needed)
    state = dataclasses.replace(state, stop_tokens=jnp.full((1, 32), -1, jnp.int32))
    state = jspec.fill_slot(tiny, state, 0, texts[2], rows[2], config)
    state, _ = jspec.decode_chunk(tiny, state, config, 1)
    assert state.processing.states == ()
    state = jspec.grow_capacity(state, 96, config)
    for _ in range(20):
        state = jspec.speculative_step(tiny, state, config)
    answer = np.asarray(state.tokens)[0, len(texts[2]) :]
    assert tuple(answer[answer >= 0].tolist()) == plain[2]
    bare = jspec.start_decoding(tiny, texts[:1], jspec.SamplingParams(4), config, capacity=64)
    with pytest.raises(ValueError, match="make the batch with them"):
        jspec.fill_slot(tiny, bare, 0, texts[0], rows[0], config)


def test_a_step_without_processors_has_none_of_them(tiny, monkeypatch):
    """What a step without them costs is nothing: none of their code is traced."""
    for name in ("started", "extended", "process", "stopped"):
        monkeypatch.setattr(Processing, name, None)
    state = jspec.start_decoding(tiny, [[1]], jspec.SamplingParams(4), jspec.StepConfig(2, NGRAM))
    assert state.processing is None
    jspec.decode_chunk.lower(tiny, state, jspec.StepConfig(2, NGRAM), 2)


needs_8 = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


@pytest.mark.exhaustive
@needs_8
@pytest.mark.parametrize(
    "draft",
    [
        pytest.param(STREAMING, marks=pytest.mark.slow),
        jspec.Chain(NGRAM, STREAMING, inner=2, rounds=2),
    ],
    ids=["self", "chain"],
)
def test_shards_of_the_vocabulary_process_the_same_logits(draft):
    model = jspec.Decoder(CONFIG, rngs=nnx.Rngs(0))
    texts, rows = prompts((6, 3), vocabulary=40), params(temperature=0.9)[:2]
    options: dict[str, Any] = {"draft": draft, "gamma": 2, "processors": [SUM]}
    alone = jspec.generate(model, texts, rows, **options).tokens
    sharded = helix.shard(model, helix.HelixConfig(kvp=1, tpa=2, block=4))
    assert sharded.vocabulary_axes
    assert jspec.generate(sharded, texts, rows, **options).tokens == alone


@pytest.mark.exhaustive
@needs_8
def test_rows_over_an_explicit_mesh_have_the_same_tokens(tiny, texts, plain):
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Explicit,))
    config = jspec.StepConfig(3, NGRAM)
    state = jspec.start_decoding(
        jax.device_put(tiny, NamedSharding(mesh, P())),
        texts,
        params(),
        config,
        sharding=NamedSharding(mesh, P("rows")),
    )
    model = jax.device_put(tiny, NamedSharding(mesh, P()))
    for _ in range(5):
        state, _ = jspec.decode_chunk(model, state, config, 4)
    rows = np.asarray(state.tokens)
    got = [row[len(text) :] for row, text in zip(rows, texts, strict=True)]
    assert [tuple(row[row >= 0].tolist()) for row in got] == [*plain]
