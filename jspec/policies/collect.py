"""A verification pass that collects what a guided policy selects by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.cache import Cache
from jspec.ops.append import QKRope
from jspec.ops.attention.dense import attention
from jspec.ops.attention.scored import scored_attention
from jspec.ops.attention.weights import mean_weights
from jspec.ops.key_scores import dot_scores
from jspec.policies.append import append_tokens
from jspec.policies.dense import DenseAttend
from jspec.policies.guided import Guided, gather_tokens, last_token, mean_query
from jspec.policies.read import in_slots, merged, settings_of
from jspec.policies.selection import NewTokens
from jspec.typing import Array, Attend, Model


class Queries(NamedTuple):
    """The queries of a layer, from which any of them can score the keys again.

    ``q``: ``[B, T, N, H]``; ``lse``: ``[B, T, N]``, the log-sum-exp of their attention.
    """

    q: Array
    lse: Array


class Scores(NamedTuple):
    """The scores of all slots of a layer, ``[B, K, S]``, by which it selects."""

    values: Array


# Of each layer what it is yet to select by, the positions that it selected, or nothing.
Collected = tuple[Array | Scores | Queries | None, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Collecting:
    """A cache in the middle of a pass, and what the layers so far have collected."""

    cache: Cache
    collected: Collected = ()

    def after_layer(self, cache: Cache, entry: Scores | Queries | None) -> Collecting:
        """The state for the next layer."""
        return Collecting(cache, (*self.collected, entry))


@dataclasses.dataclass(frozen=True, eq=False)
class CollectingAttend(Attend):
    """Appends new tokens, reads all positions, and collects what a guided policy selects by.

    A layer that selects keeps its scores, or its queries where the tokens that score are not known
    yet; `picks` selects. The float32 scores of all layers take up to 1/H of the memory of a
    bfloat16 cache with keys and values of H channels. A model passes it a `Collecting` and gets
    one.

    Attributes:
        positions: int32 ``[B, T]``: positions of the new tokens, -1 for padding.
        policy: The guided policy.
        policy_params: Parameters of ``policy.cache_policy``.
        scoring: int32 ``[B, P]``: the tokens whose queries score, -1 for none; None where the
            policy chooses them.
    """

    positions: Array
    _: dataclasses.KW_ONLY
    policy: Guided
    policy_params: Any = None
    scoring: Array | None = None

    accepts_qk_rope = True

    def __call__(
        self,
        layer: int,
        q: Array,
        k: Array,
        v: Array | None,
        cache: Collecting,
        /,
        *,
        sinks: Array | None = None,
        up: Array | None = None,
        qk_rope: QKRope | None = None,
        next_queries: Callable[[], Array] | None = None,
    ) -> tuple[Array, Collecting]:
        policy, cache_policy, carry = self.policy, self.policy.cache_policy, cache
        if policy.leaders(carry.cache.specs)[layer] != layer:
            dense = DenseAttend(
                self.positions, policy=cache_policy, policy_params=self.policy_params
            )
            out, after = dense(layer, q, k, v, carry.cache, sinks=sinks, up=up, qk_rope=qk_rope)
            return out, carry.after_layer(after, None)
        tokens = NewTokens(q, k, v, qk_rope, self.positions)
        q, after = append_tokens(carry.cache, layer, tokens, cache_policy, self.policy_params)
        out, lse, entry = self._collect(layer, q, after, sinks)
        return merged(after, out, lse, sinks, up), carry.after_layer(after, entry)

    def _collect(
        self, layer: int, q: Array, cache: Cache, sinks: Array | None
    ) -> tuple[Array, Array, Scores | Queries]:
        """Output and log-sum-exp of a layer, and the scores or queries that it collects."""
        policy, spec, columns = self.policy, cache.specs[layer], cache.columns[layer]
        scoring = self.scoring
        query_positions, key_positions = in_slots(cache, layer, self.positions)
        arguments = (q, columns["keys"], columns.get("values"), query_positions)
        settings: Any = settings_of(spec) | {"key_positions": key_positions}
        settings |= {"table": cache.table_of(layer)}
        if scoring is None and policy.score != "weight" and not policy.needs_verdict:
            with jax.named_scope("collection"):
                probe = mean_query(q, policy.scoring(self.positions), spec.kv_heads)
            out, lse, scores = scored_attention(*arguments, probe.astype(q.dtype), **settings)
            return out, lse, Scores(scores)
        out, lse = attention(*arguments, **settings)
        queries = Queries(q, lse)
        if policy.score == "weight":
            queries = Queries(q, _whole_lse(cache, lse, sinks))
        if scoring is None and policy.needs_verdict:
            return out, lse, queries
        scoring = policy.scoring(self.positions) if scoring is None else scoring
        return out, lse, _scores(policy, cache, layer, queries, scoring)


def _whole_lse(cache: Cache, lse: Array, sinks: Array | None) -> Array:
    """The log-sum-exp that weights are relative to: over the keys of all devices, and sinks."""
    lse = lse if cache.shards is None else cache.shards.over_positions(lse)
    return lse if sinks is None else jnp.logaddexp(lse, sinks[None, None])


def run_collecting(
    model: Model,
    tokens: Array,
    positions: Array,
    cache: Cache,
    *,
    policy: Guided,
    policy_params: Any = None,
) -> tuple[Array, Cache, Collected]:
    """A full pass of ``model`` over ``tokens [B, T]`` at ``positions [B, T]`` that collects.

    Returns the hidden states ``[B, T, D]``, the cache with the tokens' columns, and what each layer
    collected below the committed lengths. Other arguments as in `CollectingAttend`.
    """
    context_len = cache.lengths
    attend = CollectingAttend(positions, policy=policy, policy_params=policy_params)
    hidden, carry = model(tokens, positions, attend, Collecting(cache))
    return hidden, carry.cache, _with_picks(policy, carry, context_len)


def run_prompt(
    model: Model,
    tokens: Array,
    positions: Array,
    cache: Cache,
    context_len: Array,
    *,
    policy: Guided,
    policy_params: Any = None,
) -> tuple[Array, Cache, Collected]:
    """A pass of ``model`` over ``tokens [B, T]`` of prompts, of which the last query selects.

    Returns the hidden states ``[B, T, D]``, the cache with the tokens' columns, and the positions
    that each layer selected below ``context_len [B]``, which may count tokens of this pass. Other
    arguments as in `CollectingAttend`.
    """
    scoring = last_token(positions)
    attend = CollectingAttend(
        positions, policy=policy, policy_params=policy_params, scoring=scoring
    )
    hidden, carry = model(tokens, positions, attend, Collecting(cache))
    return hidden, carry.cache, _with_picks(policy, carry, context_len)


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
    scored = tuple(
        _scores(policy, cache, layer, entry, scoring) if isinstance(entry, Queries) else entry
        for layer, entry in enumerate(collected)
    )
    return _with_picks(policy, Collecting(cache, scored), jnp.maximum(positions[:, 0], 0))


def _with_picks(policy: Guided, carry: Collecting, context_len: Array) -> Any:
    """What was collected, with positions below ``context_len [B]`` in place of scores."""
    scores = {i: x.values for i, x in enumerate(carry.collected) if isinstance(x, Scores)}
    picked = policy.pick(scores, carry.cache, context_len)
    return tuple(picked.get(layer, x) for layer, x in enumerate(carry.collected))


@jax.named_scope("collection")
def _scores(policy: Guided, cache: Cache, layer: int, queries: Queries, scoring: Array) -> Scores:
    """The scores of a layer for the queries of the tokens ``scoring [B, P]``."""
    spec, keys = cache.specs[layer], cache.keys(layer)
    if policy.score != "weight":
        q = spec.score_scale * mean_query(queries.q, scoring, spec.kv_heads)
        return Scores(dot_scores(q[:, None], keys))
    lse = jnp.where((scoring >= 0)[..., None], gather_tokens(queries.lse, scoring), -jnp.inf)
    q = gather_tokens(queries.q, scoring)
    return Scores(mean_weights(q, keys, lse, scale=spec.scale, softcap=spec.softcap))
