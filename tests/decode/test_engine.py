"""The engine: a request gets what it gets alone, at any time and in any batch."""

import dataclasses

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jspec.cache import Cache, LinearLayout
from jspec.config import SamplingParams
from jspec.decode import engine as engine_module
from jspec.decode import slot_programs
from jspec.decode.engine import Engine
from jspec.decode.programs import Programs
from tests.conftest import TINY, make_decoder
from tests.decode.common import MIXED, prompts
from tests.decode.conftest import COMPILED
from tests.decode.engines import apart, check_arrivals, engine_of, known, work


def test_a_request_gets_what_it_gets_alone_and_compiles_nothing(engine, ahead):
    """Prompts of 1 to 90 tokens, settings that need all modes, bursts, cancellations, ends."""
    expected = known(40)
    compiled, before = len(COMPILED), engine.stats.compilations
    check_arrivals(engine, work(40), expected, seed=2)
    requests = [
        engine.submit([1, 2, 3], SamplingParams(max_new_tokens=9), on_tokens=lambda tokens: True)
        for _ in range(4)
    ]
    engine.run()
    assert [request.finished for request in requests] == ["stop"] * 4
    assert len(COMPILED) == compiled
    assert engine.stats.compilations == before
    assert ahead.at_work.count(2) > 5


def test_a_long_prompt_does_not_stall_the_others(engine, behind):
    """While its pieces are taken up, each step of the engine decodes on."""
    params = SamplingParams(max_new_tokens=80)
    first, _ = (engine.submit([1, 2], params) for _ in range(2))
    engine.step()
    long = engine.submit(prompts((100,))[0], SamplingParams(max_new_tokens=5))
    before = len(first.tokens)
    engine.step()  # with the first of its two pieces, as one slot is free
    assert len(first.tokens) > before
    assert not long.tokens
    engine.step()
    assert long.tokens
    engine.run()


@pytest.mark.exhaustive
def test_engines_side_by_side_keep_their_programs(sharp, monkeypatch):
    """Each has more of them than the table holds of its own."""
    monkeypatch.setattr("jspec.decode.chunks.PROGRAMS", Programs(limit=1))
    sizes = {"slots": 1, "prefill_chunk": 16, "draft": None, "steps_per_chunk": 2}
    engines = [Engine(sharp, capacity=capacity, **sizes) for capacity in (64, 300)]
    for engine in engines:
        engine.warm_up()
    before = [engine.stats.compilations for engine in engines]
    assert min(before) > 4
    for engine in engines:
        for params in (SamplingParams(max_new_tokens=3, **fields) for fields in MIXED[:3]):
            engine.submit([1, 2, 3, 4], params).result()
    assert [engine.stats.compilations for engine in engines] == before


GREEDY, SAMPLED, SCORED = (
    SamplingParams(max_new_tokens=3, temperature=temperature, logprobs=logprobs)
    for temperature, logprobs in ((0.0, None), (1.0, None), (0.0, 0))
)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("params", "compiling"),
    [(GREEDY, [SAMPLED, SCORED]), ([SAMPLED, SCORED], [])],
    ids=["one", "several"],
)
def test_a_warm_up_for_some_requests_compiles_their_steps_alone(
    params, compiling, sharp, monkeypatch
):
    monkeypatch.setattr("jspec.decode.chunks.PROGRAMS", Programs())
    sizes = {"slots": 1, "capacity": 64, "prefill_chunk": 16, "steps_per_chunk": 2}
    engine = Engine(sharp, draft=None, logprobs=0, **sizes)
    engine.warm_up(params)
    for request in (GREEDY, SAMPLED, SCORED):
        before = engine.stats.compilations
        engine.submit([1, 2, 3, 4], request).result()
        assert engine.stats.compilations - before == (request in compiling)


# --- short prompts together ----------------------------------------------------------------------


@pytest.fixture
def groups(engine, monkeypatch) -> list[int]:
    """How many prompts each pass over short ones had."""
    prefill, results = engine._scheduler.prefill, []
    right = prefill.fill

    def fill(state, rows, size, slots, *rest):
        results.append(len(slots))
        return right(state, rows, size, slots, *rest)

    monkeypatch.setattr(prefill, "fill", fill)
    return results


def test_short_prompts_go_in_by_one_pass(engine, groups, behind):
    requests = [engine.submit([1, 2, 3], SamplingParams(max_new_tokens=40)) for _ in range(3)]
    engine.step()
    assert all(request.tokens for request in requests)
    assert groups == [3]
    engine.run()


def test_prompts_that_go_in_together_stay_apart(engine, groups):
    """The longest of them fill a row of the pass; all slots had longer requests before."""
    which = [row for row, (text, _) in enumerate(work(40)) if len(text) <= 17][:9]
    for _ in range(3):
        engine.submit(prompts((100,))[0], SamplingParams(max_new_tokens=4))
    engine.run()
    for first in range(0, 9, 3):
        three = which[first : first + 3]
        requests = [engine.submit(*work(40)[row]) for row in three]
        engine.run()
        assert [request.tokens for request in requests] == [known(40).tokens[row] for row in three]
    assert groups == [3] * 3


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("aaaaaaaa", (8, 1)),
        ("a" * 20, (16, 1)),
        ("aaaab", (5, 8)),
        ("abcdefgha", (9, 8)),
        ("abcdefghia", (8, 8)),  # eight that differ
    ],
)
def test_equal_prompts_share_a_row_of_a_pass(tiny, prompts, expected):
    engine = engine_of(tiny, "none", slots=32, capacity=256, prefill_chunk=256)
    texts = [np.full(17, ord(name) - ord("a"), np.int32) for name in prompts]
    assert engine._scheduler.prefill.group(texts) == (*expected, 16)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([17] * 9, (8, 8, 16)),  # 16 tokens of each, as the first step feeds the last one
        ([17] * 2, (2, 8, 16)),
        ([17], (1, 1, 16)),
        ([1, 18, 1, 1], (4, 4, 64)),
        ([34] * 9, (4, 4, 64)),  # 256 tokens of a pass
        ([66] * 9, (1, 1, 256)),  # one by one
        ([17, 17, 17, 17, 66], (4, 8, 16)),
        ([17, 17, 66, 17], (2, 8, 16)),  # in the order that they came in
    ],
)
def test_short_prompts_share_a_pass_that_has_room_for_them(tiny, lengths, expected):
    engine = engine_of(tiny, "none", slots=32, capacity=256, prefill_chunk=256)
    prompts = [np.full(length, index, np.int32) for index, length in enumerate(lengths)]
    assert engine._scheduler.prefill.group(prompts) == expected


@pytest.fixture
def roomy():
    """A model with a context of 2048 tokens."""
    return make_decoder(dataclasses.replace(TINY, max_context=2048))


def test_no_row_of_a_pass_is_longer_than_a_slot(roomy):
    """Whatever the chunk, which several rows share."""
    engine = engine_of(roomy, "none", slots=4, capacity=768, prefill_chunk=8192)
    prefill = engine._scheduler.prefill
    assert prefill._sizes == [32, 128, 512, 768]
    texts = [np.ones(length, np.int32) for length in (1, 600, 769)]
    assert [prefill.group([text])[2] for text in texts] == [32, 768, 768]
    assert not prefill.is_short(np.ones(770, np.int32))
    assert prefill.group([np.full(600, index, np.int32) for index in range(9)]) == (4, 4, 768)


def test_prompts_of_up_to_a_chunk_need_no_row(engine, groups, monkeypatch):
    """One by itself, too, and those of unlike lengths."""
    texts = [prompts((length,), seed=length)[0] for length in (1, 65, 2, 17, 18, 30)]
    requests = [(text, SamplingParams(max_new_tokens=5)) for text in texts]
    expected = apart(engine.model, "ngram", requests)
    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler.prefill, "begin", None)
        tokens = [engine.submit(*requests[0]).result()]
        rest = [engine.submit(*own) for own in requests[1:]]
        engine.run()
    assert (*tokens, *(request.tokens for request in rest)) == expected.tokens
    assert groups[:3] == [1, 1, 2]
    assert sum(groups) == len(texts)


def test_short_prompts_wait_for_a_slot_in_the_queue(engine, groups, behind):
    """Not in the row, from which each would need a program of its own."""
    many = SamplingParams(max_new_tokens=60, draft_limit=0)
    full = [engine.submit([1, 2], many) for _ in range(3)]
    while not all(request.tokens for request in full):
        engine.step()
    waiting = [engine.submit(prompts((15,))[0], SamplingParams(max_new_tokens=5)) for _ in "12"]
    groups.clear()
    engine.step()
    assert not engine._scheduler.can_prefill
    for request in full[1:]:
        request.cancel()
    engine.step()
    assert all(request.tokens for request in waiting)
    assert groups == [2]
    engine.run()


def test_long_prompts_and_those_after_prefixes_go_in_by_pieces(engine, groups):
    prefix = prompts((40,), seed=6)[0]
    texts = [prompts((90,), seed=4)[0], [*prefix, 1, 2, 3], [5, 6]]
    requests = [(text, SamplingParams(max_new_tokens=5)) for text in texts]
    expected = apart(engine.model, "ngram", requests)
    engine.share_prefix(prefix)
    submitted = [engine.submit(*own) for own in requests]
    engine.run()
    engine.drop_prefix(prefix)
    assert tuple(request.tokens for request in submitted) == expected.tokens
    assert groups == [1]


@pytest.mark.parametrize(
    ("backend", "light", "chunk"),
    [("gpu", 2**29, 2048), ("gpu", 2**10, 512), ("cpu", 2**29, 256)],
)
def test_a_light_model_has_wide_passes_on_a_gpu(tiny, backend, light, chunk, monkeypatch):
    models = engine_of(tiny, "none")._options.models
    monkeypatch.setattr(engine_module, "LIGHT", light)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert engine_module.usual_chunk(models) == chunk


@pytest.mark.parametrize(
    ("left", "pieces"),
    [
        (1, [32]),
        (33, [128]),  # no longer than two of 32 would take
        (128, [128]),
        (129, [128, 32]),
        (256, [128, 128]),
        (257, [512]),
        (512, [512]),
        (513, [512, 32]),
        (1300, [512, 512, 512]),
        (1200, [512, 512, 128, 128]),
    ],
)
def test_a_prompt_goes_in_by_few_sizes_of_pieces(roomy, left, pieces):
    engine = engine_of(roomy, "ngram", capacity=2048, prefill_chunk=512)
    prefill = engine._scheduler.prefill
    prefill.begin(np.ones(left + 1, np.int32), engine._runner.state)
    results = []
    while prefill.current_row.left > 0:
        results.append(prefill.piece_of(prefill.current_row))
        prefill.advance(prefill.current_row)
    assert results == pieces


def test_the_next_prompt_is_prefilled_while_all_slots_are_full(engine, behind):
    """It begins to decode in the step after that in which a slot comes free."""
    slow = SamplingParams(max_new_tokens=60, draft_limit=0)
    full = [engine.submit([1, 2], slow) for _ in range(3)]
    while not all(request.tokens for request in full):
        engine.step()
    waiting = engine.submit(prompts((66,))[0], SamplingParams(max_new_tokens=5))
    for _ in range(3):
        engine.step()
    full[1].cancel()
    assert not waiting.tokens
    engine.step()
    assert waiting.tokens
    engine.run()


def test_a_prompt_begins_with_what_its_drafter_has_after_its_prefix(tiny):
    """And not with what the drafter had after the last prompt."""
    engine, prefix = engine_of(tiny, "suffix"), np.arange(20, dtype=np.int32)
    prefill, state = engine._scheduler.prefill, engine._runner.state

    def check(expected):
        states = (prefill.current_row.drafter_state, expected)
        jax.tree.map(np.testing.assert_array_equal, *jax.device_get(states))

    first = jax.device_get(prefill.current_row.drafter_state)
    other = jax.tree.map(lambda x: jax.device_put(x + 1), first)
    prefill.current_row.drafter_state = other
    prefill.begin(np.ones(90, np.int32), state)
    check(first)
    row = prefill.prefix(prefix)
    row.drafter_state, row.done = other, len(prefix)
    prefill.share(row)
    prefill.begin(np.append(prefix, 5), state)
    check(other)
    prefill.begin(prefix, state)  # which leaves no token for the first step
    check(first)


def test_a_pass_over_short_prompts_has_a_page_for_every_position():
    """12 positions are two pages of 5 and a part of one."""
    shapes = {"low": ((2, 16), None)}
    cache = Cache.create(
        TINY.layers, [LinearLayout(64)] * 2, 1, "float32", pages=lambda *_: shapes, page=5
    )
    shorter = slot_programs.short_cache(cache, 2, 12)
    assert [x["low"].shape[:2] for x in shorter.pages] == [(2, 3)] * 2
    assert [x["keys"].shape[:2] for x in shorter.columns] == [(2, 12)] * 2


# --- prefixes ------------------------------------------------------------------------------------


def test_prefixes_of_all_sizes_compile_nothing(engine):
    """From one token to three pieces; 48 tokens are one."""
    requests = work(40)
    which = max(range(40), key=lambda row: len(requests[row][0]))
    (text, params), expected = requests[which], known(40).tokens[which]
    compiled, before = len(COMPILED), engine.stats.compilations
    for size in (1, 2, 15, 16, 17, 33, 47, 48, 49, 64, len(text) - 1):
        engine.share_prefix(text[:size])
        assert engine.submit(text, params).result() == expected
        engine.drop_prefix(text[:size])
    engine.share_prefix([*text, *text][:126])
    engine.drop_prefix([*text, *text][:126])
    assert len(COMPILED) == compiled
    assert engine.stats.compilations == before


def test_a_long_prefix_does_not_stall_the_others(engine):
    """A step after each of its pieces but the last; the caller is told of those that end."""
    first, second = (
        engine.submit([1, 2, 3], SamplingParams(max_new_tokens=new, draft_limit=0, seed=1))
        for new in (40, 6)
    )
    engine.step()
    assert (len(first.tokens), len(second.tokens)) == (4, 4)
    prefix = prompts((100,))[0]
    assert engine.share_prefix(prefix) == (second,)
    assert len(first.tokens) == 4 + 4
    assert engine.share_prefix(prefix) == ()
    assert len(first.tokens) == 4 + 4
    engine.run()
    engine.drop_prefix(prefix)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vegas", "chain-of-models", "suffix", "quest", "lossy-host"])
def test_a_prefix_is_prefilled_once(name, sharp, other):
    prefix, longer = prompts((40,))[0], prompts((50,), seed=2)[0]
    texts = [[*prefix, *text] for text in prompts((1, 9, 30), seed=1)]
    texts += [prefix, [*longer, 7], prompts((20,), seed=5)[0]]
    params = SamplingParams(max_new_tokens=12)
    expected = apart(sharp, name, [(text, params) for text in texts], other)
    engine = engine_of(sharp, name, other)
    engine.warm_up()
    compiled = len(COMPILED)
    engine.share_prefix(prefix)
    engine.share_prefix(longer)
    engine.share_prefix(prefix)  # which it has
    requests = [engine.submit(text, params) for text in texts]
    engine.run()
    assert len(COMPILED) == compiled
    assert tuple(request.tokens for request in requests) == expected.tokens
    # The prefixes once, and of the others what is after them.
    assert engine.stats.prompt_tokens == 40 + 50 + (1 + 9 + 30) + 40 + 1 + 20


def test_the_longest_prefix_serves(engine):
    requests = work(40)
    which = max(range(40), key=lambda row: len(requests[row][0]))
    text, params = requests[which]
    assert len(text) > 80
    for size in (20, 50, 30):
        engine.share_prefix(text[:size])
    for _ in range(2):  # and is left whole
        engine._scheduler.prefill.texts.clear()  # the slots and the row have the text as well
        engine._scheduler.prefill._forget_row()
        before = engine.stats.prompt_tokens
        assert engine.submit(text, params).result() == known(40).tokens[which]
        assert engine.stats.prompt_tokens == before + len(text) - 50
    for size in (20, 50, 30):
        engine.drop_prefix(text[:size])
    with pytest.raises(ValueError, match="no prefix of these 50 tokens is shared"):
        engine.drop_prefix(text[:50])
    with pytest.raises(ValueError, match="has 127 tokens and leaves no room in capacity=128"):
        engine.share_prefix([1] * 127)


# --- what never fits -----------------------------------------------------------------------------


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


def test_what_just_fits_is_queued(engine):
    """128 positions, and 16 stop tokens."""
    params = SamplingParams(max_new_tokens=28, stop_tokens=tuple(range(16)))
    engine.submit([1] * 100, params).cancel()


# --- any order of calls --------------------------------------------------------------------------


class Calls(RuleBasedStateMachine):
    """Submit, step and cancel in any order: nobody's tokens are another's, and nobody is lost."""

    engine: Engine  # of the fixture

    def __init__(self):
        super().__init__()
        self.requests = []

    @rule(which=st.integers(0, 39))
    def submit(self, which):
        prompt, params = work(40)[which]
        self.requests.append((self.engine.submit(prompt, params), which))

    @rule(at=st.integers(0))
    def cancel(self, at):
        if self.requests:
            self.requests[at % len(self.requests)][0].cancel()

    @rule()
    def step(self):
        ended = self.engine.step()
        assert all(request.finished in ("stop", "length") for request in ended)

    @invariant()
    def tokens_are_expected(self):
        live = 0
        for request, which in self.requests:
            tokens = known(40).tokens[which]
            live += request.finished is None
            if request.finished in ("stop", "length"):
                assert (request.tokens, request.finished) == (tokens, known(40).finished[which])
            else:
                assert request.tokens == tokens[: len(request.tokens)]
        assert self.engine.busy == (live > 0)

    def teardown(self):
        self.engine.run()
        self.tokens_are_expected()
        assert all(request.finished is not None for request, _ in self.requests)


def test_any_order_of_calls(engine, ahead):
    engine.step()  # reads a chunk that the test before may have left at work
    ahead.calls.clear()
    Calls.engine = engine
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        Calls, settings=settings(max_examples=12, stateful_step_count=30, deadline=None)
    )
    assert max(ahead.at_work) == 2
