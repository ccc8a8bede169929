"""Hashes learned from attention weights: jspec's own alternative to the losses of HATA.

Eq. 9 of HATA asks that the codes of a query and its best keys agree in every bit. A selection only
needs the keys with the most attention weight to share the most bits. So this loss is the cross
entropy between the attention weights of a query and the softmax of its scores by codes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jspec.config import LayerSpec
from jspec.train.loss import HashTraining
from jspec.train.recall import attention_weights
from jspec.typing import Array

QUERIES = 32  # of a text
KEYS = 2048  # of a text that are compared; half are those with the most weight, half are random
SINKS, RECENT = 4, 16  # keys that a policy reads whatever they score: none to learn from
RATE = 3e-3  # of Adam; it falls to 0 as a cosine


class Views(NamedTuple):
    """Queries of some texts with the keys that they are trained on, on the device.

    Attributes:
        queries: float32 ``[texts, M, K, G, H]``.
        keys: float32 ``[texts, K, P, H]``.
        weights: float32 ``[texts, M, K, P]``, attention weights, mean over a group, which sum to 1
            over P; NaN where the query does not score the key.
    """

    queries: Array
    keys: Array
    weights: Array


class CrossEntropy(NamedTuple):
    """The loss of each step, mean over KV heads."""

    cross_entropy: Array


def views_of(
    samples: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]],
    spec: LayerSpec,
    rng: np.random.Generator,
    max_keys: int = KEYS,
) -> Views:
    """Choose the keys of each text to train on: those with the most weight, and random ones.

    Args:
        samples: queries ``[M, N, H]``, positions ``[M]`` and keys ``[n, K, H]`` for each text; all
            texts have the same M.
        spec: the layer.
        rng: draws the random keys.
        max_keys: keys of a text that each KV head chooses, at most.

    Returns:
        The views.
    """
    samples = list(samples)
    size = min(max_keys, max(len(keys) for *_, keys in samples))
    parts = []
    for queries, positions, keys in samples:
        # A power of two of slots, so that texts of close lengths share a program.
        room = max(size, 1 << max(len(keys) - 1, 0).bit_length())
        keys = np.pad(keys, ((0, room - len(keys)), (0, 0), (0, 0)))
        draw = rng.random((spec.kv_heads, room), np.float32)
        parts.append(_view(queries, positions, keys, draw, spec, size))
    return Views(*(jnp.stack(part) for part in zip(*parts, strict=True)))


@functools.partial(jax.jit, static_argnames=("spec", "size"))
def _view(
    queries: Array, positions: Array, keys: Array, draw: Array, spec: LayerSpec, size: int
) -> Views:
    """The `Views` of one text, without the leading axis.

    ``positions [M]``: of the queries; ``draw [K, S]``: random numbers, whose largest choose the
    random keys; ``size``: keys that each KV head chooses.
    """
    k = keys.astype(jnp.float32)
    q = queries.astype(jnp.float32).reshape(len(queries), spec.kv_heads, -1, spec.key_size)
    slot = jnp.arange(len(k))[None]
    scored = (slot >= SINKS) & (slot <= positions[:, None] - RECENT)  # [M, S]
    weights = attention_weights(q, k, scored, spec).mean(axis=2)  # NaN for a query without any
    strength = jnp.nan_to_num(weights).max(axis=0)  # [K, S]
    threshold = lax.top_k(strength, size // 2)[0][:, -1:]
    random_scores = jnp.where(scored.any(axis=0)[None], draw, -1)
    is_best = (strength >= threshold) & (strength > 0)
    chosen = lax.top_k(jnp.where(is_best, 1 + strength, random_scores), size)[1]
    chosen_keys = jnp.take_along_axis(jnp.swapaxes(k, 0, 1), chosen[..., None], axis=1)
    weights = jnp.take_along_axis(weights, chosen[None], axis=2)
    is_scored = jnp.take_along_axis(scored[:, None], chosen[None], axis=2)
    total = weights.sum(axis=2, keepdims=True)
    weights = jnp.where(is_scored & (total > 0), weights / total, jnp.nan)
    return Views(q, chosen_keys, weights)


def signs(x: Array) -> Array:
    """The signs of ``x``, 1 or -1, with the gradient of ``tanh(x)`` (straight-through)."""
    soft = jnp.tanh(x)
    return soft + lax.stop_gradient(jnp.where(x > 0, 1.0, -1.0) - soft)


def attention_loss(w: Array, log_scale: Array, views: Views) -> Array:
    """Cross entropy between attention weights and the softmax of scores by codes.

    Up to a factor a key scores as in decoding: the dot product of its bits, 1 or -1, with those of
    the queries of a group, in the mean. Projections by ``w`` are divided by their root mean square.

    Args:
        w: hashes float32 ``[K, H, R]``.
        log_scale: float32 ``[K]``, logarithm of the factor of the scores, which is also learned.
        views: those of one text, without the leading axis.

    Returns:
        float32 ``[K]``, mean over the queries.
    """
    queries, keys, weights = views
    key_products = jnp.einsum("kph,khr->kpr", keys, w)
    key_products /= lax.stop_gradient(_root_mean_square(key_products, (1, 2)))
    query_products = jnp.einsum("mkgh,khr->mkgr", queries, w)
    query_products /= lax.stop_gradient(_root_mean_square(query_products, (3,)))
    query_codes = signs(query_products).mean(axis=2)
    scores = jnp.einsum("mkr,kpr->mkp", query_codes, signs(key_products))
    scores *= jnp.exp(log_scale)[None, :, None]
    is_scored = jnp.isfinite(weights)
    log_probabilities = jax.nn.log_softmax(jnp.where(is_scored, scores, -1e9), axis=2)
    terms = -jnp.where(is_scored, weights, 0) * log_probabilities
    return terms.sum(axis=2).mean(axis=0)


def _root_mean_square(x: Array, axes: tuple[int, ...]) -> Array:
    """The root mean square of ``x`` over ``axes``, which stay."""
    return jnp.sqrt((x * x).mean(axis=axes, keepdims=True) + 1e-12)


class Learned(NamedTuple):
    """``weights [K, H, R]`` float32, columns of length 1, and the loss of each step."""

    weights: Array
    loss: CrossEntropy


def learn_attention(first: Array, views: Views, settings: HashTraining) -> Learned:
    """Learn the hashes of a layer by Adam, one text a step, all KV heads together.

    Args:
        first: float32 ``[K, H, R]``, the initial weights.
        views: queries and keys of the texts.
        settings: ``epochs`` times ``iterations`` is the number of steps; ``seed`` orders the texts.

    Returns:
        The weights and the loss of each step.
    """
    texts = len(views.keys)
    rng = np.random.default_rng(settings.seed)
    steps = settings.epochs * settings.iterations
    rounds = [rng.permutation(texts) for _ in range(-(-steps // texts))]
    order = np.concatenate(rounds)[:steps].astype(np.int32)
    return _learn(orthogonal(first), views, order)


def orthogonal(w: Array) -> Array:
    """``w [K, H, R]`` with orthonormal columns, in blocks of H where there are more than H."""
    size = w.shape[1]
    blocks = [w[:, :, at : at + size] for at in range(0, w.shape[2], size)]
    return jnp.concatenate([jnp.linalg.qr(block)[0] for block in blocks], axis=2)


@jax.jit
def _learn(first: Array, views: Views, order: Array) -> Learned:
    """``first [K, H, R]``: the initial weights; ``order [steps]``: the text of each step."""
    adam = optax.adam(optax.cosine_decay_schedule(RATE, len(order)))
    scale = jnp.full(first.shape[:1], -0.5 * np.log(first.shape[2]), jnp.float32)

    def total(parameters: tuple[Array, Array], text: Views) -> tuple[Array, Array]:
        losses = attention_loss(*parameters, text)
        return losses.sum(), losses.mean()

    def step(carry, at: Array):
        parameters, state = carry
        text = jax.tree.map(lambda x: x[at], views)
        gradient, loss = jax.grad(total, has_aux=True)(parameters, text)
        with jax.numpy_dtype_promotion("standard"):  # optax counts steps in whole numbers
            update, state = adam.update(gradient, state, parameters)
        moved: Any = optax.apply_updates(parameters, update)
        return (moved, state), loss

    begin: Any = (first, scale)
    ((weights, _), _), loss = lax.scan(step, (begin, adam.init(begin)), order)
    weights /= jnp.linalg.norm(weights, axis=1, keepdims=True)
    return Learned(weights, CrossEntropy(loss))
