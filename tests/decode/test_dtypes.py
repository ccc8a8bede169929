"""Weights, activations and caches of different dtypes, weights of numpy, and JAX's 64-bit mode."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jspec.config import SamplingParams
from jspec.decode.draft import NoDraft
from jspec.decode.generation import generate
from jspec.decode.prefill import fill_slot, start_decoding
from jspec.decode.prefill_pass import prefill_chunk
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.decode.step import decode_step
from jspec.ops.cached import FLOAT8
from tests.decode.common import DRAFTERS, NGRAM, STREAMING, prompts
from tests.decode.test_one_layer_model import OneLayer
from tests.parameters import default_run

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


def traced(source: str, first, second, params: SamplingParams, **settings):
    """A state of a drafter, and what a step makes of it, by tracing alone: as shapes and dtypes."""
    models = Models(first, second if source == "model" else None)
    config = StepConfig(0 if source == "plain" else 3, DRAFTERS[source])

    def trace(function, *args, **static):
        if function is not prefill_chunk:
            return function(*args, **static)
        jax.eval_shape(lambda *args: function(*args, **static), *args)
        _, cache, rows_state, *_ = args
        return cache, rows_state, None

    texts = prompts((9, 1, 4), vocabulary=13)
    state = start_decoding(models, texts, params, config, run=trace, **settings)
    return state, jax.eval_shape(lambda *args: decode_step(*args, config), models, state)


def dtypes(tree) -> list:
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    "cache_dtype", [None, jnp.float32, FLOAT8], ids=["bfloat16", "float32", "8-bits"]
)
@pytest.mark.parametrize("source", DRAFTERS)
def test_activations_of_bfloat16_fit_every_drafter(source, cache_dtype):
    model = Half(0)
    assert jax.tree.leaves(nnx.state(model, nnx.Param))[0].dtype == jnp.float32
    state, (after, _) = traced(source, model, Half(1), TWELVE, cache_dtype=cache_dtype)
    expected = jnp.dtype(cache_dtype or jnp.bfloat16)
    assert set(dtypes(state.cache.columns)) == {expected}
    assert dtypes(after) == dtypes(state)


@pytest.mark.parametrize("cache_dtype", default_run(["bfloat16", "float8_e4m3fn"], "float8_e4m3fn"))
def test_a_cache_of_fewer_bits_serves_activations_of_float32(cache_dtype):
    """Keys and values are rounded once, when they are written: drafts change no token."""
    settings = {"cache_dtype": cache_dtype, "gamma": 3}
    texts, model = prompts((9, 1, 4), vocabulary=13), OneLayer(0)
    plain = generate(model, texts, TWELVE, draft=NoDraft(), **settings)
    got = generate(model, texts, TWELVE, draft=STREAMING, **settings)
    assert got.tokens == plain.tokens
    # Weights of numpy, as they come from a file, serve the same programs.
    again = generate(of_numpy(model), texts, TWELVE, draft=STREAMING, **settings)
    assert again.tokens == plain.tokens
    assert again.stats.compilations == 0


def of_numpy(model: OneLayer) -> OneLayer:
    """The model with its weights as numpy's arrays."""

    def converted(leaf):
        is_weight = jnp.issubdtype(leaf.dtype, jnp.floating)
        return np.asarray(leaf) if is_weight else leaf

    result = jax.tree.map(converted, model)
    assert np.ndarray in map(type, jax.tree.leaves(result))
    return result


@pytest.mark.parametrize("source", DRAFTERS)
def test_weights_of_numpy_start_decoding_and_step(source):
    model = of_numpy(OneLayer(0))
    state, (after, _) = traced(source, model, model, TWELVE)
    assert dtypes(after) == dtypes(state)


def test_a_slot_keeps_the_dtype_of_its_batch():
    model, config = OneLayer(0), StepConfig(2, NGRAM)
    settings = {"capacity": 32, "cache_dtype": jnp.bfloat16}
    state = start_decoding(model, [[1, 2], [3]], TWELVE, config, **settings)
    state = fill_slot(model, state, 1, [5, 6], TWELVE, config)
    assert state.cache.keys(0).dtype == jnp.bfloat16


MODES = {
    "greedy": SamplingParams(max_new_tokens=12),
    "sampled": SamplingParams(max_new_tokens=12, temperature=1.0),
    "filtered": SamplingParams(max_new_tokens=12, temperature=1.0, top_p=0.5),
}


@pytest.mark.parametrize(
    ("source", "mode"),
    [
        # Filters draw as well; without draws the drafters differ little.
        pytest.param(x, m, marks=[pytest.mark.slow] * (m != "filtered" and x != "streaming"))
        for x in DRAFTERS
        for m in MODES
    ],
)
def test_64_bits_make_no_number_of_a_step_wider(source, mode):
    models = OneLayer(0), OneLayer(1)
    # Users do not promote strictly, and a loop counts in 64 bits.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        assert jnp.zeros(1).dtype == jnp.float64
        state, (after, record) = traced(source, *models, MODES[mode])
        assert state.mode == mode
        assert dtypes(after) == dtypes(state)
        assert set(dtypes(record)) == {jnp.dtype(jnp.int32)}
        assert not {x for x in dtypes(after) if x.itemsize == 8}


X64 = """
import jax
from tests.decode.test_dtypes import wide_tokens
assert jax.numpy.zeros(1).dtype == "float64"
# Users do not promote strictly; under x64 that is another thing than without.
jax.config.update("jax_numpy_dtype_promotion", "standard")
print([wide_tokens(source) for source in ("plain", "streaming", "dense", "ngram", "model")])
"""


def float32_tokens(source: str) -> list[list[int]]:
    """What a greedy and a sampled row get."""
    params = [SamplingParams(16), SamplingParams(8, temperature=1.0, seed=5)]
    second = OneLayer(1) if source == "model" else None
    settings = {"draft": DRAFTERS[source], "draft_model": second}
    got = generate(OneLayer(0), prompts((9, 4), vocabulary=13), params, **settings)
    return [list(tokens) for tokens in got.tokens]


@pytest.mark.slow
def test_every_drafter_works_in_64_bits():
    """JAX_ENABLE_X64=1 makes no greedy token another, nor a sampled one of plain decoding."""
    ran = subprocess.run(
        [sys.executable, "-c", X64],
        env=os.environ | {"JAX_ENABLE_X64": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    result = json.loads(ran.stdout)
    plain = float32_tokens("plain")
    assert result[0] == plain
    assert [tokens[0] for tokens in result] == [plain[0]] * 5
    assert {len(tokens[1]) for tokens in result} == {8}
