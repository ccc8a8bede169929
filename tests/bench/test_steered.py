"""Imposed acceptance: how often drafts are accepted, and that requests stay what they are alone."""

import dataclasses

import numpy as np
import pytest

import jspec
from bench.profiles import committed, reached
from bench.steered import Steered
from jspec.decode.draft import SelfDraft
from jspec.policies import Streaming
from tests.conftest import TINY, make_decoder
from tests.decode.common import prompts

DRAFT = SelfDraft(Streaming(sinks=1, window=4))
PARAMS = jspec.SamplingParams(max_new_tokens=120, ignore_eos=True)


TEXTS = prompts((9, 20, 3, 14, 6, 30, 11, 2), seed=1)


@pytest.fixture(scope="module")
def model() -> jspec.Decoder:
    """Of many tokens, so that rows seldom meet in the same one, where all is the same from then."""
    return make_decoder(dataclasses.replace(TINY, vocab_size=5000))


@pytest.mark.parametrize("rate", [0.5, pytest.param(0.9, marks=pytest.mark.slow)])
def test_an_engine_accepts_at_the_rate(model, rate):
    """Within four standard errors; and it gives what `generate` gives, row by row."""
    steered, settings = Steered(model, rate), {"draft": DRAFT, "gamma": 4}
    engine = jspec.Engine(steered, slots=4, capacity=160, prefill_chunk=32, **settings)
    requests = [engine.submit(text, PARAMS) for text in TEXTS]
    engine.run()
    reference = jspec.generate(steered, TEXTS, PARAMS, **settings)
    assert tuple(request.tokens for request in requests) == reference.tokens
    rates = engine.stats.acceptance_by_position
    for at, expected in zip(rates, reached(rate, 4), strict=True):
        error = np.sqrt(expected * (1 - expected) / at.attempts)
        assert at.rate == pytest.approx(expected, abs=4 * error)
    assert engine.stats.mean_accepted_length == pytest.approx(committed(rate, 4), rel=0.1)


def test_plain_decoding_favours_no_token(model):
    (row,) = jspec.generate(Steered(model, 0.5), [[1, 2]], PARAMS, draft=None).tokens
    assert len(set(row)) > 110
