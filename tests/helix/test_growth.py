"""Shards grow where they are: each device makes room for its own share, and sends nothing."""

import dataclasses
import re

import jax
import numpy as np
import pytest

import jspec
from jspec import helix
from jspec.cache import StripedLayout
from jspec.cache.cache import _lengthening
from jspec.decode import generation, prefill, rows, runner
from tests.conftest import TINY, make_decoder
from tests.decode.common import NGRAM, prompts
from tests.helix.test_decoding import DRAFTERS, SPARSE

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
TEXTS = prompts((20, 1, 7))
LONG = [jspec.SamplingParams(max_new_tokens=n, seed=n) for n in (9, 50, 30)]
SHARE = jspec.GuidedDraft(
    jspec.policies.Vegas(budget=0.5, least=0)
)  # picks more of a larger capacity
COLLECTIVE = re.compile(r"all-gather|all-to-all|collective-permute|all-reduce|dynamic-slice")


@pytest.fixture(scope="module")
def windowed():
    """A layer with a window, whose ring stays as it is."""
    layers = [dataclasses.replace(TINY.layers[0], window=window) for window in (None, 3)]
    config = dataclasses.replace(TINY, layers=tuple(layers))
    return make_decoder(config, seed=3)


def on_devices(x: jax.Array) -> list[np.ndarray]:
    return [np.asarray(shard.data) for shard in x.addressable_shards]


def test_each_device_keeps_its_slots_and_gets_its_share_of_the_new_ones(windowed):
    """From 32 positions to the 64 that 56 in whole blocks of 8 on two ranks come to."""
    model = helix.shard(windowed, helix.HelixConfig(kvp=2, tpa=2, block=8))
    config = jspec.StepConfig(27, SHARE)  # a ring of as many positions as there are at first
    state = jspec.start_decoding(model, TEXTS, LONG, config, capacity=32, grows=True)
    ring = StripedLayout(32, 2, 8, wraps=True)
    assert state.cache.layouts == (StripedLayout(32, 2, 8), ring)
    columns, picked = state.cache.columns, state.draft.picked[0]
    before = jax.tree.map(on_devices, columns)
    picks = on_devices(picked)
    after = jspec.grow_capacity(state, 56, config)
    assert after.cache.layouts == (StripedLayout(64, 2, 8), ring)
    assert all(x.is_deleted() for x in (*columns[0].values(), picked))
    for name, was in before[0].items():
        now = on_devices(after.cache.columns[0][name])
        assert {x.shape for x in now} == {(3, 32, 1, 16)}
        for old, x in zip(was, now, strict=True):
            np.testing.assert_array_equal(x[:, :16], old)
    for old, x in zip(picks, on_devices(after.draft.picked[0]), strict=True):
        assert x.shape == (3, 28)  # half of the capacity, less than both ranks had together
        np.testing.assert_array_equal(x[:, : old.shape[1]], old)
        assert (x[:, old.shape[1] :] == -1).all()
    for x, y in zip(*(jax.tree.leaves(c[1]) for c in (columns, after.cache.columns)), strict=True):
        assert x is y


def test_nothing_is_sent_and_no_device_holds_another_share():
    """By the compiled program of a column on eight devices."""
    where = helix.HelixConfig(kvp=4, tpa=2).sharding(None, "kvp", "tpa")
    column = jax.ShapeDtypeStruct((2, 64, 2, 8), "float32", sharding=where)
    program = _lengthening(where, size=128, fill=0, axis=1, parts=4).lower(column).compile()
    text = str(program.as_text())
    assert not COLLECTIVE.search(text)
    sizes = {tuple(map(int, size.split(","))) for size in re.findall(r"f32\[([\d,]+)\]", text)}
    assert max(map(np.prod, sizes)) == 2 * 32 * 8  # of one key-value head, 32 of the positions


@pytest.mark.parametrize(
    "draft",
    [
        pytest.param(None, marks=pytest.mark.exhaustive),
        *(
            pytest.param(draft, marks=pytest.mark.slow)
            for draft in (
                NGRAM,
                SHARE,
                jspec.GuidedDraft(dataclasses.replace(SHARE.policy, refresh=1)),
                DRAFTERS["suffix"],
                jspec.SelfDraft(jspec.policies.Hata(bits=64, **SPARSE)),
                jspec.SelfDraft(jspec.policies.Streaming(sinks=2, window=0.3)),
            )
        ),
    ],
    ids=["plain", "ngram", "vegas", "refreshed", "suffix", "hata", "streaming"],
)
def test_a_batch_that_grows_gives_the_tokens_of_one_device(draft, windowed, monkeypatch):
    """From 40 positions over 80 to more than the longest row's 51, with no copy in between."""
    gamma = 0 if draft is None else 3
    run = {"draft": draft, "gamma": gamma, "steps_per_chunk": 2}
    right = jspec.generate(windowed, TEXTS, LONG, **run)
    sizes = []

    def watched(state, capacity, config):
        sizes.append((state.cache.layouts[0].size, capacity))
        return rows.grow_capacity(state, capacity, config)

    monkeypatch.setattr(runner, "grow_capacity", watched)
    monkeypatch.setattr(generation, "START", 12)
    monkeypatch.setattr(prefill, "CAPACITY_STEP", 4)
    sharded = helix.shard(windowed, helix.HelixConfig(kvp=2, tpa=2, block=2))
    grown = jspec.generate(sharded, TEXTS, LONG, **run)
    assert grown.tokens == right.tokens
    assert sizes == [(40, 52)]
