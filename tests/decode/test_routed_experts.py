"""The experts that tokens were routed to, against a plain forward of the model, layer by layer."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jspec
from jspec import Experts, helix
from jspec.models.experts import MixtureOfExperts, routing_shape
from jspec.ops.attention.dense import causal
from tests.conftest import OF_BYTES, TINY, make_decoder
from tests.decode.common import NGRAM, STREAMING, prompts
from tests.decode.engines import QUEST, VEGAS
from tests.decode.test_trees import known
from tests.helix.test_decoding import CONFIG
from tests.parameters import default_run

LENGTHS, CAPACITY = (20, 1, 9, 12), 64
EXPERTS = Experts(routed=6, chosen=2, size=12, normalized=True)
ASKING = jspec.SamplingParams(12, routed_experts=True)
# Without a temperature, at one, and by a request that does not ask.
PARAMS = [ASKING, ASKING, dataclasses.replace(ASKING, temperature=1.0, seed=5)]
PARAMS += [jspec.SamplingParams(12)]


def mixture(config: jspec.ModelConfig = TINY, seed: int = 1) -> jspec.Decoder:
    """Two layers of experts; its text repeats itself here and there."""
    config = dataclasses.replace(config, experts=EXPERTS)
    return make_decoder(config, seed=seed, embedding=30.0, head=4.0)


@pytest.fixture(scope="module")
def model() -> jspec.Decoder:
    return mixture()


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return prompts(LENGTHS)


@jax.jit
def router_logits(model: jspec.Decoder, tokens: jax.Array) -> jax.Array:
    """Of each token in each mixture, ``[B, T, mixtures, E]``, by a causal pass without a cache."""

    def attend(layer, q, k, v, cache):
        return causal(q, k, v), cache

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x, logits = model.embed(tokens), []
    for layer, block in enumerate(model.layers):
        angles = model.angles(positions, model.config.layers[layer])
        x, _ = block.attention(x, block.attention_norm.rms, layer, angles, attend, None)
        if isinstance(block.mlp, MixtureOfExperts):
            logits.append(block.mlp_norm.rms(x) @ block.mlp.router.kernel[...])
        x = block.mlp(x, block.mlp_norm.rms)
    return jnp.stack(logits, axis=2)


def check(model: jspec.Decoder, text: list[int], experts: np.ndarray | None) -> None:
    """``experts`` are those that a pass over ``text`` gives its tokens, but the last."""
    assert experts is not None
    padded = np.pad(np.array([text], np.int32), ((0, 0), (0, CAPACITY - len(text))))
    logits = np.asarray(router_logits(model, padded))[0, : len(text) - 1]
    chosen = model.config.experts.chosen
    np.testing.assert_array_equal(experts, np.argsort(-logits, axis=-1)[..., :chosen])


def check_all(model: jspec.Decoder, texts: list[list[int]], got: jspec.Generation) -> None:
    assert len({row.tobytes() for row in got.routed_experts[0]}) > 4  # they differ among tokens
    for text, new, experts in zip(texts[:3], got.tokens[:3], got.routed_experts[:3], strict=True):
        check(model, [*text, *new], experts)
    assert got.routed_experts[3] is None


@pytest.mark.parametrize(
    "options",
    default_run(
        {
            "ngram": {"draft": NGRAM, "gamma": 3},
            "plain": {"draft": None},
            "itself": {"draft": STREAMING, "gamma": 2},
            "guided": {"draft": VEGAS, "gamma": 2},
            "block": {"draft": STREAMING, "gamma": 3, "rule": "block"},
        },
        "ngram",
    ),
)
def test_they_are_those_of_a_plain_forward(options, model, texts):
    """Of accepted tokens alone, and of prompts in several pieces."""
    got = jspec.generate(model, texts, PARAMS, prefill_chunk=8, **options)
    if options["draft"] is not None:
        assert 0 < got.stats.accepted < got.stats.drafted
    check_all(model, texts, got)


@pytest.mark.exhaustive
def test_those_of_a_tree_are_of_its_path(model, texts):
    """No token depends on them."""
    bare = [dataclasses.replace(one, routed_experts=False) for one in PARAMS]
    plain = jspec.generate(model, texts, bare, draft=None)
    assert plain.routed_experts == (None,) * 4
    got = jspec.generate(model, texts, PARAMS, draft=known(plain.tokens, texts))
    assert got.tokens == plain.tokens
    assert got.stats.mean_accepted_length > 1.5
    check_all(model, texts, got)


@pytest.mark.exhaustive
def test_a_layer_without_experts_is_left_out(texts):
    layers = TINY.layers[:1] * 3
    experts = dataclasses.replace(EXPERTS, dense_layers=(1,))
    model = make_decoder(dataclasses.replace(TINY, layers=layers, experts=experts), embedding=30.0)
    check_all(model, texts, jspec.generate(model, texts, PARAMS, draft=NGRAM, gamma=3))


def test_shape_of_a_routing():
    every = dataclasses.replace(TINY, experts=EXPERTS)
    one = dataclasses.replace(TINY, experts=dataclasses.replace(EXPERTS, dense_layers=(0,)))
    none = dataclasses.replace(one, experts=dataclasses.replace(EXPERTS, dense_layers=(0, 1)))
    assert [routing_shape(x) for x in (every, one, none, TINY)] == [(2, 2), (1, 2), None, None]


@pytest.mark.exhaustive
def test_experts_of_a_lossy_model(model, texts):
    """A prompt is read whole."""
    got = jspec.generate(model, texts, ASKING, draft=None, target=QUEST)
    for text, new, experts in zip(texts, got.tokens, got.routed_experts, strict=True):
        assert experts.shape == (len(text) + len(new) - 1, 2, 2)
        check(model, text, experts[: len(text) - 1])


def test_an_engine_gives_them_to_requests_that_ask(model, texts):
    """After a shared prefix and in a group; also where a callback or nobody ends them."""
    sizes: dict[str, Any] = {"slots": 2, "capacity": CAPACITY, "prefill_chunk": 16}
    engine = jspec.Engine(model, **sizes, draft=NGRAM, gamma=3, routed_experts=True)
    engine.share_prefix(texts[0][:18])
    first = engine.submit(texts[0], jspec.SamplingParams(12))
    group = engine.submit_group(texts[0], ASKING, n=2)
    cut = engine.submit(texts[3], ASKING, on_tokens=lambda tokens: 1)
    one = engine.submit(texts[1], ASKING)
    fresh = engine.submit(texts[2], ASKING)
    assert fresh.routed_experts is None
    fresh.cancel()
    engine.run()
    assert first.routed_experts is None
    assert fresh.routed_experts is None
    assert len(cut.tokens) == 1
    assert {x.tokens for x in group} == {first.tokens}
    for text, request in [(texts[0], x) for x in group] + [(texts[1], one), (texts[3], cut)]:
        check(model, [*text, *request.tokens], request.routed_experts)


@pytest.mark.exhaustive
def test_an_engine_goes_on_with_them_after_an_update(model, texts):
    """A token has the experts of the weights that took it first; nothing compiles."""
    other = mixture(seed=2)
    options: dict[str, Any] = {"draft": NGRAM, "gamma": 3, "steps_per_chunk": 2, "slots": 2}
    limits = {"routed_experts": True, "prompt_logprobs": 1, "logprobs": 1}
    engine = jspec.Engine(model, capacity=CAPACITY, prefill_chunk=16, **limits, **options)
    engine.warm_up()
    programs = engine.stats.compilations
    asking = dataclasses.replace(ASKING, max_new_tokens=30, logprobs=0)
    kept = engine.submit(texts[0], asking)
    released = engine.submit(texts[3], dataclasses.replace(asking, prompt_logprobs=1))
    while not kept.tokens or not released.tokens:
        engine.step()
    engine.release_cache()
    engine.restore_cache()
    while kept._left > 12:
        engine.step()
    engine.update(other, on_update="recompute")
    engine.run()
    assert engine.stats.compilations == programs
    for text, request in ((texts[0], kept), (texts[3], released)):
        whole, experts = [*text, *request.tokens], request.routed_experts
        old = len(text) + request.versions.index(1) - 1
        check(model, [*whole[:old], 0], experts[:old])
        padded = np.pad(np.array([whole], np.int32), ((0, 0), (0, CAPACITY - len(whole))))
        logits = np.asarray(router_logits(other, padded))[0, old : len(whole) - 1]
        np.testing.assert_array_equal(experts[old:], np.argsort(-logits, axis=-1)[..., :2])
    assert len(released.prompt_logprobs.logprobs) == len(texts[3]) - 1


@pytest.mark.exhaustive
def test_an_llm_gives_them():
    model = mixture(OF_BYTES)
    _, tokenizer = jspec.load_bundled()
    llm = jspec.LLM(model, tokenizer=tokenizer, draft=NGRAM, gamma=3)
    bare = llm.generate("import os", jspec.SamplingParams(8))[0]
    assert bare.routed_experts is None
    answers = llm.generate(["import os", "x = 1"], dataclasses.replace(ASKING, max_new_tokens=8))
    assert answers[0].tokens == bare.tokens
    for text, answer in zip(["import os", "x = 1"], answers, strict=True):
        check(model, [*tokenizer.encode(text), *answer.tokens], answer.routed_experts)


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_devices_that_share_experts_give_the_same():
    experts = dataclasses.replace(EXPERTS, routed=8, size=16)
    config = dataclasses.replace(CONFIG, experts=experts)
    model = jspec.Decoder(config, rngs=nnx.Rngs(0))
    sharded = helix.shard(model, helix.HelixConfig(kvp=2, tpa=2, ep=2, block=4))
    texts = prompts((6, 3, 5), vocabulary=40)
    alone, got = (jspec.generate(x, texts, ASKING, draft=NGRAM, gamma=2) for x in (model, sharded))
    assert got.tokens == alone.tokens
    for ours, theirs in zip(got.routed_experts, alone.routed_experts, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.exhaustive
def test_steps_of_a_loop_record_them(model, texts):
    records: list[tuple[jspec.PromptRecord, ...]] = []
    config = jspec.StepConfig(2, NGRAM)
    options: dict[str, Any] = {"capacity": CAPACITY, "on_prompt_records": records.append}
    state = jspec.start_decoding(model, texts[:2], ASKING, config, **options)
    state, record = jspec.decode_chunk(model, state, config, 4)
    for row, text in enumerate(texts[:2]):
        is_token = np.asarray(record.tokens[:, row]) >= 0
        experts = np.asarray(record.routed_experts)[:, row][is_token]
        experts = np.concatenate([records[0][row].routed_experts, experts])
        check(model, [*text, *np.asarray(record.tokens)[:, row][is_token].tolist()], experts)


def test_they_are_refused_where_there_are_none(model, tiny):
    reason = "routed_experts=True needs a model with a mixture of experts"
    with pytest.raises(ValueError, match=reason):
        jspec.generate(tiny, [[1]], ASKING, draft=None)
    with pytest.raises(ValueError, match=reason):
        jspec.Engine(tiny, slots=1, capacity=64, routed_experts=True)
    engine = jspec.Engine(model, slots=1, capacity=64, draft=None)
    with pytest.raises(ValueError, match="asks for routed_experts=True; make the engine with"):
        engine.submit([1], ASKING)
    with pytest.raises(ValueError, match=r"routed_experts=True, .* start_decoding\(on_prompt_rec"):
        jspec.start_decoding(model, [[1, 2]], ASKING)
