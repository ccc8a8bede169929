"""Checks a layer: its selection by the policy's definition, its output by brute force."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.caches import TOLERANCE
from bench.layer.workload import Token
from jspec.cache import Cache
from jspec.ops.collisions import LEAST
from jspec.policies import ExactTopK, Hata, Loki, MagicPIG, Policy, Quest, ScoredPolicy
from jspec.policies.budgeted import touched, whole_pages
from jspec.typing import Array

DOUBT = 1e-5  # of a dot product's bound: below it, rounding may change the sign
# Relative to the standard deviation of a row's scores: float32 sums in another order, and matmuls
# that a GPU computes in TF32.
CLOSE, ROUGH = 1e-3, 2e-2
WRITTEN = 0.05  # the share of a new token's code that rounding may change
Scored = tuple[Array, Array]  # scores [B, K, S or pages], and their uncertainty [B, K]
Exact = partial(jax.jit, compiler_options={"xla_gpu_autotune_level": 0})


def right(policy: Policy, policy_params: Any, cache: Cache, token: Token, outputs: Any) -> bool:
    """Whether a layer's output, its selection and the new token in ``cache`` are right."""
    out, chosen = outputs
    q, k, v = token.parts()
    if chosen is None:
        size = cache.layouts[0].size
        chosen = jnp.broadcast_to(jnp.arange(size - 1, dtype=jnp.int32), (len(out), size - 1))
    elif isinstance(policy, ScoredPolicy) and not selects(
        policy, policy_params, cache, q, chosen, token
    ):
        return False
    weights = policy.weigh(policy_params, 0, cache, q, token.context_len, chosen)
    want = attended(q, cache.keys(0), cache.values(0), chosen, token.context_len, weights)
    want = np.asarray(want)
    error = np.linalg.norm(np.asarray(out, np.float32) - want, axis=-1)
    near = error <= TOLERANCE * np.linalg.norm(want, axis=-1)
    return bool(near.all()) and _written(policy, policy_params, cache, token.context_len, k, v)


@Exact
def attended(
    q: Array,
    keys: Array,
    values: Array,
    chosen: Array,
    context_len: Array,
    log_weights: Array | None = None,
) -> Array:
    """Attention of ``q [B, 1, N, H]`` over positions ``chosen [B, n]`` or ``[B, K, n]``, -1 for
    none, and ``context_len [B]``: a softmax in float32 over copies of their keys and values.

    ``log_weights [B, 1, N, n]`` are added to the scores of the chosen ones.
    """
    batch, _, query_heads, size = q.shape
    kv_heads = keys.shape[2]
    if chosen.ndim == 2:
        chosen = jnp.broadcast_to(chosen[:, None], (batch, kv_heads, chosen.shape[1]))
    newest = jnp.broadcast_to(context_len[:, None, None], (batch, kv_heads, 1))
    slots = jnp.concatenate([chosen, newest], axis=2)
    index = jnp.maximum(jnp.swapaxes(slots, 1, 2), 0)[..., None]
    k, v = (jnp.take_along_axis(x, index, axis=1).astype(jnp.float32) for x in (keys, values))
    grouped = q.reshape(batch, kv_heads, -1, size).astype(jnp.float32) * size**-0.5
    scores = jnp.einsum("bkgh,bskh->bkgs", grouped, k, precision="highest")
    if log_weights is not None:
        scores = scores.at[..., :-1].add(log_weights.reshape(*scores.shape[:3], -1))
    weights = jax.nn.softmax(jnp.where(slots[:, :, None] >= 0, scores, -jnp.inf), axis=-1)
    out = jnp.einsum("bkgs,bskh->bkgh", weights, v, precision="highest")
    return out.reshape(batch, 1, query_heads, -1)


def selects(
    policy: ScoredPolicy, policy_params: Any, cache: Cache, q: Array, chosen: Array, token: Token
) -> bool:
    """Whether ``chosen`` are the positions of the highest scores, of equal ones the first.

    Scores within rounding of the lowest chosen one may be chosen or not.
    """
    kind = next((x for x in SCORES if isinstance(policy, x)), None)
    if kind is None:
        scores = jax.jit(lambda *arguments: policy.score(arguments[0], 0, *arguments[1:]))(
            policy_params, cache, q
        )
        scored = scores, ROUGH * jnp.nanstd(jnp.where(jnp.isfinite(scores), scores, jnp.nan), -1)
    else:
        layer_params = None if policy_params is None else policy_params[0]
        scored = SCORES[kind](policy, layer_params, cache.columns[0], q)
    page = policy.page_size
    return bool(
        _agrees(*scored, chosen, token.context_len, page, _forced(policy), policy.budget // page)
    )


def _forced(policy: ScoredPolicy) -> tuple[int, int]:
    """Numbers of first and last positions, or pages, that are always read."""
    page = policy.page_size
    recent = max(policy.recent, 1) if page > 1 else policy.recent
    return whole_pages(policy.sinks, page), touched(recent, page)


@partial(Exact, static_argnums=(4, 5, 6))
def _agrees(
    scores: Array,
    doubt: Array,
    chosen: Array,
    context_len: Array,
    page: int,
    forced: tuple[int, int],
    count: int,
) -> Array:
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
    as_many = (whole.sum(axis=-1) == expected.sum(axis=-1)).all()
    return as_expected.all() & as_many


def _written(
    policy: Policy, policy_params: Any, cache: Cache, context_len: Array, k: Array, v: Array
) -> bool:
    """Whether the new token's key, value and columns are in its slot."""
    expected_columns = {"keys": k, "values": v, **policy.encode(policy_params, 0, k)}
    rows = jnp.arange(len(context_len))[:, None]
    for name, column in cache.columns[0].items():
        actual, expected = (
            column[rows, context_len[:, None]],
            expected_columns[name].astype(column.dtype),
        )
        if jnp.issubdtype(column.dtype, jnp.floating):
            error = jnp.linalg.norm((actual - expected).astype(jnp.float32))
            good = error <= ROUGH * jnp.linalg.norm(expected.astype(jnp.float32))
        else:
            good = (actual != expected).mean() <= WRITTEN
        if not good:
            return False
    return True


def _grouped(q: Array, kv_heads: int) -> Array:
    """Queries ``[B, 1, N, H]`` as float32 ``[B, K, G, H]``."""
    return q.reshape(q.shape[0], kv_heads, -1, q.shape[-1]).astype(jnp.float32)


@partial(Exact, static_argnums=0)
def _hata(policy: Hata, matrices: Array, columns: Mapping[str, Array], q: Array) -> Scored:
    """Algorithms 2 and 3 of the paper: shared bits, summed over the queries of a group.

    One bit is in doubt for each dot product so near to 0 that rounding decides its sign.
    """
    codes = columns["codes"]
    q = _grouped(q, codes.shape[2])
    products = jnp.einsum("bkgh,khr->bkgr", q, matrices, precision="highest")
    sizes = jnp.linalg.norm(q, axis=-1)[..., None]
    sizes *= jnp.linalg.norm(matrices, axis=1)[None, :, None]
    doubt = (jnp.abs(products) <= DOUBT * sizes).sum(axis=(2, 3))
    bits = (products > 0).reshape(*products.shape[:-1], -1, 32).astype(jnp.uint32)
    places = jnp.arange(32, dtype=jnp.uint32).reshape(1, 1, 1, 1, 32)
    words = (bits << places).sum(axis=-1, dtype=jnp.uint32)
    shared = jnp.zeros((codes.shape[0], codes.shape[2], codes.shape[1]), jnp.int32)
    for one in range(words.shape[2]):
        same = jax.lax.population_count(~(codes ^ words[:, None, :, one])).sum(axis=-1)
        shared += jnp.swapaxes(same.astype(jnp.int32), 1, 2)
    return shared, doubt.astype(jnp.float32)


@partial(Exact, static_argnums=0)
def _magicpig(
    policy: MagicPIG, policy_params: Mapping[str, Array], columns: Mapping[str, Array], q: Array
) -> Scored:
    """Section 4 of its paper: how many tables put a key into a query's bucket, from two on, summed
    over the queries of a group.

    Two are in doubt for each dot product so near to 0 that rounding decides its sign.
    """
    codes, planes = columns["buckets"], policy_params["projections"]
    q = _grouped(q, codes.shape[2])
    products = jnp.einsum("bkgh,hp->bkgp", q, planes, precision="highest")
    sizes = jnp.linalg.norm(q, axis=-1)[..., None]
    sizes *= jnp.linalg.norm(planes, axis=0)[None, None, None]
    doubt = 2 * (jnp.abs(products) <= DOUBT * sizes).sum(axis=(2, 3))
    signs = (products > 0).reshape(*products.shape[:-1], policy.tables, policy.bits)

    def table(number: Array, met: Array) -> Array:
        same = jnp.ones(met.shape, bool)
        for bit in range(policy.bits):
            word = jnp.take(codes, number // 32 * policy.bits + bit, axis=3)
            key_bits = (word >> (number % 32).astype(jnp.uint32)) & 1
            asked = jnp.take(signs[..., bit], number, axis=3)
            same &= (key_bits[:, :, :, None] == 1) == asked[:, None]
        return met + same.astype(jnp.int32)

    met = jnp.zeros((*codes.shape[:3], q.shape[2]), jnp.int32)
    met = jax.lax.fori_loop(0, policy.tables, table, met)
    shared = jnp.where(met >= LEAST, met, 0).sum(axis=-1).astype(jnp.float32)
    shared = jnp.swapaxes(shared, 1, 2)
    return jnp.where(shared > 0, shared, -jnp.inf), doubt.astype(jnp.float32)


@partial(Exact, static_argnums=0)
def _exact(policy: ExactTopK, policy_params: Any, columns: Mapping[str, Array], q: Array) -> Scored:
    """Dot products of the queries of a group with every key, summed over the group."""
    return _products(_grouped(q, columns["keys"].shape[2]).sum(axis=2), columns["keys"], CLOSE)


@partial(Exact, static_argnums=0)
def _loki(policy: Loki, components: Array, columns: Mapping[str, Array], q: Array) -> Scored:
    """The same dot products in the leading components."""
    reduced = _grouped(q, components.shape[0]).sum(axis=2)
    reduced = jnp.einsum("bkh,khr->bkr", reduced, components, precision="highest")
    return _products(reduced, columns["components"], ROUGH)


def _products(q: Array, k: Array, doubt: float) -> Scored:
    def row(pair: tuple[Array, Array]) -> Array:
        return jnp.einsum("kh,skh->ks", pair[0], pair[1].astype(jnp.float32), precision="highest")

    scores = jax.lax.map(row, (q, k))
    return scores, doubt * scores.std(axis=-1)


@partial(Exact, static_argnums=0)
def _quest(policy: Quest, policy_params: Any, columns: Mapping[str, Array], q: Array) -> Scored:
    """Tang et al. 2024, algorithm 1, from the keys of each page: the largest that a product with a
    vector inside a page's bounds can be, summed over the queries of a group."""

    def row(pair: tuple[Array, Array]) -> Array:
        q, k = pair
        pages = -(-len(k) // policy.page)
        k = jnp.pad(k.astype(jnp.float32), ((0, pages * policy.page - len(k)), (0, 0), (0, 0)))
        k = k.reshape(pages, policy.page, *k.shape[1:])
        low, high = k.min(axis=1), k.max(axis=1)
        bounds = [
            jnp.maximum(x[None] * low, x[None] * high).sum(axis=-1) for x in jnp.swapaxes(q, 0, 1)
        ]
        return sum(bounds[1:], bounds[0]).T

    # The last page is always read, so its padding does not matter.
    scores = jax.lax.map(row, (_grouped(q, columns["keys"].shape[2]), columns["keys"]))
    return scores, CLOSE * scores.std(axis=-1)


SCORES: dict[type[Policy], Callable[..., Scored]] = {
    Hata: _hata,
    ExactTopK: _exact,
    Loki: _loki,
    MagicPIG: _magicpig,
    Quest: _quest,
}
