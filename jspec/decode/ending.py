"""Where a draft ends: by how certain it is, how often such drafts were accepted, and what a pass
costs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.ops.distribution import cleaned
from jspec.ops.vocabulary import Axes
from jspec.sharding import put
from jspec.typing import Array

LEVELS = 16  # of certainty: at level n the draft gives other tokens a mass of 2**-n to 2**-(n + 1)
MEMORY = 512.0  # steps of a row after which a count weighs half
SHARED = 8.0  # weight of the rates of all rows, in tokens of a row


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ending:
    """What decides where drafts end. Every leaf begins with the batch axis.

    Attributes:
        tried: float32 ``[B, LEVELS]``: verified draft tokens of each level of certainty, where
            older ones count less.
        accepted: float32 ``[B, LEVELS]``: those of them that were accepted.
        price: float32 ``[B]``: how many tokens a pass must add to a row, in the mean over rows, to
            be worth its time.
    """

    tried: Array
    accepted: Array
    price: Array

    @classmethod
    def unknown(cls, batch: int) -> Ending:
        """For rows without history, at a price of 0: their drafts end at their limits."""
        of_levels, of_rows = (batch, LEVELS), (batch,)
        zeros: Any = functools.partial(np.zeros, dtype=np.float32)
        return cls(zeros(of_levels), zeros(of_levels), zeros(of_rows))

    def priced(self, price: float) -> Ending:
        """The same with another price, set by the host."""
        prices = np.full(self.price.shape, price, np.float32)
        return dataclasses.replace(self, price=put(prices, self.price.sharding))

    @property
    def rates(self) -> Array:
        """How often tokens of each level are accepted, float32 ``[B, LEVELS]``.

        The rate of the row, with that of all rows as its prior, whose own prior is the draft's
        certainty.
        """
        said = 1 - 0.5 ** (1 + jnp.arange(LEVELS, dtype=jnp.float32))
        of_all = (self.accepted.sum(axis=0) + said) / (self.tried.sum(axis=0) + 1)
        return (self.accepted + SHARED * of_all[None]) / (self.tried + SHARED)

    @property
    def mean_rate(self) -> Array:
        """How often a token of unknown level is accepted, float32 ``[B]``."""
        tried, accepted = self.tried.sum(axis=1), self.accepted.sum(axis=1)
        of_all = (accepted.sum() + 1) / (tried.sum() + 1)
        return (accepted + SHARED * of_all) / (tried + SHARED)

    def pays(self, reached: Array, goes_on: Array, live: Array) -> Array:
        """Whether another pass of the draft is worth its time, a bool.

        Args:
            reached: float32 ``[B]``: the probability that all of a row's draft so far is accepted.
            goes_on: bool ``[B]``: rows that may draft another token.
            live: bool ``[B]``: rows that are not done.
        """
        gain = jnp.where(goes_on, reached * self.mean_rate, 0.0)
        return gain.sum() > jnp.where(live, self.price, 0.0).sum()

    def learned(self, levels: Array, lengths: Array, accepted: Array) -> Ending:
        """Count the tokens of a verified draft.

        A token counts only if all before it were accepted. So what is counted depends on no token
        that was drawn after the rejected one.

        Args:
            levels: int32 ``[B, gamma]``: the certainty of each draft token.
            lengths: int32 ``[B]``: draft tokens per row.
            accepted: int32 ``[B]``: draft tokens accepted per row.
        """
        index = jnp.arange(levels.shape[1], dtype=jnp.int32)[None]
        tried = (index < lengths[:, None]) & (index <= accepted[:, None])
        accepted = index < jnp.minimum(lengths, accepted)[:, None]
        at = levels[..., None] == jnp.arange(LEVELS, dtype=jnp.int32)[None, None]

        def added(before: Array, counts: Array) -> Array:
            fade = 0.5 ** (1 / MEMORY)
            return fade * before + (at & counts[..., None]).sum(axis=1, dtype=jnp.float32)

        return dataclasses.replace(
            self, tried=added(self.tried, tried), accepted=added(self.accepted, accepted)
        )


def level_of(logits: Array, temperature: Array | None, axis_name: Axes | None = None) -> Array:
    """How certain drafts of ``logits [B, V]`` are: a level int32 ``[B]``, below `LEVELS`.

    ``temperature [B]``: None where all rows are greedy. ``axis_name`` as in
    `jspec.ops.sample.sample`.
    """
    logits = cleaned(logits)
    largest = logits.max(axis=-1, keepdims=True)
    if axis_name is not None:
        largest = lax.pmax(largest, axis_name)
    below = jnp.where(logits == largest, 0.0, logits - largest)
    if temperature is not None:
        below = below / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    mass = jnp.exp(below).sum(axis=-1)
    if axis_name is not None:
        mass = lax.psum(mass, axis_name)
    others = jnp.maximum(1 - 1 / mass, 0.5**LEVELS)
    return jnp.clip(-jnp.log2(others), 0, LEVELS - 1).astype(jnp.int32)
