"""Drafters: where draft tokens come from.

Adding one is a file with a subclass of `Drafter` and a line in `DRAFTERS`; a policy of
`jspec.policies.POLICIES` drafts by its own name.
"""

from jspec.decode.draft.base import CATCH_UP, LACKING, Drafted, Drafter, SparseDrafter, TargetPass
from jspec.decode.draft.chain import Chain
from jspec.decode.draft.guided import GuidedDraft
from jspec.decode.draft.named import DRAFTERS, named_draft
from jspec.decode.draft.ngram import NgramDraft
from jspec.decode.draft.plain import NoDraft, Paused
from jspec.decode.draft.second_model import ModelDraft
from jspec.decode.draft.self_draft import SelfDraft
from jspec.decode.draft.suffix import SuffixDraft

__all__ = [
    "CATCH_UP",
    "DRAFTERS",
    "LACKING",
    "Chain",
    "Drafted",
    "Drafter",
    "GuidedDraft",
    "ModelDraft",
    "NgramDraft",
    "NoDraft",
    "Paused",
    "SelfDraft",
    "SparseDrafter",
    "SuffixDraft",
    "TargetPass",
    "named_draft",
]
