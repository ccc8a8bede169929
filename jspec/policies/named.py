"""Policies by name, and settings as text: ``quest:budget=256,page=32``."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jspec.checks import suggestion
from jspec.models.files import INTEGER_LIMIT
from jspec.policies.dense import Dense
from jspec.policies.exact_topk import ExactTopK
from jspec.policies.guided import Guided
from jspec.policies.hata import Hata
from jspec.policies.hata_off import HataOff
from jspec.policies.loki import Loki
from jspec.policies.magicpig import MagicPIG
from jspec.policies.policy import Policy
from jspec.policies.quest import Quest
from jspec.policies.streaming import Streaming
from jspec.policies.vegas import SparseSpec, SpecExtend, Vegas

POLICIES: dict[str, type[Policy]] = {
    "dense": Dense,
    "streaming": Streaming,
    "exact_topk": ExactTopK,
    "hata": Hata,
    "hata_off": HataOff,
    "quest": Quest,
    "loki": Loki,
    "magicpig": MagicPIG,
}
# What verification guides drafts, and selects nothing by itself.
GUIDED: dict[str, type[Guided]] = {
    "vegas": Vegas,
    "sparsespec": SparseSpec,
    "specextend": SpecExtend,
}
_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    types.UnionType: "a number",
}
_FLAGS = {"true": True, "false": False}


def named_policy(text: str) -> Policy:
    """The policy of a text ``NAME`` or ``NAME:setting=value,...``, as in ``quest:budget=256``.

    Raises:
        ValueError: For an unknown name or setting, and for a value of the wrong type.
    """
    name, _, settings = text.partition(":")
    if name in GUIDED:
        raise ValueError(
            f"policy {name!r} reads what verification attended to, so it only drafts: name it as "
            "the draft"
        )
    if name not in POLICIES:
        raise ValueError(
            f"policy {name!r} is unknown{suggestion(name, POLICIES)}; choose one of "
            f"{', '.join(POLICIES)}"
        )
    return made(POLICIES[name], "policy", name, settings)


def made(kind: type, what: str, name: str, settings: str, **fixed: Any) -> Any:
    """A ``kind`` with the ``settings`` of a text, and with the ``fixed`` fields.

    Errors begin with ``what`` and its ``name``.
    """
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind) if field.name not in fixed]
    fields = {name: hints[name] for name in names}
    values = {}
    for setting in filter(None, settings.split(",")):
        key, equals, value = setting.partition("=")
        if key not in fields or not equals:
            known = ", ".join(f"{k}=" for k in fields) or "no settings"
            raise ValueError(f"{what} {name!r} has no setting {setting!r}; it has {known}")
        if key in values:
            raise ValueError(f"{what} {name}: {key}= is set twice; leave one out")
        try:
            values[key] = _value(fields[key], value)
        except ValueError:
            expected = _KINDS.get(fields[key]) or _KINDS.get(type(fields[key]), "a word")
            raise ValueError(f"{what} {name}: {key}={value!r} must be {expected}") from None
        if isinstance(values[key], int) and abs(values[key]) > INTEGER_LIMIT:
            raise ValueError(f"{what} {name}: {key}={value} must be at most {INTEGER_LIMIT}")
    try:
        return kind(**fixed, **values)
    except ValueError as error:
        raise ValueError(f"{what} {name}: {error}") from None


def _value(kind: Any, text: str) -> Any:
    """``text`` as a ``kind``; a budget is a whole number if it can be, else a ratio."""
    if kind is bool:
        if text not in _FLAGS:
            raise ValueError(text)
        return _FLAGS[text]
    if get_origin(kind) is Literal:
        return text  # what is made of it checks its words
    if not isinstance(kind, types.UnionType):
        return kind(text)
    if str in get_args(kind):
        return text
    try:
        return int(text)
    except ValueError:
        return float(text)
