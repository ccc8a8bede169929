"""Suffix drafts: the index against its definition in plain Python, however the text arrives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config import SamplingParams
from jspec.decode.draft import NgramDraft, SuffixDraft, named_draft
from jspec.decode.draft.lookup import SuffixIndex
from jspec.decode.generation import generate
from jspec.decode.prefill import fill_slot, start_decoding
from jspec.decode.rows import grow_capacity
from jspec.decode.settings import StepConfig
from jspec.decode.step import speculative_step
from tests.decode.common import prompts, requests
from tests.parameters import default_run

CAPACITY = 70
append = jax.jit(SuffixIndex.append)


def matches(text: list[int]) -> list[int]:
    """The longest common suffix of ``text[:j + 1]`` and ``text`` for each j before the last."""
    lengths = []
    for end in range(len(text) - 1):
        length = 0
        while length <= end and text[end - length] == text[-1 - length]:
            length += 1
        lengths.append(length)
    return lengths


def drafted(text: list[int], gamma: int, draft: SuffixDraft) -> list[int]:
    """What follows the longest match, the latest of equals, in a text that goes on with it."""
    length, end = max(((m, j) for j, m in enumerate(matches(text))), default=(0, 0))
    if length < draft.min_match:
        return []
    copy = list(text)
    for i in range(min(gamma, int(draft.factor * length))):
        copy.append(copy[end + 1 + i])
    return copy[len(text) :]


def texts_of(rng: np.random.Generator, rows: int) -> list[list[int]]:
    """Random texts of few and many symbols, some of which repeat themselves for long."""
    texts = []
    for row in range(rows):
        text = rng.integers(0, 1 + row % 4, rng.integers(0, CAPACITY + 1))
        period = rng.integers(1, 30)
        texts.append((np.resize(text[:period], len(text)) if row % 3 else text).tolist())
    return texts


def check_index(index: SuffixIndex, texts: list[list[int]]) -> None:
    index = jax.device_get(index)
    for row, text in enumerate(texts):
        expected = np.zeros(index.text.shape[1], int)
        expected[: max(len(text) - 1, 0)] = matches(text)
        np.testing.assert_array_equal(index.agreed[row], expected)
        assert index.length[row] == len(text)
        np.testing.assert_array_equal(index.text[row, : len(text)], text)
        assert (index.text[row, len(text) :] == -1).all()


@pytest.mark.parametrize("piece", [1, 5])
def test_the_index_equals_its_definition(piece):
    """Ragged pieces, some of them empty; a full row; texts of one symbol."""
    rng = np.random.default_rng(piece)
    texts = texts_of(rng, 40)
    index, known = SuffixIndex.empty(40, CAPACITY), np.zeros(40, int)
    lengths = np.array([len(text) for text in texts])
    while (known < lengths).any():
        counts = np.minimum(rng.integers(0, piece + 1, 40), lengths - known)
        tokens = rng.integers(0, 4, (40, piece))  # tokens past a count mean nothing
        for row, text in enumerate(texts):
            tokens[row, : counts[row]] = text[known[row] : known[row] + counts[row]]
        index = append(index, jnp.asarray(tokens, jnp.int32), jnp.asarray(counts, jnp.int32))
        known += counts
        if known.sum() % 9 == 0:
            check_index(index, [text[:n] for text, n in zip(texts, known, strict=True)])
    check_index(index, texts)


@jax.jit(static_argnames="config")
def propose(state, config):
    return config.draft.draft(None, state, config.gamma)[0]


def check_state(state, draft: SuffixDraft, gamma: int) -> int:
    """The state's index and draft against the definition; returns how many tokens are drafted."""
    lengths = np.asarray(state.lengths)
    known = [row[:n].tolist() for row, n in zip(np.asarray(state.tokens), lengths, strict=True)]
    check_index(state.draft, [text[:-1] for text in known])
    got = jax.device_get(propose(state, StepConfig(gamma, draft)))
    for row, text in enumerate(known):
        expected = drafted(text, gamma, draft)
        assert got.tokens[row, : got.lengths[row]].tolist() == expected
    return int(got.lengths.sum())


def test_a_state_drafts_by_the_definition_from_its_prefill_on(sharp):
    """Prompts in pieces, groups of 16, committed blocks, growth and another request."""
    draft = SuffixDraft(min_match=2, factor=1.5)
    config = StepConfig(5, draft)
    params = SamplingParams(max_new_tokens=24)
    texts = prompts((50, 1, 17, 2, 33))
    state = start_decoding(sharp, texts, params, config, chunk=24, capacity=80)
    total = check_state(state, draft, 5)
    state = grow_capacity(state, 128, config)
    for step in range(3):
        state = speculative_step(sharp, state, config)
        if step == 1:
            state = fill_slot(sharp, state, 1, prompts((29,), seed=5)[0], params, config)
        total += check_state(state, draft, 5)
    assert total > 15


def test_a_match_is_as_long_as_it_is(tiny):
    """The end agrees with 40 tokens far back, and with the last 20 of them nearer by."""
    long = np.random.default_rng(0).integers(0, 30, 40).tolist()
    text = [*long, 31, 32, 33, *long[-20:], 34, 35, *long]
    config = StepConfig(5, SuffixDraft())
    params = SamplingParams(max_new_tokens=10)
    state = start_decoding(tiny, [text], params, config, capacity=128)
    assert propose(state, config).tokens[0, :3].tolist() == [31, 32, 33]
    ngram = StepConfig(5, NgramDraft())
    assert propose(state, ngram).tokens[0, :2].tolist() == [34, 35]


@pytest.mark.parametrize("name", default_run(["tiny", "sharp"], "sharp"))
def test_generated_tokens_are_the_plain_ones(name, request):
    model = request.getfixturevalue(name)
    plain = generate(model, prompts(), requests(), draft=None)
    got = generate(model, prompts(), requests(), draft=named_draft("suffix:min_match=1"))
    assert got.tokens == plain.tokens
    assert got.stats.drafted > 40


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_match": 0}, "min_match=0 must be at least 1"),
        ({"factor": 0.2}, r"factor=0\.2 must be finite and, times min_match=3, at least 1"),
        ({"factor": float("nan")}, "factor=nan must be finite"),
    ],
)
def test_settings_that_draft_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SuffixDraft(), **settings)
