"""Drafters by name, as the command and files of settings write them."""

from __future__ import annotations

from jspec.decode.draft.base import Drafter
from jspec.decode.draft.ngram import NgramDraft
from jspec.decode.draft.plain import NoDraft
from jspec.decode.draft.second_model import ModelDraft
from jspec.decode.draft.self_draft import SelfDraft
from jspec.policies import POLICIES
from jspec.policies.named import made

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
        return made(DRAFTERS[name], "draft", name, settings)
    if name in POLICIES:
        return SelfDraft(made(POLICIES[name], "draft", name, settings))
    raise ValueError(f"draft {name!r} is unknown; choose one of {', '.join(names())}")
