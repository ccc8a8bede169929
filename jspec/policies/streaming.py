"""Streaming: attention sinks and a recent window (StreamingLLM, Xiao et al. 2023)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from jspec.cache import Cache
from jspec.policies.policy import Policy
from jspec.typing import Array


@dataclasses.dataclass(frozen=True)
class Streaming(Policy):
    """The first ``sinks`` and the last ``window`` positions, at their original positions."""

    reads_queries: ClassVar[bool] = False

    sinks: int = 16
    window: int = 496

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ValueError(f"sinks={self.sinks} must be at least 0")
        if self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1")

    def select(
        self, arrays: Any, layer: int, cache: Cache, q: Array | None, until: Array
    ) -> Array | None:
        size = cache.layouts[layer].size
        sinks, window = min(self.sinks, size), min(self.window, size)
        first = jnp.broadcast_to(jnp.arange(sinks, dtype=jnp.int32)[None], (until.shape[0], sinks))
        recent = jnp.maximum(until - window, 0)[:, None] + jnp.arange(window, dtype=jnp.int32)[None]
        # A recent position that is a sink as well is read once.
        positions = jnp.concatenate([first, jnp.where(recent >= sinks, recent, -1)], axis=1)
        return jnp.where(positions < until[:, None], positions, -1)
