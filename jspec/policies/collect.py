"""A verification pass that collects what a guided policy selects by."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.cache import Cache
from jspec.dispatch import Backends
from jspec.ops.attention.dense import attention
from jspec.ops.attention.scored import scored_attention
from jspec.ops.attention.weights import mean_weights
from jspec.policies.attend import accepting_qk_rope, appended, dense_attend
from jspec.policies.guided import Guided, gather_tokens, mean_query
from jspec.policies.read import in_slots, merged, settings_of
from jspec.policies.scores import dots
from jspec.typing import Array, Attend, Model


class Queries(NamedTuple):
    """The queries of a layer, from which any of them can score the keys again.

    ``q``: ``[B, T, N, H]``; ``lse``: ``[B, T, N]``, the log-sum-exp of their attention.
    """

    q: Array
    lse: Array


# Of each layer: the selected positions, the queries that are yet to select them, or nothing.
Collected = tuple[Array | Queries | None, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Collecting:
    """A cache in the middle of a pass, and what the layers so far have collected."""

    cache: Cache
    collected: Collected = ()

    def after_layer(self, cache: Cache, entry: Array | Queries | None) -> Collecting:
        """The state for the next layer."""
        return Collecting(cache, (*self.collected, entry))


def collecting_attend(
    positions: Array,
    context_len: Array,
    *,
    policy: Guided,
    policy_params: Any = None,
    backends: Mapping[str, str] = Backends(),
) -> Attend:
    """The ``attend`` that appends new tokens, reads all positions, and collects.

    A layer that selects does so at once, so that the scores of two layers never need memory at the
    same time, or keeps its queries where the tokens that score are not known yet. A model passes
    the function a `Collecting` and gets one.

    Args:
        positions: int32 ``[B, T]``: positions of the new tokens, -1 for padding.
        context_len: int32 ``[B]``: committed positions per row, among which layers select.
        policy: The guided policy.
        policy_params: Parameters of ``policy.cache_policy``.
        backends: Named backends of operations.
    """
    cache_policy = policy.cache_policy
    dense: Any = dense_attend(
        positions, policy=cache_policy, policy_params=policy_params, backends=backends
    )

    @accepting_qk_rope
    def attend(layer, q, k, v, carry: Collecting, *, sinks=None, up=None, qk_rope=None):
        cache = carry.cache
        spec = cache.specs[layer]
        if policy.leaders(cache.specs)[layer] != layer:
            out, cache = dense(layer, q, k, v, cache, sinks=sinks, up=up, qk_rope=qk_rope)
            return out, carry.after_layer(cache, None)
        q, cache = appended(
            cache, layer, positions, q, k, v, qk_rope, cache_policy, policy_params, backends
        )
        columns = cache.columns[layer]
        query_positions, key_positions = in_slots(cache, layer, positions)
        arguments = (q, columns["keys"], columns.get("values"), query_positions)
        settings: Any = settings_of(spec) | {"key_positions": key_positions}
        if policy.score != "weight" and not policy.needs_verdict:
            with jax.named_scope("collection"):
                probe = mean_query(q, policy.scoring(positions), spec.kv_heads)
            out, lse, scores = scored_attention(
                *(*arguments, probe.astype(q.dtype)),
                implementation=backends.get("scored_attention"),
                **settings,
            )
            entry = policy.pick(scores, cache, layer, context_len)
        else:
            out, lse = attention(*arguments, implementation=backends.get("attention"), **settings)
            entry = Queries(q, lse if sinks is None else jnp.logaddexp(lse, sinks[None, None]))
            if not policy.needs_verdict:
                scoring = policy.scoring(positions)
                entry = _picked(policy, cache, layer, entry, scoring, context_len)
        return merged(cache, out, lse, sinks, up), carry.after_layer(cache, entry)

    return attend


def run_collecting(
    model: Model,
    tokens: Array,
    positions: Array,
    cache: Cache,
    *,
    policy: Guided,
    policy_params: Any = None,
    backends: Mapping[str, str] = Backends(),
) -> tuple[Array, Cache, Collected]:
    """A full pass of ``model`` over ``tokens [B, T]`` at ``positions [B, T]`` that collects.

    Returns the hidden states ``[B, T, D]``, the cache with the tokens' columns, and what each layer
    collected below the committed lengths. Other arguments as in `collecting_attend`.
    """
    attend = collecting_attend(
        positions, cache.lengths, policy=policy, policy_params=policy_params, backends=backends
    )
    hidden, carry = model(tokens, positions, attend, Collecting(cache))
    return hidden, carry.cache, carry.collected


def picks(
    policy: Guided,
    cache: Cache,
    collected: Collected,
    positions: Array,
    accepted: Array,
) -> tuple[Array | None, ...]:
    """What the layers select once the ``accepted [B]`` tokens of a pass are known.

    ``positions`` int32 ``[B, T]``: those of the pass, -1 for padding.
    """
    scoring = policy.scoring(positions, accepted)
    context_len = jnp.maximum(positions[:, 0], 0)
    return tuple(
        _picked(policy, cache, layer, entry, scoring, context_len)
        if isinstance(entry, Queries)
        else entry
        for layer, entry in enumerate(collected)
    )


def _picked(
    policy: Guided,
    cache: Cache,
    layer: int,
    queries: Queries,
    scoring: Array,
    context_len: Array,
) -> Array:
    """The positions that a layer selects by the queries of the tokens ``scoring [B, P]``."""
    scores = _scores(policy, cache, layer, queries, scoring)
    return policy.pick(scores, cache, layer, context_len)


@jax.named_scope("collection")
def _scores(policy: Guided, cache: Cache, layer: int, queries: Queries, scoring: Array) -> Array:
    """The scores of every slot of a layer for the queries of ``scoring``, ``[B, K, S]``."""
    spec, keys = cache.specs[layer], cache.keys(layer)
    if policy.score != "weight":
        return dots((spec.score_scale * mean_query(queries.q, scoring, spec.kv_heads), keys))
    lse = jnp.where((scoring >= 0)[..., None], gather_tokens(queries.lse, scoring), -jnp.inf)
    q = gather_tokens(queries.q, scoring)
    return mean_weights(q, keys, lse, scale=spec.scale, softcap=spec.softcap)
