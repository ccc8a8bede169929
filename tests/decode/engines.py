"""What the tests of the engine share: settings, requests, and what each of these gives alone."""

import functools
from typing import NamedTuple

import numpy as np

from jspec.config import SamplingParams
from jspec.decode.draft import Chain, GuidedDraft, ModelDraft, SelfDraft, SuffixDraft
from jspec.decode.engine import Engine
from jspec.decode.generation import Generation, generate
from jspec.policies import ExactTopK, Hata, HataOff, MagicPIG, Quest, Streaming, Vegas
from tests.conftest import ONE_LAYER, make_decoder
from tests.decode.common import MIXED, NGRAM, STREAMING, prompts

VEGAS = GuidedDraft(Vegas(budget=8, least=0))
SOME = {"budget": 8, "sinks": 1, "recent": 2, "dense_layers": 0}
QUEST = Quest(budget=12, page=4, sinks=1, recent=2, dense_layers=0)
GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
LOSSY = {"draft": None, "target": QUEST}
SETTINGS = {
    "ngram": {"draft": NGRAM},
    "streaming": {"draft": STREAMING},
    "quest": {"draft": SelfDraft(QUEST)},
    "magicpig": {"draft": SelfDraft(MagicPIG(**SOME, bits=2, tables=4))},
    "vegas": {"draft": VEGAS},
    "refreshed": {"draft": GuidedDraft(Vegas(budget=8, least=0, refresh=2))},
    "model": {"draft": ModelDraft()},
    "suffix": {"draft": SuffixDraft(min_match=1)},
    "chain": {"draft": Chain(NGRAM, VEGAS, inner=2, rounds=2)},
    "chain-of-models": {"draft": Chain(ModelDraft(), SelfDraft(QUEST), inner=2, rounds=2)},
    "quantized": {"draft": SelfDraft(Streaming(sinks=2, window=6), quantized="int8")},
    "none": {"draft": None},
    "padded": {"draft": None, "gamma": 3},
    "lossy": LOSSY,
    "lossy-topk": {"draft": None, "target": ExactTopK(**SOME)},
    "lossy-host": {"draft": None, "target": HataOff(**SOME, bits=32)},
    "lossy-hata": {"draft": None, "target": Hata(**SOME, bits=32)},
    "blocks": {"draft": ModelDraft(), "rule": "block"},
}
ON_A_MESH = (
    *("ngram", "streaming", "vegas", "refreshed", "suffix", "chain"),
    *("none", "padded", "lossy-topk", "lossy-hata"),
)


PromptAndParams = tuple[list[int], SamplingParams]


class ExpectedTokens(NamedTuple):
    """The tokens of each request, and why it ends."""

    tokens: tuple[tuple[int, ...], ...]
    finished: tuple[str, ...]


def work(count: int, longest: int = 90, seed: int = 0) -> list[PromptAndParams]:
    """Requests of all kinds: greedy and sampled, filtered, with stop tokens and draft limits."""
    rng = np.random.default_rng(seed)
    return _requests(rng, rng.integers(1, longest, count), rng.integers(1, 30, count), seed)


def long_work(count: int, seed: int = 0) -> list[PromptAndParams]:
    """The same of 10 to 8192 tokens each, prompt and new ones together.

    Log-uniform: one in twenty from 1024 up, the others below. A third of a request is new tokens in
    the mean, and of some nearly all.
    """
    rng = np.random.default_rng(seed)
    is_long = np.arange(count) % 20 == 7
    low, high = np.where(is_long, 1024, 10), np.where(is_long, 8192, 1024)
    totals = np.exp(rng.uniform(np.log(low), np.log(high))).astype(int)
    news = np.clip(totals * rng.uniform(0, 1, count) ** 2, 1, totals - 1).astype(int)
    return _requests(rng, totals - news, news, seed)


def _requests(
    rng: np.random.Generator, lengths: np.ndarray, news: np.ndarray, seed: int
) -> list[PromptAndParams]:
    """Requests with prompts of ``lengths`` and ``news`` new tokens at most."""
    count, texts = len(lengths), prompts(lengths, seed=seed)
    params = [
        SamplingParams(
            max_new_tokens=int(news[row]),
            seed=int(rng.integers(2**32)),
            stop_tokens=tuple(rng.integers(0, 41, rng.integers(0, 4)).tolist()),
            draft_limit=None if row % 3 else int(rng.integers(0, 4)),
            **MIXED[row % len(MIXED)],
        )
        for row in range(count)
    ]
    return list(zip(texts, params, strict=True))


def engine_of(model, name: str, second=None, **sizes) -> Engine:
    settings = SETTINGS[name]
    draft = settings["draft"]
    if draft is not None and draft.traits.needs_model:
        settings = settings | {"draft_model": second}
    usual = {"slots": 3, "capacity": 128, "prefill_chunk": 32, "steps_per_chunk": 4}
    return Engine(model, **usual | sizes, **settings)


def apart(model, name: str, requests, second=None) -> Generation:
    """What each of ``requests`` gives by `generate`, which gives each what it gives alone."""
    settings = SETTINGS[name]
    if settings["draft"] is not None and settings["draft"].traits.needs_model:
        settings = settings | {"draft_model": second}
    texts, params = zip(*requests, strict=True)
    return generate(model, list(texts), list(params), **settings)


def check_arrivals(
    engine: Engine,
    requests,
    expected: Generation | ExpectedTokens,
    seed: int = 0,
    cancelling: float = 0.3,
) -> None:
    """Submit ``requests`` in bursts between steps and cancel some; each has the expected tokens.

    ``cancelling``: the share of steps after which one of all requests is cancelled, if it has not
    ended yet.
    """
    rng = np.random.default_rng(seed)
    submitted, left = [], list(requests)
    while left or engine.busy:
        burst = int(rng.integers(0, 8))
        submitted += [engine.submit(*one) for one in left[:burst]]
        left = left[burst:]
        engine.step()
        if submitted and rng.random() < cancelling:
            submitted[rng.integers(len(submitted))].cancel()
    ends = [request.finished for request in submitted]
    for request, tokens, end in zip(submitted, expected.tokens, expected.finished, strict=True):
        if request.finished == "cancelled":
            assert request.tokens == tokens[: len(request.tokens)]
        else:
            assert (request.tokens, request.finished) == (tokens, end)
    assert ends.count("cancelled") < len(requests) / 2
    assert {"stop", "length"} <= set(ends)


@functools.cache
def known(count: int) -> Generation:
    """What plain decoding gives for the first requests of `work` on `sharp`, made again by seed 1.

    One-hot drafts change no token of it, sampled or not.
    """
    return apart(make_decoder(ONE_LAYER, seed=1, embedding=400.0, head=4.0), "none", work(count))
