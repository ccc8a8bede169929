"""Loaded checkpoints agree with the logits that transformers gave, see `goldens`."""

import dataclasses
import functools

import numpy as np
import pytest
from flax import nnx

from jspec import Rope, RopeScaling, load_model
from jspec.models.rope import rope_frequencies
from tests.models.goldens import CASES, INT8, OLD_KEYS, SHARDED
from tests.models.helpers import GOLDEN, logits_of, one_pass, ragged

TOLERANCE = 1e-4
SCALED = ["llama3", "llama_linear", "qwen2_yarn", "qwen3_yarn"]


@functools.cache
def load_golden(name: str):
    with np.load(GOLDEN / name / "logits.npz") as golden:
        return load_model(GOLDEN / name), golden["tokens"], golden["logits"]


def test_every_case_is_committed():
    assert sorted(path.name for path in GOLDEN.iterdir()) == sorted(CASES)
    assert (GOLDEN / SHARDED / "model.safetensors.index.json").exists()
    assert "int-quantized" in (GOLDEN / INT8 / "config.json").read_text()
    assert "rope_scaling" in (GOLDEN / OLD_KEYS / "config.json").read_text()


@pytest.mark.parametrize("name", CASES)
def test_prefill_in_one_pass(name):
    model, tokens, logits = load_golden(name)
    ours = logits_of(model, tokens, one_pass(tokens))
    np.testing.assert_allclose(ours, logits, atol=TOLERANCE, rtol=0)
    assert logits.std() > 0.5, "a golden without contrast proves nothing"


@pytest.mark.parametrize("name", CASES)
def test_cached_decoding_in_ragged_chunks(name):
    model, tokens, logits = load_golden(name)
    ours = logits_of(model, tokens, ragged(tokens))
    np.testing.assert_allclose(ours, logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", SCALED)
def test_scaling_matters(name):
    model, tokens, logits = load_golden(name)
    graph, state = nnx.split(model)
    model = nnx.merge(graph, state)
    model.config = dataclasses.replace(model.config, ropes=(Rope(model.config.ropes[0].theta),))
    ours = logits_of(model, tokens, one_pass(tokens))
    assert np.abs(ours - logits).max() > 0.1


@pytest.mark.parametrize("field", ["beta_fast", "beta_slow", "attention_factor", "truncate"])
def test_the_yarn_golden_depends_on_every_field(field):
    config = load_golden("qwen3_yarn")[0].config
    default = {f.name: f.default for f in dataclasses.fields(RopeScaling)}[field]
    (rope,) = config.ropes
    assert rope.scaling is not None
    changed = dataclasses.replace(rope.scaling, **{field: default})
    ours, other = (
        rope_frequencies(config.layers[0].key_size, rope.theta, scaling)
        for scaling in (rope.scaling, changed)
    )
    assert np.abs(ours[0] / other[0] - 1).max() + abs(ours[1] - other[1]) > 1e-2


def test_stop_tokens_come_from_the_config():
    assert load_golden("llama2")[0].config.stop_tokens == (2,)
    assert load_golden("llama3")[0].config.stop_tokens == (2, 3)
