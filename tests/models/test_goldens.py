"""Loaded checkpoints agree with the logits that transformers gave, see `goldens`."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jspec import Rope, RopeScaling, load_model
from jspec.models.rope import rope_frequencies
from tests.models.goldens import CASES, INT8, OLD_KEYS, SHARDED
from tests.models.helpers import GOLDEN, logits_of, one_pass, ragged
from tests.parameters import default_run

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


# Angles of one kind of scaling, and weights of 4 bits, are each in another case.
REPEATED = ("llama_linear", "qwen2_yarn", "gpt_oss_mxfp4")


@pytest.mark.parametrize(
    "name", default_run(list(CASES), *(name for name in CASES if name not in REPEATED))
)
def test_prefill_in_one_pass(name):
    model, tokens, logits = load_golden(name)
    ours = logits_of(model, tokens, one_pass(tokens))
    np.testing.assert_allclose(ours, logits, atol=TOLERANCE, rtol=0)
    assert logits.std() > 0.5, "a golden without contrast proves nothing"


# A cache holds turned keys whatever scales the angles, which one pass sees; and what the later
# families change lies outside of attention, or in windows that gpt_oss has.
SIBLINGS = ("llama_linear", "qwen2_yarn", "ernie4_5", "gemma", "granite", "mistral", "mixtral")
SIBLINGS += ("olmo3", "phi3", "qwen2_moe", "smollm3")


@pytest.mark.parametrize(
    "name", default_run(list(CASES), "deepseek_v2", "gemma3", "gpt_oss", "qwen3", slow=SIBLINGS)
)
def test_cached_decoding_in_ragged_chunks(name):
    model, tokens, logits = load_golden(name)
    ours = logits_of(model, tokens, ragged(tokens))
    np.testing.assert_allclose(ours, logits, atol=TOLERANCE, rtol=0)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_kv_heads_over_two_devices():
    """A device has the queries, keys and values of its KV head, and its columns of gate and up."""
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
    axes = {"qkv.kernel": 1, "qkv.bias": 0, "out.kernel": 0, "gate_up.kernel": 2, "down.kernel": 0}

    def by_head(name: str, shape: tuple[int, ...]) -> NamedSharding:
        axis = axes.get(".".join(name.split(".")[-2:]))
        return NamedSharding(mesh, P() if axis is None else P(*[None] * axis, "x"))

    _, tokens, logits = load_golden("qwen3")
    model = load_model(GOLDEN / "qwen3", sharding=by_head)
    kernel = model.layers[0].attention.qkv.kernel.get_value()
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(32, 1, 64)}
    ours = logits_of(model, tokens, one_pass(tokens))
    np.testing.assert_allclose(ours, logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", default_run(SCALED, "llama_linear", "qwen3_yarn"))
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
        rope_frequencies(config.layers[0].key_size, Rope(rope.theta, scaling))
        for scaling in (rope.scaling, changed)
    )
    assert np.abs(ours[0] / other[0] - 1).max() + abs(ours[1] - other[1]) > 1e-2


def test_stop_tokens_come_from_the_config():
    assert load_golden("llama2")[0].config.stop_tokens == (2,)
    assert load_golden("llama3")[0].config.stop_tokens == (2, 3)
