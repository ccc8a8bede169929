"""A user's own policy, by public names alone: lossless drafts on one device and on a mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jspec
from jspec import helix
from tests.decode.common import prompts

PARAMS = jspec.SamplingParams(max_new_tokens=16)


@dataclasses.dataclass(frozen=True)
class EveryFourth(jspec.policies.Policy):
    """Every fourth position, and the last ones."""

    runs_on_mesh = True

    recent: int = 1

    def select(self, policy_params, layer, cache, q, context_len, budget_share=1.0):
        position = jnp.arange(cache.layouts[layer].capacity, dtype=jnp.int32)[None]
        end = context_len[:, None]
        is_read = (position % 4 == 0) | (position >= end - self.recent)
        return jspec.policies.Selection(jnp.where(is_read & (position < end), position, -1))


@pytest.fixture(scope="module")
def plain(sharp):
    return jspec.generate(sharp, prompts()[:2], PARAMS, draft=None)


def assert_lossless(model, plain):
    draft = jspec.SelfDraft(EveryFourth())
    got = jspec.generate(model, prompts()[:2], PARAMS, draft=draft, gamma=2)
    assert got.tokens == plain.tokens
    assert got.stats.acceptance_rate > 0.4


def test_drafts_by_a_policy_of_the_user_are_lossless(sharp, plain):
    assert_lossless(sharp, plain)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
def test_drafts_by_a_policy_of_the_user_are_lossless_on_a_mesh(sharp, plain):
    assert_lossless(helix.shard(sharp, helix.HelixConfig(kvp=2, block=4)), plain)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_a_policy_of_the_user_that_does_not_run_on_a_mesh_is_refused(sharp):
    class Local(EveryFourth):
        runs_on_mesh = False

    model = helix.shard(sharp, helix.HelixConfig(kvp=2, block=4))
    with pytest.raises(ValueError, match=r"Local\(recent=1\) does not run on the mesh"):
        jspec.generate(model, prompts()[:1], PARAMS, draft=jspec.SelfDraft(Local()))


def test_scores_of_another_shape_are_refused_by_name(sharp):
    @dataclasses.dataclass(frozen=True)
    class Wrong(jspec.policies.ScoredPolicy):
        budget: int = 20
        dense_layers: int = 0

        def score(self, policy_params, layer, cache, q):
            return jnp.zeros((len(q), 3))

    with pytest.raises(ValueError, match=r"Wrong\.score returned \(1, 3\).*a score for each of"):
        jspec.generate(sharp, prompts()[:1], PARAMS, draft=jspec.SelfDraft(Wrong()))
