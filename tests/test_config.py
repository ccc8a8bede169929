"""Settings are checked when they are made, and say what is wrong and what to do."""

import dataclasses
import math
import re

import pytest

from jspec.config import ModelConfig, RopeScaling, SamplingParams
from tests.conftest import TINY

MODEL = {
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 16,
}

BAD = [
    (SamplingParams, {"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
    (SamplingParams, {"temperature": -0.5}, "temperature=-0.5 must be 0 (greedy) or a positive"),
    (SamplingParams, {"temperature": math.nan}, "temperature=nan must be"),
    (SamplingParams, {"temperature": math.inf}, "temperature=inf must be"),
    (SamplingParams, {"top_k": -1}, "top_k=-1 must be at least 0; 0 switches it off"),
    (SamplingParams, {"top_p": 0.0}, "top_p=0.0 must be in (0, 1]; 1 switches it off"),
    (SamplingParams, {"top_p": 1.1}, "top_p=1.1 must be in (0, 1]"),
    (SamplingParams, {"top_p": math.nan}, "top_p=nan must be in (0, 1]"),
    (SamplingParams, {"min_p": -0.1}, "min_p=-0.1 must be in [0, 1]; 0 switches it off"),
    (SamplingParams, {"min_p": 1.5}, "min_p=1.5 must be in [0, 1]"),
    (SamplingParams, {"seed": -1}, "seed=-1 must be in [0, 2**32)"),
    (SamplingParams, {"seed": 2**32}, "seed=4294967296 must be in [0, 2**32)"),
    (SamplingParams, {"stop_tokens": (3, -1)}, "stop_tokens=(3, -1) must be token ids"),
    (SamplingParams, {"draft_limit": -1}, "draft_limit=-1 must be at least 0; None leaves it"),
    (RopeScaling, {"kind": "ntk", "factor": 2.0}, "rope scaling 'ntk' is unknown; jspec has"),
    (RopeScaling, {"kind": "linear", "factor": 0.5}, "factor=0.5 must be a finite number"),
    (RopeScaling, {"kind": "linear", "factor": math.inf}, "factor=inf must be a finite number"),
    (RopeScaling, {"kind": "yarn", "factor": 2.0}, "rope scaling yarn needs original_context"),
    (RopeScaling, {"kind": "llama3", "factor": 2.0}, "rope scaling llama3 needs original_context"),
    (ModelConfig.uniform, MODEL | {"num_layers": 0}, "num_layers=0 must be a positive int"),
    (ModelConfig.uniform, MODEL | {"hidden_size": 8.0}, "hidden_size=8.0 must be a positive int"),
    (
        ModelConfig.uniform,
        MODEL | {"num_kv_heads": 3},
        "layers[0]: num_heads=4 must be a multiple of kv_heads=3",
    ),
    (
        ModelConfig.uniform,
        MODEL | {"head_size": 15},
        "layers[0]: key_size=15 must be even for RoPE",
    ),
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


def test_the_borders_are_allowed():
    SamplingParams(max_new_tokens=1, top_p=1.0, min_p=1.0, seed=2**32 - 1, draft_limit=0)
    RopeScaling("linear", 1.0)


@pytest.mark.parametrize(
    "setting",
    [TINY, SamplingParams(), RopeScaling("linear", 2.0)],
    ids=lambda setting: type(setting).__name__,
)
def test_settings_are_frozen_and_hashable(setting):
    assert hash(setting) == hash(dataclasses.replace(setting))
    assert setting == dataclasses.replace(setting)
    for field in dataclasses.fields(setting):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(setting, field.name, 1)
