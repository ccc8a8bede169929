"""The bundled model on real text: speculation writes what plain decoding writes."""

import sysconfig
from pathlib import Path

import pytest

import jspec
from jspec.eval.sample import prepared
from tests.conftest import first_layers
from tests.parameters import default_run

SOURCES = ("streaming", "ngram", "model")
# Drafts of policies: a first layer that is dense, and selections far smaller than the prompts.
POLICIES = {
    "exact_topk": "exact_topk:budget=32,dense_layers=1",
    "hata": "hata:budget=32,dense_layers=1",
    "quest": "quest:budget=64,dense_layers=1",
    "loki": "loki:budget=32,dense_layers=1,channels=16",
    "magicpig": "magicpig:budget=32,dense_layers=1,bits=5,tables=30",
}
NEW_TOKENS = 256
SHORTLY = {"new_tokens": 32, "prefill_chunk": 64}


@pytest.fixture(scope="module")
def bundled():
    return jspec.load_bundled(dtype="float32")


def prompts(tokenizer: jspec.Tokenizer, count: int, longest: int = 403) -> list[list[int]]:
    """Stretches of the standard library's source, of 20 to ``longest`` bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda p: p.name)
    files = [path for path in files if path.stat().st_size > 4000]
    lengths = [20 + index * (longest - 20) // max(count - 1, 1) for index in range(count)]
    chosen = [files[index * len(files) // count] for index in range(count)]
    # The lengths are dealt out so that a batch of neighbours is ragged.
    order = [lengths[(index * 29) % count] for index in range(count)]
    return [
        tokenizer.encode(path.read_bytes()[1000 : 1000 + n])
        for path, n in zip(chosen, order, strict=True)
    ]


def decode(model, prompts, batch, draft_model=None, new_tokens=NEW_TOKENS, **settings):
    """Tokens of all prompts, decoded ``batch`` at a time."""
    if settings["draft"] is not None:
        arrays = prepared(settings["draft"].cache_policy, model, jspec.load_bundled()[1])
        settings = settings | {"policy_params": arrays}
    params = jspec.SamplingParams(max_new_tokens=new_tokens)
    tokens: list[tuple[int, ...]] = []
    for begin in range(0, len(prompts), batch):
        group = prompts[begin : begin + batch]
        result = jspec.generate(model, group, params, draft_model=draft_model, **settings)
        tokens.extend(result.tokens)
    return tokens


def draft_of(source: str, draft_model):
    """A drafter, and a second model where it takes one: a real, if crude, draft model."""
    if source in POLICIES:
        return jspec.named_draft(POLICIES[source]), None
    drafts = {
        "streaming": (jspec.SelfDraft(jspec.policies.Streaming(sinks=8, window=56)), None),
        "ngram": (jspec.NgramDraft(), None),
        "model": (jspec.ModelDraft(), draft_model),
    }
    return drafts[source]


@pytest.fixture(scope="module")
def two_layers():
    """Of the bundled model's eight: a dense one and one that selects compile in less time."""
    return first_layers(2)


@pytest.fixture(scope="module")
def shortly(bundled, two_layers):
    """Four prompts, and 32 tokens that plain decoding gives to each."""
    some = prompts(bundled[1], 4, longest=128)
    return some, decode(two_layers, some, 4, draft=None, **SHORTLY)


# The whole model decodes with n-gram drafts in the README's commands.
@pytest.mark.parametrize("source", default_run(["streaming", "model", "hata"], slow=["streaming"]))
def test_real_text_is_decoded_as_plainly(two_layers, short_bundled, shortly, source):
    some, plain = shortly
    draft, second = draft_of(source, short_bundled)
    assert decode(two_layers, some, 4, second, draft=draft, gamma=4, **SHORTLY) == plain


@pytest.fixture(scope="module")
def plainly(bundled):
    model, tokenizer = bundled
    return decode(model, prompts(tokenizer, 64), 8, draft=None)


@pytest.mark.slow
@pytest.mark.parametrize("source", POLICIES)
def test_64_prompts_with_a_policy(bundled, plainly, source):
    model, tokenizer = bundled
    draft, _ = draft_of(source, None)
    assert decode(model, prompts(tokenizer, 64), 8, draft=draft, gamma=4) == plainly


@pytest.mark.slow
@pytest.mark.parametrize("batch", [8, 1])
@pytest.mark.parametrize("gamma", [1, 4, 8])
@pytest.mark.parametrize("source", SOURCES)
def test_64_prompts(bundled, short_bundled, plainly, source, gamma, batch):
    model, tokenizer = bundled
    draft, second = draft_of(source, short_bundled)
    texts = prompts(tokenizer, 64)
    tokens = decode(model, texts, batch, second, draft=draft, gamma=gamma)
    assert [i for i, (a, b) in enumerate(zip(tokens, plainly, strict=True)) if a != b] == []


@pytest.mark.slow
def test_plain_decoding_in_batches_of_1(bundled, plainly):
    model, tokenizer = bundled
    assert decode(model, prompts(tokenizer, 64), 1, draft=None) == plainly
