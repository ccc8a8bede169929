"""The engine looks one chunk ahead: when it does, and that no request can tell."""

import dataclasses
import gc
import math
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jspec.config import SamplingParams
from jspec.decode import chunks, runner
from jspec.decode.auto import RowAcceptance
from jspec.decode.chunks import HOST_SECONDS, Chunk, Chunks
from jspec.decode.engine import Engine
from jspec.decode.generation import generate
from jspec.decode.state import StepRecord
from jspec.processes import limit_steps
from tests.decode.common import options_of, prompts
from tests.decode.watching import COUNTS, watched

NEW = SamplingParams(max_new_tokens=20)
LONG = SamplingParams(max_new_tokens=30)
TEXTS = prompts((9, 3, 1, 14, 5))


@pytest.fixture(scope="module")
def alone(sharp) -> list[tuple[int, ...]]:
    """What the texts give with `LONG`, of which `NEW` gives the beginning."""
    return list(generate(sharp, TEXTS, LONG, draft=None).tokens)


@pytest.fixture
def engine(sharp) -> Engine:
    """Two slots, four tokens of each a chunk."""
    return Engine(sharp, slots=2, capacity=50, draft=None, steps_per_chunk=4)


@pytest.fixture
def watch(monkeypatch):
    """Makes a `Watched` of all that follows, where the host takes so many seconds for a chunk.

    The caller is never away for longer than a chunk takes, however slow the machine is.
    """
    monkeypatch.setattr(Chunks, "resume", lambda self, chunk: None)
    return lambda host: watched(monkeypatch, host)


# --- when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "last_s", "waiting", "expected"),
    [
        ([9, 0, 0, 0], 0.001, False, True),
        ([9, 0, 0, 0], 9.9 * HOST_SECONDS, False, True),
        ([9, 0, 0, 0], 10 * HOST_SECONDS, False, False),  # a long one
        ([9, 4, 9, 2], 10 * HOST_SECONDS, False, False),
        ([8, 0, 0, 0], 0.001, False, False),  # nobody is left for it
        ([8, 3, 0, 1], 0.001, False, False),
        ([8, 4, 0, 0], 0.001, False, True),  # by the second row's own pace
        ([9, 4, 9, 2], 9 * HOST_SECONDS, True, True),  # nobody ends
        ([9, 4, 9, 0], 9 * HOST_SECONDS, True, False),  # one waits that may take the free row
        ([9, 3, 9, 9], 9 * HOST_SECONDS, False, True),
        ([9, 3, 9, 9], 9 * HOST_SECONDS, True, False),  # one of four ends: 2.25 turns
        ([9, 3, 9, 9], 3.9 * HOST_SECONDS, True, True),
        ([9, 3, 2, 9], 3.9 * HOST_SECONDS, True, False),
    ],
)
def test_when_the_next_chunk_is_worth_it(sharp, left, last_s, waiting, expected):
    """Rows have committed 8, 3, 8 and 1 tokens in the last one."""
    work = Chunks(options_of(sharp), 4)
    asked = {"waiting": waiting, "fills": waiting}
    assert not work.looks_ahead(np.array(left), **asked)  # nobody knows how long chunks are
    work.last_s, work.paces = last_s, np.array([8, 3, 8, 1])
    assert work.looks_ahead(np.array(left), **asked) is expected


@pytest.mark.parametrize(
    ("left", "host_times", "expected"), [([9, 4, 9, 0], 9, True), ([8, 3, 8, 0], 0.5, False)]
)
def test_a_row_that_nobody_may_fill_is_not_wasted(sharp, left, host_times, expected):
    """The others wait for blocks: another chunk is worth it if a row goes on."""
    work = Chunks(options_of(sharp), 4)
    work.last_s, work.paces = host_times * HOST_SECONDS, np.array([8, 3, 8, 1])
    assert work.looks_ahead(np.array(left), waiting=True) is expected


@pytest.mark.parametrize(
    ("left", "chunks_as_long", "expected"),
    [
        ([9, 0, 0, 0], 15, True),  # one row in 16 ends in each chunk
        ([9, 0, 0, 0], 17, False),
        ([9, 4, 0, 0], 255, True),  # one of them will need it
        ([9, 4, 0, 0], 257, False),
        ([9, 4, 9, 2], 65535, True),
    ],
)
def test_rows_that_begin_together_go_ahead_where_one_will_likely_need_it(
    sharp, left, chunks_as_long, expected
):
    work = Chunks(options_of(sharp), 4, together=True)
    work.last_s, work.paces = chunks_as_long * HOST_SECONDS, np.array([8, 3, 8, 1])
    assert work.looks_ahead(np.array(left)) is expected


def test_where_rows_end_often_the_next_chunk_waits_for_the_next_request(sharp):
    """As at stop tokens, of which no limit tells: one of three rows in each chunk."""
    work, left = Chunks(options_of(sharp), 4), np.full(4, 99)

    def finished(count, done, tokens=(2, 1, 0, 1), filled=()):
        for _ in range(count):
            committed = np.array([[0, new, 7, 7] for new in tokens])
            record = StepRecord.of(np.zeros(4, int), np.array(done), committed)
            record = jax.tree.map(lambda x: x[None], record)
            work.finish(Chunk(record, 0, None, 0.0, 0.0, filled=set(filled)))
            work.last_s = 9 * HOST_SECONDS
        return [work.looks_ahead(left, waiting=waiting) for waiting in (False, True)]

    assert finished(1, [False, False, True, True]) == [True, True]
    assert finished(40, [False, False, True, True]) == [True, False]
    assert finished(40, [False, False, True, False]) == [True, True]
    assert finished(40, [True, False, True, True], filled=[0, 3]) == [True, True]
    assert work.paces.tolist() == [2, 1, 2, 1]  # one that was idle may be as fast as the others
    assert finished(1, [True] * 4, (0, 0, 0, 0)) == [True, True]
    assert work.paces.tolist() == [2, 1, 2, 1]


def test_where_the_host_is_slow_a_longer_chunk_is_worth_it(sharp, monkeypatch):
    """Every other row ends in each chunk, and a chunk takes a second."""
    work, now = Chunks(options_of(sharp), 2, together=True), [0.0]
    monkeypatch.setattr(chunks.time, "perf_counter", lambda: now[0])
    record = StepRecord.of(np.zeros(2, int), np.array([True, False]), np.array([[0, 1]] * 2))
    record = jax.tree.map(lambda x: x[None], record)

    def looks_ahead(count, host):
        for _ in range(count):
            begin = now[0]
            now[0] += 1
            work.finish(Chunk(record, 0, None, begin, 0.0))
            now[0] += host
            work._watch_host()
        return work.looks_ahead(np.array([9, 0]))

    assert not looks_ahead(40, 0.2)
    assert not looks_ahead(1, 100)  # the caller was away
    assert looks_ahead(40, 0.7)
    assert not looks_ahead(40, 0.2)


def test_the_next_chunk_starts_before_the_last_one_is_read(engine, watch, alone):
    """The first one says how long chunks are, and none is wasted."""
    observed = watch(math.inf)
    requests = [engine.submit(text, NEW) for text in TEXTS[:2]]
    read = []
    while engine.busy:
        engine.step()
        read.append(len(requests[0].tokens))
    assert read == [4, 8, 12, 16, 20]  # a chunk a turn
    assert observed.at_work == [1, 0, *[1, 2] * 3, 1, 0]
    assert [request.tokens for request in requests] == [tokens[:20] for tokens in alone[:2]]


@pytest.mark.parametrize("waiting", [None, 3, 40])
def test_no_slot_idles_for_long_while_others_wait_for_it(waiting, sharp, watch, monkeypatch):
    """One of two rows ends in the fifth chunk, in any case, which is not followed before it is
    read where a prompt waits for the slot that is not whole by then."""
    observed, finish = watch(0.2), Chunks.finish

    def finished(self, chunk):
        record = finish(self, chunk)
        self.last_s = 1.0
        return record

    monkeypatch.setattr(Chunks, "finish", finished)
    sizes = {"slots": 2, "capacity": 80, "prefill_chunk": 4, "steps_per_chunk": 4}
    engine = Engine(sharp, draft=None, **sizes)
    first, _ = (engine.submit(TEXTS[2], params) for params in (NEW, LONG))
    if waiting is not None:
        last = engine.submit(prompts((waiting,))[0], NEW)
    for _ in range(5):
        engine.step()
    assert observed.at_work == [1, 0, 1, *[2, 1] * 3, *([0] if waiting == 40 else [2, 1])]
    assert first.finished
    if waiting == 3:  # it went into the slot before the fifth chunk was read
        assert engine._runner.slots[0] is last
    engine.run()


def test_processes_that_wait_for_each_other_do_not_look_ahead(engine, watch):
    limit_steps(60)
    try:
        observed = watch(math.inf)
        engine.submit(TEXTS[0], NEW).result()
    finally:
        limit_steps(None)
    assert set(observed.at_work) == {0, 1}


# --- what requests get ---------------------------------------------------------------------------


def test_a_request_that_comes_while_a_chunk_is_ahead_waits_for_no_other(engine, watch, alone):
    """It goes in after the chunk that runs, which the turn reads, and is in the next one."""
    observed = watch(math.inf)
    first = engine.submit(TEXTS[0], LONG)
    engine.step()
    engine.step()
    assert observed.at_work[-1] == 1
    second, done = engine.submit(TEXTS[1], NEW), len(observed.calls)
    engine.step()
    assert observed.calls[done:] == ["start", "finish"]
    assert (len(first.tokens), len(second.tokens)) == (12, 0)
    third, done = engine.submit(TEXTS[2], NEW), len(observed.calls)
    engine.step()  # no slot is free, but the prompt gets on
    assert observed.calls[done:] == ["start", "finish"]
    assert (len(first.tokens), len(second.tokens), len(third.tokens)) == (16, 4, 0)
    engine.run()
    tokens = [request.tokens for request in (first, second, third)]
    assert tokens == [alone[0], alone[1][:20], alone[2][:20]]


def test_a_short_request_gets_its_tokens_before_the_chunk_at_work_ends(engine, watch, alone):
    """Where nobody else needs another chunk."""
    observed = watch(math.inf)
    first = engine.submit(TEXTS[0], NEW)
    for _ in range(4):
        engine.step()
    second, done = engine.submit(TEXTS[1], SamplingParams(max_new_tokens=3)), len(observed.calls)
    assert engine.step() == (first,)
    assert observed.calls[done:] == ["start", "finish"]
    assert (first.tokens, second.result()) == (alone[0][:20], alone[1][:3])


def test_the_last_chunk_of_a_request_is_lost_with_the_engine(sharp, watch):
    """Its slot has another one already, and both hear of it."""
    watch(math.inf)
    engine = Engine(sharp, slots=2, capacity=50, draft=None, steps_per_chunk=4)

    def interrupted(tokens):
        if len(first.tokens) == 16:
            raise KeyboardInterrupt

    first = engine.submit(TEXTS[0], LONG, on_tokens=interrupted)
    second, third = (engine.submit(text, NEW) for text in TEXTS[1:3])
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    requests = (first, second, third)
    assert [len(request.tokens) for request in requests] == [16, 16, 0]
    assert [request.finished for request in requests] == ["interrupted"] * 3


def test_what_the_device_has_of_rows_stays_as_it_was(engine):
    """An aligned array goes to a CPU without a copy."""
    memory = np.zeros(128, bool)
    done = memory[-memory.ctypes.data % 64 :][:2]
    state = runner._with_done(engine._runner.state, done)
    done[:] = True
    assert not np.asarray(state.done).any()


def ended_in_all_ways(engine: Engine):
    """What requests get that their callbacks end, each in its own way, and what is counted."""

    def answering(*answers):
        """A callback with these answers, one a chunk, and none after them."""
        left = list(answers)

        def on_tokens(new):
            answer = left.pop(0) if left else None
            if isinstance(answer, Exception):
                raise answer
            return answer

        return on_tokens

    def counts():
        return [np.array(getattr(engine.stats, name)) for name in COUNTS[:-2]]

    answers = [(None, None, True), (None, 2), (None, None, 0), (None, KeyError("its own")), (), ()]
    before, ends = counts(), []
    requests = [
        engine.submit(text, LONG, on_tokens=answering(*answer))
        for text, answer in zip([*TEXTS, TEXTS[0]], answers, strict=True)
    ]
    while engine.busy:
        ends += engine.step()
    assert set(ends) == set(requests)
    assert len(ends) == len(requests)
    got = [(request.tokens, request.finished) for request in requests]
    return got, [int(now - then) for now, then in zip(counts(), before, strict=True)]


def test_what_runs_ahead_of_a_request_that_has_ended_counts_nowhere(engine, watch, alone):
    behind = watch(0)
    expected = ended_in_all_ways(engine)
    observed = watch(math.inf)
    got, counts = ended_in_all_ways(engine)
    assert (got, counts) == expected
    assert [len(tokens) for tokens, _ in got] == [12, 6, 8, 8, 30, 30]
    assert [end for _, end in got] == ["stop", "stop", "stop", "error", "length", "length"]
    texts = [*alone, alone[0]]
    assert all(text[: len(x)] == x for (x, _), text in zip(got, texts, strict=True))
    assert counts[COUNTS.index("committed")] == 94
    dropped = [sum(int(x.committed.sum()) for x in run.records) - 94 for run in (behind, observed)]
    assert dropped[0] == 2 + 4  # what was cut off
    assert dropped[1] >= dropped[0] + 4  # and whole chunks


def test_one_that_is_cancelled_while_a_chunk_is_ahead_keeps_what_it_has(engine, watch, alone):
    """The device lets its row rest one chunk later, and is told of it between two chunks."""
    observed, before = watch(math.inf), engine.stats
    first, second = (engine.submit(text, LONG) for text in TEXTS[:2])
    engine.step()
    engine.step()
    first.cancel()
    assert observed.at_work[-1] == 1
    ended = [set(engine.step())]
    assert observed.at_work[-1] == 0
    ended += [set(engine.step()) for _ in range(5)]
    assert ended == [set()] * 5 + [{second}]
    assert (first.tokens, second.tokens) == (alone[0][:8], alone[1])
    assert engine.stats.committed - before.committed == 38
    live = np.array([record.committed.sum(axis=0) > 0 for record in observed.records])
    assert live.sum(axis=0).tolist() == [3, 8]


def test_a_callback_cancels_another_while_a_chunk_is_ahead(engine, watch, alone):
    observed, before = watch(math.inf), engine.stats

    def on_tokens(new):
        if len(first.tokens) == 4:
            second.cancel()

    first = engine.submit(TEXTS[0], LONG, on_tokens=on_tokens)
    second = engine.submit(TEXTS[1], LONG)
    engine.step()
    assert engine.step() == (second,)
    assert observed.at_work[-1] == 1
    engine.run()
    assert (first.tokens, second.tokens) == (alone[0], alone[1][:4])
    assert engine.stats.committed - before.committed == 34


def test_no_request_is_referenced_while_a_chunk_is_at_work_for_nobody(engine, watch, alone):
    """The next request waits for it, and for no other."""
    observed = watch(math.inf)
    answers = iter((None, True))
    request = engine.submit(TEXTS[0], LONG, on_tokens=lambda tokens: next(answers))
    engine.run()
    assert (request.tokens, request.finished) == (alone[0][:8], "stop")
    assert observed.at_work[-1] == 1
    remaining = weakref.ref(request)
    del request
    gc.collect()
    assert remaining() is None
    assert engine.submit(TEXTS[1], NEW).result() == alone[1][:20]
    assert observed.at_work[-1] == 0


def test_a_prefix_is_shared_while_a_chunk_is_ahead(engine, watch, alone):
    """It is prefilled after the chunk, whose tokens come in the next step."""
    observed = watch(math.inf)
    first = engine.submit(TEXTS[0], LONG)
    engine.step()
    engine.step()
    assert observed.at_work[-1] == 1
    engine.share_prefix(TEXTS[3][:9])
    assert observed.at_work[-1] == 1
    assert len(first.tokens) == 8
    second = engine.submit(TEXTS[3], NEW)
    for new in ((12, 0), (16, 4)):
        engine.step()
        assert (len(first.tokens), len(second.tokens)) == new
    engine.run()
    engine.drop_prefix(TEXTS[3][:9])
    assert (first.tokens, second.tokens) == (alone[0], alone[3][:20])
    assert min(observed.at_work) == 0  # nothing is read twice


def test_time_in_which_nothing_ran_counts_nowhere(engine, monkeypatch):
    """The chunk ahead has long ended when the caller comes back."""
    watched(monkeypatch, math.inf)
    engine.submit(TEXTS[0], LONG)
    engine.step()
    engine.step()
    jax.block_until_ready(engine._runner.state)
    right, before = chunks.time.perf_counter, engine.stats
    monkeypatch.setattr(chunks.time, "perf_counter", lambda: right() + 1000)
    engine.run()
    after = engine.stats
    assert after.committed == 30
    assert after.decode_s - before.decode_s < 500
    assert after.prefill_s == before.prefill_s


def test_prompts_that_a_chunk_follows_are_timed_apart(sharp, monkeypatch):
    """If they are still at work when the host comes to that chunk; else nobody knows it."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(chunks.time, "perf_counter", lambda: now.seconds)
    record = StepRecord(np.array([[[0, 0, 0, 1, 7]]]))  # pyright: ignore[reportArgumentType]
    work, heard = Chunks(options_of(sharp), 1), []
    work._acceptance = RowAcceptance(1, 1, work.options.steps, together=False)
    monkeypatch.setattr(Chunks, "_chunk", lambda self, state, config: (state, record))

    def reached(tree):
        now.seconds = getattr(tree, "ends", now.seconds)
        return tree

    monkeypatch.setattr(jax, "block_until_ready", reached)

    def dispatched(prompts) -> Any:
        now.seconds += 1
        return prompts

    def start(ends):
        """A chunk after prompts that are there then."""
        if ends is not None:
            is_ready = partial(lambda at: now.seconds >= at, ends)
            work.follow(lambda: dispatched(SimpleNamespace(is_ready=is_ready, ends=ends)))
        result = work.start(None, np.ones(1))[1]  # pyright: ignore[reportArgumentType]
        choice = SimpleNamespace(
            observe=lambda *chunk: heard.append(chunk[1]), add_rows=lambda counts: None
        )
        return dataclasses.replace(result, choice=choice)

    def finish(chunk, at):
        def read(tree):
            now.seconds = max(now.seconds, at)
            return tree

        monkeypatch.setattr(jax, "device_get", read)
        work.finish(chunk)
        return work.seconds["prefill_s"], work.seconds["decode_s"], work.last_s

    steps = work.options.steps
    first = start(ends=104)  # prompts from 100 on
    assert finish(first, at=114) == (4, 10, 10)
    second = start(ends=None)
    third = start(ends=127)  # after the second chunk
    assert finish(second, at=124) == (4, 20, 10)
    assert finish(third, at=130) == (7, 23, 3)
    fourth = start(ends=None)
    fifth = start(ends=142)
    assert finish(fourth, at=140) == (7, 33, 10)
    now.seconds += 5  # the caller's: it is 145
    assert finish(fifth, at=150) == (7, 43, 10)
    assert heard == [10 / steps, 10 / steps, 3 / steps, 10 / steps, None]
    work.follow(lambda: dispatched(SimpleNamespace(is_ready=lambda: False, ends=152)))
    work.wait_for_prompts()
    assert work.seconds["prefill_s"] == 9
