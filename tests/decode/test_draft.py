"""Sources of drafts: lookup against plain Python, windows and second models by what they see."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config import ModelDraft, NgramDraft, SamplingParams, StepConfig, StreamDraft
from jspec.decode.draft import last_token, propose
from jspec.decode.state import start
from tests.decode.common import full_logits, prompts


def lookup(text: list[int], draft: NgramDraft, gamma: int) -> list[int]:
    """Prompt lookup, by its definition: of all earlier places whose tokens agree with the end of
    the text, the one that agrees longest (up to ``max_match``), and of those the latest."""
    found = (0, -1)
    for end in range(len(text) - 1):
        length = 0
        while length < min(draft.max_match, end + 1) and text[end - length] == text[-1 - length]:
            length += 1
        found = max(found, (length, end))
    if found[0] < draft.min_match:
        return []
    copy = list(text)
    for i in range(gamma):
        copy.append(copy[found[1] + 1 + i])
    return copy[len(text) :]


@pytest.fixture(scope="module")
def blank(tiny):
    """A started state whose texts the tests replace."""
    return start(tiny, [[0]] * 64, SamplingParams(max_new_tokens=60), capacity=61)


def with_texts(state, texts):
    tokens = np.full(state.tokens.shape, -1, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    lengths = jnp.asarray([len(text) - 1 for text in texts], jnp.int32)
    return dataclasses.replace(
        state, tokens=jnp.asarray(tokens), cache=state.cache.with_lengths(lengths)
    )


@pytest.mark.parametrize(
    "draft",
    [NgramDraft(1, 1), NgramDraft(1, 4), NgramDraft(2, 3), NgramDraft(3, 16)],
    ids=lambda d: f"{d.min_match}-{d.max_match}",
)
def test_lookup_equals_its_definition(draft, blank):
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 1 + row % 4, 1 + row % 50).tolist() for row in range(64)]
    state = with_texts(blank, texts)
    expected = [lookup(text, draft, 5) for text in texts]
    got = propose(None, state, StepConfig(5, draft), None)
    assert 0 < sum(map(bool, expected)) < 64
    assert got.logits is None
    np.testing.assert_array_equal(got.lengths, [len(e) for e in expected])
    for row, wanted in enumerate(expected):
        assert got.tokens[row, : len(wanted)].tolist() == wanted


def test_lookup_knows_a_circle(blank):
    state = with_texts(blank, [[9, 4, 5, 4, 5]] * 64)
    got = propose(None, state, StepConfig(5, NgramDraft(2, 8)), None)
    assert got.tokens[0].tolist() == [4, 5, 4, 5, 4]


def test_drafts_stay_within_limits(blank):
    state = with_texts(blank, [[5] * 20] * 64)
    rng = np.random.default_rng(1)
    limits, draft_limits = rng.integers(20, 30, 64), rng.integers(0, 8, 64)
    done = rng.random(64) < 0.2
    state = dataclasses.replace(
        state,
        limits=jnp.asarray(limits, jnp.int32),
        draft_limits=jnp.asarray(draft_limits, jnp.int32),
        done=jnp.asarray(done),
    )
    got = propose(None, state, StepConfig(5, NgramDraft(1, 2)), None)
    # One token of the limit is the one that verification adds.
    room = np.maximum(limits - 20 - 1, 0)
    expected = np.where(done, 0, np.minimum(np.minimum(room, draft_limits), 5))
    np.testing.assert_array_equal(got.lengths, expected)


def greedy(model, text: list[int]) -> int:
    padded = jnp.asarray([text + [0] * (16 - len(text))])
    return int(jnp.argmax(full_logits(model, padded)[0, len(text) - 1]))


@pytest.mark.parametrize("source", ["window", "model"])
def test_a_model_drafts_its_own_continuation(source, tiny, other):
    """A window that holds the whole text, or a second model: greedy drafts are its argmaxes."""
    drafter = tiny if source == "window" else other
    draft = StreamDraft(sinks=4, window=60) if source == "window" else ModelDraft()
    texts = prompts((1, 5, 12))
    state = start(tiny, texts, SamplingParams(max_new_tokens=20), draft_model=other)
    config = StepConfig(3, draft)
    drafted = jax.jit(lambda state: propose(tiny, state, config, other).tokens)(state)
    for text, tokens in zip(texts, drafted.tolist(), strict=True):
        for token in tokens:
            assert token == greedy(drafter, text)
            text.append(token)


def test_a_window_sees_its_slots_and_no_others(tiny):
    """2 sinks and a window of 3 over 29 cached tokens: slots 0, 1, 26, 27 and 28."""
    params = SamplingParams(max_new_tokens=8, temperature=1.0)
    state = start(tiny, prompts((30,)), params)
    config = StepConfig(4, StreamDraft(sinks=2, window=3), "sampled")
    draft = jax.jit(lambda state: propose(tiny, state, config, None).logits)

    def logits_without(slots):
        def zero(x):
            return x.at[:, slots].set(0)

        cache = dataclasses.replace(
            state.cache,
            keys=tuple(map(zero, state.cache.keys)),
            values=tuple(map(zero, state.cache.values)),
        )
        changed = dataclasses.replace(state, cache=cache)
        return np.asarray(draft(changed))

    whole = logits_without(jnp.arange(29, 40))
    np.testing.assert_array_equal(logits_without(jnp.arange(2, 26)), whole)
    for slot in (0, 1, 26, 27, 28):
        assert np.abs(logits_without(jnp.asarray([slot])) - whole).max() > 1e-4


def test_the_last_token_is_known_but_not_cached(tiny):
    texts = prompts((1, 5, 12))
    state = start(tiny, texts, SamplingParams(max_new_tokens=4))
    assert state.cache.lengths.tolist() == [0, 4, 11]
    assert last_token(state).tolist() == [text[-1] for text in texts]


def test_a_model_draft_needs_its_model(tiny):
    state = start(tiny, [[1]], SamplingParams(max_new_tokens=4))
    with pytest.raises(ValueError, match=r"ModelDraft\(\) needs a draft model: pass draft_model"):
        propose(tiny, state, StepConfig(2, ModelDraft()), None)
