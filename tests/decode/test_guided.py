"""Drafts that verification guides: the text stays the target's own, whatever they read."""

import jax
import numpy as np
import pytest

from jspec.config import SamplingParams
from jspec.decode.draft import Chain, GuidedDraft, NgramDraft, SelfDraft, named_draft
from jspec.decode.generation import generate
from jspec.decode.growth import grow
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.decode.step import step
from jspec.policies import SparseSpec, SpecExtend, Streaming, Vegas
from tests.decode.common import prompts, requests

DRAFTS = {
    "vegas": "vegas:budget=6,least=0",
    "one-layer-for-both": "vegas:budget=6,least=0,every=2,collect=accepted,score=weight",
    "sparsespec": "sparsespec:budget=6,least=0,dense_layers=1",
    "specextend": "specextend:budget=8,least=0,page=4",
}


@pytest.fixture(scope="module")
def plain(sharp):
    return generate(sharp, prompts(), requests(), draft=None)


@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_tokens_stay_as_they_are(name, plain, sharp):
    got = generate(sharp, prompts(), requests(), gamma=3, draft=named_draft(DRAFTS[name]))
    assert got.tokens == plain.tokens
    assert got.stats.acceptance_rate > 0.4


def test_names_and_settings_of_drafts():
    assert named_draft("vegas") == GuidedDraft(Vegas())
    wanted = Vegas(budget=0.05, collect="all", score="weight", per_head=True)
    text = "vegas:budget=0.05,collect=all,score=weight,per_head=true"
    assert named_draft(text) == GuidedDraft(wanted)
    assert named_draft("sparsespec:least=9") == GuidedDraft(SparseSpec(least=9))
    assert named_draft("specextend:page=16") == GuidedDraft(SpecExtend(page=16))


@pytest.mark.parametrize("collect", ["ends", "all", "accepted", "last"])
def test_steps_have_numbers_of_their_own_where_rejected_tokens_score(collect):
    draft = GuidedDraft(Vegas(collect=collect))
    assert draft.learns_from_rejected == (collect in ("ends", "all"))
    assert Chain(NgramDraft(), draft).learns_from_rejected == draft.learns_from_rejected


def test_a_step_leaves_what_the_next_draft_reads(tiny):
    """Positions that it picked below the length it began with, and all that it committed since."""
    policy = Vegas(budget=5, least=0)
    config = StepConfig(3, GuidedDraft(policy))
    params = [SamplingParams(max_new_tokens=new) for new in (30, 30, 1)]
    state = start_decoding(tiny, prompts((20, 9, 5)), params, config, capacity=64)
    run = jax.jit(lambda models, state: step(models, state, config))
    models = Models(tiny)
    for _ in range(3):
        before = np.asarray(state.cache.lengths)
        was_done = np.asarray(state.done)
        state, record = run(models, state)
        since = np.asarray(state.draft.since)
        for row, committed in enumerate(np.asarray(record.committed)):
            wanted = [] if was_done[row] else list(range(before[row], before[row] + committed))
            assert [p for p in since[row].tolist() if p >= 0] == wanted
        for picked in state.draft.picked:
            assert picked.shape == (3, 5)
            live = ~was_done
            assert (np.asarray(picked)[live] < before[live, None]).all()
            assert (
                (np.asarray(picked)[live] >= 0).sum(axis=1) == np.minimum(before, 5)[live]
            ).all()


def test_more_room_gives_a_ratio_more_room(sharp):
    """A capacity of twice the size holds twice as many picked positions, and the same text."""
    config = StepConfig(3, GuidedDraft(Vegas(budget=0.25, least=0)))
    texts, params = prompts((20, 9)), SamplingParams(max_new_tokens=20)
    small = start_decoding(sharp, texts, params, config, capacity=40)
    assert small.draft.picked[0].shape == (2, 10)
    grown = grow(small, 80, config)
    assert grown.draft.picked[0].shape == (2, 20)
    large = start_decoding(sharp, texts, params, config, capacity=80)
    run = jax.jit(lambda models, state: step(models, state, config)[0])
    for _ in range(6):
        grown, large = (run(Models(sharp), state) for state in (grown, large))
    np.testing.assert_array_equal(grown.tokens, large.tokens)
    # The second row is done: what is picked for it means nothing.
    np.testing.assert_array_equal(grown.done, [False, True])
    for got, wanted in zip(grown.draft.picked, large.draft.picked, strict=True):
        np.testing.assert_array_equal(got[:1], wanted[:1])


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (lambda: SelfDraft(Vegas()), TypeError, r"guided by verification; pass GuidedDraft\("),
        (lambda: GuidedDraft(Streaming()), TypeError, "is not guided by verification"),  # pyright: ignore
        (lambda: StepConfig(draft=Vegas()), TypeError, r"is a policy; pass GuidedDraft\("),  # pyright: ignore
        (
            lambda: StepConfig(0, named_draft("none"), target=Vegas()),
            ValueError,
            r"it only drafts: pass draft=GuidedDraft\(",
        ),
    ],
    ids=["self-draft", "not-guided", "policy", "target"],
)
def test_what_is_not_a_guided_draft_is_refused(made, error, message):
    with pytest.raises(error, match=message):
        made()
