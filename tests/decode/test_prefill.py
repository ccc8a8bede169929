"""Starting a batch, and putting another request into one of its slots."""

import dataclasses

import jax
import numpy as np
import pytest

from jspec.config import SamplingParams
from jspec.decode.draft import GuidedDraft, ModelDraft, NgramDraft, NoDraft, SelfDraft
from jspec.decode.generation import generate
from jspec.decode.prefill import fill_slot, start_decoding
from jspec.decode.rows import grow_capacity
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.decode.step import decode_chunk
from jspec.policies import Streaming, Vegas
from tests.conftest import TINY, make_decoder
from tests.decode.common import prompts, requests
from tests.parameters import default_run
from tests.policies.common import NormTopK

DRAFTS = {
    "none": NoDraft(),
    "ngram": NgramDraft(min_match=1, max_match=4),
    "streaming": SelfDraft(Streaming(sinks=2, window=6)),
    "norms": SelfDraft(NormTopK()),
    "model": ModelDraft(),
}
NEWCOMER, ITS_PARAMS = [7, 3, 7, 3, 9, 7, 3], SamplingParams(max_new_tokens=20)


@pytest.mark.parametrize("name", default_run(list(DRAFTS), "streaming", slow=["ngram"]))
def test_a_slot_takes_another_request_while_others_go_on(name, sharp, other):
    """The newcomer gets what it gets alone, and the others what they get without it."""
    draft = DRAFTS[name]
    gamma = 0 if name == "none" else 3
    config = StepConfig(gamma, draft)
    models = Models(sharp, other if name == "model" else None)
    state = start_decoding(models, prompts(), requests(), config)
    state, _ = decode_chunk(models, state, config, 3)
    assert state.done[4]  # the request of one token
    state = fill_slot(models, state, 4, NEWCOMER, ITS_PARAMS, config)
    assert not state.done[4]
    while not state.done.all():
        state, _ = decode_chunk(models, state, config, 3)
    alone = generate(sharp, [NEWCOMER], ITS_PARAMS, draft=None).tokens[0]
    expected = list(generate(sharp, prompts(), requests(), draft=None).tokens)
    texts = [*prompts()]
    texts[4], expected[4] = NEWCOMER, alone
    for row, (text, tokens) in enumerate(zip(texts, expected, strict=True)):
        known = np.asarray(state.tokens[row, : state.lengths[row]]).tolist()
        assert known == [*text, *tokens]


@pytest.mark.exhaustive
def test_a_sampled_newcomer_changes_the_mode_and_no_greedy_token(sharp):
    config = StepConfig(3, NgramDraft(1, 4))
    state = start_decoding(sharp, prompts(), requests(), config)
    assert state.mode == "greedy"
    params = SamplingParams(max_new_tokens=20, temperature=1.0, top_k=5, seed=11)
    state = fill_slot(sharp, state, 0, NEWCOMER, params, config)
    assert state.mode == "filtered"
    state, _ = decode_chunk(sharp, state, config, 40)
    alone = generate(sharp, [NEWCOMER], params, draft=NgramDraft(1, 4), gamma=3).tokens[0]
    assert state.tokens[0, len(NEWCOMER) : state.lengths[0]].tolist() == list(alone)
    plain = generate(sharp, prompts(), requests(), draft=None).tokens
    for row in range(1, 8):
        begin = len(prompts()[row])
        assert state.tokens[row, begin : state.lengths[row]].tolist() == list(plain[row])


def test_a_newcomer_with_fewer_stop_tokens_gets_no_others(tiny):
    params = SamplingParams(max_new_tokens=4, stop_tokens=(7, 9))
    state = start_decoding(tiny, [[1, 2], [3]], params, capacity=32)
    one = SamplingParams(max_new_tokens=31, stop_tokens=(8,))  # which just fits
    state = fill_slot(tiny, state, 1, [5], one)
    assert state.stop_tokens.tolist() == [[7, 9], [8, -1]]


@pytest.fixture(scope="module")
def windowed():
    first, second = TINY.layers
    layers = (first, dataclasses.replace(second, window=8))
    return make_decoder(dataclasses.replace(TINY, layers=layers), seed=3)


def test_a_newcomer_takes_the_rings_of_the_batch(windowed):
    """Those of a larger gamma, and those of a smaller capacity."""
    params = SamplingParams(max_new_tokens=6)
    alone = generate(windowed, [NEWCOMER], params, draft=None).tokens[0]
    larger, config = (StepConfig(gamma, NgramDraft()) for gamma in (4, 2))
    state = start_decoding(windowed, [[1, 2], [3]], params, larger, capacity=32)
    grown = grow_capacity(
        start_decoding(windowed, [[1, 2], [3]], params, larger, capacity=10), 64, larger
    )
    for batch, step_config in ((state, config), (grown, larger)):
        batch = fill_slot(windowed, batch, 0, NEWCOMER, params, step_config)
        batch, _ = decode_chunk(windowed, batch, step_config, 6)
        begin = len(NEWCOMER)
        assert batch.tokens[0, begin : batch.lengths[0]].tolist() == list(alone)


def test_a_drafter_with_other_rings_or_arrays_is_refused(windowed, tiny):
    models, params = Models(tiny, windowed), SamplingParams(max_new_tokens=6)
    state = start_decoding(models, [[1, 2]], params, StepConfig(4, ModelDraft()))
    with pytest.raises(ValueError, match=r"gamma=2 the drafter keeps other arrays .* started with"):
        fill_slot(models, state, 0, [3], params, StepConfig(2, ModelDraft()))
    # What a guide has for a longer draft would stay from the last request of the slot.
    guided = GuidedDraft(Vegas(budget=8, least=0))
    state = start_decoding(tiny, [[1]], params, StepConfig(4, guided))
    with pytest.raises(ValueError, match="gamma=2 the drafter keeps other arrays"):
        fill_slot(tiny, state, 0, [3], params, StepConfig(2, guided))


def test_filling_a_slot_takes_the_state(tiny):
    state = start_decoding(tiny, [[1, 2], [3]], SamplingParams(max_new_tokens=4))
    fill_slot(tiny, state, 1, [5], SamplingParams(max_new_tokens=3))
    assert state.cache.keys(0).is_deleted()


@pytest.mark.parametrize(
    ("slot", "prompt", "params", "message"),
    [
        (2, [1], {}, r"slot=2 must be in \[0, 2\)"),
        (-1, [1], {}, r"slot=-1 must be in \[0, 2\)"),
        (0, [], {}, "prompt 0: the prompt is empty"),
        (0, [1] * 20, {"max_new_tokens": 13}, "needs 33 slots .* capacity=32"),
        (0, [1], {"stop_tokens": (1, 2)}, "has 2 stop tokens, the batch has room for 1"),
    ],
    ids=["above", "below", "empty", "long", "stops"],
)
def test_what_does_not_fit_is_refused(slot, prompt, params, message, tiny):
    state = start_decoding(tiny, [[1, 2], [3]], SamplingParams(max_new_tokens=4), capacity=32)
    with pytest.raises(ValueError, match=message):
        fill_slot(tiny, state, slot, prompt, SamplingParams(**{"max_new_tokens": 3, **params}))
    assert not state.cache.keys(0).is_deleted()


def test_fresh_seeds_differ_between_requests(sharp):
    """Two equal prompts of one batch share random numbers only where they are given one seed."""
    params = SamplingParams(max_new_tokens=30, temperature=1.5)
    fresh = generate(sharp, [[1, 2, 3]] * 2, params, draft=None)
    assert fresh.seeds[0] != fresh.seeds[1]
    assert fresh.tokens[0] != fresh.tokens[1]
    seeded = [dataclasses.replace(params, seed=seed) for seed in fresh.seeds]
    assert generate(sharp, [[1, 2, 3]] * 2, seeded, draft=None).tokens == fresh.tokens
    same = generate(sharp, [[1, 2, 3]] * 2, seeded[0], draft=None)
    assert same.seeds == (seeded[0].seed,) * 2
    assert same.tokens[0] == same.tokens[1]


def test_every_leaf_of_a_state_begins_with_the_batch(sharp, other):
    """What `fill_slot` relies on, for every drafter's own state too."""
    for name, draft in DRAFTS.items():
        models = Models(sharp, other if name == "model" else None)
        config = StepConfig(0 if name == "none" else 3, draft)
        state = start_decoding(models, prompts(), requests(), config)
        assert {leaf.shape[0] for leaf in jax.tree.leaves(state)} == {8}
