"""MagicPIG: keys that collide with the query in hash tables (Chen et al. 2024)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.cache import Cache
from jspec.cache.cache import Shapes
from jspec.config import LayerSpec
from jspec.ops.collisions import (
    MIN_COLLISIONS,
    bucket_codes,
    code_words,
    collision_scores,
    collisions,
    max_collisions,
)
from jspec.policies.budgeted import ScoredPolicy
from jspec.policies.policy import Encoder, SampleKeys
from jspec.policies.read import gather_columns
from jspec.policies.scores import best_positions
from jspec.policies.selection import Selection
from jspec.typing import Array, Model

MAX_BITS = 16  # of a table's bucket
TINY = 1e-6  # the least probability of a bit, and how far that of a table stays from 1
RARE = 0.05  # expected collisions below which five or more are left out: 2e-6 of the probability


@dataclasses.dataclass(frozen=True)
class MagicPIG(ScoredPolicy):
    """Keys that share a bucket with a query in at least two of ``tables`` random hash tables.

    A bucket is the signs of ``bits`` random projections. Keys are centred by the mean of sample
    keys where there are some; that does not change the softmax. A KV head's group selects what any
    of its queries found; where the budget is too small, the keys with the most collisions.

    With ``weights`` a query reads only the keys that it found itself, each with the inverse of the
    probability that it did (arXiv 2410.16179, section 4): sums over them are unbiased estimates of
    those over all keys, unless the budget cuts some off. Sinks and recent positions are read by
    every query and have weight 1. Without, the softmax over the selection is plain.
    """

    bits: int = 10
    tables: int = 150
    weights: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.bits <= MAX_BITS:
            raise ValueError(f"bits={self.bits} must be in [1, {MAX_BITS}]")
        if self.tables < MIN_COLLISIONS:
            raise ValueError(f"tables={self.tables} must be at least {MIN_COLLISIONS}")
        if self.weights and self.every > 1:
            raise ValueError(
                f"every={self.every} layers cannot read one sample with weights=true, which are of "
                "the layer that took it; set every=1 or weights=false"
            )

    @property
    def runs_on_mesh(self) -> bool:
        return False  # heads share the projections, which a mesh would have to split

    def columns(self, layer: int, spec: LayerSpec) -> Shapes:
        if layer < self.dense_layers:
            return {}
        words = code_words(self.tables, self.bits)
        return {"buckets": ((spec.kv_heads, words), jnp.uint32)}

    def prepare(self, model: Model, sample_keys: SampleKeys | None) -> Any:
        """A layer's ``center [K, H]`` and ``projections [H, tables * bits]``, float32."""
        rng = np.random.default_rng(self.seed)
        keys = None if sample_keys is None else sample_keys()
        layers = []
        for layer, spec in enumerate(model.config.layers):
            shape = (spec.kv_heads, spec.key_size)
            center = np.zeros(shape) if keys is None else keys[layer].mean(axis=0)
            projections = rng.standard_normal((spec.key_size, self.tables * self.bits))
            params = {"center": center, "projections": projections}
            layers.append({name: jnp.asarray(x, jnp.float32) for name, x in params.items()})
        return tuple(layers)

    def encoder(self, policy_params: Any, layer: int) -> Encoder:
        layer_params = policy_params[layer]

        def encode(k: Array, v: Array | None) -> dict[str, Array]:
            k = k.astype(jnp.float32) - layer_params["center"][None, None]
            return {"buckets": bucket_codes(k, layer_params["projections"], self.tables)}

        return encode

    def score(self, policy_params: Any, layer: int, cache: Cache, q: Array) -> Array:
        query_codes = bucket_codes(q, policy_params[layer]["projections"], self.tables)
        return collision_scores(query_codes, cache.columns[layer]["buckets"], self.tables)

    def best(
        self, policy_params: Any, layer: int, cache: Cache, q: Array, k: int, **budget: Any
    ) -> Array:
        scores = self.score(policy_params, layer, cache, q)
        highest = max_collisions(q, cache.columns[layer]["buckets"], self.tables)
        return best_positions(scores, cache.layouts[layer], k, highest=highest, **budget)

    def select(
        self,
        policy_params: Any,
        layer: int,
        cache: Cache,
        q: Array | None,
        context_len: Array,
        budget_share: float = 1.0,
    ) -> Selection:
        selection = super().select(policy_params, layer, cache, q, context_len, budget_share)
        chosen = selection.positions
        if chosen is None or not self.weights:
            return selection
        columns = gather_columns(cache, layer, chosen, ("keys", "buckets"))
        end = context_len[:, None, None]
        always = (chosen < self.sinks) | (chosen >= end - self.recent)
        log_weights = jax.tree_util.Partial(
            self._log_weights, policy_params[layer], columns["keys"], columns["buckets"], always
        )
        return dataclasses.replace(selection, log_weights=log_weights)

    def _log_weights(
        self, layer_params: Any, keys: Array, buckets: Array, always: Array, q: Array
    ) -> Array:
        """The log-weights ``[B, T, N, n]`` of selected ``keys [B, n, K, H]`` and their buckets.

        ``always [B, K, n]``: which of them every query reads.
        """
        query_codes = bucket_codes(q, layer_params["projections"], self.tables)
        shared_tables = jnp.moveaxis(collisions(query_codes, buckets, self.tables), 2, -1)
        heads, q = q.shape[2], by_group(q, keys.shape[2])
        k = keys.astype(jnp.float32) - layer_params["center"][None, None]
        probability = log_probability(cosines(q, k), self.bits, self.tables)
        weights = jnp.where(shared_tables >= MIN_COLLISIONS, -probability, -jnp.inf)
        weights = jnp.where(always[:, None, :, None], 0.0, weights)
        return weights.reshape(*weights.shape[:2], heads, -1)


def by_group(q: Array, kv_heads: int) -> Array:
    """``q [B, T, N, H]`` as float32 ``[B, T, K, G, H]``."""
    batch, tokens, heads, size = q.shape
    return q.astype(jnp.float32).reshape(batch, tokens, kv_heads, heads // kv_heads, size)


def cosines(q: Array, k: Array) -> Array:
    """The cosine of the angle between ``q [B, T, K, G, H]`` and each of ``k [B, n, K, H]``.

    float32 ``[B, T, K, G, n]``; 0 for a vector of zeros.
    """
    products = jnp.einsum("btkgh,bnkh->btkgn", q, k, precision=lax.Precision.HIGHEST)
    of_q, of_k = (jnp.maximum(jnp.linalg.norm(x, axis=-1), TINY) for x in (q, k))
    # Keys are the larger array: what they are divided by goes to the products.
    return products / of_q[..., None] / jnp.moveaxis(of_k, 1, 2)[:, None, :, None]


def log_probability(cosine: Array, bits: int, tables: int) -> Array:
    """The logarithm of the probability that a key shares a bucket in two tables or more.

    ``u = 1 - (1 - x)^L - L x (1 - x)^(L - 1)`` with L ``tables`` and ``x = p^bits`` for a table;
    ``p = 1 - angle / pi`` for a bit (arXiv 2410.16179, section 4).
    """
    p = 1 - jnp.arccos(jnp.clip(cosine, -1.0, 1.0)) / np.pi
    log_x = jnp.minimum(bits * jnp.log(jnp.maximum(p, TINY)), np.log1p(-TINY))
    x = jnp.exp(log_x)
    # As it stands, u is a small difference of large numbers where x is small. There it is the sum
    # of the probabilities of two, three and four collisions.
    odds, pairs = x / (1 - x), tables * (tables - 1) / 2
    three, four = (tables - 2) / 3, (tables - 2) * (tables - 3) / 12
    few = np.log(pairs) + 2 * log_x + (tables - 2) * jnp.log1p(-x)
    few = few + jnp.log1p(odds * (three + four * odds))
    none_or_one = tables * jnp.log1p(-x) + jnp.log1p(tables * odds)
    rare = tables * x < RARE
    many = jnp.log(-jnp.expm1(jnp.where(rare, -1.0, none_or_one)))
    return jnp.where(rare, few, many)
