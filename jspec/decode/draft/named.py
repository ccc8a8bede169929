"""Drafters by name, as the command and files of settings write them."""

from __future__ import annotations

import dataclasses

from jspec.checks import shown, suggestion
from jspec.decode.draft.chain import Chain
from jspec.decode.draft.drafter import Drafter, NoDraft
from jspec.decode.draft.lookup import NgramDraft, SuffixDraft
from jspec.decode.draft.model_draft import ModelDraft
from jspec.decode.draft.self_draft import GuidedDraft, SelfDraft
from jspec.policies import GUIDED, POLICIES
from jspec.policies.named import made

DRAFTERS: dict[str, type[Drafter]] = {
    "none": NoDraft,
    "ngram": NgramDraft,
    "suffix": SuffixDraft,
    "model": ModelDraft,
}


def names() -> list[str]:
    """What `named_draft` knows: the drafters, and the policies that the model drafts with."""
    return [*DRAFTERS, *POLICIES, *GUIDED]


def named_draft(text: str) -> Drafter:
    """The drafter that ``NAME`` or ``NAME:setting=value,...`` names, as in ``ngram:min_match=2``.

    A policy's name drafts with the model itself over that policy, ``streaming:window=240``; it
    takes ``quantized=`` of the drafter too. ``FIRST > SECOND`` is a `Chain` of the two, whose own
    settings may follow a semicolon: ``suffix > hata:budget=256; rounds=6,inner=4``. Raises
    `ValueError` for an unknown name or setting, and for a value of the wrong type.
    """
    if not isinstance(text, str):
        raise TypeError(f"draft {shown(text)} must be a name, as 'ngram' or 'vegas:budget=0.1'")
    if ">" in text:
        return _chain(text)
    name, _, settings = text.partition(":")
    if name in DRAFTERS:
        return made(DRAFTERS[name], "draft", name, settings)
    if name in POLICIES or name in GUIDED:
        kind, policies = (GuidedDraft, GUIDED) if name in GUIDED else (SelfDraft, POLICIES)
        draft_settings = [x for x in settings.split(",") if x.startswith("quantized=")]
        policy_settings = [x for x in settings.split(",") if x not in draft_settings]
        policy = made(policies[name], "draft", name, ",".join(policy_settings))
        draft = made(kind, "draft", name, ",".join(draft_settings))
        return dataclasses.replace(draft, policy=policy)
    raise ValueError(
        f"draft {name!r} is unknown{suggestion(name, names())}; choose one of {', '.join(names())}"
    )


def _chain(text: str) -> Chain:
    names, _, settings = text.partition(";")
    parts = [part.strip() for part in names.split(">")]
    if len(parts) != 2 or not all(parts):
        raise ValueError(f"draft {text!r} must be FIRST > SECOND, a chain of two drafters")
    first, second = map(named_draft, parts)
    settings = "".join(settings.split())
    try:
        return made(Chain, "draft", "chain", settings, first=first, second=second)
    except TypeError as error:
        raise ValueError(f"draft {text!r}: {error}") from None
