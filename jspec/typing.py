"""Axis letters and array aliases that every signature of jspec uses.

B batch rows, T query tokens of a pass (gamma + 1 in verification), S cache capacity, N query
heads, K key-value heads, G = N / K query heads per key-value head, H head size, D hidden size,
V vocabulary. Caches are ``[B, S, K, H]``, token ids int32, log-sum-exp values natural log in
float32.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax

from jspec.config import LayerSpec

Array = jax.Array


class Attend(Protocol):
    def __call__(
        self,
        layer: int,
        q: Array,
        k: Array,
        v: Array | None,
        cache: Any,
        *,
        sinks: Array | None = None,
        up: Array | None = None,
    ) -> tuple[Array, Any]: ...


class ModelSettings(Protocol):
    """What jspec reads of a model's settings; `ModelConfig` is one."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def layers(self) -> tuple[LayerSpec, ...]: ...
    @property
    def max_context(self) -> int: ...
    @property
    def stop_tokens(self) -> tuple[int, ...]: ...


class Model(Protocol):
    """What jspec asks of a model: a pytree (any Flax NNX module is one) with these three members.

    ``model(tokens [B, T], positions [B, T], attend, cache) -> (hidden [B, T, D], cache)`` calls
    ``attend`` once a layer, in order, with rotated queries and keys; ``model.logits(hidden)`` gives
    float32 ``[..., V]``. A position of -1 marks padding: what the model computes there is ignored.
    """

    config: ModelSettings

    @property
    def dtype(self) -> Any: ...

    def __call__(
        self, tokens: Array, positions: Array, attend: Attend, cache: Any
    ) -> tuple[Array, Any]: ...

    def logits(self, hidden: Array) -> Array: ...
