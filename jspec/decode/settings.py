"""What a step is compiled for: its draft length, its drafter and its backends."""

from __future__ import annotations

import dataclasses

from jspec.decode.draft import Drafter, NoDraft, SelfDraft
from jspec.dispatch import Backends
from jspec.ops.attention import ATTENTION
from jspec.ops.sample import SAMPLE
from jspec.ops.stochastic import VERIFY_STOCHASTIC
from jspec.ops.verify import VERIFY_GREEDY

OPERATIONS = (ATTENTION, SAMPLE, VERIFY_GREEDY, VERIFY_STOCHASTIC)  # of a step


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """The static part of a step: one compiled program for each value in use.

    ``gamma``: most draft tokens of a step; ``NoDraft()`` takes 0 or, for passes that are shaped
    like those of speculation, more. ``backends`` names a backend for an operation of a step, the
    best one where it names none; it raises `BackendError` for a name that is not there. What
    machinery the sampling settings need is part of the state.
    """

    gamma: int = 4
    draft: Drafter = SelfDraft()
    backends: Backends = Backends()

    def __post_init__(self) -> None:
        object.__setattr__(self, "backends", Backends(self.backends))
        self.backends.check(OPERATIONS)
        least = 0 if isinstance(self.draft, NoDraft) else 1
        if self.gamma < least:
            raise ValueError(
                f"gamma={self.gamma} must be at least {least}"
                + ("" if least == 0 else "; pass draft=NoDraft(), gamma=0 for plain decoding")
            )


PLAIN = StepConfig(gamma=0, draft=NoDraft())
