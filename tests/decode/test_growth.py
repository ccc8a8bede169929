"""Capacity that follows the context: the same tokens, few copies, nothing held twice."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cache import LinearLayout, RingLayout, StripedLayout
from jspec.config import SamplingParams
from jspec.decode import generation, prefill, runner
from jspec.decode.draft import ModelDraft, NgramDraft
from jspec.decode.generation import first_capacity, generate
from jspec.decode.prefill import start_decoding
from jspec.decode.rows import grow_capacity
from jspec.decode.settings import PLAIN, StepConfig
from jspec.policies import Quest
from jspec.policies.policy import create_cache
from tests.conftest import TINY, make_decoder
from tests.decode.common import prompts

PROMPTS = prompts((3, 5))
PARAMS = [
    SamplingParams(max_new_tokens=41, seed=1),
    SamplingParams(max_new_tokens=9, seed=2, temperature=1.0),
]


def test_a_batch_that_grows_gives_the_same_tokens(sharp, other, monkeypatch):
    """From 12 positions over 24 to the 44 that the longest row needs, the draft's cache too."""
    drafted = {"draft": ModelDraft(), "draft_model": other}
    run = functools.partial(generate, sharp, PROMPTS, PARAMS, steps_per_chunk=2, **drafted)
    whole = run()
    grown_sizes = []

    def watched(state, capacity, config):
        grown_sizes.append((state.tokens.shape[1], capacity))
        return grow_capacity(state, capacity, config)

    monkeypatch.setattr(runner, "grow_capacity", watched)
    monkeypatch.setattr(generation, "START", 12)
    monkeypatch.setattr(prefill, "CAPACITY_STEP", 4)
    grown = run()
    assert grown.tokens == whole.tokens
    assert grown_sizes == [(12, 24), (24, 44)]


def test_it_starts_with_what_is_needed_unless_that_is_far_more_than_the_prompt():
    assert first_capacity(100, 9000) == 9000
    assert first_capacity(100, 100_000) == generation.START
    assert first_capacity(90_000, 100_000) == 100_000
    assert first_capacity(30_000, 100_000) == 60_000


@pytest.fixture(scope="module")
def windowed():
    """A layer with a window of 3 positions between two without."""
    layers = [dataclasses.replace(TINY.layers[0], window=window) for window in (None, 3, None)]
    return make_decoder(dataclasses.replace(TINY, layers=tuple(layers)))


def test_every_column_keeps_its_contents_and_frees_the_old_array(windowed):
    config = StepConfig(5, NgramDraft())  # a ring of more positions than the first capacity
    state = start_decoding(windowed, PROMPTS, PARAMS, config, capacity=8, grows=True)
    assert state.cache.layouts == (LinearLayout(8), RingLayout(9), LinearLayout(8))
    before = jax.tree.map(np.asarray, (state.cache.columns, state.tokens))
    old = jax.tree.leaves((state.cache.columns[0], state.cache.columns[2], state.tokens))
    after = grow_capacity(state, 20, config)
    assert all(x.is_deleted() for x in old)
    assert after.cache.layouts == (LinearLayout(20), RingLayout(9), LinearLayout(20))
    assert after.tokens.shape == (2, 20)
    after_copy = jax.tree.map(np.asarray, (after.cache.columns, after.tokens))
    for was, now in zip(*map(jax.tree.leaves, (before, after_copy)), strict=True):
        np.testing.assert_array_equal(now[:, : was.shape[1]], was)
    assert (after_copy[1][:, 8:] == -1).all()
    same = grow_capacity(after, 20, config)
    assert not any(x.is_deleted() for x in jax.tree.leaves(same))


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_a_sharded_batch_stays_where_it_is(sharp):
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("rows"))
    state = start_decoding(sharp, PROMPTS, PARAMS, PLAIN, capacity=8, grows=True, sharding=sharding)
    after = grow_capacity(state, 16, PLAIN)
    for x in jax.tree.leaves((after.cache.columns, after.tokens)):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)


def test_what_cannot_grow_is_refused(sharp):
    state = start_decoding(sharp, PROMPTS, PARAMS, PLAIN, capacity=8, grows=True)
    with pytest.raises(ValueError, match="capacity=7 must be at least the present one, 8"):
        grow_capacity(state, 7, PLAIN)
    with pytest.raises(ValueError, match=r"capacity=12\.0 must be at least the present one, 8"):
        grow_capacity(state, 12.0, PLAIN)  # pyright: ignore[reportArgumentType]
    quest = Quest(page=4, dense_layers=0)
    paged = create_cache(quest, TINY.layers, [StripedLayout(32, 2)] * 2, 1, jnp.float32)
    with pytest.raises(
        ValueError, match=r"pages of 4 slots cannot grow with StripedLayout\(size=32"
    ):
        paged.grown(64)
    with pytest.raises(ValueError, match=r"needs 5 slots \(prompt\) but capacity=4; raise"):
        start_decoding(sharp, PROMPTS, PARAMS, StepConfig(), capacity=4, grows=True)
