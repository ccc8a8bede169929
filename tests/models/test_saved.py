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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jspec import (
    CheckpointError,
    ClampedSwiGLU,
    Decoder,
    Experts,
    Latent,
    LayerSpec,
    ModelConfig,
    Rope,
    RopeScaling,
    load_model,
    save_model,
)
from jspec.models import saved
from tests.conftest import TINY
from tests.models.helpers import GOLDEN, assert_equal, parameters
from tests.parameters import default_run

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


POSITIVE = st.floats(0, 1e300, exclude_min=True, exclude_max=True) | st.integers(1, 2**40)
ROPE = st.floats(1e-6, 1e12) | st.integers(1, 10**12)
SIZES = st.integers(1, 2**31 - 1)
FIELDS_OF_SCALING = {
    "kind": st.sampled_from(["linear", "llama3", "yarn"]),
    "factor": st.floats(1, 1e12) | st.integers(1, 10**12),
    "original_context": SIZES,
    "low_frequency_factor": st.floats(0.1, 4),
    "high_frequency_factor": st.floats(5, 9),
    "beta_fast": st.floats(2, 64),
    "beta_slow": st.floats(0.01, 2),
    "attention_factor": st.none() | ROPE,
    "truncate": st.booleans(),
}
THETAS = st.floats(1, 1e12, exclude_min=True) | st.integers(2, 10**12)


@st.composite
def all_ropes(draw, latent: Latent | None) -> Rope:
    rotated = draw(st.sampled_from([None, 0, 2])) if latent is None else None
    scaling = draw(st.none() | st.builds(RopeScaling, **FIELDS_OF_SCALING))
    if scaling is not None and rotated == 2:
        factors = (draw(st.floats(1, 64)),)
        scaling = dataclasses.replace(scaling, kind="longrope", wave_factors=factors)
    fields = {"theta": draw(THETAS), "scaling": scaling, "rotated": rotated}
    assert fields.keys() == {field.name for field in dataclasses.fields(Rope)}
    return Rope(**fields)


FIELDS_OF_LATENT = {
    "rank": st.integers(1, 2**29),
    "rope_size": st.integers(1, 2**29).map(lambda half: 2 * half),
    "plain_size": SIZES,
    "value_size": SIZES,
    "query_rank": st.none() | SIZES,
}


@st.composite
def experts(draw) -> Experts:
    groups, each = draw(st.integers(1, 9)), draw(st.integers(2, 9))
    chosen_groups, shared = draw(st.integers(1, groups)), draw(st.none() | SIZES)
    fields = {
        "routed": groups * each,
        "chosen": draw(st.integers(1, chosen_groups * each)),
        "size": draw(SIZES),
        "shared_size": shared,
        "shared_gated": shared is not None and draw(st.booleans()),
        "dense_layers": tuple(draw(st.lists(st.integers(0, 2**31 - 1), max_size=5))),
        "score": draw(st.sampled_from(["softmax", "sigmoid"])),
        "groups": groups,
        "chosen_groups": chosen_groups,
        "group_score": draw(st.sampled_from(["highest", "two_highest"])),
        "corrected": draw(st.booleans()),
        "normalized": draw(st.booleans()),
        "factor": draw(POSITIVE),
        "bias": draw(st.booleans()),
        "clamped": draw(st.none() | st.builds(ClampedSwiGLU, limit=POSITIVE, alpha=POSITIVE)),
    }
    assert fields.keys() == {field.name for field in dataclasses.fields(Experts)}
    return Experts(**fields)


@st.composite
def layers(draw, ropes: int, latent: Latent | None) -> LayerSpec:
    fields = {
        "kv_heads": draw(st.sampled_from([1, 2, 3, 6])),
        "key_size": 2 * draw(st.integers(1, 2**30 - 1)),
        "values_in_keys": draw(st.booleans()),
        "window": draw(st.none() | SIZES),
        "scale": draw(st.none() | POSITIVE),
        "softcap": draw(st.none() | POSITIVE),
        "rope": draw(st.integers(0, ropes - 1)),
    }
    max_value_size = fields["key_size"] if fields["values_in_keys"] else 2**31 - 1
    fields["value_size"] = draw(st.integers(1, max_value_size))
    if latent is not None:
        fields |= {"kv_heads": 1, "key_size": latent.rank + latent.rope_size}
        fields |= {"value_size": latent.rank, "values_in_keys": True}
    assert fields.keys() == {field.name for field in dataclasses.fields(LayerSpec)}
    return LayerSpec(**fields)


@st.composite
def configs(draw) -> ModelConfig:
    """Any `ModelConfig`: every field of it and of what it holds takes other values than its own."""
    vocab, latent = draw(SIZES), draw(st.none() | st.builds(Latent, **FIELDS_OF_LATENT))
    ropes = draw(st.lists(all_ropes(latent), min_size=1, max_size=3))
    mixture = draw(st.none() | experts())
    is_plain, qk_norm = latent is None and mixture is None, draw(st.booleans())
    post_norms = is_plain and draw(st.booleans())
    flags = ("tie_embeddings", "qkv_bias", "out_bias", "mlp_bias", "sinks")
    sizes = ("hidden_size", "intermediate_size", "max_context")
    fields = {
        "vocab_size": vocab,
        "num_heads": 6 * draw(st.integers(1, 2**20)),
        "layers": tuple(draw(st.lists(layers(len(ropes), latent), min_size=1, max_size=4))),
        "ropes": tuple(ropes),
        "family": draw(st.text()),
        "norm_eps": draw(POSITIVE),
        "latent": latent,
        "experts": mixture,
        "qk_norm": qk_norm,
        "joint_qk_norm": qk_norm and draw(st.booleans()),
        "pre_norms": not post_norms or draw(st.booleans()),
        "post_norms": post_norms,
        "residual_scale": draw(st.none() | POSITIVE) if is_plain else None,
        "logit_scale": draw(st.none() | POSITIVE),
        "centered_norms": draw(st.booleans()),
        "activation": draw(st.sampled_from(["silu", "gelu_tanh"])),
        "embedding_scale": draw(st.none() | POSITIVE),
        "logit_softcap": draw(st.none() | POSITIVE),
        "stop_tokens": tuple(draw(st.lists(st.integers(0, vocab - 1), max_size=3))),
        **{name: draw(SIZES) for name in sizes},
        **{name: draw(st.booleans()) for name in flags},
    }
    assert fields.keys() == {field.name for field in dataclasses.fields(ModelConfig)}
    return ModelConfig(**fields)


def test_the_strategies_know_every_field():
    names = {field.name for field in dataclasses.fields(RopeScaling)}
    assert FIELDS_OF_SCALING.keys() | {"wave_factors"} == names
    assert FIELDS_OF_LATENT.keys() == {field.name for field in dataclasses.fields(Latent)}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(configs())
def test_every_setting_survives_a_round_trip(tmp_path, config):
    """A field that comes back with its default gives a model of the same shapes, other logits."""
    saved.write_settings(tmp_path, config)
    read, version = saved.read_settings(tmp_path)
    assert (read, version) == (config, saved.FORMAT)
    assert repr(read) == repr(config)


def test_an_unknown_field_beside_the_settings(written):
    settings = json.loads((written / saved.SETTINGS).read_text())
    (written / saved.SETTINGS).write_text(json.dumps(settings | {"adapter": "x"}))
    with pytest.raises(CheckpointError, match=r"jspec.json: fields \['adapter'\] are unknown"):
        load_model(written)


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
    axis_types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("x",), axis_types=axis_types, devices=jax.devices()[:2])
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


@pytest.mark.parametrize("failing", ["StandardCheckpointer", "dumps", "rename"])
def test_nothing_half_written_stays(tmp_path, tiny, monkeypatch, failing):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    library = types.SimpleNamespace(**{failing: fail})
    if failing == "StandardCheckpointer":
        monkeypatch.setattr(saved, "_orbax", lambda: library)
    else:
        monkeypatch.setattr(saved, "json" if failing == "dumps" else "os", library)
    with pytest.raises(CheckpointError, match="saved cannot be written: No space left on device"):
        save_model(tiny, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_orbax_leaves_the_root_logger_alone(tmp_path):
    """A handler there would print jspec's warnings a second way, as in ``WARNING:jspec:``."""
    code = f"""
import logging, jspec
jspec.save_model(jspec.load_bundled()[0], {str(tmp_path / "saved")!r})
print(logging.root.handlers)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.fixture
def written(tmp_path, tiny):
    save_model(tiny, tmp_path / "saved")
    return tmp_path / "saved"


LAYER = dataclasses.asdict(TINY.layers[0])


def scaled(scaling) -> dict:
    return {"ropes": [{"theta": 1e4, "scaling": scaling}]}


def edit_settings(path, **config):
    settings = json.loads((path / saved.SETTINGS).read_text())
    settings["config"] |= config
    (path / saved.SETTINGS).write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "32"}, "jspec.json: config: hidden_size='32' must be a positive int32"),
        ({"hidden_size": None}, "jspec.json: .*hidden_size"),
        ({"hidden_size": 32.0}, "hidden_size=32.0 must be a positive int32"),
        ({"norm_eps": "x"}, "norm_eps='x' must be a positive, finite number"),
        ({"norm_eps": 10**400}, "norm_eps=1000.* must be a positive, finite number"),
        ({"qk_norm": 1}, "qk_norm=1 must be True or False"),
        ({"qk_norm": 0}, "qk_norm=0 must be True or False"),
        ({"qk_norm": None}, "qk_norm=None must be True or False"),
        ({"family": None}, "family=None must be a string"),
        ({"stop_tokens": ["a"]}, "stop_tokens=.* must be a tuple of token ids below 41"),
        ({"stop_tokens": 2}, "stop_tokens=2 must be a tuple of token ids below 41"),
        ({"layers": []}, "config: the model has 0 layers"),
        ({"layers": [LAYER] * 1025}, "config: the model has 1025 layers; it must have 1 to 1024"),
        ({"layers": 2}, "layers=2 must be a tuple of LayerSpec"),
        ({"layers": {}}, "layers={} must be a tuple of LayerSpec"),
        ({"layers": [LAYER, 5]}, r"config: layers\[1\]=5 must be an object"),
        ({"layers": [LAYER, LAYER | {"fins": 1}]}, r"layers\[1\]: fields \['fins'\] are unknown"),
        ({"layers": [LAYER | {"window": 0}]}, r"config: layers\[0\]: window=0 must be a positive"),
        ({"layers": [LAYER | {"kv_heads": 3}]}, "num_heads=4 must be a multiple of kv_heads=3"),
        ({"wings": 2}, r"fields \['wings'\] are unknown; the file is of a newer jspec"),
        ({"ropes": [{"theta": 0.5}]}, r"config: ropes\[0\]: theta=0.5 must be a finite number"),
        (scaled({"kind": "ntk", "factor": 2}), "rope scaling 'ntk' is unknown"),
        (scaled({"kind": "linear"}), r"jspec.json: config: ropes\[0\]: scaling: .*'factor'"),
        (scaled({}), r"ropes\[0\]: scaling: .*'kind' and 'factor'"),
        (scaled(5), r"ropes\[0\]: scaling=5 must be an object"),
        (scaled({"kind": "linear", "factor": 2, "fast": 1}), r"scaling: fields \['fast'\] are unk"),
        (
            {"intermediate_size": 40},
            r"arrays: array 'layers.0.mlp.down.kernel' has shape \(48, 32\), but .*\(40, 32\)",
        ),
        ({"layers": [LAYER] * 2}, "arrays has arrays of 1 layers, but jspec.json asks for 2"),
        ({"layers": [LAYER] * 1024}, "arrays has arrays of 1 layers, but jspec.json asks for 1024"),
        ({"layers": [LAYER | {"values_in_keys": True}]}, r"jspec.json: layers\[0\] has values"),
        ({"stop_tokens": [0] * 5000}, "config: stop_tokens has 5000 items, more than 4096"),
        ({"family": [[["x"]]]}, r"config: family=\[\[\['x'\]\]\] must be a string"),
        ({"\x1b": 1}, r"fields \['\\x1b'\] are unknown"),
        ({"qkv_bias": True}, r"array 'layers.0.attention.qkv.bias' has shape none .*\(2, 64\)"),
        (
            {"tie_embeddings": True},
            r"array 'head.kernel' has shape \(32, 41\), but .* no such array",
        ),
    ],
)
def test_damaged_settings(written, change, message):
    edit_settings(written, **change)
    with pytest.raises(CheckpointError, match=message):
        load_model(written)


TWICE = '{"format": 3, "format": 3}'
CONTENTS = ["{", "[]", "{}", TWICE, *(f'{{"format": {n}}}' for n in ("4", "true", "3", "2", "1"))]


@pytest.mark.parametrize("content", CONTENTS)
def test_malformed_settings(written, content):
    (written / saved.SETTINGS).write_text(content)
    with pytest.raises(CheckpointError, match=saved.SETTINGS):
        load_model(written)


@pytest.mark.parametrize("victim", ["", "_METADATA"])
def test_missing_parts(written, victim):
    (written / saved.ARRAYS / victim).rename(written / "away")
    with pytest.raises(CheckpointError, match="arrays"):
        load_model(written)


@pytest.mark.parametrize(
    "victim", default_run(["manifest.ocdbt", "ocdbt.process_0"], "manifest.ocdbt")
)
def test_missing_data(written, victim):
    """One line, and no log line of orbax.

    In a process of its own: orbax drops its other reads unfinished, which may complain at any time.
    """
    (written / saved.ARRAYS / victim).rename(written / "away")
    code = f"""
import jspec
try:
    jspec.load_model({str(written)!r})
except jspec.CheckpointError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert str(written / saved.ARRAYS) in done.stdout
    assert done.stdout.count("\n") == 1
    assert "absl" not in done.stderr
