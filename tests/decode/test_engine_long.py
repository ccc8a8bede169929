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
def small_pieces(sharp) -> Engine:
    return engine_of(sharp, "ngram", prefill_chunk=PIECE)


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


def test_short_prompts_go_past_a_long_one(small_pieces, behind):
    """Two of them, the second after a shared prefix; the others are too long for a step."""
    engine, prefix = small_pieces, prompts((40,), seed=6)[0]
    texts = [LONG_PROMPT, *prompts((60, 9), seed=5), [*prefix, 1, 2, 3], prompts((50,), seed=7)[0]]
    expected = apart(engine._options.models.target, "ngram", [(text, FEW) for text in texts])
    engine.share_prefix(prefix)
    long, second, *short, last = (engine.submit(text, FEW) for text in texts)
    assert [steps_until(engine, request) for request in short] == [2, 0]  # in one step
    assert steps_until(engine, long) == 2
    engine.run()
    engine.drop_prefix(prefix)
    assert tuple(x.tokens for x in (long, second, *short, last)) == expected.tokens


def test_a_short_prompt_of_any_length_goes_past_a_long_one(small_pieces, behind):
    """Each by itself, up to a whole piece, with no row of its own."""
    engine, model = small_pieces, small_pieces._options.models.target
    assert not engine._scheduler.prefill.overtakes
    for length in (1, 2, 9, PIECE, PIECE + 1):
        texts = [LONG_PROMPT, prompts((length,), seed=length)[0]]
        long, short = (engine.submit(text, FEW) for text in texts)
        assert steps_until(engine, short) == 2
        assert not long.tokens
        engine.run()
        expected = apart(model, "ngram", [(text, FEW) for text in texts])
        assert (long.tokens, short.tokens) == expected.tokens


def test_a_prompt_that_goes_past_a_long_one_leaves_out_its_prefix(small_pieces, behind):
    """Also where all of it is short."""
    engine, text = small_pieces, prompts((9,), seed=6)[0]
    engine.share_prefix(text[:5])
    before = engine.stats.prompt_tokens
    long, short = (engine.submit(prompt, FEW) for prompt in (LONG_PROMPT, text))
    assert steps_until(engine, short) == 2
    assert engine.stats.prompt_tokens - before == len(LONG_PROMPT) + 4
    engine.run()
    engine.drop_prefix(text[:5])
    expected = apart(engine._options.models.target, "ngram", [(LONG_PROMPT, FEW), (text, FEW)])
    assert (long.tokens, short.tokens) == expected.tokens


def test_a_long_prompt_gets_every_other_step(small_pieces):
    """Whatever comes: here there is a short prompt for every slot and step."""
    engine = small_pieces
    long, steps = engine.submit(LONG_PROMPT, FEW), 0
    while not long.tokens and steps < 40:
        for _ in range(engine.slots):
            engine.submit(LONG_PROMPT[:PIECE], SamplingParams(max_new_tokens=1))
        engine.step()
        steps += 1
    assert 3 < steps <= 2 * 3
    engine.run()


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
