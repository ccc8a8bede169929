"""Drafters by name, as the command and files of settings write them."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

from jspec.decode.draft.base import Drafter
from jspec.decode.draft.ngram import NgramDraft
from jspec.decode.draft.plain import NoDraft
from jspec.decode.draft.second_model import ModelDraft
from jspec.decode.draft.self_draft import SelfDraft
from jspec.policies import POLICIES

DRAFTERS: dict[str, type[Drafter]] = {
    "none": NoDraft,
    "ngram": NgramDraft,
    "model": ModelDraft,
}


def names() -> list[str]:
    """What `named_draft` knows: the drafters, and the policies that the model drafts with."""
    return [*DRAFTERS, *POLICIES]


def named_draft(text: str) -> Drafter:
    """The drafter that ``NAME`` or ``NAME:setting=value,...`` names, as in ``ngram:min_match=2``.

    A policy's name drafts with the model itself over that policy: ``streaming:window=240``. Raises
    `ValueError` for an unknown name or setting, and for a value of the wrong type.
    """
    name, _, settings = text.partition(":")
    if name in DRAFTERS:
        return _made(DRAFTERS[name], name, settings)
    if name in POLICIES:
        return SelfDraft(_made(POLICIES[name], name, settings))
    raise ValueError(f"draft {name!r} is unknown; choose one of {', '.join(names())}")


def _made(kind: type, name: str, settings: str) -> Any:
    hints = get_type_hints(kind)
    types = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    values = {}
    for setting in filter(None, settings.split(",")):
        key, equals, value = setting.partition("=")
        if key not in types or not equals:
            known = ", ".join(f"{k}=" for k in types) or "no settings"
            raise ValueError(f"draft {name!r} has no setting {setting!r}; it has {known}")
        try:
            values[key] = types[key](value)
        except ValueError:
            kind_name = {int: "a whole number", float: "a number"}.get(types[key], "a word")
            raise ValueError(f"draft {name}: {key}={value!r} must be {kind_name}") from None
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"draft {name}: {error}") from None
