"""Drafters: where draft tokens come from.

Adding one is a file with a subclass of `Drafter` and a line in `DRAFTERS`; a policy of
`jspec.policies.POLICIES` drafts by its own name.
"""

from jspec.decode.draft.base import Drafted, Drafter, Seen
from jspec.decode.draft.named import DRAFTERS, named_draft
from jspec.decode.draft.ngram import NgramDraft
from jspec.decode.draft.plain import NoDraft
from jspec.decode.draft.second_model import ModelDraft
from jspec.decode.draft.self_draft import SelfDraft

__all__ = [
    "DRAFTERS",
    "Drafted",
    "Drafter",
    "ModelDraft",
    "NgramDraft",
    "NoDraft",
    "Seen",
    "SelfDraft",
    "named_draft",
]
