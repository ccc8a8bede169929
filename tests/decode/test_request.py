"""What a caller can do with a request: read it as it comes, end it, fail, and lose nothing."""

import math

import jax
import pytest
from flax import nnx

from jspec.config import SamplingParams
from jspec.decode.chunks import Chunks
from jspec.decode.engine import Engine
from jspec.decode.generation import generate
from tests.decode.common import prompts
from tests.decode.watching import host_takes

NEW = SamplingParams(max_new_tokens=20)
TEXTS = prompts((9, 3, 1, 14, 5))


@pytest.fixture(scope="module")
def alone(sharp) -> tuple[tuple[int, ...], ...]:
    return generate(sharp, TEXTS, NEW, draft=None).tokens


def make(sharp) -> Engine:
    return Engine(sharp, slots=2, capacity=40, draft=None, steps_per_chunk=4)


@pytest.fixture(scope="module")
def engine(sharp) -> Engine:
    """For the tests that leave it whole."""
    return make(sharp)


@pytest.fixture
def submit(engine):
    """Submits the texts of given numbers; nothing is left in the engine afterwards."""
    yield lambda *which, **settings: [engine.submit(TEXTS[i], NEW, **settings) for i in which]
    engine.run()
    assert not engine.busy


# --- reading -----------------------------------------------------------------------------------


def test_tokens_come_while_the_request_is_read(engine, submit, alone):
    """Reading one drives all; the other keeps its tokens for whoever reads it late."""
    first, second = submit(0, 1)
    streamed = []
    for token in first:
        streamed.append(token)
        if len(streamed) == 1:
            assert first.finished is None
    assert tuple(streamed) == alone[0]
    assert first.finished == "length"
    assert len(second.tokens) >= 16  # they went on side by side
    assert second.result() == alone[1]
    assert tuple(second) == tuple(second) == alone[1]


def test_two_readers_alternate(submit, alone):
    (request,) = submit(3)
    readers = [iter(request), iter(request)]
    pairs = [(next(readers[0]), next(readers[1])) for _ in alone[3]]
    assert pairs == [(token, token) for token in alone[3]]


def test_more_requests_than_slots_wait(engine, submit, alone):
    requests = submit(*range(5))
    assert "in the engine" in repr(requests[4])
    assert requests[4].result() == alone[4]
    engine.run()
    assert [request.tokens for request in requests] == list(alone)
    assert repr(requests[0]) == "Request(9 prompt tokens, 20 new, length)"


def test_a_step_tells_which_requests_it_ended(engine, submit):
    requests, ended = submit(0, 1, 2), []
    while engine.busy:
        ended.append(set(engine.step()))
    assert set().union(*ended) == set(requests)
    assert [bool(some) for some in ended].count(True) == 2  # two slots
    assert engine.step() == ()


# --- ending ------------------------------------------------------------------------------------


def test_one_that_waits_and_one_that_runs_are_cancelled(engine, submit, alone):
    running, other, waiting, last = submit(0, 1, 2, 3)
    engine.step()
    running.cancel()
    waiting.cancel()
    assert (waiting.finished, waiting.tokens) == ("cancelled", ())
    assert 0 < len(running.tokens) < 20
    tokens = running.tokens
    engine.run()
    assert running.result() == tuple(running) == tokens == alone[0][: len(tokens)]
    assert (other.tokens, last.tokens) == (alone[1], alone[3])
    last.cancel()
    assert last.finished == "length"  # as it had ended before


def test_one_whose_prompt_is_at_work_is_cancelled(engine, submit, alone):
    """It takes no slot."""
    before = engine.stats.rows
    first, second = submit(0, 1)
    engine.step()
    (third,) = submit(2)
    engine.step()  # it is ready and waits for a slot
    third.cancel()
    (fourth,) = submit(3)
    engine.run()
    assert third.tokens == ()
    assert engine.stats.rows == before + 3
    assert [x.tokens for x in (first, second, fourth)] == [alone[i] for i in (0, 1, 3)]


def test_a_callback_gets_all_tokens_and_may_end_the_request(engine, submit, alone):
    heard: dict[str, list[int]] = {"all": [], "some": [], "none": []}

    def some(tokens):
        heard["some"].extend(tokens)
        return 3 if len(heard["some"]) > 6 else None

    def none(tokens):
        heard["none"].extend(tokens)
        return 0

    (whole,) = submit(0, on_tokens=lambda tokens: heard["all"].extend(tokens))
    (cut,) = submit(1, on_tokens=some)
    (nothing,) = submit(2, on_tokens=none)
    engine.run()
    assert (whole.tokens, whole.finished) == (alone[0], "length")
    assert tuple(heard["all"]) == alone[0]
    assert (cut.tokens, cut.finished) == (alone[1][:7], "stop")
    assert (nothing.tokens, nothing.finished) == ((), "stop")
    assert heard["none"] == list(alone[2][:4])


def test_what_a_callback_raises_ends_that_request_alone(engine, submit, alone):
    calls = []

    def fails(tokens):
        calls.append(tokens)
        if len(calls) == 2:
            raise KeyError("mine")

    (other,) = submit(1)
    (failed,) = submit(0, on_tokens=fails)
    (wrong,) = submit(2, on_tokens=lambda tokens: len(tokens) + 1)
    (drives,) = submit(3, on_tokens=lambda tokens: engine.step())
    (late,) = submit(4)
    engine.run()
    assert failed.finished == wrong.finished == drives.finished == "error"
    assert failed.tokens == alone[0][:8]
    with pytest.raises(KeyError, match="mine"):
        failed.result()
    with pytest.raises(KeyError, match="mine"):
        list(failed)
    with pytest.raises(ValueError, match="on_tokens returned 5 for 4 tokens"):
        wrong.result()
    with pytest.raises(RuntimeError, match="a callback may not drive the engine that calls it"):
        drives.result()
    assert (other.tokens, late.tokens) == (alone[1], alone[4])


def test_weights_that_were_replaced_are_noticed(sharp):
    model = nnx.clone(sharp)
    state = nnx.state(model)
    engine = make(model)
    nnx.update(model, jax.tree.map(lambda x: x, state))  # the same arrays
    engine.submit(TEXTS[0], NEW)
    nnx.update(model, jax.tree.map(lambda x: x + 0, state))
    with pytest.raises(RuntimeError, match=r"weights of the model were replaced.*to Engine.update"):
        engine.submit(TEXTS[0], NEW)


def test_a_callback_may_submit_and_cancel(engine, submit, alone):
    more = []

    def on_tokens(tokens):
        if not more:
            more.extend(submit(2))
            other.cancel()

    before = engine.stats.committed
    (asks,) = submit(0, on_tokens=on_tokens)
    (other,) = submit(1)
    (itself,) = submit(3, on_tokens=lambda tokens: itself.cancel())
    engine.run()
    assert other.finished == itself.finished == "cancelled"
    # It keeps what its callback saw, and statistics count it.
    assert itself.tokens == alone[3][:4]
    # The other one has tokens if its slot is read before that of the one that cancels it.
    requests = (asks, *more, itself, other)
    assert engine.stats.committed - before == sum(len(x.tokens) for x in requests)
    assert asks.tokens == alone[0]
    assert more[0].tokens == alone[2]


def test_a_request_may_be_cancelled_while_its_prompt_compiles(sharp, alone):
    requests, begun = [], []

    def on_compile(begins):
        if begins and requests:
            begun.append(requests[1].finished)
            requests[1].cancel()

    # A capacity of its own, for which no other test has compiled anything.
    engine = Engine(sharp, slots=2, capacity=700, draft=None, on_compile=on_compile)
    requests += [engine.submit(TEXTS[i], NEW) for i in (0, 1, 3)]
    engine.run()
    assert begun[0] is None
    assert requests[1].finished == "cancelled"
    assert [requests[0].tokens, requests[2].tokens] == [alone[0], alone[3]]


def test_what_was_dropped_counts_nowhere(engine, submit, monkeypatch):
    host_takes(monkeypatch, 0)  # or the next chunk runs by then
    before = engine.stats
    submit(0, on_tokens=lambda tokens: 1)
    submit(1)
    engine.step()
    engine.step()
    assert engine._runner.state.done.tolist().count(True) == 1  # no step goes on for nobody
    engine.run()
    assert engine.stats.committed - before.committed == 21
    assert engine.stats.rows - before.rows == 2


# --- the end of the engine -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "caught", "ahead"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, False),
        (
            jax.errors.JaxRuntimeError("INTERNAL: a kernel failed"),
            jax.errors.JaxRuntimeError,
            False,
        ),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), MemoryError, False),
        (KeyboardInterrupt(), KeyboardInterrupt, True),
    ],
    ids=["ctrl-c", "device", "memory", "ahead"],
)
def test_an_exception_leaves_every_handle_its_tokens(
    sharp, monkeypatch, alone, error, caught, ahead
):
    """``ahead``: while a chunk is at work, which is lost."""
    lengths = [4, 0, 0, 0, 0] if ahead else [8, 4, 0, 0, 0]
    host_takes(monkeypatch, math.inf if ahead else 0)
    engine, start, calls = make(sharp), Chunks.start, []

    def interrupted(self, state, left):
        calls.append(state)
        if len(calls) == 3:
            raise error
        return start(self, state, left)

    monkeypatch.setattr(Chunks, "start", interrupted)
    ended = engine.submit([5], SamplingParams(max_new_tokens=1))
    requests = [engine.submit(text, NEW) for text in TEXTS]
    with pytest.raises(caught):
        engine.run()
    assert ended.finished == "length"
    assert [request.finished for request in requests] == ["interrupted"] * 5
    assert [len(request.tokens) for request in requests] == lengths
    assert all(x.tokens == text[: len(x.tokens)] for x, text in zip(requests, alone, strict=True))
    if isinstance(error, KeyboardInterrupt):
        assert requests[0].result() == tuple(requests[0]) == requests[0].tokens
    else:
        with pytest.raises(caught):
            requests[0].result()
    assert not engine.busy
    for call in (engine.step, engine.warm_up, lambda: engine.submit([1])):
        with pytest.raises(RuntimeError, match="the engine ended by an exception in a step"):
            call()


def test_ctrl_c_in_a_callback_ends_the_engine(sharp, alone):
    engine = make(sharp)

    def on_tokens(tokens):
        raise KeyboardInterrupt

    first = engine.submit(TEXTS[0], NEW)
    second = engine.submit(TEXTS[1], NEW, on_tokens=on_tokens)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert (first.tokens, first.finished) == (alone[0][:4], "interrupted")
    assert (second.tokens, second.finished) == ((), "interrupted")


def test_a_device_without_memory_says_how_large_the_engine_is(sharp, monkeypatch):
    def exhausted(*args, **settings):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr("jspec.decode.slot_prefill.start_empty", exhausted)
    with pytest.raises(MemoryError, match="2 slots of 40 positions; lower slots or capacity, or p"):
        make(sharp)


def test_warm_up_comes_first(engine, submit):
    submit(0)
    with pytest.raises(RuntimeError, match="call warm_up before the first one"):
        engine.warm_up()
