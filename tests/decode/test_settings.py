"""Settings of a step and of drafters: checked when made, frozen, and found by name."""

import dataclasses
import re

import pytest

from jspec.decode.draft import (
    ModelDraft,
    NgramDraft,
    NoDraft,
    SelfDraft,
    SuffixDraft,
    named_draft,
)
from jspec.decode.draft.named import names
from jspec.decode.settings import PLAIN, StepConfig
from jspec.dispatch import Backends
from jspec.policies import Dense, Streaming

BAD = [
    (StepConfig, {"gamma": -1}, "gamma=-1 must be at least 0, which decodes plainly"),
    (
        StepConfig,
        {"backends": {"pack": "xla"}},
        "decoding calls no operation 'pack' (did you mean pack_path?); it calls",
    ),
    (StepConfig, {"backends": {"attention": "fast"}}, "attention has no implementation 'fast'"),
    (Streaming, {"sinks": -1}, "sinks=-1 must be at least 0"),
    (Streaming, {"window": 0}, "window=0 must be at least 1"),
    (NgramDraft, {"min_match": 0}, "min_match=0 must be a whole number in [1, max_match=16]"),
    (NgramDraft, {"min_match": 1.5}, "min_match=1.5 must be a whole number in [1, max_match=16]"),
    (
        NgramDraft,
        {"min_match": 5, "max_match": 4},
        "min_match=5 must be a whole number in [1,",
    ),
]


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    BAD,
    ids=[f"{kind.__name__}-{message.split()[0]}" for kind, _, message in BAD],
)
def test_a_bad_setting_is_named_with_its_value(kind, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        kind(**settings)


def test_the_borders_are_allowed():
    Streaming(sinks=0, window=1)
    NgramDraft(min_match=1, max_match=1)
    assert StepConfig(gamma=0, draft=NoDraft()) == PLAIN
    assert StepConfig(gamma=3, draft=NoDraft()).gamma == 3


@pytest.mark.parametrize(
    "setting",
    [
        StepConfig(backends=Backends(attention="xla")),
        SelfDraft(),
        NgramDraft(),
        SuffixDraft(),
        ModelDraft(),
        NoDraft(),
        Streaming(),
        Dense(),
    ],
    ids=lambda setting: type(setting).__name__,
)
def test_settings_are_frozen_and_hashable(setting):
    assert hash(setting) == hash(dataclasses.replace(setting))
    assert setting == dataclasses.replace(setting)
    for field in dataclasses.fields(setting):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(setting, field.name, 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", NoDraft()),
        ("ngram", NgramDraft()),
        ("ngram:min_match=2", NgramDraft(min_match=2)),
        ("ngram:max_match=9,min_match=1", NgramDraft(min_match=1, max_match=9)),
        ("suffix:min_match=2,factor=0.5", SuffixDraft(min_match=2, factor=0.5)),
        ("model", ModelDraft()),
        ("dense", SelfDraft(Dense())),
        ("streaming", SelfDraft(Streaming())),
        ("streaming:window=240,sinks=4", SelfDraft(Streaming(sinks=4, window=240))),
    ],
)
def test_a_drafter_has_a_name(text, expected):
    assert named_draft(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("oracle", f"draft 'oracle' is unknown; choose one of {', '.join(names())}"),
        ("ngarm", "draft 'ngarm' is unknown (did you mean ngram?); choose one of none"),
        ("", "draft '' is unknown"),
        (
            "ngram:length=3",
            "draft 'ngram' has no setting 'length=3'; it has min_match=, max_match=",
        ),
        ("ngram:min_match", "draft 'ngram' has no setting 'min_match'"),
        ("ngram:min_match=two", "draft ngram: min_match='two' must be a whole number"),
        (
            "ngram:min_match=0",
            "draft ngram: min_match=0 must be a whole number in [1, max_match=16]",
        ),
        ("streaming:window=0", "draft streaming: window=0 must be at least 1"),
        ("none:gamma=3", "draft 'none' has no setting 'gamma=3'; it has no settings"),
    ],
)
def test_a_name_that_means_no_drafter_says_why(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        named_draft(text)
