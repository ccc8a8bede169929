"""A guided draft's layer of one token as one operation: the parts' bits, and what keeps to them."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cache import PagedLayout, StripedLayout
from jspec.dispatch import Backends, named_backend
from jspec.ops.attention.appended import PARTS, rotate_append_attend
from jspec.policies import Guided, Vegas
from jspec.policies import guided as module
from jspec.policies.guided import Guidance
from jspec.policies.policy import create_cache
from tests.parameters import default_run
from tests.policies.common import BATCH, CAPACITY, LENGTHS, SPEC, random
from tests.policies.test_hata import AT, SPECS, assert_same, cache_of, pass_of

POLICY = Vegas(budget=5, least=0)


def guidance(policy, specs=SPECS) -> Guidance:
    """Random positions below `LENGTHS` for each layer that selects, -1 in the place of some."""
    rng, read = np.random.default_rng(0), []
    for layer, leader in enumerate(policy.leaders(specs)):
        lists = [rng.permutation(max(n, 6))[:6] for n in LENGTHS for _ in range(2)]
        positions = np.where(lists < LENGTHS.repeat(2)[:, None], lists, -1).reshape(BATCH, 2, 6)
        positions = jnp.asarray(positions if policy.per_head else positions[:, 0], jnp.int32)
        read.append(positions if leader == layer else None)
    return Guidance(tuple(read), jnp.full((BATCH, 1), -1, jnp.int32))


def guided_pass(policy=POLICY, **settings):
    cache = settings.setdefault("cache", cache_of(policy))
    return pass_of(policy, policy_params=guidance(policy, cache.specs), **settings)


@pytest.fixture
def calls(monkeypatch):
    """The backend that was named for each call of `rotate_append_attend` by the policy."""
    implementations = []

    def watched(*arguments, **settings):
        implementations.append(named_backend("rotate_append_attend"))
        return rotate_append_attend(*arguments, **settings)

    monkeypatch.setattr(module, "rotate_append_attend", watched)
    return implementations


def in_parts(monkeypatch, *arguments, **settings):
    monkeypatch.setattr(Guided, "attend_token", lambda *_: None)
    return guided_pass(*arguments, **settings)


SOME: dict[str, dict[str, Any]] = {
    "plain": {},
    "per-head": {"per_head": True},
    "served": {"every": 2},
    "dense-first": {"dense_layers": 1},
}


@pytest.mark.parametrize("change", default_run(list(SOME), "plain", "per-head", "served"))
def test_it_gives_the_bits_of_its_parts(change, calls, monkeypatch):
    """Outputs, selections, keys and values; two layers, one with a scale and a soft cap."""
    policy = dataclasses.replace(POLICY, **SOME[change])
    fused = guided_pass(policy)
    results = [fused(positions) for positions in AT.values()]
    assert calls == [None] * (1 if change in ("served", "dense-first") else 2)
    expected = in_parts(monkeypatch, policy)
    for positions, result in zip(AT.values(), results, strict=True):
        assert_same(result, expected(positions))
        for out, _ in result[0]:
            assert np.isfinite(np.asarray(out)[np.asarray(positions)[:, 0] >= 0]).all()


def test_sinks_and_a_projection_follow(calls, monkeypatch):
    settings = {"attend_settings": {"sinks": random(4, seed=8), "up": random(4, 4, 5, seed=9)}}
    got = guided_pass(**settings)(AT["first"])
    assert calls == [None, None]
    assert_same(got, in_parts(monkeypatch, **settings)(AT["first"]))


def test_a_named_backend_runs(calls):
    guided_pass(backends=Backends(rotate_append_attend="xla"))(AT["first"])
    assert calls == ["xla", "xla"]


def of_layout(layout):
    cache = create_cache(POLICY, [SPEC], [layout], BATCH, jnp.float32)
    return dataclasses.replace(cache, lengths=jnp.asarray(LENGTHS))


def in_blocks():
    """One block a row, so that the columns have the shape of those of rows, in another order."""
    cache = of_layout(PagedLayout(CAPACITY, BATCH, CAPACITY))
    return dataclasses.replace(cache, table=jnp.array([[2], [0], [1]], jnp.int32))


NOT_ONE: dict[str, Any] = {
    **{part: lambda part=part: {"backends": Backends({part: "xla"})} for part in PARTS},
    "blocks": lambda: {"cache": in_blocks()},
    "striped": lambda: {"cache": of_layout(StripedLayout(CAPACITY, 3, 2))},
    "two-tokens": dict,
    "not-joined": lambda: {"joined": False},
    "rotated": lambda: {"attend_settings": {"qk_rope": None}},
}


@pytest.mark.parametrize("name", NOT_ONE)
def test_what_the_operation_does_not_do_runs_in_parts(name, calls):
    tokens = np.arange(2 if name == "two-tokens" else 1)
    guided_pass(**NOT_ONE[name]())(LENGTHS[:, None] + tokens)
    assert calls == []
