"""`generate`: streams, stops, interruptions, and a device without memory."""

import dataclasses

import jax
import numpy as np
import pytest

from jspec.config import SamplingParams
from jspec.decode.generation import Interrupted, generate
from jspec.decode.prefill import fill_slot, start_decoding
from jspec.decode.programs import Programs
from tests.conftest import ONE_LAYER, make_decoder
from tests.decode.common import NGRAM, STREAMING, prompts

TWELVE = SamplingParams(max_new_tokens=12)


@pytest.fixture(scope="module")
def texts(sharp):
    """What four prompts give, 12 tokens each."""
    return generate(sharp, prompts()[:4], TWELVE, draft=STREAMING).tokens


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


def test_a_caller_may_end_a_row_within_the_tokens_of_a_call(sharp, texts):
    """What is after the end is in no count and no text, also where that is nothing at all."""
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
    # A step of which nothing is left counts nowhere.
    assert got.steps[:2] == (0, 1)
    assert sum(got.steps) == got.stats.steps


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
        monkeypatch.setattr("jspec.decode.chunks.PROGRAMS", Programs())

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


def test_stop_tokens_of_a_request_and_of_the_model_count(texts):
    """Neither takes the place of the other, whichever comes first in the text."""
    of_model, asked = texts[1][2], texts[0][3]
    config = dataclasses.replace(ONE_LAYER, stop_tokens=(of_model,))
    model = make_decoder(config, seed=1, embedding=400.0, head=4.0)
    params = SamplingParams(max_new_tokens=12, stop_tokens=(asked,))
    got = generate(model, prompts()[:4], params, draft=STREAMING)
    for text, tokens in zip(texts, got.tokens, strict=True):
        ends = [i + 1 for i, token in enumerate(text) if token in (of_model, asked)]
        assert tokens == text[: min(ends, default=12)]
    assert {of_model, asked} <= {tokens[-1] for tokens in got.tokens}


def test_a_request_may_ignore_stop_tokens_of_the_model_only(texts):
    """Row by row: the other rows end at them as before, also one that comes in later."""
    of_model, asked = texts[0][3], texts[0][5]
    assert of_model not in texts[0][:3]
    assert asked not in texts[0][:5]
    assert 40 not in texts[0]
    config = dataclasses.replace(ONE_LAYER, stop_tokens=(of_model, 40))
    model = make_decoder(config, seed=1, embedding=400.0, head=4.0)
    on = dataclasses.replace(TWELVE, ignore_eos=True)
    params = [TWELVE, on, dataclasses.replace(on, stop_tokens=(asked,)), on]
    got = generate(model, prompts()[:1] * 4, params, draft=None)
    assert got.tokens == (texts[0][:4], texts[0], texts[0][:6], texts[0])
    assert got.finished == ("stop", "length", "stop", "length")

    state = start_decoding(model, prompts()[:1], on)
    assert state.stop_tokens.tolist() == [[-1, -1]]
    assert fill_slot(model, state, 0, prompts()[0], TWELVE).stop_tokens.tolist() == [[of_model, 40]]


def test_a_device_without_memory_says_how_large_the_batch_is(sharp, monkeypatch):
    """XLA's error becomes Python's; any other of its errors stays as it is."""
    said = "RESOURCE_EXHAUSTED: Out of memory allocating 34359738368 bytes."

    def exhausted(*args, **settings):
        raise jax.errors.JaxRuntimeError(said)

    monkeypatch.setattr("jspec.decode.generation.start_decoding", exhausted)
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
