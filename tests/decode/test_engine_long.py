"""A long prompt in the queue of an engine, and the short ones after it."""

import pytest

from jspec.config import SamplingParams
from jspec.decode.engine import Engine
from tests.decode.common import prompts
from tests.decode.engines import apart, engine_of

PIECE = 16
LONG_PROMPT = prompts((7 * PIECE + 1,), seed=4)[0]
FEW = SamplingParams(max_new_tokens=5)


@pytest.fixture(scope="module")
def module_engine(sharp) -> Engine:
    return engine_of(sharp, "ngram", prefill_chunk=PIECE)


@pytest.fixture
def small_pieces(module_engine) -> Engine:
    """An engine whose row has no prompt of an earlier test."""
    module_engine._scheduler.prefill.flush()
    return module_engine


def steps_until(engine: Engine, request, limit: int = 40) -> int:
    """Engine steps until a request has tokens."""
    for step in range(limit):
        if request.tokens:
            return step
        engine.step()
    raise AssertionError(f"no token in {limit} steps")


def test_a_long_prompt_has_the_tokens_of_every_free_slot(small_pieces, behind):
    engine = small_pieces
    assert engine.slots == 3
    assert steps_until(engine, engine.submit(LONG_PROMPT, FEW)) == 3
    engine.run()


def test_short_prompts_go_past_long_ones(small_pieces, behind):
    """One of any length up to a whole piece, and only such: also two long ones."""
    engine, model = small_pieces, small_pieces._options.models.target
    for length in (1, 2, 9, PIECE, PIECE + 1):
        engine._scheduler.prefill.flush()  # the slots have the texts
        texts = [LONG_PROMPT, prompts((60,), seed=5)[0], prompts((length,), seed=length)[0]]
        long, second, short = (engine.submit(text, FEW) for text in texts)
        assert steps_until(engine, short) == 2
        assert 1 <= steps_until(engine, long) <= 2
        engine.run()
        expected = apart(model, "ngram", [(text, FEW) for text in texts])
        assert (long.tokens, second.tokens, short.tokens) == expected.tokens


def test_a_prompt_after_a_prefix_leaves_it_out_and_keeps_its_place(small_pieces, behind):
    """Also where all of it is short, as it needs the row of the long one before it."""
    engine, text = small_pieces, prompts((9,), seed=6)[0]
    engine.share_prefix(text[:5])
    before = engine.stats.prompt_tokens
    long, short = (engine.submit(prompt, FEW) for prompt in (LONG_PROMPT, text))
    assert steps_until(engine, long) == 3
    assert steps_until(engine, short) <= 1
    assert engine.stats.prompt_tokens - before == len(LONG_PROMPT) + 4
    engine.run()
    engine.drop_prefix(text[:5])
    expected = apart(engine.model, "ngram", [(LONG_PROMPT, FEW), (text, FEW)])
    assert (long.tokens, short.tokens) == expected.tokens


def test_a_long_prompt_gets_every_other_step(small_pieces):
    """Whatever comes: here there is a short prompt for every slot and step."""
    engine = small_pieces
    long, steps = engine.submit(LONG_PROMPT, FEW), 0
    while not long.tokens and steps < 40:
        for at in range(engine.slots):  # which differ, as equal ones share a pass
            engine.submit(LONG_PROMPT[at : at + PIECE], SamplingParams(max_new_tokens=1))
        engine.step()
        steps += 1
    assert 3 < steps <= 2 * 3
    engine.run()


def test_the_last_piece_of_a_long_prompt_waits_for_no_short_one(small_pieces, behind):
    """A piece and a token, by a step of a piece each, as one slot is free."""
    engine = small_pieces
    full = [engine.submit([1, 2], SamplingParams(max_new_tokens=90)) for _ in range(2)]
    steps_until(engine, full[-1])
    long = engine.submit(LONG_PROMPT[: PIECE + 2], FEW)
    engine.step()
    short = engine.submit([1, 2, 3], FEW)
    engine.step()
    assert long.tokens
    assert not short.tokens
    for request in (*full, long, short):
        request.cancel()


def test_short_prompts_wait_for_slots(small_pieces, behind):
    engine = small_pieces
    full = [engine.submit([1, 2], SamplingParams(max_new_tokens=90)) for _ in range(3)]
    steps_until(engine, full[-1])
    long, short = (engine.submit(text, FEW) for text in (LONG_PROMPT, [1, 2, 3]))
    for _ in range(3):
        engine.step()
    full[0].cancel()
    assert steps_until(engine, short) <= 2
    assert not long.tokens
    for request in (*full[1:], long):
        request.cancel()
