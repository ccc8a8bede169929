"""What `save_model` writes: bit-exact, whole or not at all, and checked when it is read."""

import dataclasses
import json
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jspec import CheckpointError, Decoder, load_model, save_model
from jspec.models import saved
from tests.conftest import TINY
from tests.models.helpers import GOLDEN, assert_equal, parameters

EVERYTHING = dataclasses.replace(
    TINY,
    family="qwen3",
    tie_embeddings=True,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    qk_norm=True,
    stop_tokens=(3, 4),
)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("config", [TINY, EVERYTHING], ids=["plain", "everything"])
def test_round_trip_is_bit_exact(tmp_path, config, dtype):
    model = Decoder(config, dtype=dtype, rngs=nnx.Rngs(0))
    save_model(model, tmp_path / "saved")
    loaded = load_model(tmp_path / "saved", dtype=dtype)
    assert loaded.config == config
    assert_equal(loaded, parameters(model))


@pytest.mark.parametrize("name", ["llama3", "llama_linear", "qwen3_yarn"])
def test_scalings_survive_a_round_trip(tmp_path, name):
    model = load_model(GOLDEN / name)
    save_model(model, tmp_path / "saved")
    loaded = load_model(tmp_path / "saved")
    assert loaded.config == model.config
    assert_equal(loaded, parameters(model))


def test_loading_converts_the_dtype(tmp_path):
    model = Decoder(TINY, rngs=nnx.Rngs(0))
    save_model(model, tmp_path / "saved")
    loaded = load_model(tmp_path / "saved", dtype=jnp.bfloat16)
    expected = {k: v.astype(jnp.bfloat16) for k, v in parameters(model).items()}
    assert_equal(loaded, expected)


def test_a_sharded_model_loads_on_the_default_device(tmp_path, tiny):
    save_model(tiny, tmp_path / "first")
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    save_model(load_model(tmp_path / "first", sharding=everywhere), tmp_path / "second")
    loaded = load_model(tmp_path / "second")
    assert_equal(loaded, parameters(tiny))
    assert loaded.embedding.get_value().devices() == {jax.devices()[0]}


def test_nothing_is_overwritten(tmp_path, tiny):
    for name in ("file", "directory"):
        (tmp_path / name).touch() if name == "file" else (tmp_path / name).mkdir()
        with pytest.raises(CheckpointError, match=f"{name} exists; choose another path"):
            save_model(tiny, tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="link exists"):
        save_model(tiny, tmp_path / "link")
    with pytest.raises(CheckpointError, match="absent is no directory; make it"):
        save_model(tiny, tmp_path / "absent" / "model")


@pytest.mark.parametrize("failing", ["ocp.StandardCheckpointer", "json.dumps", "os.rename"])
def test_nothing_half_written_stays(tmp_path, tiny, monkeypatch, failing):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    module, function = failing.split(".")
    monkeypatch.setattr(saved, module, types.SimpleNamespace(**{function: fail}))
    with pytest.raises(CheckpointError, match="saved cannot be written: No space left on device"):
        save_model(tiny, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def written(tmp_path, tiny):
    save_model(tiny, tmp_path / "saved")
    return tmp_path / "saved"


def edit_settings(path, **config):
    settings = json.loads((path / saved.SETTINGS).read_text())
    settings["config"] |= config
    (path / saved.SETTINGS).write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "32"}, "jspec.json: config: hidden_size='32' must be a positive integer"),
        ({"hidden_size": None}, "jspec.json: .*hidden_size"),
        ({"norm_eps": "x"}, "norm_eps='x' must be a positive number"),
        ({"qk_norm": 1}, "qk_norm=1 must be true or false"),
        ({"stop_tokens": ["a"]}, "stop_tokens=.* must be one or more token ids below 41"),
        ({"num_layers": 10**9}, "num_layers=1000000000 must be at most 1024"),
        ({"num_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"wings": 2}, r"fields \['wings'\] are unknown; the file is of a newer jspec"),
        ({"rope_scaling": {"kind": "ntk", "factor": 2}}, "rope scaling 'ntk' is unknown"),
        ({"rope_scaling": {"kind": "linear"}}, "jspec.json: .*factor"),
        ({"rope_scaling": 5}, "rope_scaling=5 must be an object"),
        (
            {"intermediate_size": 40},
            r"arrays: array layers.0.mlp.down.kernel has shape \(48, 32\), but .*\(40, 32\)",
        ),
        ({"qkv_bias": True}, r"array layers.0.attention.k.bias has shape none .*\(32,\)"),
        ({"tie_embeddings": True}, r"array head.kernel has shape \(32, 41\), but .* no such array"),
    ],
)
def test_damaged_settings(written, change, message):
    edit_settings(written, **change)
    with pytest.raises(CheckpointError, match=message):
        load_model(written)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"format": 2}', '{"format": 1}'])
def test_malformed_settings(written, content):
    (written / saved.SETTINGS).write_text(content)
    with pytest.raises(CheckpointError, match=saved.SETTINGS):
        load_model(written)


@pytest.mark.parametrize("victim", ["", "_METADATA"])
def test_missing_parts(written, victim):
    (written / saved.ARRAYS / victim).rename(written / "away")
    with pytest.raises(CheckpointError, match="arrays"):
        load_model(written)


@pytest.mark.parametrize("victim", ["manifest.ocdbt", "ocdbt.process_0"])
def test_missing_data(written, victim):
    """In a process of its own: orbax drops its other reads unfinished, which warn at any time."""
    (written / saved.ARRAYS / victim).rename(written / "away")
    code = f"""
import jspec
try:
    jspec.load_model({str(written)!r})
except jspec.CheckpointError as error:
    print(str(error)[:400])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert str(written / saved.ARRAYS) in done.stdout
