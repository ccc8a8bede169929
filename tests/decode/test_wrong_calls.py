"""Calls that a user gets wrong: each is refused before it costs time, with the way out."""

import jax
import numpy as np
import pytest

import jspec
from jspec.decode.options import ResolvedOptions
from jspec.models.errors import CheckpointError
from tests.decode.common import NGRAM, prompts
from tests.decode.engines import engine_of

FOUR = jspec.SamplingParams(max_new_tokens=4)


def started(model, draft=NGRAM):
    return jspec.start_decoding(model, prompts((5,)), FOUR, jspec.StepConfig(2, draft))


@pytest.mark.parametrize("draft", [jspec.SuffixDraft(), jspec.GuidedDraft()])
def test_a_state_without_what_a_drafter_keeps(tiny, draft):
    name = type(draft).__name__
    with pytest.raises(ValueError, match=f"started without {name} has .*jspec.convert_state"):
        jspec.decode_chunk(tiny, started(tiny), jspec.StepConfig(2, draft), 1)


def test_a_state_that_was_donated(tiny):
    state, config = started(tiny), jspec.StepConfig(2, NGRAM)
    for x in jax.tree.leaves(state):  # as a GPU has done; a CPU may keep what it is given
        x.delete()
    with pytest.raises(ValueError, match="was donated to an earlier call; continue with the one"):
        jspec.decode_chunk(tiny, state, config, 1)


def test_more_drafts_than_tokens_are_asked_for_are_not_made(tiny):
    few, many = (
        jspec.generate(tiny, prompts((5,)), FOUR, draft=NGRAM, gamma=gamma).tokens
        for gamma in (4, 10**9)
    )
    assert few == many
    options = ResolvedOptions.of(tiny, {"draft": NGRAM, "gamma": 1000})
    assert set(options.with_at_most(32).configs) == {options.with_at_most(32).config.gamma} == {32}
    chosen = ResolvedOptions.of(tiny, {"draft": NGRAM, "gamma": "auto"})
    assert chosen.with_at_most(1) is chosen


def test_what_is_called_with_tokens_is_checked_first(tiny):
    with pytest.raises(TypeError, match="on_tokens=3 must be callable, or None"):
        jspec.generate(tiny, prompts((5,)), FOUR, on_tokens=3)
    engine = engine_of(tiny, "none")
    with pytest.raises(TypeError, match="on_tokens=3 must be callable, or None"):
        engine.submit([1, 2], FOUR, on_tokens=3)
    with pytest.raises(TypeError, match="params=3 must be a SamplingParams"):
        engine.warm_up(3)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (None, TypeError, "draft None must be a name, as 'ngram'"),
        ("ngram >", ValueError, "'ngram >' must be FIRST > SECOND"),
        ("vegas:budget=0.1,budget=0.5", ValueError, "draft vegas: budget= is set twice"),
    ],
)
def test_names_of_drafters(text, kind, message):
    with pytest.raises(kind, match=message):
        jspec.named_draft(text)


@pytest.mark.parametrize("count", [-1, 1000, 1.5])
def test_more_tokens_than_there_are_have_no_scores(tiny, count):
    with pytest.raises(ValueError, match=f"count={count} must be a whole number, at most the"):
        jspec.score_top_tokens(tiny, [np.arange(5)], count)


def test_a_model_that_is_nowhere():
    for load in (jspec.LLM, jspec.load_tokenizer):
        with pytest.raises(CheckpointError, match="/nowhere does not exist; pass a local model"):
            load("/nowhere")
    with pytest.raises(TypeError, match="model=3 must be a path, a model, or None"):
        jspec.LLM(3)
