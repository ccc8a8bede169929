"""Weights, activations and caches of different dtypes, weights of numpy, and JAX's 64-bit mode."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jspec.config import SamplingParams
from jspec.decode.draft import ModelDraft, NoDraft
from jspec.decode.engine import generate
from jspec.decode.prefill import fill_slot, start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.decode.step import speculative_step
from tests.decode.common import DRAFTERS, NGRAM, STREAMING, prompts
from tests.decode.test_engine import OneLayer

TWELVE = SamplingParams(max_new_tokens=12)


class Half(OneLayer):
    """Weights of float32, whose activations and keys are bfloat16."""

    dtype = jnp.bfloat16

    def __call__(self, tokens, positions, attend, cache):
        x = (self.embed(tokens) + self.places(positions)).astype(jnp.bfloat16)
        weights = self.qkv.kernel[...].astype(jnp.bfloat16)
        q, k, v = jnp.split((x @ weights)[:, :, None], 3, axis=-1)
        out, cache = attend(0, q, k, v, cache)
        assert out.dtype == jnp.bfloat16
        return x + out[:, :, 0], cache

    def logits(self, hidden):
        return 8 * self.head(hidden.astype(jnp.float32))


def texts() -> list[list[int]]:
    return prompts((9, 1, 4), vocabulary=13)


@pytest.mark.parametrize("cache_dtype", [None, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("source", DRAFTERS)
def test_activations_of_bfloat16_decode_with_every_drafter(source, cache_dtype):
    model = Half(0)
    assert jax.tree.leaves(nnx.state(model, nnx.Param))[0].dtype == jnp.float32
    models = Models(model, Half(1) if source == "model" else None)
    config = StepConfig(0 if source == "plain" else 3, DRAFTERS[source])
    state = start_decoding(models, texts(), TWELVE, config, cache_dtype=cache_dtype)
    assert state.cache.keys(0).dtype == (cache_dtype or jnp.bfloat16)
    known = np.asarray(state.lengths)
    for _ in range(2):
        state = speculative_step(models, state, config)
    assert state.cache.keys(0).dtype == (cache_dtype or jnp.bfloat16)
    assert (np.asarray(state.lengths) >= known + 2).all()


@pytest.mark.parametrize("draft", [STREAMING, NGRAM], ids=["streaming", "ngram"])
def test_a_cache_of_bfloat16_serves_activations_of_float32(draft, sharp):
    """Keys and values are rounded once, when they are written: drafts change no token."""
    settings = {"cache_dtype": "bfloat16", "gamma": 3}
    plain = generate(sharp, prompts()[:3], TWELVE, draft=NoDraft(), **settings)
    assert generate(sharp, prompts()[:3], TWELVE, draft=draft, **settings).tokens == plain.tokens


def test_a_slot_keeps_the_dtype_of_its_batch(tiny):
    config = StepConfig(2, NGRAM)
    settings = {"capacity": 32, "cache_dtype": jnp.bfloat16}
    state = start_decoding(tiny, [[1, 2], [3]], TWELVE, config, **settings)
    state = fill_slot(tiny, state, 1, [5, 6], TWELVE, config)
    assert state.cache.keys(0).dtype == jnp.bfloat16


def test_weights_of_numpy_are_taken(sharp):
    """As they come from a file: the same tokens by the same programs."""
    model = jax.tree.map(np.asarray, sharp)
    assert {type(leaf) for leaf in jax.tree.leaves(model)} == {np.ndarray}
    for draft, second in ((STREAMING, None), (ModelDraft(), model)):
        own = {"draft": draft, "gamma": 2}
        wanted = generate(sharp, prompts()[:2], TWELVE, draft_model=second and sharp, **own)
        got = generate(model, prompts()[:2], TWELVE, draft_model=second, **own)
        assert got.tokens == wanted.tokens
        assert got.stats.compilations == 0


X64 = """
import jax
from tests.decode.test_dtypes import wide_tokens
assert jax.numpy.zeros(1).dtype == "float64"
# Users do not promote strictly; under x64 that is another thing than without.
jax.config.update("jax_numpy_dtype_promotion", "standard")
print([wide_tokens(source) for source in ("plain", "streaming", "dense", "ngram", "model")])
"""


def wide_tokens(source: str) -> list[list[int]]:
    """What a greedy and a sampled row get, the first twice as long."""
    params = [SamplingParams(16), SamplingParams(8, temperature=1.0, seed=5)]
    second = OneLayer(1) if source == "model" else None
    settings = {"draft": DRAFTERS[source], "draft_model": second}
    got = generate(OneLayer(0), prompts((9, 4), vocabulary=13), params, **settings)
    assert got.stats.accepted <= got.stats.drafted
    return [list(tokens) for tokens in got.tokens]


def test_every_drafter_works_in_64_bits():
    """JAX_ENABLE_X64=1 makes no token another: the step's own numbers have a dtype each."""
    ran = subprocess.run(
        [sys.executable, "-c", X64],
        env=os.environ | {"JAX_ENABLE_X64": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = eval(ran.stdout)
    plain = wide_tokens("plain")
    assert found[0] == plain
    assert [tokens[0] for tokens in found] == [plain[0]] * 5
    assert {len(tokens[1]) for tokens in found} == {8}
