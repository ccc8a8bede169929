"""Drafters: where draft tokens come from.

Adding one is a file with a subclass of `Drafter` and a line in `DRAFTERS`; a policy of
`jspec.policies.POLICIES` drafts by its own name.
"""

from jspec.decode.draft.chain import Chain
from jspec.decode.draft.drafter import Drafted, Drafter, DrafterTraits, NoDraft, TargetPass
from jspec.decode.draft.lookup import NgramDraft, SuffixDraft
from jspec.decode.draft.model_draft import ModelDraft
from jspec.decode.draft.named import DRAFTERS, named_draft
from jspec.decode.draft.self_draft import GuidedDraft, SelfDraft, SparseDrafter

__all__ = [
    "DRAFTERS",
    "Chain",
    "Drafted",
    "Drafter",
    "DrafterTraits",
    "GuidedDraft",
    "ModelDraft",
    "NgramDraft",
    "NoDraft",
    "SelfDraft",
    "SparseDrafter",
    "SuffixDraft",
    "TargetPass",
    "named_draft",
]
