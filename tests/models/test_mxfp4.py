"""MXFP4 weights of checkpoints: by their definition, kept and dequantised, and what is refused."""

import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from jspec import (
    CheckpointError,
    GuidedDraft,
    SamplingParams,
    generate,
    helix,
    load_model,
    save_model,
)
from jspec.models import packed
from jspec.models.quantized import quantized_copy
from jspec.ops.quantized import MXFP4, dequantized
from jspec.policies import Vegas
from jspec.sharding import bytes_on_device
from tests.models.goldens import GOLDEN
from tests.models.goldens import MXFP4 as CASE
from tests.models.helpers import edit_config, logits_of, one_pass
from tests.parameters import default_run

GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
SPLIT = PartitionSpec("x")


def e2m1(bits: int) -> float:
    """OCP Microscaling Formats 1.0: a sign, two bits of exponent, one of mantissa."""
    sign, exponent, mantissa = bits >> 3, bits >> 1 & 3, bits & 1
    size = mantissa / 2 if exponent == 0 else 2 ** (exponent - 1) * (1 + mantissa / 2)
    return -size if sign else size


@given(st.binary(min_size=32, max_size=32), st.lists(st.integers(0, 252), min_size=2, max_size=2))
def test_mxfp4_by_its_definition(content, scales):
    blocks = np.frombuffer(content, np.uint8).reshape(2, 16)
    got = packed.dequantized(blocks, np.array(scales, np.uint8))
    nibbles = [nibble for byte in content for nibble in (byte & 15, byte >> 4)]
    expected = [e2m1(bits) * 2.0 ** (scales[n // 32] - 127) for n, bits in enumerate(nibbles)]
    np.testing.assert_array_equal(got, np.array(expected, np.float32))
    assert np.isfinite(got).all()


@pytest.fixture
def mxfp4(tmp_path):
    return shutil.copytree(GOLDEN / CASE, tmp_path / "model")


@pytest.mark.parametrize(
    ("suffix", "change", "reason"),
    [
        ("scales", lambda x: np.full_like(x, 255), "byte 255 is no scale of weights"),
        ("scales", lambda x: None, "lacks 'model.layers.0.mlp.experts.gate_up_proj_scales'"),
        ("blocks", lambda x: x.astype(np.int32), "has dtype int32; MXFP4 is in U8"),
        ("blocks", lambda x: x[..., :8], r"has shape \(4, 128, 1, 8\), .* \(4, 128, 1, 16\)"),
    ],
    ids=["nan", "missing", "dtype", "shape"],
)
def test_damaged_mxfp4_is_refused(mxfp4, suffix, change, reason):
    name, file = f"{GATE_UP}_{suffix}", mxfp4 / "model.safetensors"
    tensors = load_file(file)
    changed = change(tensors.pop(name))
    save_file(tensors if changed is None else {**tensors, name: changed}, file)
    with pytest.raises(CheckpointError, match=reason):
        load_model(mxfp4)


def test_mxfp4_is_read_where_config_json_says_so(mxfp4):
    config = json.loads((mxfp4 / "config.json").read_text())
    del config["quantization_config"]
    (mxfp4 / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"lacks .*'{GATE_UP}', which"):
        load_model(mxfp4)


@pytest.fixture(scope="module")
def quantized():
    return load_model(GOLDEN / CASE)


@pytest.fixture(scope="module")
def unquantized():
    return load_model(GOLDEN / CASE, keep_mxfp4=False)


def kernels(model):
    """Those of the first layer's experts."""
    experts = model.layers[0].mlp.experts
    return [module.kernel.get_value() for module in (experts.gate_up, experts.down)]


def assert_same_kernels(one, other):
    for mine, theirs in zip(kernels(one), kernels(other), strict=True):
        assert type(mine) is type(theirs)
        jax.tree.map(np.testing.assert_array_equal, mine, theirs)


def test_experts_stay_as_the_checkpoint_has_them(quantized, unquantized):
    for mine, full in zip(kernels(quantized), kernels(unquantized), strict=True):
        assert isinstance(mine, MXFP4)
        assert mine.shape == full.shape
        np.testing.assert_array_equal(dequantized(mine, jnp.float32), full)
        assert bytes_on_device(mine) * 8 == 4.25 * full.size


def test_logits_are_those_of_dequantised_weights(quantized, unquantized):
    tokens = np.random.default_rng(5).integers(0, quantized.config.vocab_size, (3, 40), np.int32)
    mine, theirs = (
        logits_of(model, tokens, one_pass(tokens)) for model in (quantized, unquantized)
    )
    np.testing.assert_allclose(mine, theirs, atol=1e-5, rtol=0)


def test_a_dtype_loses_nothing(unquantized):
    half = load_model(GOLDEN / CASE, dtype=jnp.bfloat16, keep_mxfp4=False)
    for narrow, full in zip(kernels(half), kernels(unquantized), strict=True):
        # E2M1 and a power of two are exact in bfloat16.
        np.testing.assert_array_equal(narrow.astype(np.float32), full)
    assert half.dtype == load_model(GOLDEN / CASE, dtype=jnp.bfloat16).dtype == jnp.bfloat16


def test_a_saved_model_keeps_them_too(quantized, unquantized, tmp_path):
    path = tmp_path / "saved"
    save_model(quantized, path)
    assert_same_kernels(load_model(path), quantized)
    assert_same_kernels(load_model(path, keep_mxfp4=False), unquantized)


def test_a_damaged_scale_of_a_saved_model_is_refused(quantized, tmp_path):
    from flax import nnx

    copy = nnx.merge(*nnx.split(quantized))
    module = copy.layers[0].mlp.experts.down
    kernel = module.kernel.get_value()
    module.kernel = nnx.Param(MXFP4(kernel.codes, kernel.scales.at[1, 0, 0].set(254), 1))
    save_model(copy, tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"experts\.down\.kernel: byte 254 is no scale"):
        load_model(tmp_path / "saved")


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_a_sharding_that_splits_them_has_them_dequantised(quantized, unquantized, tmp_path):
    save_model(quantized, tmp_path / "saved")
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
    whole = NamedSharding(mesh, PartitionSpec())

    def by_expert(name, shape):
        return NamedSharding(mesh, SPLIT) if ".experts." in name else whole

    for path in (GOLDEN / CASE, tmp_path / "saved"):
        assert_same_kernels(load_model(path, sharding=whole), quantized)
        split = load_model(path, sharding=by_expert)
        assert_same_kernels(split, unquantized)
        assert {x.data.shape[0] for x in kernels(split)[0].addressable_shards} == {2}
        with pytest.raises(
            ValueError, match=r"keep_mxfp4=True: .* splits layers\.0\.mlp\.experts\."
        ):
            load_model(path, sharding=by_expert, keep_mxfp4=True)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_a_mesh_has_them_dequantised(quantized, unquantized):
    config = helix.HelixConfig(kvp=1, tpa=2)
    sharded = helix.load_model(GOLDEN / CASE, config)
    for mine, full in zip(kernels(sharded.model), kernels(unquantized), strict=True):
        np.testing.assert_array_equal(mine, full)
    with pytest.raises(ValueError, match=r"load_model\(path, keep_mxfp4=False\)"):
        helix.shard(quantized, config)


def test_inputs_must_be_whole_blocks(mxfp4):
    edit_config(mxfp4, hidden_size=48)
    with pytest.raises(CheckpointError, match="48 inputs are no multiple of 32"):
        load_model(mxfp4)


PARAMS = SamplingParams(max_new_tokens=16, ignore_eos=True)
PROMPTS = [list(range(3, 60)), [9, 8, 7]]


@pytest.mark.parametrize(
    ("stored", "kind"),
    default_run(
        itertools.product(("quantized", "unquantized"), ("", "int8", "mxfp4")),
        "quantized-mxfp4",
        slow=["quantized-int8", "unquantized-", "unquantized-mxfp4"],
    ),
)
def test_drafts_change_no_token(kind, stored, request):
    model = request.getfixturevalue(stored)
    plain = generate(model, PROMPTS, PARAMS, draft=None)
    draft = GuidedDraft(Vegas(budget=16, least=0), quantized=kind)
    assert generate(model, PROMPTS, PARAMS, draft=draft, gamma=3).tokens == plain.tokens


def test_what_a_copy_shares(quantized, unquantized):
    copy = quantized_copy(quantized, "mxfp4")
    for mine, original in zip(kernels(copy), kernels(quantized), strict=True):
        assert mine.codes is original.codes
    assert isinstance(copy.layers[0].attention.qkv.kernel.get_value(), MXFP4)
    assert isinstance(kernels(quantized_copy(unquantized, "int8"))[0], jax.Array)
    # Weights that have been in MXFP4 are not off.
    for mine, original in zip(
        kernels(quantized_copy(unquantized, "mxfp4")), kernels(unquantized), strict=True
    ):
        assert isinstance(mine, MXFP4)
        np.testing.assert_array_equal(dequantized(mine, jnp.float32), original)
    with pytest.raises(ValueError, match=r"kernel \(32, .* is quantised; save the model that it"):
        save_model(copy, "nowhere")
