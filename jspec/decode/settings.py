"""What a step is compiled for: its draft length, its drafter and its backends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from jspec.config import shown, whole_number
from jspec.decode.draft import Drafter, NoDraft, SelfDraft
from jspec.dispatch import Backends, preferring
from jspec.ops.append import APPEND
from jspec.ops.attention.dense import ATTENTION
from jspec.ops.attention.gathered import GATHERED
from jspec.ops.commit import VERIFY_AND_COMMIT
from jspec.ops.linear import LINEAR
from jspec.ops.sample import SAMPLE
from jspec.ops.stochastic import VERIFY_STOCHASTIC
from jspec.ops.verify import VERIFY_GREEDY
from jspec.policies import Policy

OF_MODELS = (LINEAR,)  # operations that a model calls by itself
# Of a step.
OPERATIONS = (
    *(ATTENTION, GATHERED, APPEND, SAMPLE, VERIFY_AND_COMMIT, VERIFY_GREEDY, VERIFY_STOCHASTIC),
    *OF_MODELS,
)


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """The static part of a step: one compiled program for each value in use.

    ``gamma``: most draft tokens of a step; ``NoDraft()`` takes 0 or, for passes that are shaped
    like those of speculation, more. ``backends`` names a backend for an operation of a step, the
    best one where it names none; it raises `BackendError` for a name that is not there, and
    `TypeError` for a setting of another type. What machinery the sampling settings need is part of
    the state.
    """

    gamma: int = 4
    draft: Drafter = SelfDraft()
    backends: Mapping[str, str] = Backends()

    def __post_init__(self) -> None:
        check_draft(self.draft)
        if not isinstance(self.backends, Mapping):
            raise TypeError(
                f"backends={shown(self.backends)} must name backends of operations, as in "
                "{'verify_greedy': 'cuda'}"
            )
        gamma = whole_number(self.gamma)
        if gamma is None:
            raise TypeError(f"gamma={shown(self.gamma)} must be a whole number")
        if gamma >= 2**31:
            raise ValueError(f"gamma={shown(gamma)} must be below 2**31")
        object.__setattr__(self, "gamma", gamma)
        backends = Backends(self.backends)
        backends.check(OPERATIONS)
        object.__setattr__(self, "backends", backends)
        least = 0 if isinstance(self.draft, NoDraft) else 1
        if self.gamma < least:
            raise ValueError(
                f"gamma={self.gamma} must be at least {least}"
                + ("" if least == 0 else "; pass draft=NoDraft(), gamma=0 for plain decoding")
            )

    def of_models(self) -> AbstractContextManager[None]:
        """Inside it, operations that a model calls take the backends that are named here."""
        names = {operation.name for operation in OF_MODELS} & set(self.backends)
        return preferring({name: self.backends[name] for name in names})


def check_draft(draft: Any) -> None:
    """Raise `TypeError` for what is no drafter, with what was probably meant."""
    if isinstance(draft, Drafter):
        return
    if isinstance(draft, str):
        raise TypeError(f"draft={shown(draft)} is a string; pass jspec.named_draft({shown(draft)})")
    if isinstance(draft, type):
        raise TypeError(f"draft={draft.__name__} is a class; pass one of it, {draft.__name__}()")
    if isinstance(draft, Policy):
        raise TypeError(f"draft={shown(draft)} is a policy; pass SelfDraft({shown(draft)})")
    raise TypeError(f"draft={shown(draft)} must be a drafter, as NgramDraft() is")


PLAIN = StepConfig(gamma=0, draft=NoDraft())
