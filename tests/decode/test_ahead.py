"""`generate` looks one chunk ahead: when it does, and that nothing but time tells."""

import dataclasses
import functools
import itertools
import math
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jspec.config import SamplingParams
from jspec.decode import chunks, generation, prefill, rows, runner
from jspec.decode.auto import GammaChoice
from jspec.decode.chunks import Chunks
from jspec.decode.draft import ModelDraft
from jspec.decode.generation import Interrupted, generate
from jspec.decode.programs import Programs
from jspec.decode.state import StepRecord
from jspec.processes import limit_steps
from tests.decode.common import MIXED, NGRAM, STREAMING, options_of, prompts
from tests.decode.watching import COUNTS, Watched, watched
from tests.parameters import default_run

NEW = SamplingParams(max_new_tokens=24, seed=5)
LONG = SamplingParams(max_new_tokens=48, seed=5)


@pytest.fixture
def watch(monkeypatch):
    """Makes a `Watched` of all that follows, where the host takes so many seconds for a chunk."""
    return lambda host: watched(monkeypatch, host)


def told(got: generation.Generation) -> tuple[Any, ...]:
    """All of a generation but its times."""
    counts = [getattr(got.stats, name) for name in COUNTS]
    return got.tokens, got.finished, got.seeds, counts


def check_same(watch, run) -> tuple[Watched, Any]:
    """``run()`` tells the same whether it looks ahead or not; what it did where it does."""
    behind = watch(0)
    expected = run()
    assert set(behind.at_work) == {0, 1}
    ahead = watch(math.inf)
    got = run()
    assert got == expected
    assert ahead.at_work[:3] == [1, 0, 1]  # the first chunk says how long chunks are
    assert max(ahead.at_work) == 2
    assert ahead.at_work[-1] <= 1
    assert len(ahead.records) == len(behind.records)
    return ahead, got


def keeping(answers: dict[tuple[int, int], Any]):
    """An ``on_tokens`` that answers by row and the number of calls for that row; also the calls."""
    heard: dict[int, list[tuple[int, ...]]] = {}

    def on_tokens(row, new):
        heard.setdefault(row, []).append(new)
        answer = answers.get((row, len(heard[row])))
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return on_tokens, heard


CASES: dict[str, dict[str, Any]] = {
    "plain": {"draft": None},
    "ngram": {"draft": NGRAM, "gamma": 4},
    "sampled": {"draft": STREAMING, "params": [dataclasses.replace(NEW, **x) for x in MIXED[:4]]},
}


@pytest.mark.parametrize("name", default_run(list(CASES), "sampled"))
def test_what_is_generated_is_the_same(name, sharp, watch):
    settings = {"params": NEW, "steps_per_chunk": 2} | CASES[name]
    check_same(watch, lambda: told(generate(sharp, prompts()[:4], **settings)))


def test_no_chunk_is_wasted_where_rows_end_at_their_limits(sharp, watch):
    settings = {"params": NEW, "draft": None, "steps_per_chunk": 4}
    chunks_run, _ = check_same(watch, lambda: told(generate(sharp, prompts()[:4], **settings)))
    assert chunks_run.at_work == [1, 0, *[1, 2] * 4, 1, 0]
    assert chunks_run.calls.count("start") == 24 // 4


def test_stop_tokens_waste_one_chunk(tiny, watch):
    settings = {"draft": None, "steps_per_chunk": 2}
    (text,) = generate(tiny, prompts()[:1], NEW, **settings).tokens
    at = next(i for i in range(6, 20) if text[i] not in text[:i])
    params = dataclasses.replace(NEW, stop_tokens=(text[at],))
    chunks_run, got = check_same(
        watch, lambda: told(generate(tiny, prompts()[:1], params, **settings))
    )
    assert got[0] == (text[: at + 1],)
    assert chunks_run.at_work[-1] == 1


def test_rows_that_the_caller_ends_meanwhile_count_no_further(sharp, watch):
    """After all of a chunk, within one, and before any of its tokens."""
    answers = {(0, 2): True, (1, 4): 1, (2, 4): 0}

    def run():
        on_tokens, heard = keeping(answers)
        settings = {"draft": STREAMING, "gamma": 2, "steps_per_chunk": 2, "on_tokens": on_tokens}
        return *told(generate(sharp, prompts()[:4], LONG, **settings)), heard

    chunks_run, (tokens, finished, *_, heard) = check_same(watch, run)
    assert finished == ("stop", "stop", "stop", "length")
    assert [len(heard[row]) for row in range(3)] == [2, 4, 4]
    assert tokens[2] == sum(heard[2][:3], ())
    # The device hears of it one chunk later, and then lets the row rest.
    live = np.array([record.committed.sum(axis=0) > 0 for record in chunks_run.records])
    assert live.sum(axis=0)[:3].tolist() == [3, 5, 5]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("its own")], ids=repr)
def test_an_error_while_a_chunk_is_at_work_leaves_what_there_was(error, sharp, watch):
    """Ctrl-C brings whole chunks of the rows before it, whatever is at work."""

    def run():
        on_tokens, heard = keeping({(1, 3): error})
        settings = {"draft": STREAMING, "gamma": 2, "steps_per_chunk": 2, "on_tokens": on_tokens}
        with pytest.raises((Interrupted, RuntimeError)) as caught:
            generate(sharp, prompts()[:4], LONG, **settings)
        if isinstance(caught.value, RuntimeError):
            return heard, None
        return heard, told(caught.value.generation)

    chunks_run, (heard, interrupted) = check_same(watch, run)
    assert chunks_run.at_work[-1] == 1
    assert [len(heard[row]) for row in range(4)] == [3, 3, 2, 2]
    if interrupted is not None:
        tokens, finished, _, counts = interrupted
        assert finished == ("interrupted",) * 4
        assert tokens[0] == sum(heard[0], ())
        assert tokens[1] == sum(heard[1][:2], ())
        assert dict(zip(COUNTS, counts, strict=True))["committed"] == sum(map(len, tokens))


def test_it_leaves_room_for_the_chunk_that_is_not_read_yet(sharp, watch, monkeypatch):
    """Most drafts are accepted, and no row may know more than there is room for."""
    monkeypatch.setattr(generation, "START", 12)
    monkeypatch.setattr(prefill, "CAPACITY_STEP", 4)
    grown = []

    def watched(state, capacity, config):
        grown.append((state.tokens.shape[1], capacity))
        return rows.grow_capacity(state, capacity, config)

    monkeypatch.setattr(runner, "grow_capacity", watched)
    settings = {"draft": STREAMING, "gamma": 3, "steps_per_chunk": 2}
    params = [dataclasses.replace(NEW, max_new_tokens=new) for new in (60, 31)]

    def run():
        return told(generate(sharp, prompts((3, 5)), params, **settings))

    _, got = check_same(watch, run)
    half = len(grown) // 2
    assert grown[:half] == grown[half:]
    assert half >= 2
    monkeypatch.setattr(generation, "START", 1024)
    assert run() == got
    assert len(grown) == 2 * half


@pytest.mark.parametrize("limited", ["by time", "shared"])
def test_processes_that_wait_for_each_other_do_not_look_ahead(limited, sharp, watch, monkeypatch):
    if limited == "shared":
        monkeypatch.setattr(chunks, "is_shared", lambda model: True)
    else:
        limit_steps(60)
    try:
        chunks_run = watch(math.inf)
        generate(sharp, prompts()[:2], NEW, draft=None)
    finally:
        limit_steps(None)
    assert set(chunks_run.at_work) == {0, 1}


def test_long_chunks_are_read_before_the_next_one_starts(sharp, watch, monkeypatch):
    """By what the last one took."""
    took = iter([0.5, 0.5, 1e6, 1e6, 0.5, 0.5])
    chunks_run, finish = watch(1.0), Chunks.finish

    def finished(self, chunk):
        record = finish(self, chunk)
        self.last_s = next(took)
        return record

    monkeypatch.setattr(Chunks, "finish", finished)
    generate(sharp, prompts()[:2], NEW, draft=None, steps_per_chunk=4)
    assert chunks_run.at_work == [1, 0, 1, 2, 1, 2, 1, 0, 1, 0, 1, 0]


# --- with gamma="auto" -------------------------------------------------------------------------


def cycle_gammas(monkeypatch, gammas) -> list[tuple[int, float | None, np.ndarray]]:
    """Have chunks take these gammas in turn; returns what is recorded."""
    next_gamma, recorded = itertools.cycle(gammas), []
    monkeypatch.setattr(GammaChoice, "choose", lambda *_: next(next_gamma))
    monkeypatch.setattr(GammaChoice, "observe", lambda self, *arguments: recorded.append(arguments))
    return recorded


def test_each_gamma_is_told_of_the_chunks_that_ran_with_it(sharp, watch, monkeypatch):
    """And of no time in which the next one's program was compiled."""
    monkeypatch.setattr(chunks, "PROGRAMS", Programs())
    are_timed = []

    def run():
        recorded = cycle_gammas(monkeypatch, (0, 4, 1))
        settings = {"draft": NGRAM, "gamma": "auto", "steps_per_chunk": 2}
        got = generate(sharp, prompts()[:4], NEW, **settings)
        are_timed.append([seconds is not None for _, seconds, *_ in recorded])
        assert [gamma for gamma, *_ in recorded[:4]] == [0, 4, 1, 0]
        accepted = sum(int(accepted[live].sum()) for _, _, accepted, live in recorded)
        assert accepted == got.stats.accepted
        return told(got), [gamma for gamma, *_ in recorded]

    _, ((tokens, *_), _) = check_same(watch, run)
    assert tokens == generate(sharp, prompts()[:4], NEW, draft=None).tokens
    assert all(map(all, are_timed))
    monkeypatch.setattr(chunks, "PROGRAMS", Programs())
    run()
    assert are_timed[-1][:5] == [True, False, True, True, True]


@pytest.mark.exhaustive
def test_a_second_model_takes_up_what_it_rested_through(tiny, watch, monkeypatch):
    """The target as its own draft model is always right, where its cache lacks nothing."""
    monkeypatch.setattr(chunks, "SYNC_TOKENS", 3)

    def run():
        cycle_gammas(monkeypatch, (0, 0, 0, 2))
        settings = {"draft": ModelDraft(), "draft_model": tiny, "steps_per_chunk": 2}
        return told(generate(tiny, prompts()[:4], NEW, gamma="auto", **settings))

    _, (_, _, _, counts) = check_same(watch, run)
    totals = dict(zip(COUNTS, counts, strict=True))
    assert totals["accepted"] == totals["drafted"] > 10


# --- the clock -----------------------------------------------------------------------------------


def test_time_counts_while_a_chunk_is_at_work(sharp, monkeypatch):
    """Of a chunk: from its start, or the end of the one before, to its own; never compiling."""
    now = SimpleNamespace(seconds=100.0, read=0.0)
    monkeypatch.setattr(chunks.time, "perf_counter", lambda: now.seconds)
    record = StepRecord(np.zeros((1, 1, 5), np.int32))  # pyright: ignore[reportArgumentType]
    work = Chunks(options_of(sharp), 1)

    def dispatched(self, state, config):
        now.seconds += 1
        return state, record

    def compiled(self, state, config):
        now.seconds += 50
        self.programs.compile_s += 50
        return dispatched(self, state, config)

    def read(tree):
        now.seconds = now.read
        return tree

    monkeypatch.setattr(jax, "device_get", read)

    def start(dispatch=dispatched):
        monkeypatch.setattr(Chunks, "_chunk", dispatch)
        return work.start(None, np.ones(1))[1]  # pyright: ignore[reportArgumentType]

    def finish(chunk, at):
        now.read = at
        work.finish(chunk)
        return work.seconds["decode_s"]

    first = start()
    second = start()
    assert finish(first, at=110) == 10
    assert work.last_s == 10
    now.seconds += 3  # the caller's, while the second one runs
    assert finish(second, at=120) == 20
    assert work.last_s == 10
    now.seconds += 5  # nothing runs
    third = start()
    assert finish(third, at=130) == 25
    assert work.last_s == 5
    fourth = start()
    fifth = start(compiled)
    assert finish(fourth, at=184) == 29
    assert work.last_s == 5  # nobody knows when the fourth one ended
    assert finish(fifth, at=186) == 31
    assert work.last_s == 2


def test_time_of_a_caller_who_was_away_counts_nowhere(sharp, monkeypatch):
    """Unless the chunk was at work all the while."""
    now = SimpleNamespace(seconds=100.0, is_ready=False)
    monkeypatch.setattr(chunks.time, "perf_counter", lambda: now.seconds)
    packed = SimpleNamespace(is_ready=lambda: now.is_ready)
    read = StepRecord(np.zeros((1, 1, 5), np.int32))  # pyright: ignore[reportArgumentType]
    work = Chunks(options_of(sharp), 1)
    monkeypatch.setattr(Chunks, "_chunk", lambda self, state, config: (state, StepRecord(packed)))
    monkeypatch.setattr(jax, "device_get", lambda tree: read)
    start = functools.partial(work.start, None, np.ones(1))

    def finish(after):
        now.seconds += after
        work.finish(running)
        return work.seconds["decode_s"], work.last_s

    def away(seconds, is_ready):
        now.seconds, now.is_ready = now.seconds + seconds, is_ready
        work.resume(running)

    _, running = start()
    assert finish(after=4) == (4, 4)
    _, running = start()
    away(7, is_ready=False)
    assert finish(after=2) == (13, 9)
    _, running = start()
    away(8, is_ready=True)  # it may have taken as long
    assert finish(after=0) == (21, 8)
    _, running = start()
    away(60, is_ready=True)
    assert finish(after=1) == (30, math.inf)  # as long as the one before
    _, running = start()
    assert finish(after=3) == (33, 3)
