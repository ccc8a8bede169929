"""config.json of each family: what it becomes, and what is refused."""

import dataclasses
import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from jspec import CheckpointError, LayerSpec, Rope, RopeScaling, load_model
from jspec.models import families
from jspec.models.families import FAMILIES, model_config
from jspec.models.rope import rope_frequencies
from tests.models.helpers import GOLDEN, LLAMA, assert_equal, parameters, write_checkpoint

FOLDER = Path(families.__file__).parent
PATHS = sorted(GOLDEN.glob("*/config.json"))
QWEN2 = {**LLAMA, "model_type": "qwen2"}
QWEN3 = {**LLAMA, "model_type": "qwen3"}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG = {"type": "longrope", "factor": 2.0, "short_factor": [1.0, 1.5, 2.0, 3.0]}
LONG["original_max_position_embeddings"] = 32
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def without(config: dict, *keys: str) -> dict:
    return {key: value for key, value in config.items() if key not in keys}


def test_llama():
    config = model_config(LLAMA)
    assert (config.num_heads, config.layers) == (4, (LayerSpec(2, 8, 8),) * 2)
    assert (config.qkv_bias, config.out_bias, config.mlp_bias, config.qk_norm) == (False,) * 4
    assert config.ropes == (Rope(10000.0),)
    assert config.stop_tokens == (2,)
    assert config.family == "llama"


def test_biases_of_each_family():
    llama = model_config({**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert (llama.qkv_bias, llama.out_bias, llama.mlp_bias) == (True, True, True)
    qwen2 = model_config({**QWEN2, "attention_bias": False})
    assert (qwen2.qkv_bias, qwen2.out_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, *[False] * 3)
    qwen3 = model_config({**QWEN3, "attention_bias": True})
    assert (qwen3.qkv_bias, qwen3.out_bias, qwen3.mlp_bias, qwen3.qk_norm) == (
        True,
        True,
        False,
        True,
    )


def test_sizes_that_may_be_derived():
    assert model_config(without(LLAMA, "head_dim")).layers[0].key_size == 4
    assert model_config({**LLAMA, "head_dim": None}).layers[0].key_size == 4
    assert model_config(without(LLAMA, "num_key_value_heads")).layers[0].kv_heads == 4


@pytest.mark.parametrize(
    ("stops", "expected"), [(5, (5,)), ([5, 7, 5], (5, 7)), (None, ()), ([], ())]
)
def test_stop_tokens(stops, expected):
    assert model_config({**LLAMA, "eos_token_id": stops}).stop_tokens == expected


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"type": "linear", "factor": 2}, RopeScaling("linear", 2.0)),
        ({"rope_type": "default"}, None),
        (LLAMA3, RopeScaling("llama3", 8.0, 16, 1.0, 4.0)),
        (YARN, RopeScaling("yarn", 4.0, 32)),
        ({**YARN, "attention_factor": 1.25}, RopeScaling("yarn", 4.0, 32, attention_factor=1.25)),
        (
            {**YARN, "beta_fast": 8, "beta_slow": 2, "truncate": False},
            RopeScaling("yarn", 4.0, 32, beta_fast=8.0, beta_slow=2.0, truncate=False),
        ),
        ({**YARN, "mscale": 1, "mscale_all_dim": 1}, RopeScaling("yarn", 4.0, 32, 1, 4, 32, 1, 1)),
        ({"rope_type": "yarn", "factor": 4.0}, RopeScaling("yarn", 4.0, 64)),
        ({**YARN, "factor": None}, RopeScaling("yarn", 2.0, 32)),
        (LONG, RopeScaling("longrope", 2.0, 32, wave_factors=(1.0, 1.5, 2.0, 3.0))),
    ],
)
@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters"])
def test_rope_in_both_forms(form, rope, scaling):
    if form == "rope_scaling":
        config = model_config({**LLAMA, "rope_theta": 500.0, "rope_scaling": rope})
    else:
        config = model_config({**LLAMA, "rope_parameters": {"rope_theta": 500.0, **rope}})
    assert config.ropes == (Rope(500.0, scaling),)


def test_rope_theta_inside_goes_first():
    values = {**LLAMA, "rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}
    assert model_config(values).ropes == (Rope(5e5),)


@pytest.mark.parametrize("factor", [None, 1.0, 1.5])
@pytest.mark.parametrize("more", [{}, {"mscale": 1.0, "mscale_all_dim": 0.5}])
def test_attn_factor_multiplies_what_yarn_has_without_it(factor, more):
    """YaRN's authors: ``mscale = get_mscale(factor) * attn_factor``."""
    (rope,) = model_config({**LLAMA, "rope_scaling": {**YARN, **more}}).ropes
    (other,) = model_config(
        {**LLAMA, "rope_scaling": {**YARN, **more, "attn_factor": factor}}
    ).ropes
    before, after = (
        rope_frequencies(8, rope)[1],
        rope_frequencies(8, other)[1],
    )
    assert after == pytest.approx(before * (factor or 1.0))


def test_scaling_of_the_context():
    """Linear and YaRN scaling stretch it, from the original length where the file says that."""
    linear = {"type": "linear", "factor": 3.0}
    cases = [
        (YARN, 128),
        (LLAMA3, 64),
        (linear, 192),
        ({**linear, "original_max_position_embeddings": 32}, 96),
        ({**linear, "original_max_position_embeddings": 16}, 64),
        ({"type": "dynamic", "factor": 3.0}, 64),
        (LONG, 32),
    ]
    for scaling, context in cases:
        assert model_config({**LLAMA, "rope_scaling": scaling}).max_context == context


def test_dynamic_scaling_changes_nothing_in_the_context():
    config = model_config({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 3.0}})
    assert config.ropes == (Rope(10000.0),)


def test_dual_chunk_attention_is_plain_within_a_chunk():
    chunks = {"chunk_size": 32, "local_size": 8, "original_max_position_embeddings": 48}
    assert model_config({**QWEN2, "dual_chunk_attention_config": chunks}).max_context == 32
    chunks["original_max_position_embeddings"] = 24
    assert model_config({**QWEN2, "dual_chunk_attention_config": chunks}).max_context == 24
    with pytest.raises(CheckpointError, match=r"fields \['dual_chunk_attention_config'\] are unk"):
        model_config({**LLAMA, "dual_chunk_attention_config": chunks})
    with pytest.raises(CheckpointError, match=r"dual_chunk_attention_config: fields \['other'\]"):
        model_config({**QWEN2, "dual_chunk_attention_config": {**chunks, "other": 1}})


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({"sliding_window": 16, "max_window_layers": 1, "use_sliding_window": False}, [None] * 2),
        ({"sliding_window": 16, "max_window_layers": 2}, [None] * 2),
        ({"sliding_window": 16, "max_window_layers": 1}, [None, 16]),
        ({"sliding_window": 16, "max_window_layers": 0}, [16, 16]),
        ({"sliding_window": None, "max_window_layers": 0}, [None, None]),
        ({"max_window_layers": 1}, [None, 4096]),
        ({"sliding_window": 16}, [None, None]),  # transformers: from layer 28 on
        ({"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}, [9, None]),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_of_qwen(family, change, windows):
    values = {**LLAMA, "model_type": family, "use_sliding_window": True, **change}
    assert [spec.window for spec in model_config(values).layers] == windows


def test_windows_of_qwen_that_disagree():
    values = {**QWEN3, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9}
    with pytest.raises(CheckpointError, match=r"layer_types asks for .* use_sliding_window=false"):
        model_config(values)


GOLDENS = sorted({json.loads(p.read_text())["model_type"]: p for p in PATHS}.items())


@pytest.mark.parametrize("path", [path for _, path in GOLDENS], ids=[name for name, _ in GOLDENS])
def test_unknown_fields_of_every_family(path):
    """What may change a token is an error by name; what cannot is ignored by a list of names."""
    values = json.loads(path.read_text())
    harmless = {"unsloth_version": "2026", "unsloth_fixed": True, "torch_dtype": "bfloat16"}
    harmless |= {"_name_or_path": "x", "pruned_heads": {}, "top_k": 50, "some_future_field": None}
    assert model_config({**values, **harmless}) == model_config(values)
    for key, value in {
        "this_changes_everything": True,
        "_this_too": 1,
        "alibi": True,
        "pruned_heads": {"0": [1]},
        "is_encoder_decoder": True,
    }.items():
        with pytest.raises(CheckpointError, match=rf"fields \['{key}'\] are unknown to jspec"):
            model_config({**values, key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [("sliding_window", 32), ("no_rope_layers", [1, 1, 1, 0]), ("embedding_multiplier", 12.0)],
    ids=["mistral", "smollm3", "granite"],
)
def test_a_renamed_model_is_refused(key, value):
    with pytest.raises(CheckpointError, match=rf"\['{key}'\] are unknown .* check model_type"):
        model_config({**LLAMA, key: value})


REFUSED = [
    ({"model_type": "gpt2"}, "model_type='gpt2' is unknown; jspec has deepseek_v2"),
    ({"model_type": None}, "model_type is null"),
    ({"model_type": 3}, "model_type=3 must be a string"),
    ({"hidden_size": ...}, "hidden_size is missing; it must be a positive integer"),
    ({"hidden_size": "16"}, "hidden_size='16' must be a positive integer"),
    ({"hidden_size": 16.0}, "hidden_size=16.0 must be"),
    ({"hidden_size": True}, "hidden_size=True must be"),
    ({"hidden_size": -1}, "hidden_size=-1 must be"),
    ({"hidden_size": 2**31}, f"hidden_size={2**31} must be"),
    ({"vocab_size": [1]}, r"vocab_size=\[1\] must be"),
    ({"num_hidden_layers": 10**6}, "num_hidden_layers=1000000 must be at most"),
    ({"max_position_embeddings": ...}, "max_position_embeddings is missing"),
    ({"rms_norm_eps": ...}, "rms_norm_eps is missing"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a positive number"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps=1000.* must be a positive number"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no' must be true or false"),
    ({"num_key_value_heads": 3}, "num_heads=4 must be a multiple of kv_heads=3"),
    ({"head_dim": 7}, "key_size=7 must be even"),
    ({"head_dim": ..., "hidden_size": 18}, "hidden_size=18 is no multiple.*give head_dim"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; jspec has silu"),
    ({"eos_token_id": "2"}, "eos_token_id='2' must be a token id or"),
    ({"eos_token_id": [1, True]}, r"eos_token_id=\[1, True\] must be"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, r"'sliding_attention'\] is not of"),
    ({"layer_types": 5}, "layer_types=5 must be full_attention or sliding_attention for each of 2"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
    ({"rope_theta": 0}, "rope_theta=0 must be a positive number"),
    ({"rope_theta": 1.0}, "rope_theta=1.0 must be above 1"),
    ({"rope_scaling": "linear"}, "rope_scaling='linear' must be an object"),
    ({"rope_scaling": {"rope_type": "proportional"}}, "rope_type='proportional' is not supported"),
    ({"rope_scaling": {"type": "longrope"}}, "short_factor is missing; it must be a list of pos"),
    ({"rope_scaling": {**LONG, "short_factor": [1.0] * 3}}, "its rope needs 4 wave_factors"),
    (
        {"rope_scaling": {**LONG, "short_factor": [1.0, 0]}},
        r"short_factor=\[1.0, 0\] must be a list",
    ),
    (
        {"rope_scaling": {**LONG, "type": "linear"}},
        "short_factor does not go with rope_type='linea",
    ),
    ({"rope_scaling": {"factor": 2.0}}, "factor=2.0 has no rope_type; add the one that the model"),
    ({"rope_scaling": {"type": "linear", "factor": 2, "attn_factor": 2}}, "attn_factor=2 is not s"),
    ({"rope_scaling": {**YARN, "attn_factor": 2, "attention_factor": 1}}, "keep the one that the"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
    ({"rope_scaling": {**YARN, "factor": 9e299}}, "factor=9e.299 must be a finite number from 1"),
    ({"rope_scaling": {**YARN, "factor": 1e9}}, "a rope of factor=1e.09 over"),
    ({"rope_scaling": {**YARN, "beta_slow": 1e-300}}, "beta_slow=1e-300 must be a finite number"),
    ({"rope_scaling": {**LLAMA3, "low_freq_factor": 9e299, "high_freq_factor": 1e300}}, "number"),
    ({"rope_theta": 9e299}, "theta=9e.299 must be a finite number from 1 to 1e12"),
    ({"eos_token_id": [2] * 1025}, "a list of at most 1024"),
    ({"rope_scaling": {"x" * 99: 1, "y": 2}}, "are unknown to jspec"),
    ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor=0.5 must be a finite number"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor='2' must be a positive number"),
    ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, r"\['mrope_section'\] are"),
    ({"rope_parameters": {"full_attention": {}}}, r"fields \['full_attention'\] are unknown"),
    ({"rope_scaling": without(LLAMA3, "low_freq_factor")}, "low_freq_factor is missing"),
    ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor=1.0 must be above"),
    ({"rope_scaling": {**YARN, "beta_fast": 0.5}}, "beta_fast=0.5 must be at least beta_slow=1.0"),
    ({"rope_scaling": {**YARN, "attention_factor": -1}}, "attention_factor=-1 must be a positive"),
    ({"rope_scaling": {**YARN, "truncate": 1}}, "truncate=1 must be true or false"),
    ({"rope_scaling": YARN, "rope_parameters": LLAMA3}, "disagree; keep the one"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_refused(change, message):
    values = {key: value for key, value in {**LLAMA, **change}.items() if value is not ...}
    with pytest.raises(CheckpointError, match=f"^here/config.json: .*{message}"):
        model_config(values, source="here/config.json")


@pytest.mark.parametrize("family", ["kimi_k2", "glm4_moe_lite"])
def test_deepseek_v3_under_other_names(family):
    values = json.loads((GOLDEN / "deepseek_v3" / "config.json").read_text())
    config = model_config({**values, "model_type": family})
    assert config == dataclasses.replace(model_config(values), family=family)


def test_where_jspec_differs_from_transformers():
    """docs/checkpoints.md gives the reasons; `test_family_parity` asks transformers."""
    gemma3, moe = (
        json.loads((GOLDEN / n / "config.json").read_text()) for n in ("gemma3", "qwen3_moe")
    )
    capped = model_config({**gemma3, "attn_logit_softcapping": 4.0})
    assert {spec.softcap for spec in capped.layers} == {4.0}
    moe |= {"use_sliding_window": True, "sliding_window": 9}
    assert [spec.window for spec in model_config({**moe, "max_window_layers": 1}).layers] == [
        None,
        9,
    ]
    assert [spec.window for spec in model_config(moe).layers] == [9, 9]


@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim"])
def test_qwen3_needs_its_sizes(key):
    with pytest.raises(CheckpointError, match=f"{key} is missing"):
        model_config(without(QWEN3, key))


def test_a_family_is_a_file(tmp_path, monkeypatch):
    """A Llama with other tensor names, as a file of the folder would have it."""
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    (tmp_path / "toy.py").write_text(
        "from jspec.models.families import llama\n"
        "from jspec.models.families.shared.family import Family\n"
        "NAMES = {**llama.MODULES, 'mlp.up': 'mlp.wide', 'head': 'out_head'}\n"
        "FAMILY = Family(llama.read, NAMES)\n"
    )
    monkeypatch.setattr(families, "FAMILIES", (*FAMILIES, "toy"))
    assert {*FAMILIES} == {file.stem for file in FOLDER.glob("*.py")} - {"__init__"}

    expected = parameters(load_model(write_checkpoint(tmp_path / "llama")))
    path = write_checkpoint(tmp_path / "toy", model_type="toy")
    tensors = load_file(path / "model.safetensors")
    renamed = {
        name.replace("mlp.up_proj", "mlp.wide").replace("lm_head", "out_head"): value
        for name, value in tensors.items()
    }
    save_file(renamed, path / "model.safetensors")
    model = load_model(path)
    assert model.config.family == "toy"
    assert_equal(model, expected)
