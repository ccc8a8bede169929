"""GGUF files, written by the gguf package: the models of the checkpoints that they are made of."""

import contextlib
import dataclasses

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from jspec import CheckpointError, LayerSpec, Rope, RopeScaling, load_model, load_tokenizer
from jspec.models.rope import rope_frequencies
from tests.models.gguf_files import write_gguf
from tests.models.goldens import GOLDEN, logits_of
from tests.models.helpers import logits_of as our_logits
from tests.models.helpers import one_pass, parameters
from tests.models.tokenizers import byte_level

FAMILIES = ["llama_linear", "qwen2_yarn", "qwen3", "qwen3_moe", "gemma2", "gemma3", "gpt_oss"]


def loaded(path, name, kind="F32", **fields):
    return load_model(write_gguf(path / "model.gguf", name, kind, **fields))


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_those_of_the_checkpoint(tmp_path, name):
    ours, expected = (parameters(model) for model in (loaded(tmp_path, name), golden(name)))
    assert ours.keys() == expected.keys()
    for parameter, value in expected.items():
        # To add 1 and take it away again rounds what scales in Gemma.
        error = 3e-7 if name.startswith("gemma") and parameter.endswith(".scale") else 0
        np.testing.assert_allclose(ours[parameter], value, atol=error, rtol=0, err_msg=parameter)


def golden(name):
    return load_model(GOLDEN / name)


def rounded(settings):
    """Numbers as float32, as a file has them."""
    if isinstance(settings, dict):
        return {key: rounded(value) for key, value in settings.items()}
    if isinstance(settings, (list, tuple)):
        return [rounded(value) for value in settings]
    return pytest.approx(settings, rel=1e-6) if isinstance(settings, float) else settings


@pytest.mark.parametrize("name", ["llama_linear", "qwen2_yarn", "qwen3", "qwen3_moe", "gpt_oss"])
def test_settings_are_those_of_the_checkpoint(tmp_path, name):
    expected = dataclasses.asdict(golden(name).config)
    if name == "gpt_oss":
        # A file does not say it; both models have it.
        expected["experts"]["clamped"]["limit"] = 7.0
    assert rounded(dataclasses.asdict(loaded(tmp_path, name).config)) == rounded(expected)


def test_settings_of_gemma(tmp_path):
    """What files do not say is as llama.cpp takes it."""
    two, three = (golden(name).config for name in ("gemma2", "gemma3"))
    ours = loaded(tmp_path, "gemma2").config
    scaled = tuple(dataclasses.replace(spec, scale=0.25) for spec in two.layers)
    assert (ours.layers, ours.logit_softcap) == (scaled, two.logit_softcap)
    ours = loaded(tmp_path, "gemma3", **{"rope.freq_base_swa": 100.0}).config
    window = LayerSpec(2, 16, 16, window=9, scale=0.25, rope=1)
    assert (ours.layers, ours.ropes) == ((window,) * 3, three.ropes)
    assert (ours.embedding_scale, ours.qk_norm) == (three.embedding_scale, True)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "BF16", "F16", "MXFP4"])
def test_tensors_are_dequantised(tmp_path, kind):
    ours = loaded(tmp_path, "llama2", kind).layers[0]
    stored = load_file(GOLDEN / "llama2" / "model.safetensors")
    chosen = gguf.GGMLQuantizationType[kind]

    def rounded(name):
        value = stored[f"model.layers.0.{name}.weight"]
        return gguf.dequantize(gguf.quantize(value, chosen), chosen).T

    up = ours.mlp.gate_up.kernel.get_value()[:, 1]
    np.testing.assert_array_equal(up, rounded("mlp.up_proj"))
    q = ours.attention.qkv.kernel.get_value()[:, :, :16].reshape(64, -1)
    np.testing.assert_array_equal(q, rounded("self_attn.q_proj"))


def test_rotary_factors_of_llama_3(tmp_path, monkeypatch):
    """A file has the factor of each wave, and no word of what they are from."""
    scaling = RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)
    plain, scaled = (rope_frequencies(16, Rope(5e5, factors))[0] for factors in (None, scaling))
    add, factors = gguf.GGUFWriter.write_header_to_file, plain / scaled

    def with_factors(writer, *args):
        writer.add_tensor("rope_freqs.weight", factors)
        return add(writer, *args)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
    base = {"rope.freq_base": 5e5}
    assert loaded(tmp_path, "llama2", **base).config.ropes == (Rope(5e5, scaling),)
    factors = np.linspace(1, 8, 8).astype(np.float32)
    with pytest.raises(CheckpointError, match="factors that are not Llama 3's"):
        loaded(tmp_path, "llama2", **base)


def test_a_rotary_factor_alone_is_linear(tmp_path):
    """As llama.cpp takes it."""
    (rope,) = loaded(tmp_path, "qwen2", **{"rope.scaling.factor": 4.0}).config.ropes
    assert rope.scaling == RopeScaling("linear", 4.0)


def test_the_attention_factor_of_yarn(tmp_path):
    """llama.cpp multiplies YaRN's own by both."""
    plain = loaded(tmp_path, "qwen2_yarn").config.ropes[0]
    fields = {"rope.scaling.attn_factor": 0.5, "rope.scaling.yarn_attn_factor": 1.5}
    tuned = loaded(tmp_path, "qwen2_yarn", **fields).config.ropes[0]
    before, after = (rope_frequencies(16, r)[1] for r in (plain, tuned))
    assert after == pytest.approx(0.75 * before)


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("qwen3", {"rope.scaling.attn_factor": 0.5}, "attn_factor=0.5 is not supported with"),
        ("qwen3", {"rope.dimension_count": 8}, "rope.dimension_count=8 must be that of keys, 16"),
        ("qwen3", {"attention.causal": False}, r"fields \['attention.causal'\] are unknown"),
        ("qwen3", {"context_length": None}, "context_length is missing"),
        ("qwen3", {"block_count": 3}, "has tensors of 2 layers, but its field block_count says 3"),
        ("qwen3", {"block_count": 1}, "has tensors of 2 layers, but its field block_count says 1"),
        ("qwen3", {"feed_forward_length": 41}, r"ffn_down.weight' has shape \(32, 40\), but"),
        ("qwen3", {"rope.scaling.type": "longrope"}, "rope.scaling.type='longrope' is not"),
        ("qwen3", {"embedding_length": "x"}, "'x' must be a positive integer"),
        ("gemma2", {"attention.sliding_window": None}, "must be a positive integer"),
        ("qwen3_moe", {"expert_count": 7}, r"has shape \(6, .* its field expert_count says 7"),
    ],
)
def test_refused(tmp_path, name, fields, reason):
    with pytest.raises(CheckpointError, match=reason):
        loaded(tmp_path, name, **fields)


def test_damaged_files_are_refused(tmp_path):
    content = write_gguf(tmp_path / "model.gguf", "qwen3").read_bytes()
    path = tmp_path / "damaged.gguf"
    rng = np.random.default_rng(0)
    for cut in (0, 3, 9, 200, 2000, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match=r"damaged\.gguf"):
            load_model(path)
    for _ in range(60):
        damaged = bytearray(content)
        for place in rng.integers(0, 3000, 3):
            damaged[place] = rng.integers(0, 256)
        path.write_bytes(damaged)
        with contextlib.suppress(CheckpointError):
            load_model(path)
    path.write_bytes(content.replace(b"qwen3", b"qwen9"))
    with pytest.raises(CheckpointError, match="architecture 'qwen9' is unknown; jspec has llama"):
        load_model(path)


def test_the_tokenizer_lies_beside_the_file(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", "qwen3")
    byte_level().save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(path).encode("cat") == load_tokenizer(tmp_path).encode("cat")


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama2", "qwen2"])
def test_transformers_reads_the_same_model(tmp_path, name):
    """Of other families it leaves out scalings, soft caps, biases or the size of experts."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    path = write_gguf(tmp_path / "model.gguf", name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, attn_implementation="eager"
    )
    with np.load(GOLDEN / name / "logits.npz") as stored:
        tokens = stored["tokens"]
    ours = our_logits(load_model(path), tokens, one_pass(tokens))
    np.testing.assert_allclose(ours, logits_of(theirs.eval(), tokens), atol=1e-4, rtol=0)
