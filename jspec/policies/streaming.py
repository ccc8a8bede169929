"""Streaming: attention sinks and a recent window (StreamingLLM, Xiao et al. 2023)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from jspec.cache import Cache
from jspec.models.rope import rope_frequencies
from jspec.policies.policy import Policy, SampleKeys
from jspec.policies.selection import Selection
from jspec.typing import Array, Model

POSITIONS = ("original", "window")


@dataclasses.dataclass(frozen=True)
class Streaming(Policy):
    """The first ``sinks`` and the last ``window`` positions.

    Attributes:
        sinks: How many of the first positions are read.
        window: How many of the last positions are read: a whole number, or a ratio of the context
            that includes the sinks.
        positions: The positions of keys as queries see them. ``original``: those in the text;
            ``window``: the selected keys are contiguous, as in section 3.2 of the paper. Keys are
            cached as they are rotated in the text, so the sinks are rotated further, by the angles
            of the positions between them and the window; the window and the queries stay as they
            are.
    """

    reads_queries: ClassVar[bool] = False

    sinks: int = 16
    window: int | float = 496
    positions: str = "original"

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ValueError(f"sinks={self.sinks} must be at least 0")
        if isinstance(self.window, float):
            if not 0 < self.window <= 1:
                raise ValueError(f"window={self.window} must be a ratio in (0, 1]")
        elif self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1")
        if self.positions not in POSITIONS:
            raise ValueError(f"positions={self.positions!r} must be one of {', '.join(POSITIONS)}")

    @property
    def runs_on_mesh(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.positions == "original"

    def prepare(self, model: Model, sample_keys: SampleKeys | None) -> Any:
        """The angles by which one position rotates the keys of each layer, float32 ``[H / 2]``."""
        if self.positions == "original":
            return None
        specs, ropes = model.config.layers, getattr(model.config, "ropes", None)
        if ropes is None or any(spec.values_in_keys for spec in specs):
            raise ValueError(
                "positions=window rotates keys by config.ropes over all of their channels, which "
                f"{type(model).__name__} does not; use positions=original"
            )
        kinds = [(spec.key_size, ropes[spec.rope]) for spec in specs]
        # The factor on cosine and sine is in the cached keys already.
        return tuple(jnp.asarray(rope_frequencies(size, rope)[0]) for size, rope in kinds)

    def select(
        self,
        policy_params: Any,
        layer: int,
        cache: Cache,
        q: Array | None,
        context_len: Array,
        budget_share: float = 1.0,
    ) -> Selection:
        size = cache.layouts[layer].capacity
        sinks = min(self.sinks, size)
        if isinstance(self.window, float):
            # In float32, as `_window_begin` computes it: 0.15 of 100 positions are then 16.
            window = max(math.ceil(np.float32(self.window) * np.float32(size)) - sinks, 1)
        else:
            window = min(self.window, size)
        first = jnp.broadcast_to(
            jnp.arange(sinks, dtype=jnp.int32)[None], (context_len.shape[0], sinks)
        )
        begin = jnp.maximum(self._window_begin(context_len), 0)[:, None]
        recent = begin + jnp.arange(window, dtype=jnp.int32)[None]
        # A recent position that is a sink as well is read once.
        positions = jnp.concatenate([first, jnp.where(recent >= sinks, recent, -1)], axis=1)
        positions = jnp.where(positions < context_len[:, None], positions, -1)
        if self.positions == "original":
            return Selection(positions)
        between = jnp.maximum(self._window_begin(context_len) - self.sinks, 0)[:, None]
        moved = jnp.where(positions < self.sinks, between, 0).astype(jnp.float32)
        frequencies = policy_params[layer][None, None]
        return Selection(positions, key_rotation=moved[..., None] * frequencies)

    def _window_begin(self, context_len: Array) -> Array:
        """Where the window of rows with ``context_len [B]`` positions begins; below 0 if short."""
        if not isinstance(self.window, float):
            return context_len - self.window
        share = jnp.ceil(self.window * context_len.astype(jnp.float32)).astype(jnp.int32)
        return context_len - jnp.maximum(share - self.sinks, 1)
