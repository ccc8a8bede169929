"""Policies as lossy decoders: the model reads what was selected, and nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cache import Cache, LinearLayout
from jspec.config import SamplingParams
from jspec.decode import generation, prefill
from jspec.decode.draft import NgramDraft, NoDraft, SelfDraft
from jspec.decode.generation import generate
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.decode.step import decode_chunk
from jspec.policies import Dense, ExactTopK, Loki, Policy, Quest, Selection, Streaming
from jspec.policies.attend import run_selected
from jspec.policies.pass_state import PassState
from jspec.policies.policy import with_pages
from tests.conftest import TINY, make_decoder
from tests.decode.common import prompts, requests
from tests.parameters import default_run
from tests.policies import reference
from tests.policies.common import MATRIX, SharedTopK, arrays_of, random
from tests.policies.test_selection import per_head

NEW = 5
# One page of four is chosen by its score, in every layer.
QUEST = Quest(budget=16, page=4, sinks=1, recent=2, dense_layers=0)


@pytest.fixture(scope="module")
def wandering():
    """Three layers whose text depends on what attention reads."""
    config = dataclasses.replace(TINY, layers=(TINY.layers[0],) * 3)
    return make_decoder(config, seed=3, head=8.0)


def brute_force(model, prompt, new: int, read) -> list[int]:
    """Greedy decoding without a cache of jspec's: ``read(layer, keys, queries)`` gives, per KV
    head, the positions that the last token reads; those of the prompt before it read all."""
    keys = [np.zeros((0, 2, 16)) for _ in model.config.layers]
    values, text = list(keys), list(prompt)

    def attend(layer, q, k, v, cache):
        position, queries = len(keys[layer]), np.float64(q[0, 0])
        keys[layer] = np.concatenate([keys[layer], np.float64(k[0])])
        values[layer] = np.concatenate([values[layer], np.float64(v[0])])
        out = np.zeros((4, 16))
        for head in range(4):
            group, positions = head // 2, list(range(position + 1))
            if position + 1 >= len(prompt):
                chosen = read(layer, keys[layer][:position, group], queries[2 * group :][:2], group)
                positions = positions if chosen is None else [*chosen, position]
            scores = keys[layer][positions, group] @ queries[head] / 4
            weights = np.exp(scores - scores.max())
            out[head] = weights / weights.sum() @ values[layer][positions, group]
        return jnp.asarray(out[None, None], q.dtype), cache

    # A token at a time: passes of one shape.
    for at in range(len(prompt) + new - 1):
        position = jnp.full((1, 1), at, jnp.int32)
        hidden, _ = model(jnp.full((1, 1), text[at], jnp.int32), position, attend, None)
        if at + 1 == len(text):
            text.append(int(model.logits(hidden)[0, 0].argmax()))
    return text[len(prompt) :]


TEXTS = prompts((30, 7), seed=5)


@pytest.fixture(scope="module")
def dense(wandering):
    """What is decoded where all there is is read."""
    return [tuple(brute_force(wandering, text, NEW, lambda *_: None)) for text in TEXTS]


# What the others select: `tests.policies.test_selection`.
REPEATED = ("exact_topk", "magicpig")


@pytest.mark.parametrize(
    "name",
    default_run(list(reference.SCORES), "quest", slow=REPEATED),
)
def test_it_decodes_as_brute_force_over_the_selection_does(name, wandering, dense):
    """The first layer reads all there is, the others what the paper's formula selects."""
    policy = dataclasses.replace(MATRIX[name], dense_layers=1)
    policy_params = arrays_of(policy, wandering.config.layers)

    def read(layer, keys, queries, group):
        if layer < 1:
            return None
        sample = np.float64(random(64, 2, 16, seed=7 + layer))[:, group] + 0.5
        matrices = None if policy_params is None else per_head(policy_params[layer], group)
        return reference.selected(name, policy, matrices, keys, queries, sample)

    expected = [tuple(brute_force(wandering, text, NEW, read)) for text in TEXTS]
    got = generate(
        wandering,
        TEXTS,
        SamplingParams(max_new_tokens=NEW),
        draft=None,
        target=policy,
        policy_params=policy_params,
        prefill_chunk=16,
    )
    assert list(got.tokens) == expected
    assert expected != dense, "the case is too easy: reading all there is decodes the same"


@pytest.mark.parametrize(
    "policy",
    [Streaming(sinks=0, window=100), dataclasses.replace(MATRIX["hata"], budget=1.0)],
    ids=["streaming", "hata"],
)
def test_with_room_for_all_it_is_plain_decoding(policy, tiny):
    plain = generate(tiny, prompts(), requests(), draft=None)
    policy_params = arrays_of(policy, tiny.config.layers)
    got = generate(
        tiny, prompts(), requests(), draft=None, target=policy, policy_params=policy_params
    )
    assert got.tokens == plain.tokens


@pytest.mark.exhaustive
def test_a_request_alone_gets_what_it_gets_among_others(tiny):
    settings = {"draft": None, "target": QUEST}
    whole = generate(tiny, prompts(), requests(), **settings)
    for row in (0, 3):
        alone = generate(
            tiny, prompts()[row : row + 1], requests()[row], prefill_chunk=5, **settings
        )
        assert alone.tokens == whole.tokens[row : row + 1]


def test_a_batch_that_grows_keeps_its_pages(tiny, monkeypatch):
    """From 12 positions over 24 to 44, of pages of 5, as if there had been room from the start."""
    settings = {"draft": None, "target": dataclasses.replace(QUEST, budget=20, page=5)}
    settings |= {"params": SamplingParams(max_new_tokens=40), "steps_per_chunk": 2}
    whole = generate(tiny, prompts((3, 4)), **settings)
    monkeypatch.setattr(generation, "START", 12)
    monkeypatch.setattr(prefill, "CAPACITY_STEP", 4)
    assert generate(tiny, prompts((3, 4)), **settings).tokens == whole.tokens


def test_a_slot_takes_over_pages_with_its_request(tiny):
    config = StepConfig(0, NoDraft(), target=QUEST)
    params = SamplingParams(max_new_tokens=8)
    first, other = prompts((40, 31))
    state = start_decoding(tiny, [first, first], params, config)
    state = prefill.fill_slot(tiny, state, 1, other, params, config)
    state, record = decode_chunk(tiny, state, config, 8)
    alone = generate(tiny, [first, other], params, draft=None, target=config.target)
    got = np.asarray(record.tokens)[..., 0]
    assert [tuple(got[:, row].tolist()) for row in (0, 1)] == list(alone.tokens)
    # Steps have folded what they committed, as one pass over all of it does.
    whole = jax.jit(lambda cache, n: with_pages(config.target, None, cache, 0 * n, n, 256).pages)
    pages = whole(state.cache, state.cache.lengths)
    assert [set(layer_pages) for layer_pages in pages] == [{"low", "high"}]
    jax.tree.map(np.testing.assert_array_equal, pages, state.cache.pages)


@pytest.mark.exhaustive
def test_a_selection_serves_several_layers():
    """Every second layer after the first selects; one with a window is read whole."""
    scored = []

    @dataclasses.dataclass(frozen=True)
    class Watched(SharedTopK):
        def score(self, policy_params, layer, cache, q):
            scored.append(layer)
            return super().score(policy_params, layer, cache, q)

    windows = (None, None, 3, None, None, None, None)
    layers = tuple(dataclasses.replace(TINY.layers[0], window=w) for w in windows)
    model = make_decoder(dataclasses.replace(TINY, layers=layers), seed=3)
    config = StepConfig(0, NoDraft(), target=Watched(dense_layers=1, every=2))
    params = SamplingParams(max_new_tokens=8)
    state = start_decoding(model, prompts((30, 7)), params, config)
    tokens, positions = state.last_token[:, None], state.cache.lengths[:, None]
    run = jax.jit(run_selected, static_argnums=5, static_argnames="policy")
    context_len = state.cache.lengths
    hidden, *_ = run(model, tokens, positions, state.cache, context_len, 1, policy=config.target)
    # Layer 0 is dense; 1 serves 3, 2 being windowed; 4 serves 5; 6 begins again.
    assert scored == [1, 4, 6]
    always = dataclasses.replace(config.target, every=1)
    each, *_ = run(model, tokens, positions, state.cache, context_len, 1, policy=always)
    assert scored[3:] == [1, 3, 4, 5, 6]
    assert not np.array_equal(hidden, each)


def test_a_selection_per_head_serves_layers_of_as_many_heads():
    spec = TINY.layers[0]
    specs = [spec, spec, dataclasses.replace(spec, kv_heads=4)]
    cache = Cache.create(specs, [LinearLayout(8)] * 3, 1, jnp.float32)
    per_head, shared = (jnp.zeros(shape, jnp.int32) for shape in ((1, 2, 3), (1, 3)))
    for positions, serves in ((per_head, [True, False]), (shared, [True, True])):
        state = PassState(cache).after_layer(cache, Selection(positions, num_layers=3))
        assert [state.shared_positions(layer) is not None for layer in (1, 2)] == serves


@dataclasses.dataclass(frozen=True)
class EvenPositions(Policy):
    """Every second position, whatever the layer and the query."""

    num_layers: int = 1

    def select(self, policy_params, layer, cache, q, context_len, budget_share=1.0):
        positions = jnp.arange(0, cache.layouts[layer].capacity, 2, dtype=jnp.int32)[None]
        selected = jnp.where(positions < context_len[:, None], positions, -1)
        return Selection(selected, num_layers=self.num_layers)


def test_a_shared_selection_is_read_as_one_of_the_layer_itself():
    model = make_decoder(dataclasses.replace(TINY, layers=TINY.layers[:1] * 2), seed=3)
    config = StepConfig(0, NoDraft(), target=EvenPositions())
    state = start_decoding(model, prompts((30, 7)), SamplingParams(max_new_tokens=8), config)
    tokens, context_len = state.last_token[:, None], state.cache.lengths
    positions = context_len[:, None]

    def hidden(policy):
        run = jax.jit(run_selected, static_argnums=5, static_argnames="policy")
        return run(model, tokens, positions, state.cache, context_len, 1, policy=policy)[0]

    np.testing.assert_array_equal(hidden(EvenPositions(2)), hidden(EvenPositions(1)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": 4, "draft": NgramDraft()}, "selects for one token at a time"),
        ({"gamma": 2, "draft": NoDraft()}, "selects for one token at a time"),
    ],
    ids=["draft", "gamma"],
)
def test_a_draft_beside_it_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        StepConfig(**settings, target=ExactTopK())
    assert not StepConfig(**settings, target=Dense()).is_lossy


@pytest.mark.parametrize(
    ("target", "message"),
    [("quest", "must be a policy"), (Quest, r"is a class; pass one of it, Quest\(\)")],
    ids=["name", "class"],
)
def test_what_is_no_policy_is_refused(target, message):
    with pytest.raises(TypeError, match=message):
        StepConfig(0, NoDraft(), target=target)


def test_a_cache_that_was_started_for_another_policy_is_refused(tiny):
    state = start_decoding(tiny, prompts((9,)), config=StepConfig(0, NoDraft()))
    config = StepConfig(0, NoDraft(), target=MATRIX["hata"])
    models = Models(tiny, policy=arrays_of(config.target, tiny.config.layers))
    with pytest.raises(ValueError, match=r"layer 0 keeps \['keys', 'values'\] and no \['codes'\]"):
        decode_chunk(models, state, config, 1)


def test_a_policy_without_its_arrays_is_refused(tiny):
    config = StepConfig(3, SelfDraft(Loki()))
    with pytest.raises(ValueError, match=r"Loki needs parameters; pass jspec\.Models"):
        start_decoding(tiny, prompts(), config=config)
    with pytest.raises(ValueError, match="loki needs the keys of a sample text"):
        generate(tiny, prompts(), draft=SelfDraft(Loki()))
