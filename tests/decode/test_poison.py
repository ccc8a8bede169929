"""NaN in every unused cache slot, from the first on and after each step, changes no bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cache import KVCache
from jspec.config import ModelDraft, NgramDraft, SamplingParams, StepConfig, StreamDraft
from jspec.decode.state import start
from jspec.decode.step import step
from jspec.ops.attention import implementations
from tests.decode.common import DRAFT_LIMITS, prompts

SOURCES = {
    "stream": StreamDraft(sinks=2, window=6),
    "ngram": NgramDraft(min_match=1, max_match=4),
    "model": ModelDraft(),
    "plain": None,
}


def filled(cache: KVCache, junk) -> KVCache:
    """The cache with ``junk`` in every slot at or past its row's length."""
    unused = jnp.arange(cache.capacity)[None] >= cache.lengths[:, None]

    def fill(x):
        return jnp.where(unused[:, :, None, None], junk, x)

    return dataclasses.replace(
        cache, keys=tuple(map(fill, cache.keys)), values=tuple(map(fill, cache.values))
    )


@functools.partial(jax.jit, static_argnames="config")
def poisoned_step(model, state, config, draft_model, junk):
    state, record = step(model, state, config, draft_model)
    caches = {"cache": filled(state.cache, junk)}
    if state.draft_cache is not None:
        caches["draft_cache"] = filled(state.draft_cache, junk)
    return dataclasses.replace(state, **caches), record


@pytest.mark.parametrize("implementation", implementations())
@pytest.mark.parametrize("source", SOURCES)
def test_unused_slots_never_reach_an_output(source, implementation, sharp, other, monkeypatch):
    """Half of the rows sample; all end at different times; 60 slots leave none to spare."""
    draft = SOURCES[source]
    config = StepConfig(3 if draft else 0, draft, "sampled", implementation)
    second = other if source == "model" else None
    params = [
        SamplingParams(max_new_tokens=8 + row, temperature=row % 2, seed=row, draft_limit=limit)
        for row, limit in enumerate(DRAFT_LIMITS)
    ]

    def run(junk: float):
        def create(cls, *args, **settings):
            return filled(right(*args, **settings), jnp.float32(junk))

        right = KVCache.create
        with monkeypatch.context() as patch:
            patch.setattr(KVCache, "create", classmethod(create))
            state = start(
                sharp,
                prompts(),
                params,
                draft_model=second,
                capacity=60,
                chunk=16,
                attention=implementation,
            )
        assert np.isnan(state.cache.keys[0]).any() == np.isnan(junk)
        for _ in range(15):
            state, _ = poisoned_step(sharp, state, config, second, jnp.float32(junk))
        return state

    clean, poisoned = run(0.0), run(np.nan)
    assert clean.done.all()
    assert np.isnan(poisoned.cache.keys[1]).any()
    np.testing.assert_array_equal(poisoned.tokens, clean.tokens)
    for expected, got in (
        (clean.cache, poisoned.cache),
        (clean.draft_cache, poisoned.draft_cache),
    ):
        if expected is None:
            continue
        np.testing.assert_array_equal(got.lengths, expected.lengths)
        jax.tree.map(np.testing.assert_array_equal, filled(got, 0.0), filled(expected, 0.0))
