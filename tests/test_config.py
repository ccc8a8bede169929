"""Settings are checked when they are made, and say what is wrong and what to do."""

import dataclasses
import math
import random
import re

import numpy as np
import pytest

from jspec.config import LayerSpec, ModelConfig, SamplingParams
from jspec.parts import Experts, Rope, RopeScaling
from tests.conftest import TINY

MODEL = {field.name: getattr(TINY, field.name) for field in dataclasses.fields(TINY)}
UNIFORM = {
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 16,
}
LAYER = {"kv_heads": 2, "key_size": 16, "value_size": 16}


def second(**changes) -> tuple[LayerSpec, ...]:
    """Two layers, the second with ``changes``."""
    return (TINY.layers[0], LayerSpec(**(LAYER | changes)))


LINEAR = {"kind": "linear", "factor": 2.0}
YARN = {"kind": "yarn", "factor": 2.0, "original_context": 64}

BAD = [
    (SamplingParams, {"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
    (SamplingParams, {"temperature": -0.5}, "temperature=-0.5 must be 0 (greedy) or a positive"),
    (SamplingParams, {"temperature": math.nan}, "temperature=nan must be"),
    (SamplingParams, {"temperature": math.inf}, "temperature=inf must be"),
    (SamplingParams, {"top_k": -2}, "top_k=-2 must be at least 1; 0 or -1 switches it off"),
    (SamplingParams, {"top_p": 0.0}, "top_p=0.0 must be in (0, 1]; 1 switches it off"),
    (SamplingParams, {"top_p": 1.1}, "top_p=1.1 must be in (0, 1]"),
    (SamplingParams, {"top_p": math.nan}, "top_p=nan must be in (0, 1]"),
    (SamplingParams, {"min_p": -0.1}, "min_p=-0.1 must be in [0, 1]; 0 switches it off"),
    (SamplingParams, {"min_p": 1.5}, "min_p=1.5 must be in [0, 1]"),
    (SamplingParams, {"seed": -1}, "seed=-1 must be in [0, 2**32)"),
    (SamplingParams, {"seed": 2**32}, "seed=4294967296 must be in [0, 2**32)"),
    (SamplingParams, {"stop_tokens": (3, -1)}, "stop_tokens=(3, -1) must be token ids"),
    (SamplingParams, {"draft_limit": -1}, "draft_limit=-1 must be at least 0; None leaves it"),
    (SamplingParams, {"max_new_tokens": 2**31}, "max_new_tokens=2147483648 must be below 21474"),
    (SamplingParams, {"max_new_tokens": 8.0}, "max_new_tokens=8.0 must be a whole number"),
    (SamplingParams, {"max_new_tokens": None}, "max_new_tokens=None must be a whole number"),
    (SamplingParams, {"max_new_tokens": True}, "max_new_tokens=True must be a whole number"),
    (SamplingParams, {"temperature": 10**400}, "temperature=1000"),
    (SamplingParams, {"temperature": 10**5000}, "temperature=int of thousands of digits must be"),
    (SamplingParams, {"temperature": 3.5e38}, "temperature=3.5e+38 must be 0 (greedy) or a"),
    (SamplingParams, {"temperature": True}, "temperature=True must be 0 (greedy) or a positive"),
    (SamplingParams, {"temperature": "1"}, "temperature='1' must be 0 (greedy) or a positive"),
    (SamplingParams, {"temperature": None}, "temperature=None must be 0 (greedy) or a positive"),
    (SamplingParams, {"top_k": 2**31}, "top_k=2147483648 must be below 2147483648"),
    (SamplingParams, {"top_k": 2.9}, "top_k=2.9 must be a whole number"),
    (SamplingParams, {"top_k": np.float32(2)}, "top_k=np.float32(2.0) must be a whole number"),
    (SamplingParams, {"top_p": -(10**5000)}, "top_p=int of thousands of digits must be in (0, 1]"),
    (SamplingParams, {"top_p": "x" * 10**4}, f"top_p='{'x' * 37}...{'x' * 38}' must be in (0, 1]"),
    (SamplingParams, {"min_p": math.nan}, "min_p=nan must be in [0, 1]"),
    (SamplingParams, {"seed": 1.7}, "seed=1.7 must be a whole number"),
    (SamplingParams, {"seed": 10**5000}, "seed=int of thousands of digits must be in [0, 2**32)"),
    (SamplingParams, {"stop_tokens": (2**31,)}, "stop_tokens=(2147483648,) must be token ids"),
    (SamplingParams, {"stop_tokens": (1.0,)}, "stop_tokens=(1.0,) must be token ids"),
    (SamplingParams, {"stop_tokens": (False,)}, "stop_tokens=(False,) must be token ids"),
    (SamplingParams, {"stop_tokens": 5}, "stop_tokens=5 must be token ids, whole numbers below"),
    (SamplingParams, {"stop_tokens": "57"}, "stop_tokens='57' must be token ids, whole numbers"),
    (SamplingParams, {"stop_tokens": b"57"}, "stop_tokens=b'57' must be token ids, whole"),
    (SamplingParams, {"stop_tokens": {5: 1}}, "stop_tokens={5: 1} must be token ids, whole"),
    (SamplingParams, {"draft_limit": 2**31}, "draft_limit=2147483648 must be below 2147483648"),
    (SamplingParams, {"draft_limit": 0.5}, "draft_limit=0.5 must be a whole number"),
    (SamplingParams, {"ignore_eos": 1}, "ignore_eos=1 must be True or False"),
    (SamplingParams, {"ignore_eos": None}, "ignore_eos=None must be True or False"),
    (SamplingParams, {"routed_experts": 2}, "routed_experts=2 must be True or False"),
    (RopeScaling, {"kind": "ntk", "factor": 2.0}, "rope scaling 'ntk' is unknown; jspec has"),
    (RopeScaling, {"kind": "linear", "factor": 0.5}, "factor=0.5 must be a finite number"),
    (RopeScaling, {"kind": "linear", "factor": math.inf}, "factor=inf must be a finite number"),
    (RopeScaling, {"kind": "yarn", "factor": 2.0}, "rope scaling yarn needs original_context"),
    (RopeScaling, {"kind": "llama3", "factor": 2.0}, "rope scaling llama3 needs original_context"),
    (RopeScaling, LINEAR | {"factor": True}, "factor=True must be a finite number"),
    (RopeScaling, YARN | {"original_context": 2.5}, "original_context=2.5 must be an int32"),
    (RopeScaling, YARN | {"high_frequency_factor": 1.0}, "high_frequency_factor=1.0 must be above"),
    (RopeScaling, YARN | {"beta_slow": 33.0}, "beta_fast=32.0 must be at least beta_slow=33.0"),
    (RopeScaling, YARN | {"attention_factor": math.nan}, "attention_factor=nan must be a finite"),
    (RopeScaling, YARN | {"truncate": 1}, "truncate=1 must be True or False"),
    (Rope, {"theta": 1}, "theta=1 must be above 1"),
    (Rope, {"theta": 10**400}, "theta=1000"),
    (Rope, {"scaling": 2.0}, "scaling=2.0 must be a RopeScaling or None"),
    (LayerSpec, LAYER | {"kv_heads": 0}, "kv_heads=0 must be a positive int32"),
    (LayerSpec, LAYER | {"key_size": True}, "key_size=True must be a positive int32"),
    (LayerSpec, LAYER | {"value_size": 2**31}, "value_size=2147483648 must be a positive int32"),
    (LayerSpec, LAYER | {"window": 0}, "window=0 must be a positive int32"),
    (LayerSpec, LAYER | {"scale": -0.5}, "scale=-0.5 must be a positive, finite number"),
    (LayerSpec, LAYER | {"softcap": 0.0}, "softcap=0.0 must be a positive, finite number"),
    (LayerSpec, LAYER | {"softcap": math.inf}, "softcap=inf must be a positive, finite number"),
    (LayerSpec, LAYER | {"rope": -1}, "rope=-1 must be an index, at least 0"),
    (LayerSpec, LAYER | {"values_in_keys": 1}, "values_in_keys=1 must be True or False"),
    (
        LayerSpec,
        LAYER | {"value_size": 17, "values_in_keys": True},
        "value_size=17 must be at most key_size=16 where values are in keys",
    ),
    (ModelConfig, MODEL | {"hidden_size": 8.0}, "hidden_size=8.0 must be a positive int"),
    (ModelConfig, MODEL | {"max_context": 0}, "max_context=0 must be a positive int"),
    (ModelConfig, MODEL | {"norm_eps": 0.0}, "norm_eps=0.0 must be a positive, finite number"),
    (ModelConfig, MODEL | {"mlp_bias": None}, "mlp_bias=None must be True or False"),
    (ModelConfig, MODEL | {"family": 1}, "family=1 must be a string"),
    (ModelConfig, MODEL | {"layers": ()}, "the model has 0 layers; it must have 1 to 1024"),
    (ModelConfig, MODEL | {"layers": [*TINY.layers]}, "layers=[LayerSpec(kv_heads=2,"),
    (ModelConfig, MODEL | {"layers": (2, 3)}, "layers=(2, 3) must be a tuple of LayerSpec"),
    (ModelConfig, MODEL | {"ropes": (1e4,)}, "ropes=(10000.0,) must be a tuple of Rope"),
    (
        ModelConfig,
        MODEL | {"layers": second(kv_heads=3)},
        "layers[1]: num_heads=4 must be a multiple of kv_heads=3",
    ),
    (ModelConfig, MODEL | {"layers": second(key_size=15)}, "layers[1]: key_size=15 must be even"),
    (
        ModelConfig,
        MODEL | {"layers": second(rope=1)},
        "layers[1]: rope=1 must be an index into",
    ),
    (ModelConfig, MODEL | {"joint_qk_norm": True}, "joint_qk_norm=True needs qk_norm=True"),
    (ModelConfig, MODEL | {"pre_norms": False}, "pre_norms=False leaves no norm in a layer"),
    (ModelConfig, MODEL | {"residual_scale": 0.0}, "residual_scale=0.0 must be a positive, finite"),
    (Rope, {"rotated": 3}, "rotated=3 must be an even number of channels, or None for all"),
    (
        ModelConfig,
        MODEL | {"ropes": (Rope(rotated=18),)},
        "layers[0]: rotated=18 of its rope must be at most key_size=16",
    ),
    (
        RopeScaling,
        {"kind": "yarn", "factor": 2.0, "original_context": 8, "wave_factors": (1.0,)},
        "wave_factors=(1.0,) do not go with rope scaling yarn",
    ),
    (
        Experts,
        {"routed": 4, "chosen": 2, "size": 8, "shared_gated": True},
        "shared_gated=True needs shared_size",
    ),
    (Experts, {"routed": 4097, "chosen": 2, "size": 8}, "routed=4097 must be at most 4096"),
    (ModelConfig, MODEL | {"stop_tokens": (3, 41)}, "stop_tokens=(3, 41) must be a tuple of token"),
    (ModelConfig, MODEL | {"stop_tokens": [3]}, "stop_tokens=[3] must be a tuple of token ids"),
    (ModelConfig.uniform, UNIFORM | {"num_layers": 0}, "num_layers=0 must be a positive int"),
    (ModelConfig.uniform, UNIFORM | {"num_layers": 10**9}, "num_layers=1000000000 must be at most"),
    (
        ModelConfig.uniform,
        UNIFORM | {"num_kv_heads": 3},
        "num_heads=4 must be a multiple of kv_heads=3",
    ),
    (ModelConfig.uniform, UNIFORM | {"head_size": 15}, "key_size=15 must be even for RoPE"),
]


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    BAD,
    ids=[f"{kind.__qualname__}-{message.split()[0]}" for kind, _, message in BAD],
)
def test_a_bad_setting_is_named_with_its_value(kind, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        kind(**settings)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "greedy"),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1}, "greedy"),
        ({"temperature": 1.0}, "sampled"),
        ({"temperature": 1.0, "top_k": 5}, "filtered"),
        ({"temperature": 1.0, "top_p": 0.5}, "filtered"),
        ({"temperature": 1.0, "min_p": 0.1}, "filtered"),
    ],
)
def test_a_request_asks_for_the_least_machinery(settings, expected):
    assert SamplingParams(**settings).mode == expected


def test_equal_layers():
    scaling = RopeScaling("linear", 2.0)
    config = ModelConfig.uniform(**UNIFORM, rope_theta=5e5, rope_scaling=scaling, qk_norm=True)
    assert config == ModelConfig(
        vocab_size=41,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        layers=(LayerSpec(kv_heads=2, key_size=16, value_size=16),) * 2,
        ropes=(Rope(5e5, scaling),),
        qk_norm=True,
    )
    assert config.num_layers == 2


def test_the_borders_are_allowed():
    LayerSpec(1, 1, 1, values_in_keys=True, window=1, scale=1e-9, softcap=1e-9)
    SamplingParams(max_new_tokens=1, top_p=1.0, min_p=1.0, seed=2**32 - 1, draft_limit=0)
    limit = 2**31 - 1
    SamplingParams(max_new_tokens=limit, top_k=limit, draft_limit=limit, stop_tokens=(0, limit))
    SamplingParams(temperature=float(np.finfo(np.float32).max), top_p=1e-30, seed=0)
    RopeScaling("linear", 1.0)


@pytest.mark.parametrize(
    "setting",
    [
        TINY,
        SamplingParams(),
        RopeScaling("linear", 2.0),
        Rope(),
        TINY.layers[0],
    ],
    ids=lambda setting: type(setting).__name__,
)
def test_settings_are_frozen_and_hashable(setting):
    assert hash(setting) == hash(dataclasses.replace(setting))
    assert setting == dataclasses.replace(setting)
    for field in dataclasses.fields(setting):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(setting, field.name, 1)


def test_numbers_of_numpy_are_those_of_python():
    """A request that was made of arrays equals one that was not, and hashes as it does."""
    got = SamplingParams(
        max_new_tokens=np.int64(3),
        temperature=np.float32(0.5),
        top_k=np.uint8(7),
        top_p=np.float64(0.25),
        min_p=np.float16(0.125),
        seed=np.uint32(2**32 - 1),
        stop_tokens=np.array([2, 9], np.int16),
        draft_limit=np.int32(1),
        logprobs=np.int64(2),
        prompt_logprobs=np.uint16(3),
    )
    expected = SamplingParams(3, 0.5, 7, 0.25, 0.125, 2**32 - 1, (2, 9), 1, False, 2, 3)
    assert got == expected
    assert hash(got) == hash(expected)
    assert {type(value) for value in vars(got).values()} == {int, float, tuple, bool}
    assert SamplingParams(stop_tokens=[2, 9]) == SamplingParams(stop_tokens=(2, 9))


VALUES = [
    *(None, True, False, 0, 1, 2, -1, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**64, 10**400),
    *(10**5000, -(10**5000), 0.0, -0.0, 0.5, 1.0, 1.7, 1e-320, 1e39, math.nan, math.inf, -math.inf),
    *("", "1", "x\n" * 99, b"7", (), (3,), (3, -1), [2.5], [[1]], {5: 1}, {1, 2}, range(3)),
    *(np.float32(0.5), np.int64(-1), np.bool_(True), np.arange(30), np.zeros((3, 9)), 1j, object()),
]
FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]


@pytest.mark.parametrize(
    "count", [4_000, pytest.param(200_000, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_a_request_is_either_refused_or_fits_the_arrays_of_a_step(count):
    rng = random.Random(count)
    chosen = 0
    for _ in range(count):
        settings = {name: rng.choice(VALUES) for name in rng.sample(FIELDS, rng.choice((1, 1, 2)))}
        try:
            params = SamplingParams(**settings)
        except ValueError as error:
            message = str(error)
        else:
            message, chosen = None, chosen + 1
            check_fits(params)
        if message is not None:
            assert message.isprintable()
            assert 0 < len(message) < 250
    assert 0.1 < chosen / count < 0.9


def check_fits(params: SamplingParams) -> None:
    whole = [params.max_new_tokens, params.top_k, params.draft_limit or 0, *params.stop_tokens]
    assert [int(np.int32(x)) for x in whole] == whole
    assert params.seed is None or np.uint32(params.seed) == params.seed
    real = np.array([params.temperature, params.top_p, params.min_p], np.float32)
    assert np.isfinite(real).all()
    assert hash(params) == hash(dataclasses.replace(params))
