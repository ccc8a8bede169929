"""Counting what the requests of an engine use of its cache."""

import numpy as np
import pytest

from bench import memory
from bench.serving import SUITE
from bench.settings import Settings
from jspec.config import SamplingParams
from jspec.decode.engine import Engine
from jspec.decode.request import Request


def text(prompt: list[int], tokens: int = 0) -> memory.Text:
    request = Request(np.zeros(1, np.int32), SamplingParams(), (), None)
    request._append((0,) * tokens)
    return memory.Text(request, prompt)


def test_blocks_are_shared_up_to_the_first_token_that_differs():
    block, start = memory.BLOCK, list(range(1000))
    one, two = text(start[:300]), text([*start[:200], -1])
    assert memory.positions_in_blocks([one]) == 3 * block
    assert memory.positions_in_blocks([one, two]) == (1 + 2 + 1) * block
    assert memory.positions_in_blocks([one, one, one]) == (2 + 3) * block
    # The second block of both is the same, but what is before it is not.
    three = text([-1, *start[1:256]])
    assert memory.positions_in_blocks([text(start[:256]), three]) == 4 * block
    grown = text(start[:200])
    assert memory.positions_in_blocks([grown]) == 2 * block
    grown.request._append((5,) * 56)
    assert memory.positions_in_blocks([grown]) == 2 * block
    assert memory.positions_in_blocks([grown, text([*start[:200], *[5] * 56])]) == 2 * block


def test_usage_is_that_of_requests_in_slots(tiny):
    engine = Engine(tiny, slots=2, capacity=64, draft=None)
    usage, prompts = memory.Usage.of(engine), {seed: [seed] * 4 for seed in range(3)}
    texts = memory.answered(engine, usage, prompts, {0: 20, 1: 9, 2: 20})
    assert [len(texts[seed]) for seed in range(3)] == [24, 13, 24]
    assert all(row[:4] == prompts[seed] for seed, row in texts.items())
    figures, last = usage.figures(), usage.used[-1]
    assert usage.positions == 3 * 64
    assert usage.is_full[0]
    assert not usage.is_full[-2]
    assert last == 0
    # In the first turn each of two rows gets the tokens of a chunk, and the third waits.
    assert usage.used[0] == 2 * (4 + 4)
    assert figures["least_unused"] == pytest.approx(1 - max(usage.used) / (3 * 64))
    assert figures["least_unused"] < figures["unused_while_full"] < figures["unused"] < 1


def test_lengths_have_a_long_tail():
    lengths = np.array(memory.answer_lengths(np.random.default_rng(0), 20_000, 100, 700))
    assert np.median(lengths) == pytest.approx(100, rel=0.03)
    assert lengths.max() == 700
    assert (lengths == 700).mean() == pytest.approx(1 / 40, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("trace", memory.TRACES)
def test_a_trace_is_counted(trace):
    _, case = SUITE.case(f"op=memory,trace={trace},B=4,S=512")
    rows = list(memory.rows(case, Settings()))
    assert all(0.3 < x["unused"] < 1 for x in rows)
    assert all(0 < x["blocks"] <= x["most_blocks"] <= 1 for x in rows)
    by_name = {x["name"]: x for x in rows}
    one, half, many = (by_name[x] for x in (memory.ONE, memory.HALF, memory.FOURFOLD))
    assert [x["positions"] for x in (one, half, many)] == [5 * 512, 3 * 512, 5 * 512]
    assert half["unused"] < one["unused"]
    assert one["most_requests"] <= 4 < many["most_requests"] <= 16
    if trace == "rollouts":
        two = by_name[memory.TWO]
        assert two["checked"] is half["checked"] is many["checked"] is True
        assert two["same_texts"] == 1
        assert two["positions"] == 3 * 512
        assert two["unused"] < one["unused"]
    else:
        assert 0 < one["prefilled"] < 1
