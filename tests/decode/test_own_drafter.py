"""A drafter of the user's own, by public names alone: lossless wherever jspec decodes."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import jspec
from jspec import helix, policies
from tests.decode.common import prompts
from tests.parameters import default_run

NEW = jspec.SamplingParams(max_new_tokens=20)
TEXTS = prompts((40, 1, 17, 6))


@dataclasses.dataclass(frozen=True)
class Bigrams(jspec.Drafter):
    """Drafts what last followed each token; its state is a table int32 ``[B, V]``."""

    traits = jspec.DrafterTraits(default_gamma=3, runs_on_mesh=True)

    def init(self, models, batch, capacity, max_gamma):
        return jnp.zeros((batch, models.target.config.vocab_size), jnp.int32)

    def sync(self, models, drafter_state, tokens, lengths, max_tokens):
        follows = jnp.arange(1, tokens.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
        rows = jnp.arange(len(tokens))[:, None]
        before = jnp.where(follows, tokens[:, :-1], drafter_state.shape[1])
        return drafter_state.at[rows, before].set(tokens[:, 1:], mode="drop")

    def draft(self, models, state, gamma):
        tokens = [state.last_token[:, None]]
        for _ in range(gamma):
            tokens.append(jnp.take_along_axis(state.draft, tokens[-1], axis=1))
        lengths = jnp.full(len(state.lengths), gamma, jnp.int32)
        return jspec.Drafted(jnp.concatenate(tokens[1:], axis=1), lengths), state

    def learn(self, state, target_pass, verified):
        table = self.sync(None, state.draft, state.tokens, state.cache.lengths, 0)
        return dataclasses.replace(state, draft=table)


@pytest.fixture(scope="module")
def plain(sharp):
    return jspec.generate(sharp, TEXTS, NEW, draft=None).tokens


def test_it_is_lossless_on_one_device(sharp, plain):
    got = jspec.generate(sharp, TEXTS, NEW, draft=Bigrams())
    assert got.tokens == plain
    assert got.stats.accepted > 10


@pytest.mark.parametrize("gamma", default_run([2, "auto"], "2"))
def test_it_is_lossless_in_an_engine(gamma, sharp, plain):
    """After a shared prefix too, whose state the request starts from."""
    sizes = {"slots": 2, "capacity": 64, "prefill_chunk": 8, "steps_per_chunk": 2}
    engine = jspec.Engine(sharp, draft=Bigrams(), gamma=gamma, **sizes)
    engine.share_prefix(TEXTS[0][:9])
    requests = [engine.submit(text, NEW) for text in TEXTS]
    assert tuple(tuple(request.result()) for request in requests) == plain
    assert engine.stats.accepted > 5


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_it_is_lossless_on_a_mesh(sharp, plain):
    model = helix.shard(sharp, helix.HelixConfig(kvp=2, tpa=2, block=4))
    got = jspec.generate(model, TEXTS, NEW, draft=Bigrams())
    assert got.tokens == plain
    assert got.stats.accepted > 10


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_one_that_does_not_say_so_is_refused_on_a_mesh(sharp):
    class Elsewhere(Bigrams):
        traits = jspec.DrafterTraits()

    model = helix.shard(sharp, helix.HelixConfig(kvp=2))
    with pytest.raises(ValueError, match=r"as its traits\.runs_on_mesh is False"):
        jspec.generate(model, TEXTS, NEW, draft=Elsewhere())


WRONG = {
    "few-tokens": (
        lambda d, s: (dataclasses.replace(d, tokens=d.tokens[:, 1:]), s),
        "tokens int32",
    ),
    "floats": (
        lambda d, s: (dataclasses.replace(d, tokens=d.tokens.astype(jnp.float32)), s),
        r"tokens float32 \(4, 3\); must be int32 \(4, 3\)",
    ),
    "one-length": (
        lambda d, s: (dataclasses.replace(d, lengths=d.lengths[:1]), s),
        "lengths int32",
    ),
    "no-state": (lambda d, s: d, r"must return \(Drafted, DecodeState\), not Drafted"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_draft_of_another_shape_is_refused_by_name(name, sharp):
    change, message = WRONG[name]

    class Wrong(Bigrams):
        def draft(self, models, state, gamma):
            return change(*super().draft(models, state, gamma))

    with pytest.raises(TypeError, match=rf"Wrong\.draft .*{message}"):
        jspec.generate(sharp, TEXTS, NEW, draft=Wrong())


def test_a_state_without_the_batch_axis_is_refused_by_name(sharp):
    """In an engine as in `generate`, which need not insert rows into it."""

    class Counter(Bigrams):
        def init(self, models, batch, capacity, max_gamma):
            return super().init(models, batch, capacity, max_gamma), jnp.int32(0)

    message = r"Counter\.init returned an array of shape \(\); each must begin with the batch axis"
    with pytest.raises(ValueError, match=message):
        jspec.generate(sharp, TEXTS, NEW, draft=Counter())
    with pytest.raises(ValueError, match=message):
        jspec.Engine(sharp, slots=2, capacity=64, draft=Counter())


class NoLearning(Bigrams):
    def learn(self, state, target_pass, verified):
        return state.draft


class NoSelection(policies.Policy):
    def select(self, policy_params, layer, cache, q, context_len, budget_share=1.0):
        return context_len[:, None]


class Undrafted(jspec.Drafter):
    pass


class Unselected(policies.Policy):
    pass


class Unscored(policies.ScoredPolicy):
    pass


UNSCORED = Unscored(budget=20, dense_layers=0)


@pytest.mark.parametrize(
    ("draft", "error", "message"),
    [
        (NoLearning(), TypeError, "NoLearning.learn must return a DecodeState, not "),
        (jspec.Chain(NoLearning(), jspec.SelfDraft()), TypeError, "NoLearning.learn must return"),
        (jspec.SelfDraft(NoSelection()), TypeError, "NoSelection.select must return a Selection"),
        (Undrafted(), NotImplementedError, "Undrafted must have a method draft(models, state"),
        (jspec.SelfDraft(Unselected()), NotImplementedError, "Unselected must have a method sele"),
        (jspec.SelfDraft(UNSCORED), NotImplementedError, "Unscored must have a method score("),
    ],
)
def test_what_a_method_lacks_is_named(draft, error, message, sharp):
    with pytest.raises(error, match=re.escape(message)):
        jspec.generate(sharp, TEXTS, NEW, draft=draft)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jspec.SelfDraft(Unscored), "policy=Unscored is a class; pass one of it, Unsc"),
        (lambda: jspec.SelfDraft("quest"), "policy='quest' must be a policy; pass jspec.poli"),
        (lambda: jspec.GuidedDraft(policies.Vegas), "policy=Vegas is a class; pass one of it"),
        (lambda: jspec.Chain(Bigrams, jspec.SelfDraft()), "first=Bigrams is a class; pass one"),
        (lambda: jspec.Chain(Bigrams(), jspec.SelfDraft), "second=SelfDraft is a class; pass"),
        (lambda: jspec.StepConfig(0, jspec.NoDraft(), target=Unscored), "target=Unscored is a"),
        (lambda: policies.prepare_params(Unscored, None), "policy=Unscored is a class; pass one"),
    ],
)
def test_a_class_in_place_of_one_of_it_is_named(make, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        make()
