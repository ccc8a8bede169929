"""Drafts that are trees: the tokens of plain decoding, whatever the tree and the layers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.config import SamplingParams
from jspec.decode import step as step_module
from jspec.decode.draft import Chain, NgramDraft, SelfDraft
from jspec.decode.draft.lookup import DECAY, agreement, continuations
from jspec.decode.engine import Engine
from jspec.decode.generation import generate
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.step import speculative_step
from tests.conftest import make_decoder
from tests.decode.common import DRAFT_LIMITS, MIXED, NEW, prompts
from tests.decode.test_windows import CONFIG

TREE = NgramDraft(min_match=1, max_match=4, branches=6)
SHAPES = 7  # of trees that take turns
NODES = 11


@dataclasses.dataclass(frozen=True)
class Known(jspec.Drafter):
    """Random trees in which one path, or a part of it, is what the row is known to go on with.

    ``texts``: prompts and answers of the rows, -1 after them.
    """

    traits = jspec.DrafterTraits(
        default_gamma=NODES, one_hot=True, branches=True, runs_on_mesh=True
    )

    texts: tuple[tuple[int, ...], ...]

    def draft(self, models, state, gamma):
        rng = np.random.default_rng(gamma)
        parents = np.stack([rng.integers(0, i + 1, SHAPES) for i in range(gamma)], axis=1)
        depths, offsets = np.ones((2, SHAPES, gamma), int)
        for row, i in np.ndindex(parents.shape):
            parent = parents[row, i]
            depths[row, i] += depths[row, parent - 1] if parent else 0
            siblings = parents[row, :i] == parent
            is_taken = (offsets[row, :i][siblings] == 0).any()
            # 0 for the known token, else another one for each sibling.
            offsets[row, i] = 0 if not is_taken and rng.random() < 0.6 else i + 1
        shape = state.lengths % SHAPES
        parents, depths, offsets = (
            jnp.asarray(x, jnp.int32)[shape] for x in (parents, depths, offsets)
        )
        texts = jnp.asarray(self.texts, jnp.int32)
        at = jnp.minimum(state.lengths[:, None] + depths - 1, texts.shape[1] - 1)
        known = jnp.take_along_axis(texts, at, axis=1)
        tokens = (known + offsets) % models.target.config.vocab_size
        lengths = jnp.full(len(tokens), gamma, jnp.int32)
        return jspec.Drafted(tokens, lengths, parents=parents), state


@pytest.fixture(scope="module")
def layered():
    """Rings for windows, a whole layer with a soft cap, and attention sinks."""
    model = make_decoder(dataclasses.replace(CONFIG, sinks=True), seed=4, embedding=30.0, head=4.0)
    for layer in model.layers:
        layer.attention.sinks[...] = jnp.linspace(-1.0, 2.0, 4)
    return model


PARAMS = [
    SamplingParams(new, draft_limit=limit, seed=100 + row, **settings)
    for row, (new, limit, settings) in enumerate(zip(NEW, DRAFT_LIMITS, MIXED, strict=True))
]


@pytest.fixture(scope="module")
def plain(layered):
    return generate(layered, prompts(), PARAMS, draft=None).tokens


def known(answers, texts=None) -> Known:
    pairs = zip(prompts() if texts is None else texts, answers, strict=True)
    texts = [[*text, *tokens] for text, tokens in pairs]
    longest = max(map(len, texts))
    return Known(tuple(tuple(text + [-1] * (longest - len(text))) for text in texts))


def test_any_tree_gives_the_tokens_of_plain_decoding(layered, plain):
    """Greedily and sampled, by windows, soft caps and sinks, with limits of rows and drafts."""
    got = generate(layered, prompts(), PARAMS, draft=known(plain))
    assert got.tokens == plain
    rates = got.stats.acceptance_by_position
    assert len(rates) == NODES
    assert rates[0].accepted > 50
    assert rates[2].accepted > 10
    assert got.stats.mean_accepted_length > 1.8


@pytest.mark.exhaustive
def test_without_packing_it_does_not(layered, plain, monkeypatch):
    monkeypatch.setattr(step_module, "pack", lambda cache, *rest: cache)
    # Another gamma is another program, which is traced now.
    got = generate(layered, prompts(), PARAMS, draft=known(plain), gamma=NODES - 1)
    assert got.tokens != plain


@pytest.mark.slow
def test_a_bonus_number_of_another_position_is_seen(layered, plain, monkeypatch):
    """Nodes take the number of their place among the nodes, not of their position."""
    right = step_module._target_tokens

    def wrong(state, logits, axis_name, depths):
        index = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
        return right(state, logits, axis_name, index)

    monkeypatch.setattr(step_module, "_target_tokens", wrong)
    got = generate(layered, prompts(), PARAMS, draft=known(plain), gamma=NODES - 2)
    assert got.tokens != plain


@pytest.mark.exhaustive
def test_ngram_trees_in_an_engine(sharp):
    """With log-probabilities, which are those of the nodes of the path."""
    params = [dataclasses.replace(p, draft_limit=None, logprobs=1) for p in PARAMS[:5]]
    results = []
    for draft in (None, TREE):
        engine = Engine(sharp, slots=3, capacity=128, draft=draft, gamma=draft and 9, logprobs=1)
        pairs = zip(prompts()[:5], params, strict=True)
        requests = [engine.submit(text, p) for text, p in pairs]
        engine.run()
        results.append(requests)
    assert sum(x.steps for x in results[1]) < 0.7 * sum(x.steps for x in results[0])
    for one, other in zip(*results, strict=True):
        assert one.tokens == other.tokens
        for scores in ("model", "sampling"):
            pair = (getattr(x.logprobs, scores).logprobs for x in (one, other))
            np.testing.assert_allclose(*pair, atol=3e-5)


def test_logits_processors_take_the_first_path(sharp):
    params = SamplingParams(24, repetition_penalty=1.3, temperature=0.7, seed=5)
    want = generate(sharp, prompts()[:3], params, draft=None).tokens
    got = generate(sharp, prompts()[:3], params, draft=TREE, gamma=5)
    assert got.tokens == want
    assert got.stats.accepted > 0


def test_a_chain_of_drafters_takes_the_first_path(sharp):
    texts, params = prompts()[:3], SamplingParams(24)
    want = generate(sharp, texts, params, draft=None).tokens
    chain = Chain(TREE, SelfDraft(jspec.policies.Streaming(sinks=2, window=6)), inner=3, rounds=2)
    assert generate(sharp, texts, params, draft=chain).tokens == want


# What an n-gram tree has


def paths_of(drafted, row: int) -> list[tuple[int, ...]]:
    """The path of each node of a row, whose parents must come before it."""
    paths = [()]
    tokens, parents = np.asarray(drafted.tokens)[row], np.asarray(drafted.parents)[row]
    for i in range(int(drafted.lengths[row])):
        assert 0 <= parents[i] <= i
        paths.append((*paths[parents[i]], int(tokens[i])))
    return paths[1:]


def weights_of(text: list[int], agreed: list[int], branches: int, gamma: int):
    """The weight of every beginning of what followed the longest matches, the latest of equals."""
    matches = sorted((-length, -end) for end, length in enumerate(agreed) if length)[:branches]
    weights: dict[tuple[int, ...], float] = {}
    for length, end in ((-a, -b) for a, b in matches):
        period = max(len(text) - 1 - end, 1)
        path = tuple(text[end + 1 + i % period] for i in range(gamma))
        for depth in range(gamma):
            weight = 2.0 ** (length + matches[0][0]) * DECAY**depth
            weights[path[: depth + 1]] = weights.get(path[: depth + 1], 0) + weight
    return weights, matches


@pytest.mark.parametrize(("branches", "gamma"), [(3, 5), (16, 15)])
def test_a_tree_has_the_likeliest_continuations(branches, gamma):
    rng, capacity = np.random.default_rng(branches), 40
    texts = [rng.integers(0, 3, n).tolist() for n in (40, 23, 2, 1, 12, 33)]
    rows = np.full((len(texts), capacity), -1, np.int32)
    for line, text in zip(rows, texts, strict=True):
        line[: len(text)] = text
    ends = jnp.array([len(text) for text in texts], jnp.int32)
    agreed = agreement(jnp.asarray(rows), jnp.zeros_like(ends), ends, 8)
    run = jax.jit(continuations, static_argnums=(3, 4))
    drafted = run(jnp.asarray(rows), ends, agreed, gamma, branches)
    branched = 0
    for row, text in enumerate(texts):
        weights, matches = weights_of(text, np.asarray(agreed)[row].tolist(), branches, gamma)
        paths = paths_of(drafted, row)
        assert len(set(paths)) == len(paths) == min(gamma, len(weights))
        if not paths:
            continue
        lightest = min(weights[path] for path in paths)
        assert lightest >= max([0, *(w for p, w in weights.items() if p not in paths)]) - 1e-5
        # What followed the longest match comes first.
        end, period = -matches[0][1], max(len(text) - 1 + matches[0][1], 1)
        first = int(drafted.first_path.lengths[row])
        assert list(paths[first - 1]) == [text[end + 1 + i % period] for i in range(first)]
        branched += first < len(paths)
    assert branched >= 3


def test_what_cannot_be_a_tree_is_refused(tiny):
    with pytest.raises(ValueError, match="branches=0 must be at least 1"):
        NgramDraft(branches=0)
    assert TREE.traits.branches
    assert not NgramDraft().traits.branches

    def step(draft, gamma, **settings):
        config = StepConfig(gamma, draft, **settings)
        state = start_decoding(tiny, prompts()[:1], SamplingParams(8), config, capacity=64)
        return speculative_step.lower(tiny, state, config=config)

    with pytest.raises(ValueError, match="gamma=32 is over 31, the most draft tokens of a tree"):
        step(TREE, 32)

    class WithLogits(NgramDraft):
        def draft(self, models, state, gamma):
            drafted, state = super().draft(models, state, gamma)
            logits = jnp.zeros((*drafted.tokens.shape, 41))
            return dataclasses.replace(drafted, logits=logits), state

    with pytest.raises(ValueError, match="drafts a tree, but it has logits, and the tokens"):
        step(WithLogits(branches=2), 4)
