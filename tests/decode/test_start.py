"""What requests become: the state that `start_decoding` fills, and the errors of those refused."""

import dataclasses

import jax
import numpy as np
import pytest

from jspec.config import SamplingParams
from jspec.decode.draft import ModelDraft
from jspec.decode.generation import generate
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.ops.sample import Sampling
from tests.conftest import TINY, make_decoder
from tests.decode.common import NGRAM, STREAMING, prompts

TWELVE = SamplingParams(max_new_tokens=12)


def test_start_fills_the_state(tiny, other):
    params = [
        SamplingParams(max_new_tokens=7, temperature=0.5, top_k=3, seed=9, stop_tokens=(4, 5)),
        SamplingParams(max_new_tokens=2, top_p=0.5, min_p=0.25, seed=0, draft_limit=0),
    ]
    models, config = Models(tiny, other), StepConfig(2, ModelDraft())
    state = start_decoding(models, [[3, 1, 2], [7]], params, config, capacity=12)
    assert state.tokens.tolist() == [[3, 1, 2] + [-1] * 9, [7] + [-1] * 11]
    assert state.lengths.tolist() == [3, 1]
    assert state.limits.tolist() == [10, 3]
    assert state.done.tolist() == [False, False]
    assert state.stop_tokens.tolist() == [[4, 5], [-1, -1]]
    assert state.draft_limits.tolist() == [2**31 - 1, 0]
    for cache in (state.cache, state.draft):
        assert {layout.size for layout in cache.layouts} == {12}
        assert {x.shape[1] for x in jax.tree.leaves(cache.columns)} == {12}
        assert cache.lengths.tolist() == [2, 0]
    assert state.mode == "filtered"
    expected = Sampling(
        np.array([0.5, 0.0], np.float32),
        np.array([3, 0], np.int32),
        np.array([1.0, 0.5], np.float32),
        np.array([0.0, 0.25], np.float32),
        np.array([9, 0], np.uint32),
    )
    jax.tree.map(np.testing.assert_array_equal, state.sampling, expected)


@pytest.mark.parametrize("chunk", [1, 3, 16, 256])
def test_any_prefill_chunk_gives_the_same_cache(chunk, tiny):
    texts = prompts((50, 1, 17))
    whole = start_decoding(tiny, texts, TWELVE, chunk=64).cache
    cache = start_decoding(tiny, texts, TWELVE, chunk=chunk).cache
    assert [set(layer) for layer in cache.columns] == [{"keys", "values"}]
    jax.tree.map(
        lambda got, expected: np.testing.assert_allclose(got, expected, atol=1e-5),
        cache.columns,
        whole.columns,
    )


@pytest.mark.parametrize(
    ("texts", "settings", "message"),
    [
        ([], {}, "no prompts were given; pass at least one"),
        ([[1], []], {}, "prompt 1: the prompt is empty; give it at least one token"),
        ([[1, 41]], {}, r"prompt 0: the prompt holds token 41, outside the vocabulary 0\.\.40"),
        ([[1], [3, -1]], {}, "prompt 1: the prompt holds token -1, outside the vocabulary"),
        (
            [[1] * 501],
            {},
            "has 501 tokens, which with max_new_tokens=12 exceeds the context of 512",
        ),
        ([[1]] * 2, {"params": [TWELVE] * 3}, "got 2 prompts but 3 sampling params"),
        ([[1]], {"gamma": -2, "draft": NGRAM}, "gamma=-2 must be at least 0"),
        ([[1]], {"gamma": -1, "draft": None}, "gamma=-1 must be at least 0"),
        ([[1]], {"draft": ModelDraft()}, r"draft=ModelDraft\(\) and draft_model go together"),
        ([[1]], {"steps_per_chunk": 0}, "steps_per_chunk=0 must be at least 1"),
        ([[1]], {"prefill_chunk": 0}, "a prefill chunk of 0 tokens must be at least 1"),
        (
            [[1]],
            {"backends": {"attention": "fastest"}},
            "attention has no implementation 'fastest'",
        ),
        ([[1]], {"backends": {"verify_greedy": "slow"}}, "verify_greedy has no implementation"),
        (
            [[1]],
            {
                "backends": {"verify_stochastic": "ballot"},
                "params": SamplingParams(temperature=1.0),
            },
            "verify_stochastic has no implementation 'ballot'; choose one of xla",
        ),
        (
            [[1]],
            {"backends": {"verify": "xla"}},
            r"decoding calls no operation 'verify' \(did you mean verify_tree\?\); it calls",
        ),
    ],
    ids=lambda value: "-".join(value.split()[:4]) if isinstance(value, str) else "",
)
def test_a_bad_request_is_refused(texts, settings, message, tiny):
    with pytest.raises(ValueError, match=message):
        generate(tiny, texts, **{"params": TWELVE} | settings)


def test_a_draft_model_needs_its_setting(tiny, other):
    with pytest.raises(ValueError, match="go together; pass both or neither"):
        generate(tiny, [[1]], TWELVE, draft=STREAMING, draft_model=other)


def test_a_draft_model_of_another_vocabulary_is_refused(tiny):
    foreign = make_decoder(dataclasses.replace(TINY, vocab_size=41 + 1025))
    message = r"vocabulary of 1066 differs from the target's 41; they must be the same but for pad"
    with pytest.raises(ValueError, match=message):
        generate(tiny, [[1]], TWELVE, draft=ModelDraft(), draft_model=foreign)


def test_a_request_beyond_the_capacity_is_refused(tiny):
    message = r"needs 22 slots .* but capacity=21; raise the capacity or lower max_new_tokens"
    with pytest.raises(ValueError, match=message):
        start_decoding(tiny, [[1] * 10], TWELVE, capacity=21)
    state = start_decoding(tiny, [[1] * 10], TWELVE, capacity=22)
    assert state.cache.keys(0).shape[1] == state.tokens.shape[1] == 22


def test_a_request_beyond_the_draft_models_context_is_refused(tiny):
    short = make_decoder(dataclasses.replace(TINY, max_context=20))
    message = (
        "prompt 0: for the draft model: the prompt has 10 tokens, .* exceeds the context of 20"
    )
    with pytest.raises(ValueError, match=message):
        generate(tiny, [[1] * 10], TWELVE, draft=ModelDraft(), draft_model=short)


def test_each_request_has_a_seed_that_repeats_it(sharp):
    """Two requests without a seed share no random numbers; the seeds told repeat them."""
    hot = SamplingParams(max_new_tokens=12, temperature=1.5)
    got = generate(sharp, [[1, 2, 3]] * 3, [hot, dataclasses.replace(hot, seed=7), hot])
    assert got.seeds[1] == 7
    assert len(set(got.seeds)) == 3
    assert got.tokens[0] != got.tokens[2]
    named = [dataclasses.replace(hot, seed=seed) for seed in got.seeds]
    again = generate(sharp, [[1, 2, 3]] * 3, named)
    assert again.tokens == got.tokens
    assert again.seeds == got.seeds
