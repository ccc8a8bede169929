"""Learning the hashes of one layer: SGD over draws of pairs, in one program."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jspec.train.loss import HashTraining, Terms, hash_loss
from jspec.train.samples import Pairs
from jspec.typing import Array


class Learned(NamedTuple):
    """``weights [K, H, R]`` float32, and the ``loss`` terms of each step, mean over KV heads."""

    weights: Array
    loss: Terms


def learn(first: Array, pairs: Pairs, settings: HashTraining) -> Learned:
    """Learn the hashes of a layer by SGD on `hash_loss`, all KV heads together.

    Each epoch draws blocks with about ``settings.pairs`` pairs, or all if there are fewer.

    Args:
        first: float32 ``[K, H, R]``, the initial weights.
        pairs: labelled pairs of the layer.
        settings: how hashes are learned.

    Returns:
        The weights and the loss of each step.
    """
    blocks, size = pairs.keys.shape[:2]
    drawn = min(blocks, max(1, settings.pairs // size))
    rng = np.random.default_rng(settings.seed)
    order = np.stack([rng.permutation(blocks)[:drawn] for _ in range(settings.epochs)])
    return _learn(first, pairs, order.astype(np.int32), settings)


def optimizer(settings: HashTraining) -> optax.GradientTransformation:
    """SGD with momentum; the decay is added to the gradient, as PyTorch does it."""
    return optax.chain(
        optax.add_decayed_weights(settings.decay),
        optax.sgd(settings.rate, momentum=settings.momentum),
    )


@functools.partial(jax.jit, static_argnames="settings")
def _learn(first: Array, pairs: Pairs, order: Array, settings: HashTraining) -> Learned:
    """``order [epochs, drawn]``: the blocks of each epoch."""
    sgd = optimizer(settings)

    def total(w: Array, drawn: Pairs) -> tuple[Array, Terms]:
        terms = hash_loss(w, drawn, settings)
        return jnp.stack(terms).sum(), jax.tree.map(jnp.mean, terms)

    def epoch(state, chosen: Array):
        drawn = Pairs(*(x[chosen].astype(jnp.float32) for x in pairs))

        def step(state, _):
            w, inner = state
            gradient, terms = jax.grad(total, has_aux=True)(w, drawn)
            update, inner = sgd.update(gradient, inner, w)
            return (jnp.asarray(optax.apply_updates(w, update)), inner), terms

        return jax.lax.scan(step, state, length=settings.iterations)

    (weights, _), loss = jax.lax.scan(epoch, (first, sgd.init(first)), order)
    return Learned(weights, jax.tree.map(jnp.ravel, loss))
