"""NaN in every unused cache slot, from the first on and after each step, changes no bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cache import Cache, LinearLayout
from jspec.config import SamplingParams
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.decode.step import decode_step
from jspec.dispatch import Backends
from jspec.ops.attention.dense import ATTENTION
from tests.decode.common import DRAFT_LIMITS, DRAFTERS, prompts
from tests.parameters import default_run

CAPACITY = 60


def filled(cache: Cache, junk) -> Cache:
    """The cache with ``junk`` in every slot at or past its row's length."""
    assert set(cache.layouts) == {LinearLayout(CAPACITY)}
    unused = jnp.arange(CAPACITY)[None] >= cache.lengths[:, None]

    def fill(x):
        return jnp.where(unused[:, :, None, None], junk, x)

    return dataclasses.replace(cache, columns=jax.tree.map(fill, cache.columns))


@functools.partial(jax.jit, static_argnames="config")
def poisoned_step(models, state, config, junk):
    state, record = decode_step(models, state, config)
    caches = {"cache": filled(state.cache, junk)}
    if state.draft is not None:
        caches["draft"] = filled(state.draft, junk)
    return dataclasses.replace(state, **caches), record


# Every drafter by the reference; every backend by the drafter that attends the most in the cache.
RUNS = [(source, "xla") for source in DRAFTERS]
RUNS += [("dense", name) for name in ATTENTION.never_refusing if name != "xla"]


@pytest.mark.parametrize(
    ("source", "implementation"), default_run(RUNS, "streaming-xla", "dense-xla_blocked")
)
def test_unused_slots_never_reach_an_output(source, implementation, sharp, other, monkeypatch):
    """Half of the rows sample; all end at different times; 60 slots leave none to spare."""
    case = ATTENTION.cases()[0]
    if reason := ATTENTION.backend(implementation).supports(*case.arguments, **case.static):
        pytest.skip(f"{implementation}: {reason}")
    gamma = 0 if source == "plain" else 3
    config = StepConfig(gamma, DRAFTERS[source], Backends(attention=implementation))
    models = Models(sharp, other if source == "model" else None)
    params = [
        SamplingParams(max_new_tokens=8 + row, temperature=row % 2, seed=row, draft_limit=limit)
        for row, limit in enumerate(DRAFT_LIMITS)
    ]

    def run(junk: float):
        def create(cls, *args, **settings):
            return filled(right(*args, **settings), jnp.float32(junk))

        right = Cache.create
        with monkeypatch.context() as patch:
            patch.setattr(Cache, "create", classmethod(create))
            settings = {"capacity": CAPACITY, "chunk": 16}
            state = start_decoding(models, prompts(), params, config, **settings)
        assert state.mode == "sampled"
        assert np.isnan(state.cache.keys(0)).any() == np.isnan(junk)
        for _ in range(15):
            state, _ = poisoned_step(models, state, config, jnp.float32(junk))
        return state

    clean, poisoned = run(0.0), run(np.nan)
    assert clean.done.all()
    if source == "model":  # it has no token that was rejected
        assert (clean.draft.lengths <= clean.cache.lengths).all()
    assert np.isnan(poisoned.cache.keys(0)).any()
    np.testing.assert_array_equal(poisoned.tokens, clean.tokens)
    for expected, got in ((clean.cache, poisoned.cache), (clean.draft, poisoned.draft)):
        if expected is None:
            continue
        np.testing.assert_array_equal(got.lengths, expected.lengths)
        jax.tree.map(np.testing.assert_array_equal, filled(got, 0.0), filled(expected, 0.0))
