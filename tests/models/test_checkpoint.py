"""Loading: layouts, dtypes, int8, shardings."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from jspec import CheckpointError, load_model, save_model
from jspec.models.safetensors_file import StoredTensor
from tests.models.helpers import (
    apart,
    assert_equal,
    edit_config,
    edit_tensors,
    parameters,
    shapes_of,
    together,
    write_apart,
    write_checkpoint,
)


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "model")


def expected_of(path, dtype=np.float32) -> dict[str, np.ndarray]:
    """Parameters of a checkpoint in jspec's layout, read by the safetensors library."""
    settings = json.loads((path / "config.json").read_text())
    stored = load_file(path / "model.safetensors")
    assert stored.keys() == shapes_of(settings).keys()
    expected = together(apart(stored), settings["num_key_value_heads"])
    return {name: value.astype(dtype) for name, value in expected.items()}


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_every_dtype_to_every_dtype(checkpoint, stored, dtype):
    path = checkpoint / "model.safetensors"
    save_file({k: v.astype(stored) for k, v in load_file(path).items()}, path)
    assert_equal(load_model(checkpoint, dtype=dtype), expected_of(checkpoint, dtype))


def test_the_default_dtype_on_a_cpu_is_float32(checkpoint):
    assert load_model(str(checkpoint)).dtype == jnp.float32


@pytest.mark.parametrize("dtype", [np.float64, np.int8])
def test_other_dtypes_are_refused(checkpoint, dtype):
    with pytest.raises(ValueError, match="must be float32, bfloat16 or float16"):
        load_model(checkpoint, dtype=dtype)


def test_blocks_of_rows_are_joined(tmp_path):
    """Blocks of 20 rows, the last ones partial, of which some begin within a head's 8."""
    sizes = {"hidden_size": 13000, "intermediate_size": 24, "num_hidden_layers": 1}
    path = write_checkpoint(tmp_path / "m", num_key_value_heads=4, **sizes)
    assert_equal(load_model(path), expected_of(path))


# int8

QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "kv_cache_scheme": None,
    "sparsity_config": {},
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "group_size": None,
            },
        }
    },
}
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def quantized(checkpoint):
    """Every linear weight but the head's is int8, with scales of mixed dtypes."""
    edit_config(checkpoint, quantization_config=QUANTIZATION)
    rng, changes = np.random.default_rng(1), {}
    for name, value in load_file(checkpoint / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = rng.uniform(0.01, 0.02, (len(value), 1)).astype(np.float32)
            scale = scale.astype(ml_dtypes.bfloat16) if "mlp" in name else scale
            changes[name] = rng.integers(-128, 128, value.shape, np.int8)
            changes[f"{name}_scale"] = scale
    edit_tensors(checkpoint, **changes)
    return checkpoint


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_int8_equals_dequantised_numpy(quantized, dtype, monkeypatch):
    """By blocks of a few rows, each of which has a scale of its own."""
    blocks = StoredTensor.blocks
    monkeypatch.setattr(StoredTensor, "blocks", lambda self, **more: blocks(self, 100, **more))
    stored = load_file(quantized / "model.safetensors")
    weights = {name: value for name, value in stored.items() if not name.endswith("_scale")}
    for name, value in weights.items():
        if value.dtype == np.int8:
            weights[name] = value * stored[f"{name}_scale"].astype(np.float32)
    expected = together(apart(weights), 2)
    want = {name: value.astype(np.float32).astype(dtype) for name, value in expected.items()}
    assert_equal(load_model(quantized, dtype=dtype), want)


def group(**weights):
    values = {**QUANTIZATION["config_groups"]["group_0"]["weights"], **weights}
    return {**QUANTIZATION, "config_groups": {"group_0": {"weights": values}}}


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method='gptq' with format='none' is not sup"),
        ({**QUANTIZATION, "format": "pack-quantized"}, "format='pack-quantized' is not supported"),
        ({**QUANTIZATION, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is not supported"),
        ({**QUANTIZATION, "sparsity_config": {"format": "24"}}, "sparsity_config is not supported"),
        ({**QUANTIZATION, "transform_config": {"r1": 1}}, "transform_config is not supported"),
        ({**QUANTIZATION, "config_groups": {"g": {"format": "float"}}}, "'g' has format='float'"),
        (group(num_bits=4), "config_groups: group_0: weights: .*'num_bits': 4.* is not supported"),
        (group(symmetric=False), "'symmetric': False"),
        (group(strategy="group"), "'strategy': 'group'"),
        (group(type="float"), "'type': 'float'"),
        ({**QUANTIZATION, "config_groups": {"group_0": 5}}, "group_0=5 must be an object"),
    ],
)
def test_other_quantisations_are_refused_by_name(quantized, quantization, message):
    edit_config(quantized, quantization_config=quantization)
    with pytest.raises(CheckpointError, match=f"config.json: quantization_config.*{message}"):
        load_model(quantized)


def test_int8_without_a_quantization_config(quantized):
    edit_config(quantized, quantization_config=...)
    with pytest.raises(CheckpointError, match=r"shape \(.*\) is int8, but config.json has no"):
        load_model(quantized)


def test_int8_embedding(quantized):
    name = "model.embed_tokens.weight"
    edit_tensors(quantized, **{name: np.zeros((24, 16), np.int8)})
    with pytest.raises(CheckpointError, match=rf"'{name}' with shape \(24, 16\) is int8"):
        load_model(quantized)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (None, rf"tensor '{UP}' is int8, but '{UP}_scale' \(20, 1\) is missing"),
        (np.ones((20,), np.float32), rf"tensor '{UP}_scale' has shape \(20,\), but .* \(20, 1\)"),
        (np.ones((20, 1), np.int8), f"tensor '{UP}_scale' must be of floats"),
    ],
)
def test_bad_scales(quantized, scale, message):
    edit_tensors(quantized, **{f"{UP}_scale": scale})
    with pytest.raises(CheckpointError, match=message):
        load_model(quantized)


# shardings


def mesh(size: int = 8) -> jax.sharding.Mesh:
    return jax.make_mesh((size,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def by_columns(name: str, shape: tuple[int, ...]) -> NamedSharding:
    """Kernels over their last axis, the embedding over its rows, the rest everywhere."""
    spec = PartitionSpec()
    if name.endswith(".kernel"):
        spec = PartitionSpec(*[None] * (len(shape) - 1), "x")
    if name == "embedding":
        spec = PartitionSpec("x", None)
    return NamedSharding(mesh(), spec)


@pytest.fixture(params=["hugging face", "jspec", "format 2"])
def either(request, tmp_path):
    path = write_checkpoint(tmp_path / "model", intermediate_size=24)
    if request.param == "jspec":
        save_model(load_model(path), tmp_path / "saved")
        return tmp_path / "saved"
    if request.param == "format 2":
        arrays = apart(load_file(path / "model.safetensors"))
        return write_apart(tmp_path / "old", load_model(path).config, arrays)
    return path


def test_a_sharding_for_each(either):
    asked = {}

    def sharding(name, shape):
        asked[name] = shape
        return by_columns(name, shape)

    plain, model = load_model(either), load_model(either, sharding=sharding)
    assert_equal(model, parameters(plain))
    assert asked == {name: value.shape for name, value in parameters(model).items()}
    assert asked["layers.0.attention.qkv.kernel"] == (16, 2, 32)
    kernel = model.layers[1].mlp.gate_up.kernel.get_value()
    assert kernel.sharding.is_equivalent_to(by_columns("x.kernel", (16, 2, 24)), 3)
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(16, 2, 3)}
    assert len(kernel.sharding.device_set) == 8
    assert model.norm.scale.get_value().is_fully_replicated


def test_one_sharding_for_all(either):
    everywhere = NamedSharding(mesh(), PartitionSpec())
    model = load_model(either, dtype=jnp.bfloat16, sharding=everywhere)
    assert_equal(model, parameters(load_model(either, dtype=jnp.bfloat16)))
    for _, value in nnx.to_flat_state(nnx.state(model)):
        assert value.get_value().sharding == everywhere


def test_one_device(either):
    device = jax.devices()[3]
    model = load_model(either, sharding=jax.sharding.SingleDeviceSharding(device))
    assert model.embedding.get_value().devices() == {device}


def test_a_sharding_that_does_not_fit_names_the_parameter(either):
    over = NamedSharding(mesh(), PartitionSpec(None, "x"))
    with pytest.raises(ValueError, match=r"^[\w.]+ \(.*\) cannot be placed by"):
        load_model(either, sharding=over)
