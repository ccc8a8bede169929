"""Gemma 2 and 3: settings of the hub's files, the language model without images, and refusals."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tokenizers import normalizers, pre_tokenizers

from jspec import (
    CheckpointError,
    LayerSpec,
    NgramDraft,
    Rope,
    RopeScaling,
    SamplingParams,
    SelfDraft,
    generate,
    load_model,
    load_tokenizer,
    save_model,
)
from jspec.models.decoder import Decoder
from jspec.models.families import model_config
from jspec.ops.append import APPEND, QKRope
from jspec.ops.linear import LINEAR
from jspec.ops.norm import RMS
from jspec.policies import ExactTopK
from tests.conftest import ONE_LAYER
from tests.models.goldens import GOLDEN
from tests.models.helpers import assert_equal, logits_of, one_pass, parameters
from tests.models.tokenizers import byte_fallback

GEMMA2, GEMMA3 = (
    json.loads((GOLDEN / name / "config.json").read_text()) for name in ("gemma2", "gemma3")
)
# As they are on the hub.
GEMMA_2_2B = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 107],
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.4",
    "use_cache": True,
    "vocab_size": 256000,
}
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
    "vocab_size": 262144,
}
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


def test_settings_of_gemma_2_2b():
    config = model_config(GEMMA_2_2B)
    whole = LayerSpec(4, 256, 256, scale=256**-0.5, softcap=50.0)
    assert config.layers == (dataclasses.replace(whole, window=4096), whole) * 13
    assert (config.ropes, config.qk_norm, config.logit_softcap) == ((Rope(1e4),), False, 30.0)
    assert (config.post_norms, config.centered_norms, config.activation) == (
        True,
        True,
        "gelu_tanh",
    )
    assert (config.embedding_scale, config.tie_embeddings) == (48.0, True)


def test_settings_of_gemma_3_1b():
    config = model_config(GEMMA_3_1B)
    whole = LayerSpec(1, 256, 256, scale=256**-0.5)
    local = dataclasses.replace(whole, window=512, rope=1)
    assert config.layers == (*((*[local] * 5, whole) * 4), local, local)
    assert (config.ropes, config.qk_norm) == ((Rope(1e6), Rope(1e4)), True)
    assert (config.logit_softcap, config.stop_tokens) == (None, (1, 106))


def test_settings_of_gemma_3_4b():
    """Most sizes of its language model are those that transformers fills in."""
    config = model_config(GEMMA_3_4B)
    assert config.ropes == (Rope(1e6, RopeScaling("linear", 8.0)), Rope(1e4))
    assert (config.num_heads, config.num_layers, config.vocab_size) == (8, 34, 262208)
    assert config.layers[5] == LayerSpec(4, 256, 256, scale=256**-0.5)
    assert config.layers[6] == LayerSpec(4, 256, 256, window=1024, scale=256**-0.5, rope=1)
    assert (config.family, config.stop_tokens, config.max_context) == ("gemma3", (1, 106), 131072)


def test_a_cap_that_is_null_is_none():
    """Where it is absent it is the family's own."""
    absent = {key: value for key, value in GEMMA2.items() if not key.endswith("softcapping")}
    assert (model_config(absent).layers[0].softcap, model_config(absent).logit_softcap) == (50, 30)
    null = absent | {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    assert (model_config(null).layers[0].softcap, model_config(null).logit_softcap) == (None, None)


@pytest.mark.parametrize(
    ("config", "change", "reason"),
    [
        (GEMMA3, {"use_bidirectional_attention": True}, "jspec decodes causal models"),
        (
            GEMMA3,
            {"hidden_activation": "gelu"},
            "hidden_activation='gelu' is not supported",
        ),
        (GEMMA2, {"hidden_act": "silu"}, "hidden_act='silu' is not supported"),
        (GEMMA2, {"sliding_window": None}, "sliding_window is null"),
        (GEMMA2, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 must be a positive number"),
        (GEMMA2, {"attn_logit_softcapping": -1}, "attn_logit_softcapping=-1 must be"),
        (GEMMA2, {"altup_num_inputs": 4}, r"fields \['altup_num_inputs'\] are unknown to jspec"),
        (
            GEMMA3,
            {"rope_parameters": {"full_attention": {"rope_theta": 9.0}, "factor": 2}},
            "'factor'",
        ),
        (
            GEMMA3,
            {"rope_parameters": {"full_attention": {"mscale": 1, "x": 1}}},
            r"\['x'\] are unkn",
        ),
        (GEMMA_3_4B, {"text_config": None}, "text_config is missing"),
        (GEMMA_3_4B, {"audio_config": {"a": 1}}, r"fields \['audio_config'\] are unknown"),
        (GEMMA_3_4B, {"text_config": {"x": 1}}, r"text_config: fields \['x'\] are unknown"),
    ],
)
def test_refused(config, change, reason):
    with pytest.raises(CheckpointError, match=reason):
        model_config({**config, **change})


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_language_model_beside_images(tmp_path, prefix):
    """In the names of the hub's files, and in those of later ones."""
    tensors = load_file(GOLDEN / "gemma3" / "model.safetensors")
    renamed = {name.replace("model.", prefix, 1): value for name, value in tensors.items()}
    before = "model." if prefix.startswith("model.") else ""
    for name in ("vision_tower.embeddings.weight", "multi_modal_projector.norm.weight"):
        renamed[before + name] = np.zeros((3, 4), np.float32)
    config = {"model_type": "gemma3", "text_config": GEMMA3, "vision_config": {"hidden_size": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(renamed, tmp_path / "model.safetensors")
    assert_equal(load_model(tmp_path), parameters(load_model(GOLDEN / "gemma3")))
    save_file({**tensors, **renamed}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="a second time"):
        load_model(tmp_path)


def test_centered_norms_are_computed_in_float32():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8)), jnp.bfloat16)
    scale = jnp.full(8, 2.0**-9, jnp.bfloat16)
    x32 = np.asarray(x, np.float32)
    expected = x32 / np.sqrt((x32**2).mean(-1, keepdims=True) + 1e-6) * (1 + 2.0**-9)
    got = RMS(scale, 1e-6, centered=True)(x)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, jnp.asarray(expected, jnp.bfloat16))


def test_the_scale_of_embeddings_has_their_dtype():
    """The root of Gemma 7B's 3072 is 55.4; transformers rounds it to 55.5 in bfloat16."""
    config = dataclasses.replace(ONE_LAYER, embedding_scale=3072**0.5)
    model = Decoder(config, dtype=jnp.bfloat16, rngs=None)
    embedding = np.random.default_rng(0).normal(size=(41, 32)).astype(jnp.bfloat16)
    model.embedding = nnx.Param(jnp.asarray(embedding))
    expected = (np.float32(embedding) * 55.5).astype(jnp.bfloat16)
    np.testing.assert_array_equal(model.embed(np.arange(41, dtype=np.int32)[None])[0], expected)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_kernels_refuse_centered_norms(backend):
    norm = RMS(jnp.zeros(16, jnp.bfloat16), centered=True)
    x, kernel = jnp.zeros((1, 16), jnp.bfloat16), jnp.zeros((16, 16), jnp.bfloat16)
    settings = {"gated": False, "transposed": False, "dtype": np.dtype(jnp.bfloat16)}
    reason = LINEAR.backend(backend).supports(x, kernel, None, norm, None, **settings)
    assert reason == "its norm scales by 1 + scale"
    if backend == "triton":
        q, k = jnp.zeros((1, 1, 2, 16)), jnp.zeros((1, 1, 1, 16))
        qk_rope = QKRope(k, k, norm, norm, jnp.zeros((1, 1, 1, 64)))
        args = (q, k, k, qk_rope, k, k, jnp.zeros((1, 1), jnp.int32))
        assert APPEND.backend(backend).supports(*args) == "its norm scales by 1 + scale"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
@pytest.mark.parametrize(
    "change",
    [
        {"embedding_scale": None},
        {"logit_softcap": None},
        {"layers": "scale"},
        {"layers": "window"},
        {"layers": "softcap"},
        {"ropes": (Rope(123.0), Rope(100.0))},
        {"ropes": (Rope(50000.0, RopeScaling("linear", 8.0)), Rope(123.0))},
    ],
    ids=["embedding", "logits", "scale", "window", "softcap", "rope", "local-rope"],
)
def test_the_goldens_depend_on_every_setting(name, change):
    model = load_model(GOLDEN / name)
    if isinstance(field := change.get("layers"), str):
        if all(getattr(spec, field) is None for spec in model.config.layers):
            pytest.skip(f"{name} has no {field}")
        specs = tuple(dataclasses.replace(s, **{field: None}) for s in model.config.layers)
        change = {"layers": specs}
    if "ropes" in change:
        change = {"ropes": change["ropes"][: len(model.config.ropes)]}
    if change == {"ropes": model.config.ropes}:
        pytest.skip(f"{name} has one rope")
    copy = nnx.merge(*nnx.split(model))
    copy.config = dataclasses.replace(model.config, **change)
    with np.load(GOLDEN / name / "logits.npz") as golden:
        tokens, logits = golden["tokens"], golden["logits"]
    assert np.abs(logits_of(copy, tokens, one_pass(tokens)) - logits).max() > 0.01


def test_a_saved_model_comes_back(tmp_path):
    model = load_model(GOLDEN / "gemma3")
    save_model(model, tmp_path / "saved")
    again = load_model(tmp_path / "saved")
    assert again.config == model.config
    assert_equal(again, parameters(model))


def test_texts_come_back_from_its_tokenizer(tmp_path):
    """Spaces become a character of the vocabulary before the text is cut at it."""
    made = byte_fallback(strip=False)
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    for text in ("a b", "  the cat é日", "𝄞"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


PROMPTS = [list(range(3, 60)), [9, 8, 7]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
@pytest.mark.parametrize(
    "draft", [NgramDraft(), SelfDraft(ExactTopK(budget=24, dense_layers=0))], ids=["ngram", "top-k"]
)
def test_drafts_change_no_token(name, draft):
    model = load_model(GOLDEN / name)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    plain = generate(model, PROMPTS, params, draft=None, gamma=0)
    drafted = generate(model, PROMPTS, params, draft=draft, gamma=3)
    assert drafted.tokens == plain.tokens
