"""The suite `serving`: loads, the figures of them, and checks."""

import dataclasses
import time

import numpy as np
import pytest

import jspec
from bench import load, serving
from bench.settings import Settings
from bench.texts import texts
from jspec.config import SamplingParams
from jspec.decode.draft import NoDraft
from jspec.decode.engine import Engine
from jspec.decode.programs import PROGRAMS
from jspec.decode.settings import StepConfig
from jspec.models.bundled import bundled_path
from tests.decode.common import prompts
from tests.decode.conftest import COMPILED


def test_arrivals_are_a_poisson_process():
    at = load.arrivals(20_000, rate=50.0, seed=0)
    gaps = np.diff(at, prepend=0.0)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)


def test_tokens_are_timed_from_the_first_chunk_to_the_last():
    watch = load.Watch(1.0)
    assert not watch.times
    for count, now in ((3, 2.0), (4, 3.0), (2, 5.0)):
        watch.record((0,) * count, now)
    assert watch.per_token == pytest.approx(3.0 / 6)
    one = load.Watch(0.0)
    one.record((1, 2), 1.0)
    assert one.per_token is None


def test_the_phases_of_a_rollout_part_when_half_of_the_slots_are_free():
    ends = [
        [(1.0, 3)],
        [(1.0, 2), (2.0, 2)],
        [(3.0, 9)],
        [(3.0, 4), (5.0, 8)],
        [(3.0, 1), (7.0, 4)],
    ]
    watches = [load.Watch(0.0) for _ in ends]
    for watch, records in zip(watches, ends, strict=True):
        for at, count in records:
            watch.record((0,) * count, at)
    result = load.phases(watches, slots=4)
    assert result == {"half_free_s": 3.0, "tail_tokens_per_s": pytest.approx((8 + 4) / 4.0)}
    assert load.phases(watches[:2], slots=4) == {
        "half_free_s": 1.0,
        "tail_tokens_per_s": pytest.approx(2.0),
    }
    assert load.phases(watches[:1], slots=1) == {"half_free_s": 1.0}


def test_a_rollout_has_one_long_answer_in_eight():
    case = BENCHMARK.case("mix=rollout,B=4,S=16,new=64,requests=16")
    tokenizer = jspec.load_tokenizer(bundled_path())
    news = [params.max_new_tokens for _, params in serving.requests_of(case, tokenizer)]
    assert news == ([4] * 7 + [64]) * 2


def test_a_speed_while_all_slots_are_busy():
    """Two slots, four requests: from when two have begun to before the last one has."""
    samples = [(1.0, 5, 1), (2.0, 15, 2), (3.0, 40, 3), (6.0, 75, 3), (7.0, 80, 4)]
    assert load._while_full(samples, slots=2, count=4) == pytest.approx((75 - 15) / 4)
    assert load._while_full(samples, slots=2, count=3) is None


def test_requests_wait_for_their_time(tiny):
    engine = Engine(tiny, slots=2, capacity=32, draft=None)
    requests = [(text, SamplingParams(max_new_tokens=6)) for text in prompts((5, 3, 7))]
    load.serve(engine, requests, np.zeros(3))
    begin = time.perf_counter()
    result = load.serve(engine, requests, np.array([0.0, 0.0, 0.3]))
    assert time.perf_counter() - begin > 0.3
    assert result.figures["compilations"] == 0
    assert [len(tokens) for tokens in result.tokens] == [6] * 3
    assert result.figures["tokens_per_s"] == pytest.approx(18 / result.figures["seconds"])
    assert result.figures["mean_accepted_length"] == 1
    assert max(result.figures["first_token_s"]) < 0.3


def test_the_chunks_of_a_sample_follow_each_other(tiny, monkeypatch):
    """By a clock that only a wait for the device moves on, by a second."""
    right, waits = load.jax.block_until_ready, []

    def block_until_ready(tree):
        waits.append(None)
        return right(tree)

    monkeypatch.setattr(load.jax, "block_until_ready", block_until_ready)
    monkeypatch.setattr(load.time, "perf_counter", lambda: float(len(waits)))
    config = StepConfig(0, NoDraft())
    seconds = load.step_seconds(tiny, prompts((5, 3)), 100, config, steps=2)
    assert seconds == pytest.approx(1 / (load.CHUNKS_PER_SAMPLE * 2))
    assert len(waits) == 1 + 5  # the first chunk compiles


def test_steps_alone_run_the_program_of_an_engine(tiny):
    engine = Engine(tiny, slots=2, capacity=100, draft=None, steps_per_chunk=2)
    engine.submit([1, 2, 3], SamplingParams(max_new_tokens=2)).result()
    before = set(PROGRAMS._compiled)
    load.step_seconds(tiny, prompts((5, 3)), 100, StepConfig(0, NoDraft()), steps=2)
    assert set(PROGRAMS._compiled) == before


def test_requests_decoded_alone_share_programs(tiny):
    """Whatever lengths prompts and answers have."""
    requests = [
        (text, SamplingParams(max_new_tokens=new))
        for text, new in zip(prompts((5, 40, 3, 17)), (6, 2, 300, 1), strict=True)
    ]
    serving.decoded_alone(tiny, requests[2:3])
    before = len(COMPILED)
    tokens = serving.decoded_alone(tiny, requests)
    assert len(COMPILED) == before
    for (prompt, params), row in zip(requests, tokens, strict=True):
        assert row == jspec.generate(tiny, [prompt], params, draft=None).tokens[0]


BENCHMARK = serving.SERVING


def test_cases_have_the_sizes_of_their_mix():
    case = BENCHMARK.case("mix=long-context,B=8,S=32K")
    assert (case["S"], case["new"], case["requests"]) == (32768, 128, 24)
    assert [x["mix"] for x in BENCHMARK.grid(Settings())] == ["reasoning", "long-context"]
    for text in ("mix=poems", "model=gpt-2", "C=3", "gamma=3", "layers=2"):
        with pytest.raises(ValueError, match="must be one of"):
            BENCHMARK.case(text)


def test_requests_are_ragged_around_the_case():
    _, tokenizer = jspec.load_bundled()
    case = BENCHMARK.case("S=100,new=50,requests=200")
    requests = serving.requests_of(case, tokenizer)
    sizes = [(len(text), params.max_new_tokens) for text, params in requests]
    lengths, news = np.array(sizes).T
    assert lengths.min() >= 50
    assert lengths.max() < 150
    assert lengths.mean() == pytest.approx(100, rel=0.05)
    assert news.mean() == pytest.approx(50, rel=0.05)
    assert requests == serving.requests_of(case, tokenizer)


def test_texts_depend_on_the_number_of_their_row_alone():
    _, tokenizer = jspec.load_bundled()
    whole = texts(tokenizer, range(5), 600)
    assert texts(tokenizer, range(2, 5), 600) == whole[2:]
    assert {len(text) for text in whole} == {600}
    assert len({tuple(text) for text in whole}) == 5


CASE = "B=2,S=12,new=6,requests=5"


def rows(text: str, *names: str) -> list[dict]:
    return list(BENCHMARK.rows(BENCHMARK.case(text), Settings(quick=True, only=names)))


@pytest.mark.slow
def test_a_case_has_a_row_for_each_drafter_and_load(small_bundled):
    measured = rows(CASE, "ngram")
    assert [(x["name"], x["case"]["load"]) for x in measured] == [
        *(("none", "full"), ("none", "50%")),
        *(("ngram", "full"), ("ngram", "50%")),
    ]
    assert all(x["checked"] and x["tokens_per_s"] > 0 for x in measured)
    assert all(x["served"]["compilations"] == 0 for x in measured)
    assert (measured[0]["length"], measured[0]["vs_plain"]) == (1, 1)
    assert measured[2]["vs_plain"] == pytest.approx(
        measured[2]["tokens_per_s"] / measured[0]["tokens_per_s"]
    )


@pytest.mark.exhaustive
def test_wrong_tokens_have_no_speed(small_bundled, monkeypatch):
    right = serving.serve

    def wrong(*arguments):
        load = right(*arguments)
        tokens = [((text[0] + 1) % 256, *text[1:]) for text in load.tokens]
        return dataclasses.replace(load, tokens=tokens)

    monkeypatch.setattr(serving, "serve", wrong)
    (row,) = rows(CASE, "none")
    assert (row["checked"], row["reason"]) == (False, "its tokens are wrong")
    assert "tokens_per_s" not in row
