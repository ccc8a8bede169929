"""Prompts of a light model: they go in by wide passes, so that the host launches few programs."""

import math

import jax
import pytest

from jspec.config import SamplingParams
from jspec.decode import short_prompts
from jspec.decode.engine import Engine
from jspec.decode.programs import PROGRAMS
from jspec.decode.short_prompts import ShortPrompts, is_light
from tests.decode.common import prompts
from tests.decode.conftest import COMPILED
from tests.decode.engines import SETTINGS, apart, check_arrivals, engine_of, known, work
from tests.decode.watching import watched

FEW = SamplingParams(max_new_tokens=5)
MANY = SamplingParams(max_new_tokens=60, draft_limit=0)
CHUNK = 32


@pytest.fixture(autouse=True)
def light(monkeypatch):
    """Every model is, where it goes."""
    monkeypatch.setattr(short_prompts, "is_light", lambda models: True)


@pytest.fixture(scope="module")
def engine(sharp) -> Engine:
    """One that has compiled all that it needs; each test ends its requests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(short_prompts, "is_light", lambda models: True)
        result = engine_of(sharp, "ngram", prefill_chunk=CHUNK)
    result.warm_up()
    return result


@pytest.fixture
def passes(engine, monkeypatch) -> list[tuple[int, int]]:
    """How many prompts each pass had, and its size."""
    results, right = [], engine._scheduler.short.take_up

    def take_up(state, size, slots, *rest):
        results.append((len(slots), size))
        return right(state, size, slots, *rest)

    monkeypatch.setattr(engine._scheduler.short, "take_up", take_up)
    return results


@pytest.mark.parametrize("where", ["ahead", "behind"])
def test_a_request_gets_what_it_gets_alone_and_compiles_nothing(engine, where, monkeypatch):
    """Prompts of a pass, longer ones, cancellations; chunks run ahead or do not."""
    watched(monkeypatch, math.inf if where == "ahead" else 0)
    expected, compiled = known(40), len(COMPILED)
    check_arrivals(engine, work(40), expected, seed=5)
    assert len(COMPILED) == compiled


def test_prompts_of_up_to_a_chunk_need_no_row(engine, passes, monkeypatch):
    """One by itself, too, and those of unlike lengths."""
    lengths = [1, CHUNK + 1, 2, 17, 18, 30]
    texts = [prompts((length,), seed=length)[0] for length in lengths]
    expected = apart(engine._options.models.target, "ngram", [(text, FEW) for text in texts])
    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler.prefill, "begin", None)
        tokens = [engine.submit(texts[0], FEW).result()]
        requests = [engine.submit(text, FEW) for text in texts[1:]]
        engine.run()
    assert (*tokens, *(request.tokens for request in requests)) == expected.tokens
    assert passes[:2] == [(1, CHUNK), (3, CHUNK)]
    assert sum(count for count, _ in passes) == len(texts)


def test_a_step_prefills_two_passes(sharp, monkeypatch):
    """Where slots are free for more of them."""
    watched(monkeypatch, 0)
    monkeypatch.setattr(short_prompts, "LARGE_PASS", 4 * CHUNK)
    engine = engine_of(sharp, "ngram", slots=12, prefill_chunk=CHUNK)
    requests = [engine.submit(prompts((20,))[0], MANY) for _ in range(13)]
    engine.step()
    assert [bool(request.tokens) for request in requests] == [True] * 8 + [False] * 5
    engine.step()
    assert [bool(request.tokens) for request in requests] == [True] * 12 + [False]
    engine.run()


def test_pieces_of_longer_prompts_share_passes(engine, monkeypatch):
    prefill, sizes = engine._scheduler.prefill, []
    right = prefill._pass
    monkeypatch.setattr(prefill, "_pass", lambda *x: (sizes.append(x[-1]), right(*x)))
    request = engine.submit(prompts((3 * CHUNK,))[0], FEW)
    engine.run()
    assert len(request.tokens) == FEW.max_new_tokens
    assert max(sizes) > CHUNK


def test_prompts_wait_for_a_slot_in_the_queue(engine, passes, monkeypatch):
    """Not in the row, from which each would need a program of its own."""
    watched(monkeypatch, 0)
    full = [engine.submit([1, 2], MANY) for _ in range(3)]
    while not all(request.tokens for request in full):
        engine.step()
    waiting = [engine.submit(prompts((20,))[0], FEW) for _ in range(2)]
    passes.clear()
    engine.step()
    assert not engine._scheduler.can_take_up
    assert engine._scheduler._incoming is None
    for request in full[1:]:
        request.cancel()
    engine.step()
    assert all(request.tokens for request in waiting)
    assert passes == [(2, CHUNK)]
    engine.run()


def test_long_prompts_and_those_behind_prefixes_go_in_by_pieces(engine, passes):
    prefix = prompts((40,), seed=6)[0]
    texts = [prompts((90,), seed=4)[0], [*prefix, 1, 2, 3], [5, 6]]
    expected = apart(engine._options.models.target, "ngram", [(text, FEW) for text in texts])
    engine.share_prefix(prefix)
    requests = [engine.submit(text, FEW) for text in texts]
    engine.run()
    engine.drop_prefix(prefix)
    assert tuple(request.tokens for request in requests) == expected.tokens
    assert passes == [(1, CHUNK)]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([1], (1, 32)),
        ([33] * 9, (8, 32)),
        ([34, 1, 1], (3, 128)),
        ([513], (1, 512)),
        ([513] * 9, (4, 512)),  # 2048 tokens of a pass
        ([514], (0, 0)),
        ([3, 514], (1, 32)),
        ([17] * 5 + [300], (5, 32)),  # with the last one there would be more than four
    ],
)
def test_large_passes_take_any_prompts_of_a_chunk(tiny, lengths, expected):
    options = engine_of(tiny, "ngram")._options
    sizes = {"slots": 32, "capacity": 1024, "chunk": 512}
    assert ShortPrompts(options, **sizes, programs=PROGRAMS.timed()).together(lengths) == expected


@pytest.mark.parametrize(
    ("backend", "max_bytes", "expected"),
    [("gpu", 2**28, True), ("gpu", 2**10, False), ("cpu", 2**28, False)],
)
def test_a_model_is_light_by_its_bytes_on_a_gpu(tiny, backend, max_bytes, expected, monkeypatch):
    options = engine_of(tiny, "none")._options
    monkeypatch.setattr(short_prompts, "LIGHT", max_bytes)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert is_light(options.models) is expected


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_a_request_gets_what_it_gets_alone_with_any_settings(name, sharp, other):
    """With all drafters and policies; the host's memory has no passes."""
    requests = work(40)
    engine = engine_of(sharp, name, other, slots=4, prefill_chunk=64)
    assert engine._scheduler.short.has_large_passes == (name != "lossy-host")
    check_arrivals(engine, requests, apart(sharp, name, requests, other), seed=1)
