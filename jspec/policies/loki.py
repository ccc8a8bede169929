"""Loki: scores in the leading principal components of the keys (Singhania et al. 2024)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jspec.cache import Cache
from jspec.cache.cache import Shapes
from jspec.config import LayerSpec
from jspec.ops.key_scores import dot_scores
from jspec.policies.budgeted import ScoredPolicy
from jspec.policies.policy import Encoder, SampleKeys
from jspec.typing import Array, Model


@dataclasses.dataclass(frozen=True)
class Loki(ScoredPolicy):
    """Scores q.k in the first ``channels`` principal components of a KV head's keys.

    The components come from the covariance of sample keys, rotated as they are cached. Each token
    keeps its key's components in addition to the key, and a query is projected on them when it
    scores.
    """

    channels: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.channels < 1:
            raise ValueError(f"channels={self.channels} must be at least 1")

    def columns(self, layer: int, spec: LayerSpec) -> Shapes:
        if layer < self.dense_layers:
            return {}
        return {"components": ((spec.kv_heads, self._channels(spec.key_size)), None)}

    def prepare(self, model: Model, sample_keys: SampleKeys | None) -> Any:
        """The components of each layer, float32 ``[K, H, channels]``, the largest first."""
        if sample_keys is None:
            raise ValueError(
                "loki needs the keys of a sample text: pass policy_params="
                "jspec.policies.prepare_params(policy, model, tokens)"
            )
        return tuple(jnp.asarray(self._components(k)) for k in sample_keys())

    def _components(self, keys: np.ndarray) -> np.ndarray:
        k = np.swapaxes(keys, 0, 1).astype(np.float64)
        k = k - k.mean(axis=1, keepdims=True)
        _, vectors = np.linalg.eigh(np.swapaxes(k, 1, 2) @ k)  # ascending
        return vectors[..., ::-1][..., : self._channels(k.shape[-1])].astype(np.float32)

    def _channels(self, size: int) -> int:
        return min(self.channels, size)

    def encoder(self, policy_params: Any, layer: int) -> Encoder:
        def encode(k: Array, v: Array | None) -> dict[str, Array]:
            k = k.astype(jnp.float32)
            return {"components": jnp.einsum("btkh,khr->btkr", k, policy_params[layer])}

        return encode

    def score(self, policy_params: Any, layer: int, cache: Cache, q: Array) -> Array:
        components = cache.columns[layer]["components"]
        return dot_scores(q, components, projection=policy_params[layer])
