"""What every policy is: frozen settings with four methods, of which most policies write one."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax

from jspec.cache import Cache
from jspec.cache.cache import Shapes
from jspec.config import LayerSpec
from jspec.typing import Array


@dataclasses.dataclass(frozen=True)
class Policy:
    """A sparse view of the cache. Subclasses are frozen dataclasses of settings.

    ``arrays`` are what a policy was trained for, from `jspec.Models`; None where it needs none.
    ``reads_queries=False`` promises that `select` ignores its query and gives None or ``[B, n]``:
    one selection then serves a whole draft.
    """

    reads_queries: ClassVar[bool] = True

    def columns(self, spec: LayerSpec) -> Shapes:
        """What a layer keeps of each token beside its key and value: shape and dtype by name."""
        return {}

    def encode(self, arrays: Any, spec: LayerSpec, k: Array) -> dict[str, Array]:
        """The `columns` of new tokens, ``[B, T, ...]``, from their keys ``k [B, T, K, H]``."""
        return {}

    def select(
        self, arrays: Any, layer: int, cache: Cache, q: Array | None, until: Array
    ) -> Array | None:
        """The positions below ``until [B]`` that the queries ``q [B, T, N, H]`` read in a layer.

        int32 ``[B, n]``, shared by all heads, or ``[B, K, n]``; each once, -1 for none. None reads
        all of them. Positions from ``until`` on, the query's own among them, are always read.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class ScoredPolicy(Policy):
    """A policy that reads the ``budget`` positions of the highest score; ties go to the first."""

    budget: int = 512

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ValueError(f"budget={self.budget} must be at least 1 position")

    def score(self, arrays: Any, layer: int, cache: Cache, q: Array) -> Array:
        """Float scores of all slots of a layer, ``[B, S]`` or, per head, ``[B, K, S]``.

        What it gives for a slot without a committed position is ignored, NaN included.
        """
        raise NotImplementedError

    def select(
        self, arrays: Any, layer: int, cache: Cache, q: Array | None, until: Array
    ) -> Array | None:
        assert q is not None
        scores = self.score(arrays, layer, cache, q)
        held = cache.layouts[layer].held(until - 1)
        held = held.reshape(held.shape[0], *[1] * (scores.ndim - 2), held.shape[1])
        held = jnp.broadcast_to(held, scores.shape)
        scores = jnp.where(held >= 0, scores, -jnp.inf)
        # A committed position with a score of minus infinity is still a better choice than none.
        scores = jnp.where(held >= 0, jnp.maximum(scores, jnp.finfo(scores.dtype).min), scores)
        _, slots = lax.top_k(scores, min(self.budget, scores.shape[-1]))
        return jnp.take_along_axis(held, slots, axis=-1)
