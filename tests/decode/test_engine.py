"""`generate` and `start_decoding`: streams, stops, interruptions, errors, a model of one's own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jspec.config import LayerSpec, SamplingParams
from jspec.decode.draft import ModelDraft
from jspec.decode.engine import Interrupted, generate
from jspec.decode.prefill import fill_slot, start_decoding
from jspec.decode.programs import Programs
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.ops.sample import Sampling
from tests.conftest import TINY, make_decoder
from tests.decode.common import DRAFTERS, NGRAM, STREAMING, full_logits, prompts

TWELVE = SamplingParams(max_new_tokens=12)


@pytest.fixture(scope="module")
def texts(sharp):
    """What four prompts give, 12 tokens each."""
    return generate(sharp, prompts()[:4], TWELVE, draft=STREAMING).tokens


# --- streams and ends ------------------------------------------------------------------------


def test_tokens_are_handed_on_in_order_as_they_come(sharp, texts):
    heard: dict[int, list[tuple[int, ...]]] = {row: [] for row in range(4)}
    got = generate(
        sharp,
        prompts()[:4],
        TWELVE,
        draft=STREAMING,
        steps_per_chunk=1,
        on_tokens=lambda row, tokens: heard[row].append(tokens),
    )
    assert got.tokens == texts
    assert got.finished == ("length",) * 4
    for row, parts in heard.items():
        assert len(parts) > 1
        assert all(parts)
        assert sum(parts, ()) == texts[row]


def test_a_caller_may_end_a_row(sharp, texts):
    calls = []

    def on_tokens(row, tokens):
        calls.append(row)
        return row == 2

    got = generate(
        sharp, prompts()[:4], TWELVE, draft=STREAMING, steps_per_chunk=1, on_tokens=on_tokens
    )
    assert calls.count(2) == 1
    assert got.finished == ("length", "length", "stop", "length")
    assert got.tokens[2] == texts[2][: len(got.tokens[2])]
    assert len(got.tokens[2]) < 12
    assert [got.tokens[i] for i in (0, 1, 3)] == [texts[i] for i in (0, 1, 3)]
    assert got.stats.committed == sum(map(len, got.tokens))


def test_a_caller_may_end_a_row_within_what_it_was_given(sharp, texts):
    """What is behind the end is in no count and no text, also where that is nothing at all."""
    keeps = {0: 0, 1: 1, 2: np.int64(3)}
    got = generate(
        sharp,
        prompts()[:4],
        TWELVE,
        draft=STREAMING,
        on_tokens=lambda row, tokens: keeps.get(row),
    )
    assert got.finished == ("stop", "stop", "stop", "length")
    assert got.tokens == ((), texts[1][:1], texts[2][:3], texts[3])
    assert got.stats.committed == 16


def test_an_end_at_the_limit_is_a_stop(sharp):
    params = SamplingParams(max_new_tokens=4)
    ends = {"draft": STREAMING, "on_tokens": lambda row, tokens: True}
    got = generate(sharp, prompts()[:4], params, **ends)
    assert got.finished == ("stop",) * 4
    assert [len(tokens) for tokens in got.tokens] == [4] * 4


@pytest.mark.parametrize("answer", [-1, 99, 1.0, "stop"])
def test_an_answer_that_means_nothing_is_refused(answer, sharp):
    with pytest.raises(ValueError, match=f"on_tokens returned {answer!r} for \\d+ tokens; return"):
        generate(sharp, prompts()[:4], TWELVE, draft=STREAMING, on_tokens=lambda *_: answer)


def test_an_interrupt_brings_what_there_is(sharp, texts):
    """It comes to the caller's caller: a loop over batches ends there, too."""
    calls = []

    def on_tokens(row, tokens):
        calls.append(row)
        if len(calls) == 6:
            raise KeyboardInterrupt

    settings = {"draft": STREAMING, "steps_per_chunk": 1, "on_tokens": on_tokens}
    with pytest.raises(KeyboardInterrupt) as caught:
        generate(sharp, prompts()[:4], TWELVE, **settings)
    assert isinstance(caught.value, Interrupted)
    got = caught.value.generation
    assert got.finished == ("interrupted",) * 4
    # The call for row 1 of the second chunk was interrupted: only row 0 has that chunk.
    assert got.tokens == tuple(texts[row][: len(got.tokens[row])] for row in range(4))
    assert all(got.tokens)
    assert got.stats.committed == sum(map(len, got.tokens))
    assert got.stats.steps == 5


def test_a_row_that_ended_before_the_interrupt_says_so(sharp):
    params = [dataclasses.replace(TWELVE, max_new_tokens=new) for new in (1, 12, 12, 12)]

    def on_tokens(row, tokens):
        if row == 1:
            raise KeyboardInterrupt

    settings = {"draft": STREAMING, "steps_per_chunk": 1, "on_tokens": on_tokens}
    with pytest.raises(Interrupted) as caught:
        generate(sharp, prompts()[:4], params, **settings)
    assert caught.value.generation.finished == ("length", *["interrupted"] * 3)


def test_an_interrupt_of_the_prefill_brings_no_tokens(sharp):
    def on_prefill(done, total):
        raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        generate(sharp, prompts()[:4], TWELVE, draft=STREAMING, on_prefill=on_prefill)
    got = caught.value.generation
    assert got.tokens == ((),) * 4
    assert got.finished == ("interrupted",) * 4
    assert (got.stats.prompt_tokens, got.stats.committed) == (0, 0)


@pytest.mark.parametrize("where", ["on_tokens", "on_prefill", "on_compile"])
def test_an_exception_in_a_callback_leaves_nothing_behind(where, sharp, texts, monkeypatch):
    if where == "on_compile":
        monkeypatch.setattr("jspec.decode.engine.PROGRAMS", Programs())

    def fail(*args):
        raise RuntimeError("the caller's own")

    settings = {"draft": STREAMING}
    with pytest.raises(RuntimeError, match="the caller's own"):
        generate(sharp, prompts()[:4], TWELVE, **settings, **{where: fail})
    got = generate(sharp, prompts()[:4], TWELVE, **settings)
    assert got.tokens == texts
    assert got.stats.committed == sum(map(len, texts))


@pytest.mark.parametrize("draft", [STREAMING, NGRAM, None], ids=["streaming", "ngram", "plain"])
@pytest.mark.parametrize("at", [0, 3, 11])
def test_a_stop_token_ends_the_text_behind_itself(at, draft, sharp, texts):
    stop = texts[0][at]
    params = [
        dataclasses.replace(TWELVE, stop_tokens=(40, stop)),
        TWELVE,
    ]
    got = generate(sharp, prompts()[:2], params, draft=draft)
    end = texts[0].index(stop) + 1
    assert got.tokens == (texts[0][:end], texts[1])
    assert got.finished == ("stop", "length")


def test_a_stop_token_at_the_limit_is_a_stop(sharp, texts):
    stop = texts[0][0]
    params = SamplingParams(max_new_tokens=1, stop_tokens=(stop,))
    assert generate(sharp, prompts()[:1], params, draft=STREAMING).finished == ("stop",)


def test_stop_tokens_of_a_request_count_beside_those_of_the_model(texts):
    """Neither takes the place of the other, whichever comes first in the text."""
    own, asked = texts[1][2], texts[0][3]
    config = dataclasses.replace(TINY, stop_tokens=(own,))
    model = make_decoder(config, seed=1, embedding=400.0, head=4.0)
    params = SamplingParams(max_new_tokens=12, stop_tokens=(asked,))
    got = generate(model, prompts()[:4], params, draft=STREAMING)
    for text, tokens in zip(texts, got.tokens, strict=True):
        ends = [i + 1 for i, token in enumerate(text) if token in (own, asked)]
        assert tokens == text[: min(ends, default=12)]
    assert {own, asked} <= {tokens[-1] for tokens in got.tokens}


def test_a_request_may_ignore_the_models_stop_tokens_but_not_its_own(texts):
    """Row by row: the other rows end at them as before, also one that comes in later."""
    own, asked = texts[0][3], texts[0][5]
    assert own not in texts[0][:3]
    assert asked not in texts[0][:5]
    assert 40 not in texts[0]
    config = dataclasses.replace(TINY, stop_tokens=(own, 40))
    model = make_decoder(config, seed=1, embedding=400.0, head=4.0)
    on = dataclasses.replace(TWELVE, ignore_eos=True)
    params = [TWELVE, on, dataclasses.replace(on, stop_tokens=(asked,)), on]
    got = generate(model, prompts()[:1] * 4, params, draft=None)
    assert got.tokens == (texts[0][:4], texts[0], texts[0][:6], texts[0])
    assert got.finished == ("stop", "length", "stop", "length")

    state = start_decoding(model, prompts()[:1], on)
    assert state.stop_tokens.tolist() == [[-1, -1]]
    assert fill_slot(model, state, 0, prompts()[0], TWELVE).stop_tokens.tolist() == [[own, 40]]


def test_a_device_without_memory_says_how_large_the_batch_is(sharp, monkeypatch):
    """XLA's error becomes Python's; any other of its errors stays as it is."""
    said = "RESOURCE_EXHAUSTED: Out of memory allocating 34359738368 bytes."

    def exhausted(*args, **settings):
        raise jax.errors.JaxRuntimeError(said)

    monkeypatch.setattr("jspec.decode.engine.start_decoding", exhausted)
    way_out = "give fewer prompts at a time, shorten them, lower max_new_tokens, or pass cache_d"
    with pytest.raises(MemoryError, match=way_out) as caught:
        generate(sharp, prompts()[:2], TWELVE, draft=None)
    assert str(caught.value).startswith("the device is out of memory with 2 prompts at a time, ")
    assert "the longest of 62 tokens" in str(caught.value)
    assert str(caught.value.__cause__) == said
    assert "\n" not in str(caught.value)
    said = "INTERNAL: a kernel failed"
    with pytest.raises(jax.errors.JaxRuntimeError, match="a kernel failed"):
        generate(sharp, prompts()[:2], TWELVE, draft=None)


def test_prefill_is_heard_of(sharp):
    heard = []
    generate(
        sharp,
        [[1] * 50, [2] * 3],
        TWELVE,
        draft=STREAMING,
        prefill_chunk=16,
        on_prefill=lambda done, total: heard.append((done, total)),
    )
    assert heard == [(16, 49), (32, 49), (48, 49), (49, 49)]


def test_a_prompt_of_one_token_needs_no_prefill(sharp):
    heard = []
    got = generate(
        sharp, [[5]], TWELVE, draft=STREAMING, on_prefill=lambda *counts: heard.append(counts)
    )
    assert len(got.tokens[0]) == 12
    assert heard == []


# --- start_decoding --------------------------------------------------------------------------


def test_start_fills_the_state(tiny, other):
    params = [
        SamplingParams(max_new_tokens=7, temperature=0.5, top_k=3, seed=9, stop_tokens=(4, 5)),
        SamplingParams(max_new_tokens=2, top_p=0.5, min_p=0.25, seed=0, draft_limit=0),
    ]
    models, config = Models(tiny, other), StepConfig(2, ModelDraft())
    state = start_decoding(models, [[3, 1, 2], [7]], params, config, capacity=12)
    assert state.tokens.tolist() == [[3, 1, 2] + [-1] * 9, [7] + [-1] * 11]
    assert state.lengths.tolist() == [3, 1]
    assert state.limits.tolist() == [10, 3]
    assert state.done.tolist() == [False, False]
    assert state.stop_tokens.tolist() == [[4, 5], [-1, -1]]
    assert state.draft_limits.tolist() == [2**31 - 1, 0]
    for cache in (state.cache, state.draft):
        assert {layout.size for layout in cache.layouts} == {12}
        assert {x.shape[1] for x in jax.tree.leaves(cache.columns)} == {12}
        assert cache.lengths.tolist() == [2, 0]
    assert state.mode == "filtered"
    expected = Sampling(
        np.array([0.5, 0.0], np.float32),
        np.array([3, 0], np.int32),
        np.array([1.0, 0.5], np.float32),
        np.array([0.0, 0.25], np.float32),
        np.array([9, 0], np.uint32),
    )
    jax.tree.map(np.testing.assert_array_equal, state.sampling, expected)


@pytest.mark.parametrize("chunk", [1, 3, 16, 256])
def test_any_prefill_chunk_gives_the_same_cache(chunk, tiny):
    texts = prompts((50, 1, 17))
    whole = start_decoding(tiny, texts, TWELVE, chunk=64).cache
    cache = start_decoding(tiny, texts, TWELVE, chunk=chunk).cache
    assert [set(layer) for layer in cache.columns] == [{"keys", "values"}] * 2
    jax.tree.map(
        lambda got, expected: np.testing.assert_allclose(got, expected, atol=1e-5),
        cache.columns,
        whole.columns,
    )


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "settings", "message"),
    [
        ([], {}, "no prompts were given; pass at least one"),
        ([[1], []], {}, "prompt 1: the prompt is empty; give it at least one token"),
        ([[1, 41]], {}, r"prompt 0: the prompt holds token 41, outside the vocabulary 0\.\.40"),
        ([[1], [3, -1]], {}, "prompt 1: the prompt holds token -1, outside the vocabulary"),
        (
            [[1] * 501],
            {},
            "has 501 tokens, which with max_new_tokens=12 exceeds the context of 512",
        ),
        ([[1]] * 2, {"params": [TWELVE] * 3}, "got 2 prompts but 3 sampling params"),
        ([[1]], {"gamma": 0}, r"gamma=0 must be at least 1; pass draft=NoDraft\(\)"),
        ([[1]], {"gamma": -2, "draft": NGRAM}, "gamma=-2 must be at least 1"),
        ([[1]], {"gamma": -1, "draft": None}, "gamma=-1 must be at least 0"),
        ([[1]], {"draft": ModelDraft()}, r"draft=ModelDraft\(\) and draft_model go together"),
        ([[1]], {"steps_per_chunk": 0}, "steps_per_chunk=0 must be at least 1"),
        ([[1]], {"prefill_chunk": 0}, "a prefill chunk of 0 tokens must be at least 1"),
        (
            [[1]],
            {"backends": {"attention": "fastest"}},
            "attention has no implementation 'fastest'",
        ),
        ([[1]], {"backends": {"verify_greedy": "slow"}}, "verify_greedy has no implementation"),
        (
            [[1]],
            {
                "backends": {"verify_stochastic": "triton"},
                "params": SamplingParams(temperature=1.0),
            },
            "verify_stochastic has no implementation 'triton'; choose one of xla",
        ),
        ([[1]], {"backends": {"verify": "xla"}}, "there is no operation 'verify'; name one of"),
    ],
    ids=lambda value: "-".join(value.split()[:4]) if isinstance(value, str) else "",
)
def test_a_bad_request_is_refused(texts, settings, message, tiny):
    with pytest.raises(ValueError, match=message):
        generate(tiny, texts, **{"params": TWELVE} | settings)


def test_a_draft_model_needs_its_setting(tiny, other):
    with pytest.raises(ValueError, match="go together; pass both or neither"):
        generate(tiny, [[1]], TWELVE, draft=STREAMING, draft_model=other)


def test_a_draft_model_of_another_vocabulary_is_refused(tiny):
    foreign = make_decoder(dataclasses.replace(TINY, vocab_size=41 + 1025))
    message = r"vocabulary of 1066 differs from the target's 41; they must be the same but for pad"
    with pytest.raises(ValueError, match=message):
        generate(tiny, [[1]], TWELVE, draft=ModelDraft(), draft_model=foreign)


def test_a_request_beyond_the_capacity_is_refused(tiny):
    message = r"needs 22 slots .* but capacity=21; raise the capacity or lower max_new_tokens"
    with pytest.raises(ValueError, match=message):
        start_decoding(tiny, [[1] * 10], TWELVE, capacity=21)
    state = start_decoding(tiny, [[1] * 10], TWELVE, capacity=22)
    assert state.cache.keys(0).shape[1] == state.tokens.shape[1] == 22


def test_a_request_beyond_the_draft_models_context_is_refused(tiny):
    short = make_decoder(dataclasses.replace(TINY, max_context=20))
    message = (
        "prompt 0: for the draft model: the prompt has 10 tokens, .* exceeds the context of 20"
    )
    with pytest.raises(ValueError, match=message):
        generate(tiny, [[1] * 10], TWELVE, draft=ModelDraft(), draft_model=short)


def test_each_request_has_a_seed_that_repeats_it(sharp):
    """Two requests without a seed share no random numbers; the seeds told repeat them."""
    hot = SamplingParams(max_new_tokens=12, temperature=1.5)
    got = generate(sharp, [[1, 2, 3]] * 3, [hot, dataclasses.replace(hot, seed=7), hot])
    assert got.seeds[1] == 7
    assert len(set(got.seeds)) == 3
    assert got.tokens[0] != got.tokens[2]
    named = [dataclasses.replace(hot, seed=seed) for seed in got.seeds]
    again = generate(sharp, [[1, 2, 3]] * 3, named)
    assert again.tokens == got.tokens
    assert again.seeds == got.seeds


# --- a model of the user's own ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shape:
    """All that a model's config must tell."""

    vocab_size: int = 13
    layers: tuple[LayerSpec, ...] = (LayerSpec(kv_heads=1, key_size=8, value_size=8),)
    max_context: int = 64
    stop_tokens: tuple[int, ...] = ()


class OneLayer(nnx.Module):
    """Plain Flax layers around ``attend``; the dropout's random state is the first leaf."""

    dtype = jnp.float32

    def __init__(self, seed: int):
        rngs = nnx.Rngs(seed)
        self.config = Shape()
        self.a_dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs)
        self.embed = nnx.Embed(13, 8, rngs=rngs)
        self.places = nnx.Embed(64, 8, rngs=rngs)
        self.qkv = nnx.Linear(8, 24, rngs=rngs)
        self.head = nnx.Linear(8, 13, rngs=rngs)

    def __call__(self, tokens, positions, attend, cache):
        x = self.embed(tokens) + self.places(positions)
        q, k, v = jnp.split(self.qkv(self.a_dropout(x))[:, :, None], 3, axis=-1)
        out, cache = attend(0, q, k, v, cache)
        return x + out[:, :, 0], cache

    def logits(self, hidden):
        return 8 * self.head(hidden)


@pytest.mark.parametrize("source", DRAFTERS)
def test_a_flax_model_of_ones_own(source):
    model = OneLayer(0)
    assert not jnp.issubdtype(jax.tree.leaves(model)[0].dtype, jnp.floating)
    second = OneLayer(1) if source == "model" else None
    texts = prompts((9, 1, 4), vocabulary=13)
    got = generate(model, texts, TWELVE, draft=DRAFTERS[source], draft_model=second)
    for text, tokens in zip(texts, got.tokens, strict=True):
        logits = full_logits(model, jnp.asarray([[*text, *tokens]]))
        choice = jnp.argmax(logits, axis=-1)[0, len(text) - 1 : -1]
        assert choice.tolist() == list(tokens)
