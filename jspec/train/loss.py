"""The loss of HATA's Eq. 9, for all KV heads of a layer at once."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jspec.checks import shown
from jspec.ops.hash import BITS
from jspec.train.samples import Pairs
from jspec.typing import Array

Variant = Literal["attention", "paper", "authors"]
VARIANTS: tuple[Variant, ...] = ("attention", "paper", "authors")


@dataclasses.dataclass(frozen=True)
class HashTraining:
    """How hashes are learned; the defaults are those of HATA's table 13.

    Args:
        bits: bits of a code.
        variant: the loss: ``paper`` or ``authors``, see `hash_loss`, or ``attention``, see
            `learn_attention`, which uses ``epochs``, ``iterations`` and ``seed`` alone of the
            following.
        sigma: scale of the sigmoid that relaxes the sign.
        epsilon: weight of the similarity term.
        eta: weight of the balance of bits.
        lambda_: weight of the independence of bits.
        rate: learning rate of SGD.
        momentum: momentum of SGD.
        decay: weight decay of SGD.
        epochs: draws of pairs.
        iterations: steps on each draw.
        pairs: pairs of a draw.
        seed: seeds the initial weights and the draws.

    Raises:
        ValueError: a value is out of range.
    """

    bits: int = 128
    variant: Variant = "paper"
    sigma: float = 0.1
    epsilon: float = 0.01
    eta: float = 2.0
    lambda_: float = 1.0
    rate: float = 0.1
    momentum: float = 0.9
    decay: float = 1e-6
    epochs: int = 15
    iterations: int = 20
    pairs: int = 3 * 32768
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits={shown(self.bits)} must be one of {', '.join(map(str, BITS))}")
        if self.variant not in VARIANTS:
            raise ValueError(f"variant={shown(self.variant)} must be one of {', '.join(VARIANTS)}")
        for name, kind, least in _BOUNDS:
            value = getattr(self, name)
            valid = isinstance(value, kind) and not isinstance(value, bool)
            if not valid or not least <= value < 2**32:
                what = "whole number" if kind is int else "finite number"
                raise ValueError(f"{name}={shown(value)} must be a {what} of at least {least}")

    @property
    def used(self) -> dict[str, Any]:
        """The settings that the variant uses, by name."""
        settings = dataclasses.asdict(self)
        names = _OF_ATTENTION if self.variant == "attention" else settings
        return {name: settings[name] for name in names}


_OF_ATTENTION = ("bits", "variant", "epochs", "iterations", "seed")
_BOUNDS: tuple[tuple[str, Any, int], ...] = (
    *((name, (int, float), 0) for name in ("sigma", "epsilon", "eta", "lambda_")),
    *((name, (int, float), 0) for name in ("rate", "momentum", "decay")),
    *((name, int, 1) for name in ("epochs", "iterations", "pairs")),
    ("seed", int, 0),
)


class Terms(NamedTuple):
    """The three terms of the loss with their weights, each ``[K]``."""

    similarity: Array
    balance: Array
    independence: Array


def relaxed(x: Array, w: Array, sigma: float) -> Array:
    """Codes between -1 and 1: ``2 sigmoid(sigma x w) - 1`` (Eq. 7). ``x [..., K, H]``."""
    return jnp.tanh(sigma / 2 * jnp.einsum("...kh,khr->...kr", x, w))


def hash_loss(w: Array, pairs: Pairs, settings: HashTraining) -> Terms:
    """The loss of ``w [K, H, R]`` on ``pairs``, which are all float32.

    ``"paper"`` is Eq. 9 with means over pairs in place of sums, of which SGD at the paper's rate
    would diverge::

        epsilon mean(s |h(q) - h(k)|^2) + eta |mean h(k)|^2 + lambda |w' w - I|

    ``"authors"`` is what the authors' code does: eta and lambda change places, and balance is of
    ``(h(q) + h(k)) / R``. In both, the terms of the query heads of a group are added, and the norm
    of the matrix is Frobenius', not squared. A KV head is learned by itself.
    """
    queries, keys, labels, counts = pairs
    total_pairs = counts.sum()
    hq = relaxed(queries.swapaxes(1, 2), w, settings.sigma)  # [blocks, G, K, R]
    hk = relaxed(keys, w, settings.sigma)  # [blocks, P, K, R]; zero where there is no pair
    # |q - k|^2 expanded, so that the code of a query is not repeated for each of its pairs.
    cross = jnp.einsum("bgkr,bpkr,bpkg->k", hq, hk, labels, optimize=[(1, 2), (0, 1)])
    query_norms = jnp.einsum("bgkr,bgkr,bkg->k", hq, hq, labels.sum(axis=1))
    key_norms = jnp.einsum("bpkr,bpkr,bpk->k", hk, hk, labels.sum(axis=3))
    similarity = settings.epsilon / total_pairs * (query_norms + key_norms - 2 * cross)
    total = hk.sum(axis=(0, 1))[None]  # [1, K, R]
    scale, balance, independence = total_pairs, settings.eta, settings.lambda_
    if settings.variant == "authors":
        total = total + jnp.einsum("bgkr,b->gkr", hq, counts)
        scale, balance, independence = total_pairs * w.shape[2], independence, balance
    gram = jnp.einsum("khr,khs->krs", w, w) - jnp.eye(w.shape[2])[None]
    return Terms(
        similarity,
        balance * ((total / scale) ** 2).sum(axis=(0, 2)),
        independence * jnp.sqrt((gram**2).sum(axis=(1, 2))),
    )


def first_weights(heads: int, size: int, settings: HashTraining, layer: int) -> Array:
    """Normal random numbers ``[K, H, R]``: random projections, from which training starts."""
    key = jax.random.fold_in(jax.random.key(settings.seed), layer)
    return jax.random.normal(key, (heads, size, settings.bits), jnp.float32)
