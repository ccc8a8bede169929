"""Axis letters and array aliases that every signature of jspec uses.

B batch rows, T query tokens of a pass (gamma + 1 in verification), S cache capacity, N query
heads, K key-value heads, G = N / K query heads per key-value head, H head size, D hidden size,
V vocabulary. Caches are ``[B, S, K, H]``, token ids int32, log-sum-exp values natural log in
float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import jax
from jax.typing import DTypeLike

from jspec.config import LayerSpec

Array = jax.Array


class Attend:
    """What a model calls once a layer, in order, for attention over the cache.

    It appends ``k`` and ``v`` to ``cache`` at the pass's positions and lets each query read the
    keys at or before its own position. Window, scale and softcap are those of
    ``config.layers[layer]``: the model applies none of them. Which of the keys are read, by what
    kernel and on which devices is the caller's choice.

    ``layer`` is a Python int. ``q [B, T, N, key_size]`` and ``k [B, T, K, key_size]`` are rotated,
    if the model rotates, and not scaled; ``v [B, T, K, value_size]``, or None where the layer has
    ``values_in_keys``. ``sinks [N]`` takes the share of an attention sink from each head: its
    output times ``sigmoid(lse - sinks)``, where lse is the log-sum-exp of its scores. ``up
    [N, value_size, H']`` is a linear map applied to each head's output after that.
    Returns the output, ``[B, T, N, value_size]`` or with ``up`` ``[B, T, N, H']``, in the dtype of
    ``q``, and the new cache. At a position of -1 nothing is appended and the output means nothing.

    Attributes:
        accepts_qk_rope: Whether a model may pass ``qk_rope``, a `jspec.ops.append.QKRope`, with
            queries and keys that are neither normed nor rotated yet: ``qk_rope(q, k)`` does both.
        accepts_next_queries: Whether a model may pass ``next_queries``, which returns the queries
            that the next layer would compute from this layer's input, normed and rotated; None for
            the last layer.
    """

    accepts_qk_rope: ClassVar[bool] = False
    accepts_next_queries: ClassVar[bool] = False

    def __call__(
        self,
        layer: int,
        q: Array,
        k: Array,
        v: Array | None,
        cache: Any,
        /,
        *,
        sinks: Array | None = None,
        up: Array | None = None,
        qk_rope: Any = None,
        next_queries: Callable[[], Array] | None = None,
    ) -> tuple[Array, Any]:
        raise NotImplementedError


class ModelShape(Protocol):
    """What jspec reads of a model's config; `jspec.ModelConfig` has it all.

    ``layers`` describe the cache of each layer, ``max_context`` is the most tokens of a row, and
    ``stop_tokens`` end a row in addition to those of its request.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def layers(self) -> Sequence[LayerSpec]: ...
    @property
    def max_context(self) -> int: ...
    @property
    def stop_tokens(self) -> Sequence[int]: ...


class Model(Protocol):
    """What jspec asks of a model: a pytree, as any Flax NNX module is, with these four members.

    ``model(tokens, positions, attend, cache)`` takes int32 ``[B, T]`` twice, calls ``attend`` once
    a layer, in order, and returns hidden states ``[B, T, D]`` and the cache that the last call
    returned. A position of -1 marks padding, whose token may be -1 too: what is computed there is
    ignored. ``logits(hidden)`` are float32 ``[..., V]``. ``dtype`` is that of the keys and values
    that the model passes to ``attend``; the cache has the same.
    """

    @property
    def config(self) -> ModelShape: ...
    @property
    def dtype(self) -> DTypeLike: ...

    def __call__(
        self, tokens: Array, positions: Array, attend: Attend, cache: Any, /
    ) -> tuple[Array, Any]: ...

    def logits(self, hidden: Array, /) -> Array: ...
