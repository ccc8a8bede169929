"""`LLM`: text and conversations in, text out, by the first layers of the bundled model."""

import numpy as np
import pytest

import jspec
from jspec.models.bundled import bundled_path
from jspec.models.chat import ChatTemplate

CODE = "import os\nimport sys\n\n\ndef main():\n"
TALK = [{"role": "user", "content": CODE}]
SHORT = jspec.SamplingParams(max_new_tokens=12)
HOT = jspec.SamplingParams(max_new_tokens=12, temperature=1.0, seed=2**32 - 1)


@pytest.fixture(scope="module")
def llm(short_bundled) -> jspec.LLM:
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    template = ChatTemplate(source, {"bos_token": "<|bos|>"}, "test")
    tokenizer = jspec.load_tokenizer(bundled_path())
    return jspec.LLM(short_bundled, tokenizer=tokenizer, chat_template=template)


@pytest.fixture(scope="module")
def plain(llm):
    """Tokens of the call beneath."""
    ids = [llm.tokenizer.encode(CODE)]
    return jspec.generate(llm.model, ids, SHORT, draft=jspec.NgramDraft()).tokens[0]


def test_a_completion_is_what_generate_gives(llm, plain):
    (result,) = llm.generate(CODE, SHORT)
    assert result.tokens == plain
    assert result.text == llm.tokenizer.decode(plain)
    assert result.finished == "length"
    assert result.logprobs is None


def test_a_conversation_goes_through_the_template(llm, plain):
    assert llm.encode_chat(TALK) == llm.tokenizer.encode(CODE)  # special tokens come once
    assert [c.tokens for c in llm.chat(TALK, SHORT)] == [plain]
    several = llm.chat([TALK, TALK], [SHORT, HOT])
    assert several[0].tokens == plain
    assert several[1].seed == HOT.seed


def test_a_stream_is_the_text_in_pieces(llm, plain):
    text = llm.tokenizer.decode(plain)
    pieces = list(llm.stream(CODE, SHORT))
    assert "".join(pieces) == text
    assert all(pieces)
    assert len(pieces) > 1
    assert "".join(llm.stream(TALK, SHORT)) == text
    assert "".join(llm.stream(CODE, SHORT, stop=text[4:8])) == text[: text.index(text[4:8])]


def test_a_stream_may_be_closed_and_its_errors_reach_the_reader(llm, monkeypatch):
    decoded = []

    def generate(*arguments, **settings):
        decoded.append(jspec.generate(*arguments, **settings))

    monkeypatch.setattr("jspec.llm.generate", generate)
    stream = llm.stream(CODE, jspec.SamplingParams(max_new_tokens=1000))
    assert next(stream)
    stream.close()
    (ended,) = decoded
    assert ended.finished == ("stop",)
    assert ended.stats.committed < 500
    with pytest.raises(ValueError, match="exceeds the context"):
        list(llm.stream(CODE, jspec.SamplingParams(max_new_tokens=10**6)))


def test_text_ends_before_a_stop_text(llm, plain):
    text = llm.tokenizer.decode(plain)
    (result,) = llm.generate(CODE, SHORT, stop=[text[4:8]])
    assert result.text == text[: text.index(text[4:8])]
    assert result.finished == "stop"
    assert result.tokens == plain[: len(result.tokens)]


def test_n_answers_have_seeds_in_a_row(llm):
    result = llm.generate([CODE, "x = "], HOT, n=3)
    assert [c.seed for c in result] == [2**32 - 1, 0, 1] * 2
    assert len({c.tokens for c in result[:3]}) > 1
    alone = jspec.SamplingParams(max_new_tokens=12, temperature=1.0, seed=1)
    assert llm.generate("x = ", alone)[0].tokens == result[5].tokens


def test_log_probabilities_are_the_models(llm):
    result = llm.generate([CODE, "x = "], SHORT, logprobs=True)
    for prompt, completion in zip((CODE, "x = "), result, strict=True):
        whole = [*llm.tokenizer.encode(prompt), *completion.tokens]
        expected = jspec.score_tokens(llm.model, [whole])[0][-12:]
        assert completion.logprobs is not None
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        # Greedy tokens are the likeliest of 256 and more.
        assert (completion.logprobs > -np.log(llm.model.config.vocab_size)).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(CODE, n=0), "n=0 must be a whole number, at least 1"),
        (lambda llm: llm.generate(CODE, n=1.5), r"n=1\.5 must be a whole number"),
        (lambda llm: llm.generate(CODE, stop=None), "stop=None must be a text or texts"),
        (lambda llm: llm.generate(CODE, stop=[""]), "none of them empty"),
        (lambda llm: llm.generate(CODE, stop=[3]), "must be a text or texts"),
        (lambda llm: llm.generate([]), "no prompts were given"),
        (lambda llm: llm.chat([]), "no conversation; pass messages"),
        (lambda llm: jspec.LLM(batch=0), "batch=0 must be a whole number, at least 1"),
        (lambda llm: jspec.LLM(batch="8"), "batch='8' must be a whole number"),
        (lambda llm: jspec.LLM(llm.model), "needs tokenizer="),
        (
            lambda llm: jspec.LLM(llm.model, tokenizer=llm.tokenizer).chat(TALK),
            r"has no chat template; pass chat_template=",
        ),
    ],
    ids=[
        *("n", "half-n", "no-stop", "empty-stop", "stop", "none", "no-messages", "batch"),
        *("text-batch", "tokenizer", "template"),
    ],
)
def test_bad_calls_say_the_way_out(llm, call, message):
    with pytest.raises(ValueError, match=message):
        call(llm)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft": "ngram"}, r"pass jspec.named_draft\('ngram'\)"),
        ({"draft": jspec.NgramDraft}, r"pass one of it, NgramDraft\(\)"),
        ({"draft": jspec.policies.Quest()}, r"is a policy; pass SelfDraft\(Quest"),
        ({"draft": None, "target": "quest"}, "must be a policy; pass jspec.policies.named_policy"),
    ],
    ids=["name", "class", "policy", "target"],
)
def test_what_is_no_drafter_or_policy_says_what_was_meant(settings, message):
    with pytest.raises(TypeError, match=message):
        jspec.LLM(**settings)
