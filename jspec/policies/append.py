"""New tokens in the cache: keys and values, rotated as they are written, and policy columns."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jspec.cache import Cache
from jspec.ops.append import rotate_and_append, rotate_append_encode
from jspec.policies.offload import append_to_host, is_offloaded
from jspec.policies.policy import HashEncoder, Policy, columns_of
from jspec.policies.selection import NewTokens
from jspec.typing import Array


def append_tokens(
    cache: Cache, layer: int, tokens: NewTokens, policy: Policy, policy_params: Any
) -> tuple[Array, Cache]:
    """The rotated queries, and the cache with the tokens' keys, values and policy columns.

    Rotation, append and the encoding by a `HashEncoder` are one operation.
    """
    if is_offloaded(cache, layer):
        return append_to_host(cache, layer, tokens, policy, policy_params)
    policy_columns = columns_of(policy, layer, cache.specs[layer])
    encoder = policy.encoder(policy_params, layer) if policy_columns else None
    if tokens.qk_rope is None or tokens.v is None:
        tokens = tokens.rotated()
        encoded = {} if encoder is None else encoder(tokens.k, tokens.v)
        return tokens.q, cache.append(layer, tokens.positions, **tokens.columns, **encoded)
    slots = cache.slots(layer, tokens.positions)
    if isinstance(encoder, HashEncoder) and tokens.qk_rope.joined is not None:
        cache.check_keeps(layer, policy_columns)
        columns = cache.columns[layer]
        q, keys, values, codes = rotate_append_encode(
            *(tokens.q, tokens.k, tokens.v, tokens.qk_rope),
            *(columns["keys"], columns["values"], columns["codes"], encoder.matrices, slots),
        )
        return q, cache.replaced(layer, keys=keys, values=values, codes=codes)
    if cache.table_of(layer) is not None:
        return _rotate_into_blocks(cache, layer, tokens, slots)
    q, cache = rotate_into(cache, layer, tokens, slots)
    if encoder is not None:
        # Of the rotated keys the cache has the only copy; a slot past its end is not written.
        rows = jnp.arange(slots.shape[0])[:, None]
        k = cache.keys(layer).at[rows, slots].get(mode="clip")
        cache = cache.written(layer, slots, **encoder(k, tokens.v))
    return q, cache


def rotate_into(cache: Any, layer: int, tokens: NewTokens, slots: Array) -> tuple[Array, Any]:
    """The rotated queries, and a `Cache` or `Compact` with rotated keys and values in ``slots``."""
    columns = cache.columns[layer]
    q, k, v, qk_rope, _ = tokens
    assert v is not None
    assert qk_rope is not None
    q, keys, values = rotate_and_append(
        *(q, k, v, qk_rope, columns["keys"], columns["values"], slots)
    )
    return q, cache.replaced(layer, keys=keys, values=values)


def _rotate_into_blocks(
    cache: Cache, layer: int, tokens: NewTokens, slots: Array
) -> tuple[Array, Cache]:
    """As `rotate_into` for a layer in blocks: the tokens of all rows are those of one row."""
    columns, slots = cache.in_memory(layer, slots)
    assert tokens.v is not None
    assert tokens.qk_rope is not None

    def one_row(x: Array) -> Array:
        return x.reshape(1, -1, *x.shape[2:])

    rope = tokens.qk_rope
    qk_rope = dataclasses.replace(
        rope,
        cosine=one_row(rope.cosine),
        sine=one_row(rope.sine),
        joined=None if rope.joined is None else one_row(rope.joined),
    )
    q, keys, values = rotate_and_append(
        *(one_row(tokens.q), one_row(tokens.k), one_row(tokens.v), qk_rope),
        *(columns["keys"], columns["values"], one_row(slots)),
    )
    return q.reshape(tokens.q.shape), cache.replaced(layer, keys=keys, values=values)
