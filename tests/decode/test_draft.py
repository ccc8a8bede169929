"""Drafters: lookup against plain Python, sparse views and second models by what they see."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jspec.config import LayerSpec, SamplingParams
from jspec.decode.draft import Chain, Drafted, GuidedDraft, ModelDraft, NgramDraft, SelfDraft
from jspec.decode.generation import generate
from jspec.decode.options import usual_steps
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState, Models
from jspec.decode.step import within_limits
from jspec.policies import Dense, Streaming
from tests.conftest import TINY, make_decoder
from tests.decode.common import DRAFTERS, full_logits, prompts
from tests.parameters import default_run


@functools.partial(jax.jit, static_argnames="config")
def propose(models, state: DecodeState, config: StepConfig) -> Drafted:
    """The draft of a step, cut at the rows' limits."""
    drafted, _ = config.draft.draft(Models.of(models), state, config.gamma)
    return within_limits(drafted, state, config.gamma)


def lookup(text: list[int], draft: NgramDraft, gamma: int) -> list[int]:
    """Prompt lookup, by its definition: of all earlier places whose tokens agree with the end of
    the text, the one that agrees longest (up to ``max_match``), and of those the latest."""
    match = (0, -1)
    for end in range(len(text) - 1):
        length = 0
        while length < min(draft.max_match, end + 1) and text[end - length] == text[-1 - length]:
            length += 1
        match = max(match, (length, end))
    if match[0] < draft.min_match:
        return []
    copy = list(text)
    for i in range(gamma):
        copy.append(copy[match[1] + 1 + i])
    return copy[len(text) :]


@pytest.fixture(scope="module")
def blank(tiny):
    """A started state whose texts the tests replace."""
    params, config = SamplingParams(max_new_tokens=60), StepConfig(5, NgramDraft())
    return start_decoding(tiny, [[0]] * 64, params, config, capacity=61)


def with_texts(state, texts):
    tokens = np.full(state.tokens.shape, -1, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    lengths = jax.device_put(np.array([len(text) - 1 for text in texts], np.int32))
    return dataclasses.replace(
        state, tokens=jax.device_put(tokens), cache=state.cache.with_lengths(lengths)
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
    got = propose(None, state, StepConfig(5, draft))
    assert 0 < sum(map(bool, expected)) < 64
    assert got.logits is None
    np.testing.assert_array_equal(got.lengths, [len(e) for e in expected])
    for row, tokens in enumerate(expected):
        assert got.tokens[row, : len(tokens)].tolist() == tokens


def test_lookup_knows_a_circle(blank):
    state = with_texts(blank, [[9, 4, 5, 4, 5]] * 64)
    got = propose(None, state, StepConfig(5, NgramDraft(2, 8)))
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
    got = propose(None, state, StepConfig(5, NgramDraft(1, 2)))
    # One token of the limit is the one that verification adds.
    room = np.maximum(limits - 20 - 1, 0)
    expected = np.where(done, 0, np.minimum(np.minimum(room, draft_limits), 5))
    np.testing.assert_array_equal(got.lengths, expected)
    # Nor does it write past the last token, for which there may be no slot.
    beyond = state.beyond(state.limits[:, None] + jnp.arange(-1, 1, dtype=jnp.int32)[None])
    np.testing.assert_array_equal(beyond, np.stack([done, np.ones(64, bool)], axis=1))


def greedy(model, text: list[int]) -> int:
    padded = jnp.asarray([text + [0] * (16 - len(text))])
    return int(jnp.argmax(full_logits(model, padded)[0, len(text) - 1]))


@pytest.mark.parametrize(
    "draft",
    default_run(
        {
            "window": SelfDraft(Streaming(sinks=4, window=60)),
            "dense": SelfDraft(Dense()),
            "model": ModelDraft(),
        },
        "model",
    ),
)
def test_a_model_drafts_its_continuation(draft, tiny, other):
    """A window that holds the whole text, the text itself, or a second model: greedy drafts are
    its argmaxes."""
    drafter = other if isinstance(draft, ModelDraft) else tiny
    texts = prompts((1, 5, 12))
    models, config = Models(tiny, other), StepConfig(3, draft)
    state = start_decoding(models, texts, SamplingParams(max_new_tokens=20), config)
    drafted = jax.jit(lambda state: propose(models, state, config).tokens)(state)
    for text, tokens in zip(texts, drafted.tolist(), strict=True):
        for token in tokens:
            assert token == greedy(drafter, text)
            text.append(token)


def test_a_window_sees_its_slots_and_no_others(tiny):
    """2 sinks and a window of 3 over 29 cached tokens: slots 0, 1, 26, 27 and 28."""
    params = SamplingParams(max_new_tokens=8, temperature=1.0, seed=0)
    config = StepConfig(4, SelfDraft(Streaming(sinks=2, window=3)))
    state = start_decoding(tiny, prompts((30,)), params, config)
    draft = jax.jit(lambda state: propose(tiny, state, config).logits)

    def logits_without(slots):
        def zero(x):
            x = np.array(x)
            x[:, slots] = 0
            return x

        columns = jax.tree.map(zero, state.cache.columns)
        cache = dataclasses.replace(state.cache, columns=columns)
        changed = dataclasses.replace(state, cache=cache)
        return np.asarray(draft(changed))

    whole = logits_without(np.arange(29, 40))
    np.testing.assert_array_equal(logits_without(np.arange(2, 26)), whole)
    for slot in (0, 1, 26, 27, 28):
        assert np.abs(logits_without([slot]) - whole).max() > 1e-4


def test_the_last_token_is_known_but_not_cached(tiny):
    texts = prompts((1, 5, 12))
    state = start_decoding(tiny, texts, SamplingParams(max_new_tokens=4))
    assert state.cache.lengths.tolist() == [0, 4, 11]
    assert state.last_token.tolist() == [text[-1] for text in texts]


def test_a_model_draft_needs_its_model(tiny, other):
    params, config = SamplingParams(max_new_tokens=4), StepConfig(2, ModelDraft())
    message = r"ModelDraft\(\) needs a draft model: pass draft_model"
    with pytest.raises(ValueError, match=message):
        start_decoding(tiny, [[1]], params, config)
    state = start_decoding(Models(tiny, other), [[1]], params, config)
    with pytest.raises(ValueError, match=message):
        propose(tiny, state, config)
    without = start_decoding(tiny, [[1]], params)
    with pytest.raises(ValueError, match=message):
        propose(Models(tiny, other), without, config)


@pytest.mark.parametrize("source", ["model", "dense"])
def test_a_draft_writes_nothing_for_a_row_that_is_done(source, tiny, other):
    """The row has room below its limit: a stop token has ended it."""
    models, config = Models(tiny, other), StepConfig(3, DRAFTERS[source])
    state = start_decoding(models, prompts((9, 9)), SamplingParams(max_new_tokens=20), config)
    state = dataclasses.replace(state, done=jnp.array([True, False]))
    before = jax.tree.map(np.array, state)
    after = jax.jit(lambda state: config.draft.draft(models, state, config.gamma)[1])(state)
    caches = [(c.draft if source == "model" else c.cache).columns for c in (before, after)]
    pairs = list(zip(*map(jax.tree.leaves, caches), strict=True))
    assert len(pairs) == 2 * len(tiny.config.layers)
    for old, new in pairs:
        np.testing.assert_array_equal(old[0], new[0])
        assert (np.asarray(new[1]) != old[1]).any()


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [37, pytest.param(48, marks=pytest.mark.slow)])
def test_a_draft_model_may_be_padded_otherwise(size, tiny):
    """With fewer tokens than the target's 41 or more: greedy tokens are the plain ones."""
    second = make_decoder(dataclasses.replace(TINY, vocab_size=size), seed=2, head=3.0)
    texts = [*prompts((9, 4)), [40, 38, 40, 38, 40]]  # of which a short vocabulary lacks some
    params = SamplingParams(max_new_tokens=12)
    plain = generate(tiny, texts, params, draft=None)
    got = generate(tiny, texts, params, draft=ModelDraft(), draft_model=second, gamma=3)
    assert got.tokens == plain.tokens
    assert got.stats.drafted > 0


@pytest.mark.parametrize(
    ("size", "draft", "rule"),
    default_run(
        {
            "shorter": (37, ModelDraft(), "token"),
            "longer": (48, ModelDraft(), "block"),
            "chain": (
                37,
                Chain(ModelDraft(), SelfDraft(Streaming(1, 4)), inner=2, rounds=2),
                "token",
            ),
        },
        "longer",
    ),
)
def test_a_draft_model_that_is_padded_otherwise_draws(size, draft, rule, tiny):
    """Greedy rows are the plain ones, and sampled ones have only the target's tokens."""
    second = make_decoder(dataclasses.replace(TINY, vocab_size=size), seed=2)
    texts = [*prompts((9, 4)), [40, 38, 40, 38, 40]]
    params = [SamplingParams(max_new_tokens=12, temperature=t, seed=7) for t in (0.0, 1.0, 1.0)]
    plain = generate(tiny, texts, params, draft=None)
    got = generate(tiny, texts, params, draft=draft, draft_model=second, gamma=4, rule=rule)
    assert got.tokens[0] == plain.tokens[0]
    assert max(map(max, got.tokens)) < TINY.vocab_size
    assert got.stats.accepted > 0


def test_what_the_target_has_no_token_for_is_never_drafted(tiny):
    """A second model that is certain of its last token, which only padding has."""
    config = dataclasses.replace(TINY, vocab_size=48)
    second = Sure(make_decoder(config, seed=2), 47)
    models, config = Models(tiny, second), StepConfig(3, ModelDraft())
    state = start_decoding(models, prompts((9, 4)), SamplingParams(max_new_tokens=20), config)

    def draft(state):
        return propose(models, state, config)

    assert (np.asarray(jax.jit(draft)(state).tokens) < 41).all()
    sampled = jax.eval_shape(draft, dataclasses.replace(state, mode="sampled"))
    assert sampled.logits.shape == (2, 3, 41)


class Sure(nnx.Module):
    """A model that is all but certain of one token."""

    def __init__(self, model, token: int):
        self.model, self.config, self.dtype, self.token = model, model.config, model.dtype, token

    def __call__(self, tokens, positions, attend, cache):
        return self.model(tokens, positions, attend, cache)

    def logits(self, hidden):
        logits = self.model.logits(hidden)
        sure = jax.nn.one_hot(self.token, logits.shape[-1])
        return logits + 1e4 * jnp.broadcast_to(sure, logits.shape)


def test_a_draft_longer_than_its_models_rings_is_refused(tiny):
    spec = LayerSpec(kv_heads=2, key_size=16, value_size=16, window=8)
    models = Models(tiny, make_decoder(dataclasses.replace(TINY, layers=(spec,) * 2)))
    params = SamplingParams(max_new_tokens=40)
    state = start_decoding(models, [[1, 2]], params, StepConfig(2, ModelDraft()))
    propose(models, state, StepConfig(2, ModelDraft()))
    with pytest.raises(ValueError, match="gamma=3 does not fit a cache whose rings were made for"):
        propose(models, state, StepConfig(3, ModelDraft()))


@pytest.mark.parametrize(
    ("draft", "gamma", "steps"),
    [
        (NgramDraft(), 8, 16),
        (SelfDraft(), 4, 4),
        (SelfDraft(), "auto", 16),  # gamma may be 0
        (ModelDraft(), None, 4),
        (Chain(NgramDraft(), GuidedDraft()), 12, 4),
    ],
    ids=["ngram", "self", "auto", "model", "chain"],
)
def test_a_chunk_of_a_gpu_has_fewer_steps_where_drafts_take_passes(
    draft, gamma, steps, monkeypatch
):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert usual_steps(draft, gamma) == steps
