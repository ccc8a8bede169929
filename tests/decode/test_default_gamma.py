"""The gamma of decoding where the caller names none."""

import itertools

import pytest

from jspec.config import SamplingParams
from jspec.decode import options
from jspec.decode.auto import LADDER, GammaChoice
from jspec.decode.draft import Chain, NoDraft, SuffixDraft
from jspec.decode.engine import Engine
from jspec.decode.generation import generate
from tests.conftest import USUAL_GAMMA
from tests.decode.common import MIXED, NGRAM, STREAMING, options_of, prompts


@pytest.fixture(autouse=True)
def usual_gamma(monkeypatch):
    monkeypatch.setattr(options, "usual_gamma", USUAL_GAMMA)


@pytest.fixture
def cycled(monkeypatch):
    """Chosen gammas take turns."""
    gammas = itertools.cycle((0, 2, 1))
    monkeypatch.setattr(GammaChoice, "choose", lambda *_: next(gammas))


@pytest.mark.parametrize(
    ("settings", "greedy", "sampled"),
    [
        ({"draft": NGRAM}, LADDER, LADDER),
        ({"draft": SuffixDraft(), "gamma": 3}, (3,), (3,)),
        ({"draft": STREAMING}, LADDER, (4,)),
        ({"draft": STREAMING, "gamma": "auto"}, LADDER, LADDER),
        ({"draft": Chain(NGRAM, STREAMING)}, (0, 1, 2, 4, 8, 12, 16), (12,)),
        ({"draft": NoDraft()}, (0,), (0,)),
    ],
    ids=["one-hot", "named", "logits", "logits-auto", "chain", "none"],
)
def test_it_is_chosen_where_no_seeded_token_depends_on_it(settings, greedy, sampled, sharp):
    resolved = options_of(sharp, **settings)
    assert tuple(resolved.configs_of("greedy")) == greedy
    assert tuple(resolved.configs_of("sampled")) == sampled
    assert resolved.config.gamma == max(greedy)


@pytest.mark.exhaustive
def test_one_hot_drafts_of_any_gamma_give_the_tokens_of_plain_decoding(sharp, cycled):
    rows = [SamplingParams(max_new_tokens=24, seed=row, **MIXED[row]) for row in range(len(MIXED))]
    plain = generate(sharp, prompts(), rows, draft=None)
    got = generate(sharp, prompts(), rows, draft=NGRAM, steps_per_chunk=2)
    assert got.tokens == plain.tokens
    assert {gamma for gamma, _ in got.stats.steps_at_gamma} == {0, 1, 2}


def test_a_sampled_request_has_one_gamma_and_greedy_ones_after_it_others(sharp, cycled):
    texts = prompts()[:2]
    hot = SamplingParams(max_new_tokens=16, temperature=1.0, seed=7)
    greedy = SamplingParams(max_new_tokens=32)
    engine = Engine(sharp, slots=2, capacity=128, draft=STREAMING, steps_per_chunk=1)
    requests = [engine.submit(*pair) for pair in zip(texts, (hot, greedy), strict=True)]
    while requests[0].finished is None:
        engine.step()
    assert [gamma for gamma, _ in engine.stats.steps_at_gamma] == [4]
    engine.run()
    assert len(engine.stats.steps_at_gamma) > 1
    alone = generate(sharp, texts[:1], hot, draft=STREAMING, gamma=4)
    plain = generate(sharp, texts[1:], greedy, draft=None)
    assert requests[0].tokens == alone.tokens[0]
    assert requests[1].tokens == plain.tokens[0]
