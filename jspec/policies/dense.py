"""Dense: every query reads every position."""

from __future__ import annotations

import dataclasses
from typing import Any

from jspec.cache import Cache
from jspec.policies.policy import Policy
from jspec.typing import Array


@dataclasses.dataclass(frozen=True)
class Dense(Policy):
    """No selection. As a drafter it is the model itself, whose greedy draft is always accepted."""

    def select(
        self, policy_params: Any, layer: int, cache: Cache, q: Array | None, context_len: Array
    ) -> Array | None:
        return None
