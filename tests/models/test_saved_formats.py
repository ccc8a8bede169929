"""Directories that earlier versions of jspec wrote are read, and written in the present format."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import (
    CheckpointError,
    LayerSpec,
    ModelConfig,
    Rope,
    RopeScaling,
    load_model,
    save_model,
)
from jspec.models import saved
from tests.models.helpers import assert_equal, parameters, write_apart

FORMAT_1 = {
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 16,
    "family": "qwen3",
    "rope_theta": 5000.0,
    "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_context": 32, "truncate": False},
    "qk_norm": True,
    "stop_tokens": [3, 4],
}


def test_format_1_is_read(tmp_path):
    def write(**change):
        text = json.dumps({"format": 1, "config": FORMAT_1 | change})
        (tmp_path / saved.SETTINGS).write_text(text)

    write()
    config = ModelConfig(
        vocab_size=41,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        layers=(LayerSpec(kv_heads=2, key_size=16, value_size=16),) * 2,
        ropes=(Rope(5000.0, RopeScaling("yarn", 4.0, 32, truncate=False)),),
        family="qwen3",
        qk_norm=True,
        stop_tokens=(3, 4),
    )
    assert saved.read_settings(tmp_path) == (config, 1)
    for change, message in (
        ({"layers": []}, r"fields \['layers'\] are unknown"),
        ({"num_layers": 10**9}, "num_layers=1000000000 must be at most 1024"),
        ({"rope_scaling": {}}, "config: rope_scaling: .*'kind'"),
    ):
        write(**change)
        with pytest.raises(CheckpointError, match=f"jspec.json: .*{message}"):
            saved.read_settings(tmp_path)


# Sizes that differ, one and three queries a KV head, and biases.
APART = ModelConfig(
    vocab_size=13,
    hidden_size=24,
    intermediate_size=20,
    num_heads=6,
    layers=(LayerSpec(6, 8, 12), LayerSpec(2, 16, 6)),
    qkv_bias=True,
    mlp_bias=True,
)


def arrays_apart() -> dict[str, np.ndarray]:
    """Random arrays of `APART`, by the names and shapes that formats 1 and 2 had."""
    shapes = {"embedding": (13, 24), "head.kernel": (24, 13), "norm.scale": (24,)}
    for layer, (q, k, v, out) in enumerate([(48, 48, 72, 72), (96, 32, 12, 36)]):
        outputs = {"attention.q": q, "attention.k": k, "attention.v": v, "mlp.gate": 20}
        linear = {name: (24, size) for name, size in (outputs | {"mlp.up": 20}).items()}
        linear |= {"mlp.down": (20, 24)}
        layer_shapes = {f"{name}.kernel": shape for name, shape in linear.items()}
        layer_shapes |= {f"{name}.bias": shape[1:] for name, shape in linear.items()}
        layer_shapes |= {"attention.out.kernel": (out, 24)}
        layer_shapes |= {"attention_norm.scale": (24,), "mlp_norm.scale": (24,)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in layer_shapes.items()}
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def test_format_2_is_read_and_joined(tmp_path):
    """Each part of a joined product is the product of its own array, in NumPy."""
    arrays = arrays_apart()
    model = load_model(write_apart(tmp_path / "old", APART, arrays))
    assert model.config == APART
    x = np.random.default_rng(1).normal(size=(2, 3, 24)).astype(np.float32)
    for layer, (block, spec) in enumerate(zip(model.layers, APART.layers, strict=True)):

        def product(name, x=x, layer=layer):
            name = f"layers.{layer}.{name}"
            return x @ arrays[f"{name}.kernel"] + arrays[f"{name}.bias"]

        projections = jax.jit(lambda qkv, x: qkv(x))(block.attention.qkv, x)
        for part, count, got in zip(
            "qkv", (6, spec.kv_heads, spec.kv_heads), projections, strict=True
        ):
            want = product(f"attention.{part}").reshape(2, 3, count, -1)
            np.testing.assert_allclose(got.reshape(want.shape), want, atol=1e-4, rtol=0)
        gate = product("mlp.gate")
        want = product("mlp.down", gate / (1 + np.exp(-gate)) * product("mlp.up"))
        got = jax.jit(lambda mlp, x: mlp.down(mlp.gate_up.gated(x)))(block.mlp, x)
        np.testing.assert_allclose(got, want, atol=1e-3, rtol=0)


def test_format_2_becomes_format_3(tmp_path):
    path = write_apart(tmp_path / "old", APART, arrays_apart())
    model = load_model(path)
    assert model.embedding.get_value().devices() == {jax.devices()[0]}
    save_model(model, tmp_path / "new")
    assert_equal(load_model(tmp_path / "new"), parameters(model))
    half = {name: value.astype(jnp.bfloat16) for name, value in parameters(model).items()}
    assert_equal(load_model(path, dtype=jnp.bfloat16), half)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("layers.1.attention.k.kernel", None, r"none \(it is missing\), .* asks for \(24, 32\)"),
        ("layers.1.attention.v.bias", (2, 6), r"\(2, 6\), but jspec.json asks for \(12,\)"),
        ("layers.0.mlp.up.kernel", (20, 24), r"\(20, 24\), but jspec.json asks for \(24, 20\)"),
        ("layers.0.mlp.gate_up.kernel", (24, 2, 20), r"\(24, 2, 20\), .* asks for no such array"),
    ],
)
def test_a_damaged_format_2_names_the_array_of_the_file(tmp_path, name, shape, message):
    arrays = arrays_apart()
    arrays.pop(name, None)
    if shape is not None:
        arrays[name] = np.zeros(shape, np.float32)
    path = write_apart(tmp_path / "old", APART, arrays)
    with pytest.raises(CheckpointError, match=rf"arrays: array '{name}' has shape {message}"):
        load_model(path)
