"""Exact decoding end to end: speculation leaves the bits of plain decoding, in text and cache.

Interpreted on a tiny model, and on a GPU on the bundled one in bfloat16.
"""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

import jspec
from jspec.config import ModelConfig, SamplingParams
from jspec.decode import checks
from jspec.decode.draft import GuidedDraft, NoDraft
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState, Models
from jspec.decode.step import decode_chunk
from jspec.models.decoder import Decoder
from jspec.policies import Vegas
from jspec.policies.prepare import prepare_params
from jspec.triton import append, attention, linear
from jspec.triton.call import refuses_triton
from tests.conftest import make_decoder
from tests.decode.common import DRAFTERS, NGRAM, prompts

SMALL = ModelConfig.uniform(
    vocab_size=41,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_size=8,
    max_context=512,
    qk_norm=True,
)
PLAIN = StepConfig(0, NoDraft(), exact="bits")
LEVELS = ("tokens", "bits")
GUIDED = GuidedDraft(Vegas(budget=8, least=0))


@pytest.fixture
def interpreting(interpreted, monkeypatch):
    """The kernels of exact passes run in Triton's interpreter, also in jitted code."""

    def call(kernel, *arrays, out, **settings):
        def run(*arrays):
            return tuple(interpreted(kernel, *arrays, out=out, **settings))

        return jax.pure_callback(run, tuple(out), *arrays)

    for module in (linear, attention, append):
        monkeypatch.setattr(module, "triton_call", call)
        monkeypatch.setattr(module, "refuses_triton", lambda *keys: None)
    monkeypatch.setattr(checks, "refuses_triton", lambda *keys: None)


def decoded(models, texts, config: StepConfig, new: int, **settings) -> DecodeState:
    """The state after ``new`` tokens of each text."""
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    state = start_decoding(models, texts, params, config, **settings)
    while not np.asarray(state.done).all():
        state, _ = decode_chunk(models, state, config, 1)
    return state


def assert_same(got: DecodeState, row: int, want: DecodeState, of: int) -> None:
    """Both rows have the same text, and keys and values of the same bits."""
    length = int(want.lengths[of])
    assert int(got.lengths[row]) == length
    np.testing.assert_array_equal(got.tokens[row, :length], want.tokens[of, :length])
    for columns, other in zip(got.cache.columns, want.cache.columns, strict=True):
        for name in ("keys", "values"):
            mine, its = (np.asarray(x, np.float32) for x in (columns[name][row], other[name][of]))
            np.testing.assert_array_equal(mine[: length - 1], its[: length - 1])


def test_speculation_leaves_the_bits_of_plain_decoding_in_the_interpreter(interpreting):
    """After a prefill in pieces, too, and with more room in the cache."""
    one = dataclasses.replace(SMALL, layers=SMALL.layers[:1])
    model, texts = make_decoder(one, seed=1, embedding=400.0, head=4.0), prompts((9,))
    for exact in LEVELS:
        config = StepConfig(2, NGRAM, exact=exact)
        state = decoded(model, texts, config, 4, chunk=4, capacity=512)
        sizes = {"chunk": 4} if exact == "tokens" else {}
        plain = decoded(model, texts, dataclasses.replace(PLAIN, exact=exact), 4, **sizes)
        assert_same(state, 0, plain, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "draft", [NGRAM, DRAFTERS["streaming"], DRAFTERS["dense"], GUIDED], ids=lambda x: repr(x)[:10]
)
def test_rows_leave_the_same_bits_in_any_batch_in_the_interpreter(draft, interpreting):
    model, texts = make_decoder(SMALL, seed=1, embedding=400.0, head=4.0), prompts((11, 20))
    plain, config = decoded(model, texts, PLAIN, 9), StepConfig(3, draft, exact="bits")
    state = decoded(model, texts[::-1], config, 9)
    for row in range(2):
        assert_same(state, row, plain, 1 - row)
    assert_same(decoded(model, texts[1:], config, 9), 0, plain, 1)


@pytest.mark.slow
def test_an_engine_leaves_the_bits_of_plain_decoding_in_the_interpreter(interpreting):
    """One prompt in two pieces, and one in a slot that another has left."""
    one = dataclasses.replace(SMALL, layers=SMALL.layers[:1])
    model, texts = make_decoder(one, seed=1, embedding=400.0, head=4.0), prompts((20, 3, 2))
    params = [SamplingParams(max_new_tokens=new, ignore_eos=True) for new in (14, 3, 5)]
    engine = jspec.Engine(
        model,
        slots=2,
        capacity=40,
        draft=NGRAM,
        gamma=2,
        prefill_chunk=16,
        steps_per_chunk=1,
        exact="bits",
    )
    requests = [engine.submit(text, sampling) for text, sampling in zip(texts, params, strict=True)]
    engine.run()
    assert engine.stats.accepted > 0
    for slot, which in ((0, 0), (1, 2)):
        text, tokens = texts[which], requests[which].tokens
        plain = decoded(model, [text], PLAIN, params[which].max_new_tokens)
        assert_same(engine._runner.state, slot, plain, 0)
        assert tokens == tuple(plain.tokens[0, len(text) :][: len(tokens)].tolist())


def test_the_draft_has_other_backends(interpreting, monkeypatch):
    """Exact ones are of the target's passes alone, whose model may be the same."""
    launched = []
    right = linear.triton_call

    def call(kernel, *arrays, **settings):
        launched.append(settings["ROWS"])
        return right(kernel, *arrays, **settings)

    monkeypatch.setattr(linear, "triton_call", call)
    model, config = make_decoder(SMALL, seed=1), StepConfig(2, DRAFTERS["dense"], exact="bits")
    state = start_decoding(model, prompts((11,)), SamplingParams(max_new_tokens=4), config)
    launched.clear()
    jspec.speculative_step.lower(model, state, config)
    # Four products a layer and the logits, of the verification alone: exact ones, which read the
    # number of rows when they run.
    assert launched == [0] * (4 * SMALL.num_layers + 1)


@pytest.fixture(scope="module")
def bundled() -> Decoder:
    """Two layers of the bundled model, in bfloat16, which write text."""
    if reason := refuses_triton():
        pytest.skip(reason)
    model, _ = jspec.load_bundled(dtype="bfloat16")
    model.config = dataclasses.replace(model.config, layers=model.config.layers[:2])
    model.layers = nnx.List(list(model.layers)[:2])
    return model


@pytest.fixture(scope="module")
def alone(bundled):
    """Prompts of many lengths, and plain decoding of each by itself."""
    texts = prompts(range(5, 5 + 32 * 37, 37), vocabulary=256)
    configs = [dataclasses.replace(PLAIN, exact=exact) for exact in LEVELS]
    plain = {x.exact: [decoded(bundled, [text], x, 48) for text in texts] for x in configs}
    return texts, plain


EVERY = DRAFTERS | {
    "vegas": GUIDED,
    "hata": jspec.named_draft("hata:budget=32"),
    "quest": jspec.named_draft("quest:budget=64"),
    "chain": jspec.named_draft("suffix > hata:budget=32"),
}


OF_BITS = [("bits", *sizes) for sizes in ((1, 16), (8, 4), (32, 1), (32, 16))]


@pytest.mark.parametrize(
    ("exact", "batch", "gamma"), [*OF_BITS, ("tokens", 8, 4), ("tokens", 32, 16)]
)
@pytest.mark.parametrize("name", EVERY)
def test_every_drafter_leaves_the_bits_of_plain_decoding_on_a_gpu(
    exact, name, batch, gamma, bundled, alone
):
    draft, (texts, plain) = EVERY[name], alone
    other = bundled if draft.traits.needs_model else None
    config = StepConfig(0 if name == "plain" else gamma, draft, exact=exact)
    models = Models(bundled, other, prepare_params(config.cache_policy, bundled))
    state = decoded(models, texts[:batch], config, 48)
    for row in range(batch):
        assert_same(state, row, plain[exact][row], 0)


@pytest.mark.parametrize("name", ["ngram", "vegas", "model"])
@pytest.mark.parametrize("exact", LEVELS)
def test_an_engine_leaves_the_tokens_of_plain_decoding_on_a_gpu(exact, name, bundled, alone):
    """Prompts of one or several pieces, short ones past long ones, in eight slots."""
    draft, (texts, plain) = EVERY[name], alone
    engine = jspec.Engine(
        bundled,
        slots=8,
        capacity=1300,
        draft=draft,
        gamma=4,
        draft_model=bundled if draft.traits.needs_model else None,
        prefill_chunk=2048,  # that of `start_decoding`
        exact=exact,
    )
    params = SamplingParams(max_new_tokens=48, ignore_eos=True)
    requests = [engine.submit(text, params) for text in [*texts[16:], *texts[:16]]]
    engine.run()
    states = plain[exact]
    for request, text, state in zip([*requests[16:], *requests[:16]], texts, states, strict=True):
        assert request.tokens == tuple(state.tokens[0, len(text) :][:48].tolist())


def test_scores_are_of_the_same_logits_on_a_gpu(bundled):
    """A text's log-probabilities are the same bits alone and in a batch."""
    texts = prompts((300, 41, 170), vocabulary=256)
    together = jspec.score_tokens(bundled, texts, exact="bits")
    for text, row in zip(texts, together, strict=True):
        np.testing.assert_array_equal(jspec.score_tokens(bundled, [text], exact="bits")[0], row)


def assert_scores_equal(model, texts, generation: jspec.Generation, count: int) -> None:
    """The generation's log-probabilities have the bits of those of another pass."""
    whole = [[*text, *new] for text, new in zip(texts, generation.tokens, strict=True)]
    scores = jspec.score_top_tokens(model, whole, count, exact="bits")
    rows = zip(scores, generation.prompt_logprobs, generation.logprobs, strict=True)
    for score, of_prompt, got in rows:
        assert got is not None
        whole = jax.tree.map(lambda *parts: np.concatenate(parts), of_prompt, got.model)
        for ours, theirs in zip(jax.tree.leaves(whole), jax.tree.leaves(score), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_log_probabilities_have_the_bits_of_scores_in_the_interpreter(interpreting):
    one = dataclasses.replace(SMALL, layers=SMALL.layers[:1])
    model, texts = make_decoder(one, seed=1, embedding=400.0, head=4.0), prompts((9,))
    params = SamplingParams(max_new_tokens=4, temperature=0.8, seed=1, logprobs=2)
    params = dataclasses.replace(params, prompt_logprobs=2)
    got = jspec.generate(
        model, texts, params, draft=NGRAM, gamma=2, exact="bits", steps_per_chunk=1
    )
    assert_scores_equal(model, texts, got, 2)


@pytest.mark.parametrize(
    "calls", [1, pytest.param(8, marks=pytest.mark.slow)], ids=["128k", "a-million"]
)
def test_log_probabilities_have_the_bits_of_scores_on_a_gpu(calls, bundled):
    """Of 128,000 tokens a call, greedy and sampled."""
    texts = prompts([5 + 3 * (i % 32) for i in range(256)], vocabulary=256)
    for call in range(calls):
        params = [
            SamplingParams(500, temperature=(i % 2) * 0.9, seed=i + 256 * call, ignore_eos=True)
            for i in range(256)
        ]
        params = [dataclasses.replace(one, logprobs=3, prompt_logprobs=3) for one in params]
        got = jspec.generate(bundled, texts, params, draft=NGRAM, gamma=4, exact="bits")
        assert sum(map(len, got.tokens)) == 128_000
        assert_scores_equal(bundled, texts, got, 3)
