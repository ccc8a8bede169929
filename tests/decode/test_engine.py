"""The engine: a request gets what it gets alone, whenever it comes and whoever is beside it."""

import dataclasses
import functools
import gc
import tracemalloc
from collections import Counter

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jspec import helix
from jspec.cache import Striped
from jspec.config import SamplingParams
from jspec.decode import prefill
from jspec.decode.draft import Chain, GuidedDraft, ModelDraft, SelfDraft, SuffixDraft
from jspec.decode.engine import Engine
from jspec.decode.generation import Generation, generate
from jspec.policies import ExactTopK, Hata, HataOff, MagicPIG, Quest, Streaming, Vegas
from tests.conftest import TINY, make_decoder
from tests.decode.common import NGRAM, STREAMING, prompts
from tests.decode.test_programs import COMPILED
from tests.decode.test_sampled import (
    MIXED,
    PROMPT,
    SAMPLED,
    SOURCES,
    enumerated,
    second,
    seeded,
    target,
)
from tests.ops.laws import check_counts

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


def work(count: int, longest: int = 90, seed: int = 0) -> list[tuple[list[int], SamplingParams]]:
    """Requests of all kinds: greedy and sampled, filtered, with stop tokens and draft limits."""
    rng = np.random.default_rng(seed)
    texts = prompts(rng.integers(1, longest, count), seed=seed)
    params = [
        SamplingParams(
            max_new_tokens=int(rng.integers(1, 30)),
            seed=int(rng.integers(2**32)),
            stop_tokens=tuple(rng.integers(0, 41, rng.integers(0, 4)).tolist()),
            draft_limit=None if row % 3 else int(rng.integers(0, 4)),
            **MIXED[row % len(MIXED)],
        )
        for row in range(count)
    ]
    return list(zip(texts, params, strict=True))


def engine_of(model, name: str, second=None, **sizes) -> Engine:
    own = SETTINGS[name]
    draft = own["draft"]
    if draft is not None and draft.needs_model:
        own = own | {"draft_model": second}
    return Engine(model, **{"slots": 3, "capacity": 128, "prefill_chunk": 32} | sizes, **own)


def apart(model, name: str, requests, second=None) -> Generation:
    """What each of ``requests`` gives by `generate`, which gives each what it gives alone."""
    own = SETTINGS[name]
    if own["draft"] is not None and own["draft"].needs_model:
        own = own | {"draft_model": second}
    texts, params = zip(*requests, strict=True)
    return generate(model, list(texts), list(params), **own)


def check_arrivals(engine: Engine, requests, wanted: Generation, seed: int = 0) -> None:
    """Submit ``requests`` in bursts between steps and cancel some; each has the wanted tokens."""
    rng = np.random.default_rng(seed)
    handles, left = [], list(requests)
    while left or engine.busy:
        burst = int(rng.integers(0, 8))
        handles += [engine.submit(*one) for one in left[:burst]]
        left = left[burst:]
        engine.step()
        if handles and rng.random() < 0.3:
            handles[rng.integers(len(handles))].cancel()
    ends = [handle.finished for handle in handles]
    for handle, tokens, end in zip(handles, wanted.tokens, wanted.finished, strict=True):
        if handle.finished == "cancelled":
            assert handle.tokens == tokens[: len(handle.tokens)]
        else:
            assert (handle.tokens, handle.finished) == (tokens, end)
    assert ends.count("cancelled") < len(requests) / 2
    assert {"stop", "length"} <= set(ends)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_a_request_gets_what_it_gets_alone_with_any_settings(name, sharp, other):
    requests = work(40)
    check_arrivals(
        engine_of(sharp, name, other), requests, apart(sharp, name, requests, other), seed=1
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ngram", "streaming", "vegas", "chain"])
def test_a_thousand_requests_get_what_they_get_alone(name, sharp, other):
    requests = work(1000, seed=3)
    wanted = apart(sharp, name, requests, other)
    engine = engine_of(sharp, name, other, slots=8)
    engine.warm_up()
    compiled = len(COMPILED)
    check_arrivals(engine, requests, wanted, seed=4)
    assert len(COMPILED) == compiled


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_texts_have_the_target_law(source, monkeypatch):
    """The joint law of four tokens over 6,000 requests; fails below p = 1e-4."""
    monkeypatch.setattr(prefill, "CAPACITY_STEP", 2)
    draft, rows = SOURCES[source], 6000
    engine = Engine(
        target(),
        slots=256,
        capacity=10,
        draft=draft,
        gamma=0 if source == "plain" else 2,
        draft_model=second() if draft.needs_model else None,
        prefill_chunk=256 * 16,
        steps_per_chunk=2,
    )
    handles = [engine.submit(PROMPT, params) for params in seeded(SAMPLED, 0, rows)]
    engine.run()
    check_counts(Counter(handle.tokens for handle in handles), enumerated(SAMPLED))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ngram", "vegas", "model", "chain-of-models"])
def test_a_gamma_that_is_chosen_changes_no_greedy_token(name, sharp, other, monkeypatch):
    """Nor does it compile anything: a second model rests and is caught up, row by row."""
    monkeypatch.setitem(SETTINGS, "auto", SETTINGS[name] | {"gamma": "auto"})
    greedy = [(text, dataclasses.replace(own, **GREEDY)) for text, own in work(120)]
    wanted = apart(sharp, name, greedy, other)
    engine = engine_of(sharp, "auto", other, steps_per_chunk=1)
    engine.warm_up()
    compiled = len(COMPILED)
    check_arrivals(engine, greedy, wanted)
    assert len(engine.stats.steps_at_gamma) > 2
    assert len(COMPILED) == compiled


ON_A_MESH = ("ngram", "streaming", "vegas", "suffix", "none", "padded", "lossy-topk", "lossy-hata")


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_A_MESH)
def test_a_model_on_a_mesh_serves_as_one_device_does(name, sharp):
    requests = work(20)
    wanted = apart(sharp, name, requests)
    sharded = helix.shard(sharp, helix.HelixConfig(kvp=2, tpa=2, block=4))
    engine = engine_of(sharded, name)
    engine.warm_up()
    compiled = len(COMPILED)
    check_arrivals(engine, requests, wanted)
    assert len(COMPILED) == compiled
    engine.share_prefix(requests[-1][0][:-1] or [1])
    shared = engine.submit(*requests[-1])
    assert shared.result() == wanted.tokens[-1]


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in ON_A_MESH])
def test_what_does_not_run_on_a_mesh_is_refused(name, sharp, other):
    sharded = helix.shard(sharp, helix.HelixConfig(kvp=2, tpa=2, block=4))
    with pytest.raises(ValueError, match=r"does not run on the mesh of .*; take "):
        engine_of(sharded, name, other)


@pytest.mark.slow
def test_an_engine_on_a_mesh_takes_turns_with_rings():
    """Rows come and go in slots whose rings earlier rows have wrapped many times."""
    layers = [dataclasses.replace(TINY.layers[0], window=window) for window in (5, None)]
    model = make_decoder(dataclasses.replace(TINY, layers=tuple(layers)), seed=3)
    requests = work(20)
    wanted = apart(model, "ngram", requests)
    sharded = helix.shard(model, helix.HelixConfig(kvp=4, block=2))
    engine = engine_of(sharded, "ngram")
    assert engine._state.cache.layouts[0] == Striped(16, 4, 2, wraps=True)
    check_arrivals(engine, requests, wanted)


@pytest.fixture(scope="module")
def engine(sharp) -> Engine:
    """One that has compiled all that it needs, for all tests of this module that end its
    requests."""
    found = engine_of(sharp, "ngram")
    found.warm_up()
    return found


@functools.cache
def known(count: int) -> Generation:
    """What the first requests of `work` give on `sharp`, which seed 1 makes again."""
    return apart(make_decoder(seed=1, embedding=400.0, head=4.0), "ngram", work(count))


def test_a_request_gets_what_it_gets_alone_and_compiles_nothing(engine):
    """Prompts of 1 to 90 tokens, settings that need all modes, bursts, cancellations, ends."""
    wanted = known(40)
    compiled, own = len(COMPILED), engine.stats.compilations
    check_arrivals(engine, work(40), wanted, seed=2)
    handles = [
        engine.submit([1, 2, 3], SamplingParams(max_new_tokens=9), on_tokens=lambda tokens: True)
        for _ in range(4)
    ]
    engine.run()
    assert [handle.finished for handle in handles] == ["stop"] * 4
    assert len(COMPILED) == compiled
    assert engine.stats.compilations == own


def test_a_long_prompt_does_not_stall_the_others(engine):
    """While its pieces are taken up, each step of the engine decodes on."""
    (short, params), _ = work(2, longest=3)
    params = SamplingParams(max_new_tokens=80)
    first = engine.submit(short, params)
    engine.step()
    long = engine.submit(prompts((100,))[0], SamplingParams(max_new_tokens=5))
    for _ in range(3):  # of its four pieces
        before = len(first.tokens)
        engine.step()
        assert len(first.tokens) > before
        assert not long.tokens
    engine.step()
    assert long.tokens
    engine.run()


def test_short_prompts_go_in_together(engine):
    """As many as a piece of a long one would have tokens."""
    handles = [engine.submit([1, 2, 3], SamplingParams(max_new_tokens=40)) for _ in range(3)]
    engine.step()
    assert [bool(handle.tokens) for handle in handles] == [True, True, False]
    engine.run()


def test_the_next_prompt_is_taken_up_while_all_slots_are_full(engine):
    """It begins to decode in the step behind that in which a slot comes free."""
    slow = SamplingParams(max_new_tokens=60, draft_limit=0)
    full = [engine.submit([1, 2], slow) for _ in range(3)]
    waiting = engine.submit(prompts((60,))[0], SamplingParams(max_new_tokens=5))
    while not all(handle.tokens for handle in full):
        engine.step()
    for _ in range(3):
        engine.step()
    full[1].cancel()
    assert not waiting.tokens
    engine.step()
    assert waiting.tokens
    engine.run()


# --- prefixes ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vegas", "chain-of-models", "suffix", "quest", "lossy-host"])
def test_a_prefix_is_taken_up_once(name, sharp, other):
    prefix, longer = prompts((40,))[0], prompts((50,), seed=2)[0]
    texts = [[*prefix, *text] for text in prompts((1, 9, 30), seed=1)]
    texts += [prefix, [*longer, 7], prompts((20,), seed=5)[0]]
    params = SamplingParams(max_new_tokens=12)
    wanted = apart(sharp, name, [(text, params) for text in texts], other)
    engine = engine_of(sharp, name, other)
    engine.share_prefix(prefix)
    engine.share_prefix(longer)
    engine.share_prefix(prefix)  # which it has
    handles = [engine.submit(text, params) for text in texts]
    engine.run()
    assert tuple(handle.tokens for handle in handles) == wanted.tokens
    # The prefixes once, and of the others what is behind them.
    assert engine.stats.prompt_tokens == 40 + 50 + (1 + 9 + 30) + 40 + 1 + 20


def test_the_longest_prefix_serves(engine):
    requests = work(40)
    which = max(range(40), key=lambda row: len(requests[row][0]))
    text, params = requests[which]
    assert len(text) > 80
    for size in (20, 50, 30):
        engine.share_prefix(text[:size])
    before = engine.stats.prompt_tokens
    for use in (1, 2):  # and is left whole
        assert engine.submit(text, params).result() == known(40).tokens[which]
        assert engine.stats.prompt_tokens == before + use * (len(text) - 50)
    for size in (20, 50, 30):
        engine.drop_prefix(text[:size])
    with pytest.raises(ValueError, match="no prefix of these 50 tokens is shared"):
        engine.drop_prefix(text[:50])
    with pytest.raises(ValueError, match="has 127 tokens and leaves no room in capacity=128"):
        engine.share_prefix([1] * 127)


# --- what never fits, and what is left behind ----------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([1] * 100, {"max_new_tokens": 29}, "100 tokens, .* max_new_tokens=29 exceeds capacity=12"),
        ([], {}, "the prompt is empty"),
        ([41], {}, "token 41, outside the vocabulary 0..40"),
        ([1] * 500, {"max_new_tokens": 13}, "exceeds the context of 512"),
        (
            [1],
            {"max_new_tokens": 2, "stop_tokens": range(17)},
            "has 17 stop tokens, .* for stop_",
        ),
    ],
)
def test_what_never_fits_is_refused_when_it_comes(engine, prompt, params, message):
    with pytest.raises(ValueError, match=message):
        engine.submit(prompt, SamplingParams(**params))
    assert not engine.busy
    with pytest.raises(TypeError, match="prompt 0 is text"):
        engine.submit("hello")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("name", "value"),
    [*((n, 0) for n in ("slots", "capacity", "prefill_chunk", "stop_tokens")), ("slots", "2")],
)
def test_sizes_are_checked(tiny, name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} must be at least 1"):
        Engine(tiny, **{"slots": 1, "capacity": 8} | {name: value})


def test_room_for_stop_tokens_begins_with_the_models_own(tiny):
    model = make_decoder(dataclasses.replace(TINY, stop_tokens=(1, 2, 3)))
    with pytest.raises(ValueError, match="stop_tokens=2 must be at least 3"):
        Engine(model, slots=1, capacity=8, stop_tokens=2)


def held(engine: Engine, count: int) -> tuple[int, int]:
    """Arrays and bytes of Python that live behind ``count`` requests."""
    for row in range(count):
        handle = engine.submit([1 + row % 7, 2, 3], SamplingParams(max_new_tokens=2, seed=row))
        if row % 10 == 9:
            handle.cancel()
            engine.run()  # or the queue's own table would grow
    del handle
    gc.collect()
    return len(jax.live_arrays()), tracemalloc.get_traced_memory()[0]


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_memory_is_flat(engine, count):
    before = engine.stats
    tracemalloc.start()
    try:
        held(engine, 30)
        arrays, used = held(engine, 30)
        found, after = held(engine, count)
    finally:
        tracemalloc.stop()
    assert found == arrays
    assert after - used < 50_000  # a handle has more than 500 bytes
    assert engine.stats.rows == before.rows + (60 + count) * 9 // 10


@pytest.mark.slow
def test_a_queue_of_ten_thousand_loses_nobody(engine):
    """All are there at once: most end, the others are refused or cancelled."""
    handles, refused = [], 0
    for row in range(10_000):
        new = 2 if row % 100 else 1000
        try:
            handles.append(engine.submit([1 + row % 40], SamplingParams(max_new_tokens=new)))
        except ValueError:
            refused += 1
    for handle in handles[::7]:
        handle.cancel()
    engine.run()
    ends = [handle.finished for handle in handles]
    assert refused == 100
    assert ends[::7] == ["cancelled"] * len(ends[::7])
    assert {end for row, end in enumerate(ends) if row % 7} == {"length"}
    by_prompt = {}
    for row, handle in enumerate(handles):
        if row % 7:
            by_prompt.setdefault(handle.params.max_new_tokens, set()).add(handle.tokens)
    assert len(by_prompt[2]) <= 40


# --- any order of calls --------------------------------------------------------------------------


class Calls(RuleBasedStateMachine):
    """Submit, step and cancel in any order: nobody's tokens are another's, and nobody is lost."""

    engine: Engine  # of the fixture

    def __init__(self):
        super().__init__()
        self.handles = []

    @rule(which=st.integers(0, 39))
    def submit(self, which):
        prompt, params = work(40)[which]
        self.handles.append((self.engine.submit(prompt, params), which))

    @rule(at=st.integers(0))
    def cancel(self, at):
        if self.handles:
            self.handles[at % len(self.handles)][0].cancel()

    @rule()
    def step(self):
        ended = self.engine.step()
        assert all(handle.finished in ("stop", "length") for handle in ended)

    @invariant()
    def tokens_are_their_own(self):
        live = 0
        for handle, which in self.handles:
            tokens = known(40).tokens[which]
            live += handle.finished is None
            if handle.finished in ("stop", "length"):
                assert (handle.tokens, handle.finished) == (tokens, known(40).finished[which])
            else:
                assert handle.tokens == tokens[: len(handle.tokens)]
        assert self.engine.busy == (live > 0)

    def teardown(self):
        self.engine.run()
        self.tokens_are_their_own()
        assert all(handle.finished is not None for handle, _ in self.handles)


def test_any_order_of_calls(engine):
    Calls.engine = engine
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        Calls, settings=settings(max_examples=12, stateful_step_count=30, deadline=None)
    )
