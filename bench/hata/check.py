"""Checks a layer: its selection by the policy's scores, its output by attention over that."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.caches import TOLERANCE
from bench.hata.workload import Token
from bench.program import AUTOTUNING_OFF
from jspec.cache import Cache
from jspec.dispatch import use_backends
from jspec.ops import gathered_attention, operations
from jspec.policies import MagicPIG, Policy, ScoredPolicy
from jspec.policies.budgeted import max_pages_of, whole_pages
from jspec.policies.policy import HashEncoder
from jspec.typing import Array

# Of the standard deviation of a row's scores: sums in another order, matmuls in TF32.
ROUGH = 2e-2
# Of the standard deviation of a vector's projections: one so near to 0 may have either sign, since
# float32 sums in another order differ by less. That bit of a code moves all scores by one.
UNSURE = 1e-5
REFERENCE = {x.name: "xla" for x in operations() if "xla" in x.backends}
Exact = partial(jax.jit, compiler_options=AUTOTUNING_OFF)


def is_right(policy: Policy, policy_params: Any, cache: Cache, token: Token, outputs: Any) -> bool:
    """Whether a layer's output, its selection and the new token in ``cache`` are right."""
    out, chosen = outputs
    q, k, v = token.parts()
    if chosen is None:
        size = cache.layouts[0].size
        chosen = np.broadcast_to(np.arange(size - 1, dtype=np.int32), (len(out), size - 1))
    elif isinstance(policy, ScoredPolicy) and not selects(
        policy, policy_params, cache, q, chosen, token
    ):
        return False
    with jax.default_matmul_precision("highest"):
        expected = _attended(policy, policy_params, cache, q, chosen, token.context_len)
    expected = np.asarray(expected, np.float32)
    error = np.linalg.norm(np.asarray(out, np.float32) - expected, axis=-1)
    near = error <= TOLERANCE * np.linalg.norm(expected, axis=-1)
    return bool(near.all()) and bool(
        _written(policy, policy_params, cache, token.context_len, k, v)
    )


@partial(Exact, static_argnums=0)
def _attended(
    policy: Policy, policy_params: Any, cache: Cache, q: Array, chosen: Array, context_len: Array
) -> Array:
    """The attention of ``q`` over the ``chosen`` positions and the new token."""
    selection = policy.select(policy_params, 0, cache, q, context_len)
    weights = None if selection.log_weights is None else selection.log_weights(q)
    newest = context_len[:, None]
    arguments = q, cache.keys(0), cache.values(0), newest, chosen, newest, context_len
    return gathered_attention(*arguments, log_weights=weights, implementation="xla")[0]


def selects(
    policy: ScoredPolicy, policy_params: Any, cache: Cache, q: Array, chosen: Array, token: Token
) -> bool:
    """Whether ``chosen`` are the positions of the highest scores, of equal ones the first.

    Scores within rounding of the lowest chosen one may be chosen or not.
    """
    return bool(_selects(policy, policy_params, cache, q, chosen, token.context_len))


@partial(Exact, static_argnums=0)
def _selects(
    policy: ScoredPolicy,
    policy_params: Any,
    cache: Cache,
    q: Array,
    chosen: Array,
    context_len: Array,
) -> Array:
    with use_backends(REFERENCE):
        scores = policy.score(policy_params, 0, cache, q)
    if jnp.issubdtype(scores.dtype, jnp.integer):  # a negative one is never selected
        scores = jnp.where(scores < 0, -jnp.inf, scores.astype(jnp.float32))
    deviation = jnp.nanstd(jnp.where(jnp.isfinite(scores), scores, jnp.nan), axis=-1)
    page = policy.page_size
    agrees = _agrees(
        *(scores, ROUGH * deviation, chosen, context_len),
        *(page, _forced(policy), int(policy.budget) // page),
    )
    return (agrees | has_unsure_bits(policy, policy_params, q, scores.shape[1])).all()


def has_unsure_bits(policy: Policy, policy_params: Any, x: Array, kv_heads: int) -> Array:
    """Whether the codes of ``x [B, 1, N, H]`` may differ by rounding, bool ``[B, K]``.

    False for policies without codes.
    """
    encoder = policy.encoder(policy_params, 0)
    if isinstance(encoder, HashEncoder):
        matrices = encoder.matrices
    elif isinstance(policy, MagicPIG):
        matrices = policy_params[0]["projections"][None]
    else:
        return jnp.zeros((len(x), kv_heads), bool)
    matrices = jnp.broadcast_to(matrices, (kv_heads, *matrices.shape[1:])).astype(jnp.float32)
    grouped = x.reshape(len(x), kv_heads, -1, x.shape[-1]).astype(jnp.float32)
    projections = jnp.einsum("bkgh,khr->bkgr", grouped, matrices, precision="highest")
    deviation = projections.std(axis=-1, keepdims=True)
    return (jnp.abs(projections) <= UNSURE * deviation).any(axis=(2, 3))


def _forced(policy: ScoredPolicy) -> tuple[int, int]:
    """Numbers of first and last positions, or pages, that are always read."""
    page = policy.page_size
    recent = max(policy.recent, 1) if page > 1 else policy.recent
    return whole_pages(policy.sinks, page), max_pages_of(recent, page)


def _agrees(
    scores: Array,
    doubt: Array,
    chosen: Array,
    context_len: Array,
    page: int,
    forced: tuple[int, int],
    count: int,
) -> Array:
    """Whether the chosen positions of each row and KV head are right, bool ``[B, K]``."""
    scores = scores.astype(jnp.float32)
    end = -(-context_len // page)[:, None, None]
    index = jnp.arange(scores.shape[-1])[None, None]
    always = (index < forced[0]) | (index >= end - forced[1])
    scores = jnp.where(always, jnp.inf, scores)
    scores = jnp.where(index < end, scores, -jnp.inf)
    lowest = jax.lax.top_k(scores, count)[0][..., -1:]
    above, equal = scores > lowest, scores == lowest
    left = count - above.sum(axis=-1, keepdims=True)
    expected = (above | (equal & (jnp.cumsum(equal, axis=-1) <= left))) & (scores > -jnp.inf)
    # The extra slot at the end collects entries that are no position.
    slots = jnp.where(chosen >= 0, chosen, scores.shape[-1] * page)
    counts = jnp.zeros((*scores.shape[:2], scores.shape[-1] * page + 1), jnp.int32)
    rows, heads = (jnp.arange(n) for n in scores.shape[:2])
    counts = counts.at[rows[:, None, None], heads[None, :, None], slots].add(1)[..., :-1]
    committed = jnp.arange(counts.shape[-1])[None, None] < context_len[:, None, None]
    whole, none = (
        (counts == expected).reshape(*scores.shape, page).all(axis=-1)
        for expected in (committed.astype(jnp.int32), jnp.zeros_like(counts))
    )
    whole &= index < end
    near = (doubt[..., None] > 0) & (jnp.abs(scores - lowest) <= doubt[..., None])
    as_expected = jnp.where(expected, whole, none) | (near & (whole | none))
    as_many = whole.sum(axis=-1) == expected.sum(axis=-1)
    return as_expected.all(axis=-1) & as_many


@partial(Exact, static_argnums=0)
def _written(
    policy: Policy, policy_params: Any, cache: Cache, context_len: Array, k: Array, v: Array
) -> Array:
    """Whether the new token's key, value and columns are in its slot."""
    expected_columns = {"keys": k, "values": v, **policy.encoder(policy_params, 0)(k, v)}
    rows = jnp.arange(len(context_len))[:, None]
    right = []
    for name, column in cache.columns[0].items():
        actual = column[rows, context_len[:, None]]
        expected = expected_columns[name].astype(column.dtype)
        if jnp.issubdtype(column.dtype, jnp.floating):
            error = jnp.linalg.norm((actual - expected).astype(jnp.float32))
            right.append(error <= ROUGH * jnp.linalg.norm(expected.astype(jnp.float32)))
        else:
            centered = k.astype(jnp.float32)
            if isinstance(policy, MagicPIG):
                centered -= policy_params[0]["center"][None, None]
            unsure = has_unsure_bits(policy, policy_params, centered, k.shape[2])
            right.append(((actual == expected).all(axis=(1, 3)) | unsure).all())
    return jnp.stack(right).all()
