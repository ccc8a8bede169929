"""What a draft pass costs, in tokens, and who goes by it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jspec.config import SamplingParams
from jspec.decode import auto
from jspec.decode.acceptance import RowAcceptance
from jspec.decode.auto import LADDER, GammaChoice, Gammas
from jspec.decode.draft import Chain, GuidedDraft, ModelDraft, NgramDraft, named_draft
from jspec.decode.engine import Engine
from jspec.decode.generation import generate
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.policies import Vegas
from tests.decode.common import STREAMING, prompts
from tests.decode.engines import VEGAS


def test_the_price_is_what_a_row_commits_in_the_time_of_a_pass():
    """Of steps that take 1 + 0.3 for each pass, whose drafts end behind three."""
    choice, rng = GammaChoice((0, 8), 8, early=True), np.random.default_rng(3)
    assert choice.price(8) == 0
    for turn in range(60):
        gamma = 0 if turn % 3 == 0 else 8
        passes = 3 if choice.price(gamma) else gamma
        accepted = np.minimum(rng.geometric(0.25, (16, 25)) - 1, passes)
        live = np.ones_like(accepted, bool)
        choice.saw(gamma, 1 + 0.3 * passes, accepted, live, np.full(16, passes))
    committed = sum(0.75**i for i in range(4))
    assert choice.price(8) == pytest.approx(0.3 * committed / (1 + 0.3 * 3), rel=0.05)
    assert choice.price(0) == 0


def test_prices_follow_what_is_accepted():
    """Texts that are easy and hard by turns, and drafts that end as soon as they do not pay: near
    the best length of each, in the mean of eight runs."""

    def speed(rate: float, length: int) -> float:
        return sum(rate**i for i in range(length + 1)) / (1 + 0.45 * length)

    def run(seed: int) -> float:
        choice, rng = GammaChoice(LADDER, 4, warm=2, early=True), np.random.default_rng(seed)
        rows, left = RowAcceptance(1, max(LADDER), 16, together=False), np.array([10_000])
        tokens = best = 0.0
        for turn in range(600):
            rate = 0.95 if turn // 50 % 2 else 0.6
            gamma = choice.choose(rows, left)
            price, passes = choice.price(gamma), min(gamma, 1)
            while 0 < passes < gamma and rate ** (passes + 1) > price:
                passes += 1
            accepted = np.minimum(rng.geometric(1 - rate, (16, 1)) - 1, passes)
            live, every = np.ones((16, 1), bool), np.full(16, passes)
            seconds = (1 + 0.45 * passes) * rng.lognormal(0, 0.02)
            choice.saw(gamma, seconds, accepted, live, every)
            choice.met(rows.saw(gamma, accepted, live, every))
            if turn >= 100:
                tokens += (1 + accepted).mean()
                best += max(speed(rate, n) for n in range(17)) * seconds
        return tokens / best

    assert np.mean([run(seed) for seed in range(8)]) > 0.935


def test_drafters_that_draw_tokens_one_by_one_end_early_with_auto():
    early = {
        name: [own.ends_early for own in Gammas(StepConfig(draft=draft)).configs.values()]
        for name, draft in {
            "streaming": STREAMING,
            "vegas": VEGAS,
            "model": ModelDraft(),
            "ngram": NgramDraft(),
            "refreshed": GuidedDraft(Vegas(refresh=2)),
            "chain": Chain(NgramDraft(), STREAMING),
        }.items()
    }
    assert {name for name, own in early.items() if own == [False] + [True] * 5} == {
        "streaming",
        "vegas",
        "model",
    }
    assert not any(any(early[name]) for name in ("ngram", "refreshed", "chain"))


def test_a_gpu_ends_drafts_of_large_models_alone(tiny, monkeypatch):
    """Their own weights decide, those of a second model where that drafts."""
    held = sum(x.nbytes for x in jax.tree.leaves(tiny))
    small = jnp.zeros(1)
    assert auto.may_ask(Models(tiny))  # a CPU does for all
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not auto.may_ask(Models(tiny))
    for long, ends in ((held, True), (held + 1, False)):
        monkeypatch.setattr(auto, "LONG", long)
        assert auto.may_ask(Models(tiny)) == ends
        assert auto.may_ask(Models(small, draft=tiny)) == ends
    shared = jax.device_put(
        np.zeros(8, np.float32), jax.sharding.NamedSharding(halves(), PartitionSpec("x"))
    )
    monkeypatch.setattr(auto, "LONG", 16)  # of two devices each holds a half
    assert auto.may_ask(Models(shared))
    monkeypatch.setattr(auto, "LONG", 17)
    assert not auto.may_ask(Models(shared))
    gammas = Gammas(StepConfig(draft=STREAMING), early=False)
    assert not any(own.ends_early for own in gammas.configs.values())


def halves():
    return jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])


def test_what_cannot_end_early_is_refused():
    with pytest.raises(ValueError, match="does not draw tokens one by one, so that ends_early"):
        StepConfig(4, NgramDraft(), ends_early=True)
    with pytest.raises(TypeError, match="ends_early=1 must be True or False"):
        StepConfig(4, STREAMING, ends_early=1)  # pyright: ignore


def test_an_engine_is_told_the_price_anew_when_rows_come_in(sharp, monkeypatch):
    """Each chunk runs at the price that was chosen, in every row, and nothing is compiled."""
    monkeypatch.setattr(auto, "LADDER", (0, 4))
    monkeypatch.setattr(GammaChoice, "choose", lambda *_: 4)
    monkeypatch.setattr(GammaChoice, "price", lambda self, gamma: 0.5)
    settings = {"draft": named_draft("streaming"), "gamma": "auto", "steps_per_chunk": 2}
    engine = Engine(sharp, slots=3, capacity=64, **settings)
    engine.warm_up()
    seen, run = [], engine._chunks._chunk

    def chunk(state, config):
        seen.append(np.asarray(state.ending.price).tolist())
        return run(state, config)

    monkeypatch.setattr(engine._chunks, "_chunk", chunk)
    compiled = engine.stats.compilations
    texts = prompts((9, 30, 4, 17, 8, 12))
    requests = [engine.submit(text, SamplingParams(max_new_tokens=12)) for text in texts]
    engine.run()
    wanted = generate(sharp, texts, SamplingParams(max_new_tokens=12), draft=None).tokens
    assert tuple(request.tokens for request in requests) == wanted
    assert len(seen) > 3
    assert all(price == [0.5] * 3 for price in seen)
    assert engine.stats.compilations == compiled
