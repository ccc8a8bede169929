"""Policies by name, and settings as text: ``quest:budget=256,page=32``."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, get_type_hints

from jspec.policies.dense import Dense
from jspec.policies.exact_topk import ExactTopK
from jspec.policies.hata import Hata
from jspec.policies.loki import Loki
from jspec.policies.magicpig import MagicPIG
from jspec.policies.policy import Policy
from jspec.policies.quest import Quest
from jspec.policies.streaming import Streaming

POLICIES: dict[str, type[Policy]] = {
    "dense": Dense,
    "streaming": Streaming,
    "exact_topk": ExactTopK,
    "hata": Hata,
    "quest": Quest,
    "loki": Loki,
    "magicpig": MagicPIG,
}
_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    types.UnionType: "a number",
}
_FLAGS = {"true": True, "false": False}


def named_policy(text: str) -> Policy:
    """The policy that ``NAME`` or ``NAME:setting=value,...`` names, as in ``quest:budget=256``.

    Raises `ValueError` for an unknown name or setting, and for a value of the wrong type.
    """
    name, _, settings = text.partition(":")
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is unknown; choose one of {', '.join(POLICIES)}")
    return made(POLICIES[name], "policy", name, settings)


def made(kind: type, what: str, name: str, settings: str) -> Any:
    """A ``kind`` with the ``settings`` of a text; errors begin with ``what`` and its ``name``."""
    hints = get_type_hints(kind)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    values = {}
    for setting in filter(None, settings.split(",")):
        key, equals, value = setting.partition("=")
        if key not in fields or not equals:
            known = ", ".join(f"{k}=" for k in fields) or "no settings"
            raise ValueError(f"{what} {name!r} has no setting {setting!r}; it has {known}")
        try:
            values[key] = _value(fields[key], value)
        except ValueError:
            wanted = _KINDS.get(fields[key]) or _KINDS.get(type(fields[key]), "a word")
            raise ValueError(f"{what} {name}: {key}={value!r} must be {wanted}") from None
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{what} {name}: {error}") from None


def _value(kind: Any, text: str) -> Any:
    """``text`` as a ``kind``; a budget is a whole number, or a ratio where it is none."""
    if kind is bool:
        if text not in _FLAGS:
            raise ValueError(text)
        return _FLAGS[text]
    if not isinstance(kind, types.UnionType):
        return kind(text)
    try:
        return int(text)
    except ValueError:
        return float(text)
