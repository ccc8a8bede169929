"""config.json of each family: what it becomes, and what is refused."""

from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from jspec import CheckpointError, LayerSpec, Rope, RopeScaling, load_model
from jspec.models import families
from jspec.models.families import FAMILIES, model_config
from tests.models.helpers import LLAMA, assert_equal, parameters, write_checkpoint

FOLDER = Path(families.__file__).parent
QWEN2 = {**LLAMA, "model_type": "qwen2"}
QWEN3 = {**LLAMA, "model_type": "qwen3"}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
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


def test_yarn_stretches_the_context():
    assert model_config({**LLAMA, "rope_scaling": YARN}).max_context == 128
    assert model_config({**LLAMA, "rope_scaling": LLAMA3}).max_context == 64


def test_unused_sliding_windows_are_no_obstacle():
    window = {"sliding_window": 16, "max_window_layers": 1}
    assert model_config({**QWEN2, **window, "use_sliding_window": False}).num_layers == 2
    window["max_window_layers"] = 2
    assert model_config({**QWEN2, **window, "use_sliding_window": True}).num_layers == 2
    assert model_config({**QWEN3, "layer_types": ["full_attention"] * 2}).num_layers == 2


REFUSED = [
    ({"model_type": "mixtral"}, "model_type='mixtral' is unknown; jspec has deepseek_v2"),
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
    ({"eos_token_id": "2"}, "eos_token_id='2' must be a token id below 24"),
    ({"eos_token_id": 24}, "eos_token_id=24 must be"),
    ({"eos_token_id": [1, -1]}, r"eos_token_id=\[1, -1\] must be"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types has \['sliding"),
    ({"layer_types": 5}, "layer_types has 5"),
    ({"use_sliding_window": True, "sliding_window": 16}, "use_sliding_window=true with sliding"),
    (
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        "sliding_window=16 and max_window_layers=1",
    ),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
    ({"rope_theta": 0}, "rope_theta=0 must be a positive number"),
    ({"rope_theta": 1.0}, "rope_theta=1.0 must be above 1"),
    ({"rope_scaling": "linear"}, "rope_scaling='linear' must be an object"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope_type='dynamic' is not supp"),
    ({"rope_scaling": {"type": "longrope"}}, "'longrope' is not supported; jspec has default, li"),
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
