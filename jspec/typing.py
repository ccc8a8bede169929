"""Axis letters and array aliases that every signature of jspec uses.

B batch rows, T query tokens of a pass (gamma + 1 in verification), S cache capacity, N query
heads, K key-value heads, G = N / K query heads per key-value head, H head size, D hidden size,
V vocabulary. Caches are ``[B, S, K, H]``, token ids int32, log-sum-exp values natural log in
float32.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax

Array = jax.Array

# attend(layer, q [B, T, N, H], k [B, T, K, H], v [B, T, K, H], cache) -> (out [B, T, N, H], cache)
Attend = Callable[[int, Array, Array, Array, Any], tuple[Array, Any]]


@runtime_checkable
class CacheShape(Protocol):
    """What a cache must know of a model; `ModelConfig` is one."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


class Model(Protocol):
    """What jspec asks of a model: a pytree (any Flax NNX module is one) with these three members.

    ``model(tokens [B, T], positions [B, T], attend, cache) -> (hidden [B, T, D], cache)`` calls
    ``attend`` once a layer, in order, with rotated queries and keys; ``model.logits(hidden)`` gives
    float32 ``[..., V]``. A position of -1 marks padding: what the model computes there is ignored.
    """

    config: Any

    def __call__(
        self, tokens: Array, positions: Array, attend: Attend, cache: Any
    ) -> tuple[Array, Any]: ...

    def logits(self, hidden: Array) -> Array: ...
