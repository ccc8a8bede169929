"""The engine with real families: windows, sinks, experts, latents; each gets what it gets alone."""

import functools
import itertools

import pytest

import jspec
from jspec.decode.draft import GuidedDraft, ModelDraft, SelfDraft, SuffixDraft
from jspec.policies import ExactTopK, Vegas
from tests.decode.common import NGRAM, prompts
from tests.models.goldens import GOLDEN
from tests.parameters import default_run

DRAFTS = {
    "ngram": NGRAM,
    "suffix": SuffixDraft(min_match=1),
    "vegas": GuidedDraft(Vegas(budget=8, least=0)),
    "topk": SelfDraft(ExactTopK(budget=8, sinks=1, recent=2, dense_layers=0)),
    "model": ModelDraft(),
}
FAMILIES = ("gemma3", "gpt_oss", "qwen3_moe", "deepseek_v3")
QUICK = {("gemma3", "vegas"), ("gpt_oss", "ngram"), ("qwen3_moe", "model"), ("deepseek_v3", "topk")}
# The windows of 9 tokens end in the first piece of 16; a short prompt goes past the second one.
TEXTS = prompts((50, 33, 17, 10), vocabulary=112)
PREFIX = TEXTS[1][:20]
PARAMS = jspec.SamplingParams(max_new_tokens=24, ignore_eos=True)


@functools.cache
def loaded(name: str) -> jspec.Decoder:
    return jspec.load_model(GOLDEN / name)


@functools.cache
def alone(name: str) -> list[tuple[int, ...]]:
    """What plain decoding gives each prompt by itself."""
    model, settings = loaded(name), {"draft": None, "prefill_chunk": 16}
    return [jspec.generate(model, [text], PARAMS, **settings).tokens[0] for text in TEXTS]


@pytest.mark.parametrize(
    ("name", "draft"),
    default_run(
        itertools.product(FAMILIES, DRAFTS),
        "gpt_oss-ngram",
        slow=[f"{name}-{x}" for name in FAMILIES for x in DRAFTS if (name, x) not in QUICK],
    ),
)
def test_a_family_gets_what_it_gets_alone(name, draft):
    """Of three slots one is used twice, and one prompt goes on after a shared prefix."""
    second = loaded("qwen3") if draft == "model" else None
    engine = jspec.Engine(
        loaded(name),
        slots=3,
        capacity=100,
        draft=DRAFTS[draft],
        gamma=3,
        draft_model=second,
        prefill_chunk=16,
        steps_per_chunk=4,
    )
    engine.share_prefix(PREFIX)
    requests = [engine.submit(text, PARAMS) for text in TEXTS]
    engine.run()
    assert [request.tokens for request in requests] == alone(name)
    assert engine.stats.drafted > 0
